"""`bench queue`: work queues on SQLite against their peers, one item and a hundred at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from time import monotonic, perf_counter
from typing import Any

import pxrs
from bench.children import Child
from bench.harness import (
    Check,
    Comparison,
    Contestant,
    Options,
    Sample,
    Say,
    Section,
    compare,
    scratch,
)
from bench.ours import url
from bench.queue_peers import PEERS, Peer
from bench.workload import PAIRS

QUEUE = "inbox"
BATCH = 100
WORKERS = 8
VALUES = [value for _, value in PAIRS]
SINGLY, IN_BATCHES = "pxrs", f"pxrs, {BATCH} at a time"


def putting(options: Options, say: Say) -> Section:
    """Items per second into a queue, each put durable when it returns."""
    few = 100 if options.quick else 500
    contestants = [
        Contestant(SINGLY, partial(_put_singly, few), "FULL"),
        Contestant(IN_BATCHES, partial(_put_batches, 10 * few), "FULL, one transaction each"),
        *(Contestant(name, partial(_peer_puts, peer[0], few)) for name, peer in PEERS.items()),
    ]
    result = compare("put", contestants, 2 * options.rounds, options, say)
    return Section([result], _against_best("put", result))


def taking(options: Options, say: Say) -> Section:
    """Items per second out of a queue: taken, handled and committed."""
    few = 100 if options.quick else 500
    contestants = [
        Contestant(SINGLY, partial(_take_singly, few), "counted, held, removed"),
        Contestant(IN_BATCHES, partial(_take_batches, 10 * few), "one transaction each"),
        *(
            Contestant(name, partial(_peer_takes, peer[0], few), peer[1])
            for name, peer in PEERS.items()
        ),
    ]
    result = compare("take and commit", contestants, 2 * options.rounds, options, say)
    return Section([result], _against_best("take + commit", result))


def _against_best(what: str, result: Comparison) -> list[Check]:
    """Against whichever peer was the fastest, by the median of its rounds."""
    rates = {name: rate for name in PEERS if (rate := result.rate(name)) is not None}
    if not rates:
        return []
    best = max(rates, key=lambda name: rates[name])
    single, batches = result.ratio(SINGLY, best), result.ratio(IN_BATCHES, best)
    return [
        Check(f"{what} ÷ the best peer ({best})", single, 1.0, "", "at least"),
        Check(f"{what}, {BATCH} at a time ÷ the best peer", batches, 20.0, "", "at least"),
    ]


def _put_singly(count: int, folder: Path) -> Sample:
    with pxrs.connect(url(folder)) as px:
        px.put(QUEUE, VALUES[0])
        started = perf_counter()
        for value in VALUES[:count]:
            px.put(QUEUE, value)
        seconds = perf_counter() - started
        _require(px, count + 1)
    return Sample(count, seconds)


def _put_batches(count: int, folder: Path) -> Sample:
    with pxrs.connect(url(folder)) as px:
        px.put(QUEUE, VALUES[0])
        seconds = _fill(px, count)
        _require(px, count + 1)
    return Sample(count, seconds)


def _fill(px: Any, count: int, batch: int = BATCH) -> float:
    started = perf_counter()
    for start in range(0, count, batch):
        with px.transaction() as tx:
            for at in range(start, min(count, start + batch)):
                tx.put(QUEUE, VALUES[at % len(VALUES)])
    return perf_counter() - started


def _take_singly(count: int, folder: Path) -> Sample:
    with pxrs.connect(url(folder)) as px:
        _fill(px, count)
        seconds = _take(px, count, 1)
        _require(px, 0)
    return Sample(count, seconds)


def _take_batches(count: int, folder: Path) -> Sample:
    with pxrs.connect(url(folder)) as px:
        _fill(px, count)
        seconds = _take(px, count, BATCH)
        _require(px, 0)
    return Sample(count, seconds)


def _take(px: Any, count: int, batch: int) -> float:
    taken = 0
    started = perf_counter()
    while taken < count:
        with px.transaction() as tx:
            if batch == 1:
                taken += tx.take(QUEUE, timeout=0) is not None
            else:
                taken += len(tx.take_many(QUEUE, batch, timeout=0))
    return perf_counter() - started


def _require(px: Any, depth: int) -> None:
    found = px.queues.describe(QUEUE).depth
    if found != depth:
        raise RuntimeError(f"{found} items are in the queue, not {depth}")


def _peer_puts(opened: Callable[[Path], Peer], count: int, folder: Path) -> Sample:
    peer = opened(folder)
    peer.put(VALUES[0])
    started = perf_counter()
    for value in VALUES[:count]:
        peer.put(value)
    seconds = perf_counter() - started
    peer.close()
    return Sample(count, seconds)


def _peer_takes(opened: Callable[[Path], Peer], count: int, folder: Path) -> Sample:
    peer = opened(folder)
    for value in VALUES[:count]:
        peer.put(value)
    started = perf_counter()
    for _ in range(count):
        peer.take()
    seconds = perf_counter() - started
    peer.close()
    return Sample(count, seconds)


def backlog(options: Options, say: Say) -> Section:
    """The same work with few and with many items waiting."""
    few, many = 1_000, 20_000 if options.quick else 1_000_000
    rounds = 20 if options.quick else 50
    section = Section()
    with scratch(options) as short, scratch(options) as long:
        places = {few: url(Path(short)), many: url(Path(long))}
        with pxrs.connect(places[few]) as near, pxrs.connect(places[many]) as far:
            stores = {few: near, many: far}
            for depth, px in stores.items():
                say(f"backlog: putting {depth:,} items")
                _fill(px, depth, 5_000)
            for batch in (1, BATCH):
                contestants = [
                    Contestant(f"{depth:,} waiting", partial(_turn_over, px, rounds, batch))
                    for depth, px in stores.items()
                ]
                title = f"put and take, {batch} at a time"
                result = compare(title, contestants, 2 * options.rounds, options, say)
                cost = result.cost(contestants[1].name, contestants[0].name)
                section.comparisons.append(result)
                section.checks.append(
                    Check(f"{title}, {many:,} waiting ÷ {few:,}, cost", cost, 1.2, "")
                )
    return section


def _turn_over(px: Any, rounds: int, batch: int, folder: Path) -> Sample:
    started = perf_counter()
    for _ in range(rounds):
        with px.transaction() as tx:
            for value in VALUES[:batch]:
                tx.put(QUEUE, value)
        with px.transaction() as tx:
            if len(tx.take_many(QUEUE, batch, timeout=0)) != batch:
                raise RuntimeError("the queue is shorter than it was")
    return Sample(rounds * batch, perf_counter() - started)


def sharing(options: Options, say: Say) -> Section:
    """Eight processes take from one queue as fast as they can."""
    seconds = 2.0 if options.quick else 5.0
    with scratch(options) as folder, pxrs.connect(url(Path(folder))) as px:
        _fill(px, int(seconds * 4_000), 1_000)
        say(f"{WORKERS} workers, {seconds:g} s")
        workers = [Child(_worker, url(Path(folder)), seconds) for _ in range(WORKERS)]
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell("go")
        found: list[list[int]] = [worker.hear() for worker in workers]
        for worker in workers:
            worker.__exit__(None, None, None)
    ids = [number for each in found for number in each]
    shares = [len(each) for each in found]
    return Section(
        checks=[
            Check("8 workers: items handed out twice", len(ids) - len(set(ids)), 0, ""),
            Check("8 workers: slowest ÷ mean", min(shares) / mean(shares), 0.5, "", "at least"),
        ],
        notes=[f"{WORKERS} workers: {' · '.join(map(str, shares))} items in {seconds:g} s"],
        figures={"shares": shares},
    )


def _worker(line: Connection, where: str, seconds: float) -> None:
    with pxrs.connect(where) as px:
        handled = []
        line.send("ready")
        line.recv()
        end = monotonic() + seconds
        while monotonic() < end:
            with px.transaction() as tx:
                item = tx.take(QUEUE, timeout=0.1)
            if item is not None:
                handled.append(item.id)
        line.send(handled)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "putting": putting,
    "taking": taking,
    "backlog": backlog,
    "sharing": sharing,
}
