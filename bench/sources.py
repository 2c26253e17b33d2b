"""`bench sources`: a table that exists, consumed by groups and copied into a topic.

Ratios are of the time that the processors of this process took, beside those of the clock: what a
database server does for either side is the same query, and other programs disturb the clock more.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import Any

import psycopg

import pxrs
from bench import ours, postgres
from bench.children import Child
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare, scratch
from bench.members import await_share, spin, turns_in
from bench.ours import Px
from bench.workload import PAIRS, PARTITIONS, TOPIC, passes, rounded
from pxrs.sources import Table

BARE = "bare SELECT … WHERE id > … LIMIT"
EVENTS = Table("events", key="account", value="payload")
AT_ONCE = 5_000
WORK_US = 50.0
_TIMEOUT = 60.0

_numbers = count(1)
_ROWS = [(key.decode(), value.decode()) for key, value in PAIRS]

Connect = Callable[[], Any]


class _Clocks:
    """Both times of runs: those of the processors are the samples, those of the clock stay here."""

    def __init__(self) -> None:
        self._walls: dict[str, list[float]] = {}

    @contextmanager
    def around(self, name: str, rows: int) -> Iterator[list[Sample]]:
        """Times a block; afterwards the list has its sample."""
        found: list[Sample] = []
        cpu, started = process_time(), perf_counter()
        yield found
        found.append(Sample(rows, process_time() - cpu))
        self._walls.setdefault(name, []).append(perf_counter() - started)

    def ratio(self, name: str, other: str) -> float:
        """The median ratio of rates by the clock."""
        pairs = zip(self._walls[name][1:], self._walls[other][1:], strict=True)
        return median(theirs / mine for mine, theirs in pairs)


@contextmanager
def _sqlite(options: Options, rows: int) -> Iterator[tuple[Px, Connect]]:
    """A store with the table in its file, and how to open that file."""
    with scratch(options) as name, ours.opened(Path(name)) as px:

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(Path(name) / "app.db")

        with closing(connect()) as db:
            db.execute(
                """CREATE TABLE events
                    (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, payload TEXT)"""
            )
            for _ in range(passes(rows)):
                db.executemany("INSERT INTO events (account, payload) VALUES (?, ?)", _ROWS)
            db.commit()
        px.attach("events", EVENTS, partitions=PARTITIONS)
        yield px, connect


@contextmanager
def _postgres(options: Options, rows: int) -> Iterator[tuple[Px, Connect]]:
    """The same on a PostgreSQL of its own."""
    with postgres.server() as server, postgres.opened(server) as px:
        with psycopg.connect(server) as db:
            db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text)")
            with db.cursor().copy("COPY events (account, payload) FROM STDIN") as copy:
                for _ in range(passes(rows)):
                    for row in _ROWS:
                        copy.write_row(row)
        with psycopg.connect(server, autocommit=True) as db:
            db.execute("VACUUM ANALYZE events")
        px.attach("events", EVENTS, partitions=PARTITIONS)
        yield px, lambda: psycopg.connect(server)


_ENGINES = {"sqlite": _sqlite, "postgres": _postgres}


def _reading(engine: str, options: Options, say: Say) -> Section:
    """Rows per second: one member, and a loop that builds the same tuples."""
    rows, clocks = rounded(options.messages), _Clocks()
    ours_name = "pxrs, one member"
    say(f"{engine}: filling the table")
    with _ENGINES[engine](options, rows) as (px, connect):
        contestants = [
            Contestant(BARE, lambda _: _bare(clocks, connect, rows), "the limit"),
            Contestant(ours_name, lambda _: _consume(clocks, ours_name, px, rows)),
        ]
        result = compare(f"reading a table, {engine}", contestants, options.rounds, options, say)
    ratio = result.ratio(ours_name, BARE)
    note = "" if ratio is None else f"by the clock: {clocks.ratio(ours_name, BARE):.2f}"
    return Section(
        [result], [Check(f"{engine}: one member ÷ bare, CPU", ratio, 0.5, "", "at least")], [note]
    )


def _bare(clocks: _Clocks, connect: Connect, rows: int) -> Sample:
    with closing(connect()) as db:
        mark = "?" if isinstance(db, sqlite3.Connection) else "%s"
        query = f"""SELECT id, account, payload FROM events WHERE id > {mark}
            ORDER BY id LIMIT {AT_ONCE}"""
        last = found = 0
        with clocks.around(BARE, rows) as sample:
            while batch := db.execute(query, (last,)).fetchall():
                messages = [
                    (number, 0, key.encode(), value.encode(), ()) for number, key, value in batch
                ]
                last = messages[-1][0]
                found += len(messages)
    _check(found, rows)
    return sample[0]


def _consume(clocks: _Clocks, name: str, px: Px, rows: int) -> Sample:
    found = 0
    with px.consumer("events", group=f"g{next(_numbers)}") as consumer:
        await_share(consumer, PARTITIONS)
        with clocks.around(name, rows) as sample:
            while found < rows:
                messages = consumer.poll(AT_ONCE, timeout=_TIMEOUT)
                _check(bool(messages), True)
                found += len(messages)
            consumer.commit()
    return sample[0]


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} of {wanted} rows came")


def _sharing(engine: str, options: Options, say: Say) -> Section:
    """Two processes against one, each row worth some work, by the clock.

    On a machine with other work on it two processes get less than twice of what one gets: the
    processor time per row is beside it.
    """
    rows = rounded(options.messages // 5)
    turns = turns_in(WORK_US)
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with _ENGINES[engine](options, rows) as (px, _):

        def together(processes: int) -> Sample:
            done = _work_together(px.url, processes, rows, turns)
            cpu[processes].append(1e6 * sum(part[2] for part in done) / rows)
            return Sample(rows, max(part[1] for part in done) - min(part[0] for part in done))

        note = f"{WORK_US:g} µs of work each"
        contestants = [
            Contestant("one process", lambda _: together(1), note),
            Contestant("two processes", lambda _: together(2), note),
        ]
        result = compare(f"sharing a table, {engine}", contestants, options.rounds, options, say)
    ratio = result.ratio("two processes", "one process")
    both = [f"{median(found):.1f} µs" for found in cpu.values() if found]
    return Section(
        [result],
        [Check(f"{engine}: two processes ÷ one", ratio, 1.8, "", "at least")],
        [f"CPU per row, in one process and in two: {' and '.join(both)}"],
    )


Part = tuple[float, float, float, int]


def _work_together(url: str, processes: int, rows: int, turns: int) -> list[Part]:
    """When each process began and ended, its processor time, and how many rows it had."""
    group = f"g{next(_numbers)}"
    share = PARTITIONS // processes
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_work, url, group, share)) for _ in range(processes)]
        for child in children:
            child.hear()
        for child in children:
            child.tell(turns)
        parts: list[Part] = [child.hear() for child in children]
    _check(sum(part[3] for part in parts), rows)
    return parts


def _work(line: Connection, url: str, group: str, share: int) -> None:
    with pxrs.connect(url) as px, px.consumer("events", group=group) as consumer:
        while len(consumer.assignment) < share:
            time.sleep(0.01)
        line.send("ready")
        turns, handled = line.recv(), 0
        started, ended, cpu = monotonic(), monotonic(), process_time()
        last = cpu
        # Nobody knows how many rows its partitions have: it is over when nothing comes.
        while messages := consumer.poll(500, timeout=2.0):
            for _ in messages:
                spin(turns)
            handled += len(messages)
            ended, last = monotonic(), process_time()
        consumer.commit()
        line.send((started, ended, last - cpu, handled))


def pushed_down(options: Options, say: Say) -> Section:
    """Three members of a prepared table: how many rows the server read for all of them."""
    rows = rounded(options.messages)
    with _postgres(options, rows) as (px, connect):
        say("pushed down: preparing the table")
        px.sources.prepare("events", apply=True)
        with closing(connect()) as db:
            db.autocommit = True
            db.execute("VACUUM ANALYZE events")
            before = _rows_read(db)
            group = f"g{next(_numbers)}"
            with ExitStack() as stack:
                children = [
                    stack.enter_context(Child(_work, px.url, group, PARTITIONS // 3))
                    for _ in range(3)
                ]
                for child in children:
                    child.hear()
                for child in children:
                    child.tell(0)
                _check(sum(child.hear()[3] for child in children), rows)
            # A server tells what it counted when the connections are closed, or a second later.
            time.sleep(2.0)
            read = _rows_read(db) - before
    return Section(
        checks=[Check("rows read by the server ÷ rows, three members", read / rows, 1.1, "")],
        notes=[f"{read:,} rows read for {rows:,} rows of the table"],
    )


def _rows_read(db: Any) -> int:
    [(found,)] = db.execute(
        """SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
            FROM pg_stat_user_tables WHERE relname = 'events'"""
    ).fetchall()
    return int(found)


def _relaying(engine: str, options: Options, say: Say) -> Section:
    """Messages per second into a topic: a relay that reads the table, and `send_many`."""
    rows, clocks = rounded(options.messages), _Clocks()
    with _ENGINES[engine](options, rows) as (px, _):

        def send(_: Path) -> Sample:
            with _new_topic(px), clocks.around("pxrs send_many", rows) as sample:
                ours.fill(px, rows)
            return sample[0]

        def relay(_: Path) -> Sample:
            with _new_topic(px):
                group = f"g{next(_numbers)}"
                with (
                    clocks.around("pxrs relay", rows) as sample,
                    px.relay("events", topic=TOPIC, group=group) as running,
                ):
                    _await(running, rows)
                _check(px.topics.describe(TOPIC).messages, rows)
            return sample[0]

        contestants = [
            Contestant("pxrs send_many", send, "10,000 messages per call"),
            Contestant("pxrs relay", relay, "reads the table, too"),
        ]
        result = compare(f"into a topic, {engine}", contestants, options.rounds, options, say)
    ratio = result.ratio("pxrs relay", "pxrs send_many")
    note = (
        "" if ratio is None else f"by the clock: {clocks.ratio('pxrs relay', 'pxrs send_many'):.2f}"
    )
    return Section(
        [result], [Check(f"{engine}: relay ÷ send_many, CPU", ratio, 0.5, "", "at least")], [note]
    )


def _await(running: Any, rows: int) -> None:
    """Wait until a relay has copied all; `join` costs too much to be called all the time."""
    for look in count(1):
        if running.handled >= rows:
            return
        time.sleep(0.01)
        if look % 100 == 0 and running.join(0):
            return


@contextmanager
def _new_topic(px: Px) -> Iterator[None]:
    px.topics.delete(TOPIC)
    px.topics.create(TOPIC, partitions=PARTITIONS)
    yield


def _on(engine: str, part: Callable[[str, Options, Say], Section]) -> Any:
    return lambda options, say: part(engine, options, say)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    f"{name}-{engine}": _on(engine, part)
    for name, part in (("reading", _reading), ("sharing", _sharing), ("relay", _relaying))
    for engine in _ENGINES
} | {"pushed-down": pushed_down}
