"""Queues on PostgreSQL in `bench engines`: against a hand-written loop and procrastinate.

The hand-written loop is what one would write for this one purpose: a table, `SKIP LOCKED`, the
item deleted in the transaction that has read it. It counts no deliveries, so one that kills its
worker comes again and again; pxrs commits the count before it hands an item out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import psycopg

import pxrs
from bench.harness import Check, Comparison, Contestant, Options, Sample, Say, Section, compare
from bench.postgres import database, server
from bench.procrastinating import put_jobs, take_jobs
from bench.queues import QUEUE, VALUES

BATCHES = (1, 100)
PROCRASTINATE = "procrastinate"
# A loop has to have churned so much before what it leaves behind can show.
CHURN = 50_000

_TABLE = "CREATE TABLE hand (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea NOT NULL)"
_PUT_ONE = "INSERT INTO hand (body) VALUES (%b)"
_PUT_MANY = "INSERT INTO hand (body) SELECT unnest(%b::bytea[])"
_TAKE = "SELECT id, body FROM hand ORDER BY id LIMIT %b FOR UPDATE SKIP LOCKED"
_DONE = "DELETE FROM hand WHERE id = ANY (%b)"


def putting(options: Options, say: Say) -> Section:
    """Items per second into a queue, each put durable when it returns."""
    with server() as url:
        return _against_both(
            "PostgreSQL: put",
            options,
            say,
            partial(_hand_puts, url),
            partial(_puts, url),
            Contestant(PROCRASTINATE, lambda _: put_jobs(url, _few(options)), "batch_defer"),
        )


def taking(options: Options, say: Say) -> Section:
    """Items per second out of a queue: taken, handled and gone."""
    with server() as url:
        return _against_both(
            "PostgreSQL: take and commit",
            options,
            say,
            partial(_hand_takes, url),
            partial(_takes, url),
            Contestant(PROCRASTINATE, lambda _: take_jobs(url, _few(options)), "one worker"),
        )


def beside(options: Options, say: Say) -> Section:
    """Units of work while another session holds a transaction open that saw the beginning.

    It keeps every dead row version from being removed, and every look from the front of the queue
    passes them. The same work is done in turn in a database where nobody does that.
    """
    section = Section()
    with server() as url:
        for batch in BATCHES:
            churn = (CHURN if batch > 1 else CHURN // 2) // (10 if options.quick else 1)
            alone, late = _alone_and_beside(url, batch, churn, say)
            section.checks += [
                Check(
                    f"queue, {batch} at a time: {name} beside an open transaction ÷ alone",
                    after / before,
                    2.0,
                    "",
                )
                for name, before, after in zip(("put", "take", "commit"), alone, late, strict=True)
            ]
            section.notes.append(
                f"{batch} at a time, after {churn:,} items: put, take, commit take {_as_ms(alone)} "
                f"ms, and beside an open transaction {_as_ms(late)} ms"
            )
            section.figures[f"{batch}"] = {"alone_s": alone, "beside_s": late}
    return section


def _alone_and_beside(
    url: str, batch: int, churn: int, say: Say
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Median seconds of a put, a take and a commit, without and with an old transaction."""
    with (
        database(url) as quiet,
        database(url) as crowded,
        pxrs.connect(quiet) as here,
        pxrs.connect(crowded) as there,
        _old_transaction(crowded),
    ):
        say(f"PostgreSQL: queue, {churn:,} items beside an open transaction, {batch} at a time")
        for _ in range(churn // batch):
            _unit(here, batch)
            _unit(there, batch)
        took: list[list[tuple[float, ...]]] = [[], []]
        for _ in range(500 if batch == 1 else 100):
            took[0].append(_unit(here, batch))
            took[1].append(_unit(there, batch))
    alone, late = (tuple(median(part) for part in zip(*each, strict=True)) for each in took)
    return alone, late


def _as_ms(seconds: tuple[float, ...]) -> str:
    return " · ".join(f"{1e3 * each:.2f}" for each in seconds)


def _few(options: Options) -> int:
    return 200 if options.quick else 1_000


def _count(options: Options, batch: int) -> int:
    return _few(options) * (1 if batch == 1 else 20)


def _against_both(
    title: str,
    options: Options,
    say: Say,
    by_hand: Callable[[int, int], Sample],
    ours: Callable[[int, int], Sample],
    peer: Contestant,
) -> Section:
    def contestant(name: str, run: Callable[[int, int], Sample], batch: int) -> Contestant:
        count = _count(options, batch)
        return Contestant(f"{name}, {batch} at a time", lambda _: run(count, batch))

    contestants = []
    for batch in BATCHES:
        contestants.append(contestant("by hand", by_hand, batch))
        contestants.append(contestant("pxrs", ours, batch))
    result = compare(title, [*contestants, peer], options.rounds, options, say)
    return Section([result], _ratios(title, result))


def _ratios(title: str, result: Comparison) -> list[Check]:
    checks = []
    for batch in BATCHES:
        name = f"{batch} at a time"
        ratio = result.ratio(f"pxrs, {name}", f"by hand, {name}")
        checks.append(Check(f"{title}, {name} ÷ by hand", ratio, 0.5, "", "at least"))
    ratio = result.ratio(f"pxrs, {BATCHES[-1]} at a time", PROCRASTINATE)
    return [*checks, Check(f"{title} ÷ procrastinate", ratio, 10.0, "", "at least")]


@contextmanager
def _by_hand(url: str) -> Iterator[psycopg.Connection[Any]]:
    with database(url) as place, psycopg.connect(place, autocommit=True) as connection:
        connection.execute(_TABLE)
        yield connection


def _hand_puts(url: str, count: int, batch: int) -> Sample:
    with _by_hand(url) as connection:
        _hand_put(connection, 10 * batch, batch)
        return Sample(count, _hand_put(connection, count, batch))


def _hand_put(connection: psycopg.Connection[Any], count: int, batch: int) -> float:
    started = perf_counter()
    if batch == 1:
        for at in range(count):
            connection.execute(_PUT_ONE, (VALUES[at % len(VALUES)],))
    else:
        for start in range(0, count, batch):
            connection.execute(_PUT_MANY, ([VALUES[start % len(VALUES)]] * batch,))
    return perf_counter() - started


def _hand_takes(url: str, count: int, batch: int) -> Sample:
    with _by_hand(url) as connection:
        _hand_put(connection, count + 10 * batch, 10)
        _hand_take(connection, 10 * batch, batch)
        return Sample(count, _hand_take(connection, count, batch))


def _hand_take(connection: psycopg.Connection[Any], count: int, batch: int) -> float:
    taken = 0
    started = perf_counter()
    with connection.cursor(binary=True) as cursor:
        while taken < count:
            with connection.transaction():
                rows = cursor.execute(_TAKE, (batch,)).fetchall()
                taken += sum(1 for _, body in rows if body)
                cursor.execute(_DONE, ([number for number, _ in rows],))
    return perf_counter() - started


def _puts(url: str, count: int, batch: int) -> Sample:
    with database(url) as place, pxrs.connect(place) as px:
        _put(px, 10 * batch, batch)
        seconds = _put(px, count, batch)
        _require(px, count + 10 * batch)
    return Sample(count, seconds)


def _put(px: Any, count: int, batch: int) -> float:
    started = perf_counter()
    for start in range(0, count, batch):
        with px.transaction() as tx:
            for at in range(start, start + batch):
                tx.put(QUEUE, VALUES[at % len(VALUES)])
    return perf_counter() - started


def _takes(url: str, count: int, batch: int) -> Sample:
    with database(url) as place, pxrs.connect(place) as px:
        _put(px, count + 10 * batch, 10)
        _take(px, 10 * batch, batch)
        seconds = _take(px, count, batch)
        _require(px, 0)
    return Sample(count, seconds)


def _take(px: Any, count: int, batch: int) -> float:
    taken = 0
    started = perf_counter()
    while taken < count:
        with px.transaction() as tx:
            taken += sum(1 for item in tx.take_many(QUEUE, batch, timeout=0) if item.value)
    return perf_counter() - started


def _require(px: Any, depth: int) -> None:
    found = px.queues.describe(QUEUE).depth
    if found != depth:
        raise RuntimeError(f"{found} items are in the queue, not {depth}")


@contextmanager
def _old_transaction(place: str) -> Iterator[None]:
    with psycopg.connect(place, autocommit=True) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM pxrs.pxrs_queue_items")
        yield
        other.execute("ROLLBACK")


def _unit(px: Any, batch: int) -> tuple[float, float, float]:
    began = perf_counter()
    with px.transaction() as tx:
        for value in VALUES[:batch]:
            tx.put(QUEUE, value)
    put = perf_counter()
    with px.transaction() as tx:
        if len(tx.take_many(QUEUE, batch, timeout=0)) != batch:
            raise RuntimeError("the queue is shorter than it was")
        taken = perf_counter()
    return put - began, taken - put, perf_counter() - taken


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "postgres-putting": putting,
    "postgres-taking": taking,
    "postgres-beside": beside,
}
