"""Stores that fail: a seeded wrapper over any backend, for tests of code that uses one.

```python
faults = Faults(Random(7), clock, Rates(unknown_applied=0.05, unavailable=0.05))
stores = FaultyStores(MemoryStores(clock=clock), faults, who="a")
faults.cut_off("a", until=clock.monotonic() + 30)
```

One `Faults` decides for everybody; each user of the store gets a wrapper with its own name, so
that one of them can be cut off. What can go wrong:

- a commit is done, and answered with `OutcomeUnknown`;
- a commit is not done, and answered with `OutcomeUnknown`, `StoreUnavailable` or `StoreBusy`;
- a commit is answered with `OutcomeUnknown` and done later, if its checks still hold then;
- a caller is interrupted while it commits or takes something, which is done, not done, or done
  later;
- the same of whatever changes a queue: `take`, `extend`, `apply` and `release`;
- the same of a transaction. One that is on its way holds its locks, and whoever commits something
  about the same records waits until it has arrived; or it holds none, and may be overtaken;
- the same of each batch of an append by itself, or there is no room for it (`StoreFull`);
- reads and renewals fail;
- nobody, or one of them, can reach the store for a while; or it crashes, and what was on its way
  is gone;
- wake-ups are lost, or come late.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from pxrs.errors import OutcomeUnknown, PxrsError, StoreBusy, StoreFull, StoreUnavailable
from pxrs.stores.api import Atomic, CoordStore, LogStore, Session, Stores, Watch
from pxrs.testing.faulty_atomic import FaultyAtomic
from pxrs.testing.faulty_queues import FaultyQueues
from pxrs.testing.trouble import NOTHING, Faults, FaultyWatch, Interrupted, Rates
from pxrs.types import (
    Append,
    Appended,
    Bounds,
    Check,
    Committed,
    Conflict,
    Fetched,
    Limits,
    LogPartition,
    Versioned,
    Write,
)

__all__ = [
    "NOTHING",
    "Faults",
    "FaultyAtomic",
    "FaultyCoord",
    "FaultyLog",
    "FaultyQueues",
    "FaultySession",
    "FaultyStores",
    "FaultyWatch",
    "Interrupted",
    "Rates",
]


class FaultyStores:
    """`Stores` that fail now and then."""

    def __init__(self, inner: Stores, faults: Faults, who: str = "") -> None:
        self._inner = inner
        self._faults = faults
        self._who = who
        self._coord = FaultyCoord(inner.coord, faults, who)
        self._log = FaultyLog(inner.log, faults, who)
        self._queues = FaultyQueues(inner.queues, faults, who)

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def coord(self) -> FaultyCoord:
        return self._coord

    @property
    def log(self) -> FaultyLog:
        return self._log

    @property
    def queues(self) -> FaultyQueues:
        return self._queues

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        return FaultyAtomic(self._inner.atomic(connection), self._faults, self._who)

    def close(self) -> None:
        self._inner.close()


class FaultyCoord:
    """A `CoordStore` that fails now and then."""

    def __init__(self, inner: CoordStore, faults: Faults, who: str = "") -> None:
        self._inner = inner
        self._faults = faults
        self._who = who

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def get(self, key: str) -> Versioned | None:
        self._faults.call(self._who, f"get {key}", self._faults.rates.reads)
        return self._inner.get(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> builtins.list[Versioned]:
        self._faults.call(self._who, f"list {prefix}", self._faults.rates.reads)
        return self._inner.list(prefix, after, limit)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        faults = self._faults
        faults.call(self._who, "commit", faults.rates.unavailable)
        if faults.happens(faults.rates.busy):
            raise StoreBusy("somebody else is writing")
        if faults.happens(faults.rates.unknown_lost):
            raise faults.unknown(self._who, "the commit was lost", writes)
        if faults.happens(faults.rates.unknown_late):
            faults.put_off(lambda: self._inner.commit(checks, writes))
            raise faults.unknown(self._who, "the commit is on its way", writes)
        faults.interrupt(
            self._who, "commit", lambda: self._inner.commit(checks, writes), writes=writes
        )
        faults.wait_for_locks(each.key for each in (*checks, *writes))
        outcome = self._inner.commit(checks, writes)
        if faults.happens(faults.rates.unknown_applied):
            raise faults.unknown(self._who, "the answer was lost", writes)
        return outcome

    def watch(self, *prefixes: str) -> Watch:
        self._faults.call(self._who, "watch")
        return FaultyWatch(self._inner.watch(*prefixes), self._faults)

    def session(self, ttl: float) -> Session:
        self._faults.call(self._who, "open a session", self._faults.rates.unavailable)
        return FaultySession(self._inner.session(ttl), self._faults, self._who)

    def close(self) -> None:
        self._inner.close()


class FaultySession:
    """A `Session` whose renewals fail now and then, some of them after they were done."""

    def __init__(self, inner: Session, faults: Faults, who: str) -> None:
        self._inner = inner
        self._faults = faults
        self._who = who
        self._safe_until = faults.clock.monotonic() + inner.remaining()

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def ttl(self) -> float:
        return self._inner.ttl

    def renew(self) -> None:
        faults, sent = self._faults, self._faults.clock.monotonic()
        faults.call(self._who, "renew", faults.rates.renewals)
        self._inner.renew()
        if faults.happens(faults.rates.renewals):
            raise StoreUnavailable("renewed, but no answer came")
        self._safe_until = max(self._safe_until, sent + self.ttl)

    def remaining(self) -> float:
        left = self._safe_until - self._faults.clock.monotonic()
        return max(0.0, min(left, self._inner.remaining()))

    def close(self) -> None:
        self._faults.call(self._who, "close the session", self._faults.rates.unavailable)
        self._inner.close()


class FaultyLog:
    """A `LogStore` that fails now and then, each batch of an append by itself."""

    def __init__(self, inner: LogStore, faults: Faults, who: str = "") -> None:
        self._inner = inner
        self._faults = faults
        self._who = who

    def _read(self, what: str) -> None:
        self._faults.call(self._who, what, self._faults.rates.reads)

    def _write(self, what: str) -> None:
        self._faults.call(self._who, what, self._faults.rates.unavailable)

    def create(self, topic_id: str, partitions: int) -> None:
        self._write("create")
        self._inner.create(topic_id, partitions)

    def drop(self, topic_id: str) -> None:
        self._write("drop")
        self._inner.drop(topic_id)

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        self._write("append")
        self._faults.interrupt(
            self._who, "append", lambda: self._inner.append(self._some_of(appends))
        )
        held_up: set[LogPartition] = set()
        results: list[Appended | PxrsError] = []
        for append in appends:
            if append.where in held_up:
                results.append(StoreUnavailable("it waits for the batch before it"))
                continue
            result = self._append_one(append)
            if isinstance(result, PxrsError) and (
                result.retryable or isinstance(result, OutcomeUnknown)
            ):
                held_up.add(append.where)
            results.append(result)
        return results

    def _some_of(self, appends: Sequence[Append]) -> list[Append]:
        """What was sent before an interrupt: of each partition the first ones."""
        ends = {where: self._faults.rng.random() < 0.5 for where, _ in appends}
        sent = []
        for append in appends:
            ends[append.where] = ends[append.where] or self._faults.rng.random() < 0.3
            if not ends[append.where]:
                sent.append(append)
        return sent

    def _append_one(self, append: Append) -> Appended | PxrsError:
        """Its offset, unless this is one of those that fail."""
        faults, rates = self._faults, self._faults.rates
        if faults.happens(rates.full):
            return StoreFull("there is no room for the batch")
        if faults.happens(rates.unavailable):
            return StoreUnavailable("the partition can't be reached")
        if faults.happens(rates.unknown_lost):
            return faults.unknown(self._who, "the batch was lost", ())
        if faults.happens(rates.unknown_late):
            faults.put_off(lambda: self._inner.append([append]))
            return faults.unknown(self._who, "the batch is on its way", ())
        (answer,) = self._inner.append([append])
        if isinstance(answer, Appended) and faults.happens(rates.unknown_applied):
            return faults.unknown(self._who, "the answer to a batch was lost", ())
        return answer

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        self._read("fetch")
        return self._inner.fetch(where, offset, max_bytes)

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        self._read("bounds")
        return self._inner.bounds(topic_id)

    def size(self, where: LogPartition) -> int:
        self._read("size")
        return self._inner.size(where)

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        self._read("batch_at")
        return self._inner.batch_at(where, timestamp)

    def trim(self, where: LogPartition, before: int) -> int:
        self._write("trim")
        return self._inner.trim(where, before)

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        self._write("expire")
        return self._inner.expire(where, before_timestamp, max_bytes)

    def watch(self, *where: LogPartition) -> Watch:
        self._read("watch")
        return FaultyWatch(self._inner.watch(*where), self._faults)

    def close(self) -> None:
        self._inner.close()
