"""Helpers for checks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pxrs.codec.batches import decode, encode
from pxrs.errors import SessionLost
from pxrs.stores.api import CoordStore, LogStore, Session, Watch
from pxrs.testing.conformance.lab import Lab, Patient, Violation
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Committed,
    Conflict,
    Fence,
    LogPartition,
    Put,
    StoredBatch,
)

A_LOT = 1 << 30

# Seconds: longer than any check takes.
LONG = 3600.0

# How often a commit that meets a conflict is tried before giving up.
ATTEMPTS = 10_000

# How many of the lab's TTLs a session gets. On a busy machine a check may be delayed for longer
# than that before it renews: then the session is rightly over, and the next one gets more time.
FACTORS = (2, 4, 8, 16)


def require(condition: bool, rule: str) -> None:
    """Raise `Violation` unless the condition holds."""
    if not condition:
        raise Violation(rule)


def same(actual: Any, expected: Any, what: str) -> None:
    """Raise `Violation` unless the two are equal."""
    if actual != expected:
        raise Violation(f"{what}: got {actual!r}, not {expected!r}")


@contextmanager
def raises(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `Violation` unless the block raises one of these."""
    try:
        yield
    except kinds:
        return
    raise Violation(f"{' or '.join(each.__name__ for each in kinds)} was not raised")


def together(lab: Patient, *jobs: Callable[[], object]) -> None:
    """Run the jobs in threads that start at once; raises the error of the first that failed."""
    start = threading.Barrier(len(jobs))
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(job: Callable[[], object]) -> None:
        try:
            start.wait(lab.patience)
            job()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            ends.put(error)
        else:
            ends.put(None)

    for job in jobs:
        threading.Thread(target=run, args=(job,), daemon=True).start()
    for _ in jobs:
        try:
            error = ends.get(timeout=lab.patience)
        except queue.Empty:
            raise Violation("the threads did not end in time") from None
        if error is not None:
            raise error


def must_wake(lab: Patient, watch: Watch, why: str) -> None:
    """Require that the watch wakes within the lab's patience."""
    require(watch.wait(lab.patience), f"the watch was not woken by {why}")


def close_must_wake(lab: Patient, watch: Watch) -> None:
    """Close the watch under a thread that waits without a timeout, then wait again."""
    asleep, awake = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        while not awake.is_set():
            require(watch.wait(None), "a wait without a timeout timed out")

    def wake() -> None:
        require(asleep.wait(lab.patience), "the sleeper did not start")
        awake.set()
        watch.close()

    together(lab, sleep, wake)
    watch.close()
    require(watch.wait(None) and watch.wait(0), "a closed watch says that nothing happened")


def put(coord: CoordStore, key: str, value: bytes = b"v", session: str | None = None) -> int:
    """Write one record without a check; returns its version."""
    return committed(coord.commit((), (Put(key, value, session),))).versions[key]


def mortal(lab: Lab, coord: CoordStore, *keys: str, least: int = FACTORS[0]) -> Session:
    """A session whose end can be waited for, with records of its own.

    On a busy machine its time can be over before they are written: then another gets more time.
    """
    for factor in FACTORS[FACTORS.index(least) :]:
        session = coord.session(factor * lab.ttl / FACTORS[0])
        try:
            committed(coord.commit((), [Put(key, b"1", session.id) for key in keys]))
        except SessionLost:
            if session.remaining() > 0:
                raise
        else:
            return session
    raise Violation("no session lived long enough to write a record")


def committed(outcome: Committed | Conflict) -> Committed:
    """The outcome, which must be a success."""
    if isinstance(outcome, Conflict):
        raise Violation(f"the commit met a conflict: {outcome.current!r}")
    return outcome


def refused(outcome: Committed | Conflict) -> Conflict:
    """The outcome, which must be a conflict."""
    if isinstance(outcome, Committed):
        raise Violation(f"the commit was carried out though a check did not hold: {outcome!r}")
    return outcome


def value_of(coord: CoordStore, key: str) -> bytes | None:
    """The value of a record, None if there is none."""
    record = coord.get(key)
    return None if record is None else record.value


def keys_of(coord: CoordStore, prefix: str) -> list[str]:
    """The keys under a prefix, as listed."""
    return [record.key for record in coord.list(prefix)]


def batch(
    *values: bytes, timestamps: Sequence[int] = (), producer: tuple[int, int, int] = (-1, -1, -1)
) -> Batch:
    """A batch of these values; `producer` is id, epoch and sequence."""
    stamps = timestamps or [1_000] * len(values)
    producer_id, epoch, sequence = producer
    return encode(
        [(b"key", value, [], stamp) for value, stamp in zip(values, stamps, strict=True)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def append(log: LogStore, where: LogPartition, *batches: Batch) -> list[int]:
    """Append in one call; returns the base offsets of the batches, which all must be new."""
    bases = []
    for outcome in log.append([Append(where, each) for each in batches]):
        if not isinstance(outcome, Appended):
            raise Violation(f"a good batch was refused: {outcome!r}")
        require(not outcome.duplicate, "a new batch was taken for a duplicate")
        bases.append(outcome.base)
    return bases


def stored_in(log: LogStore, where: LogPartition) -> list[StoredBatch]:
    """Every batch of a partition, fetched one by one."""
    found: list[StoredBatch] = []
    offset = log.bounds(where.topic_id)[where.partition].start
    while fetched := log.fetch(where, offset, 0).batches:
        require(fetched[-1].next > offset, "a fetch returned what ends before the offset")
        found += fetched
        offset = found[-1].next
    return found


def values_in(log: LogStore, where: LogPartition) -> dict[int, bytes]:
    """Every message's value by its offset, checksums checked."""
    fence = Fence(*where, 0)
    return {
        message.offset: message.value
        for stored in stored_in(log, where)
        for message in decode(stored, fence)
    }
