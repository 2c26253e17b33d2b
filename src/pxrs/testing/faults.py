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
- reads and renewals fail;
- nobody, or one of them, can reach the store for a while;
- wake-ups are lost, or come late.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any, NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.errors import OutcomeUnknown, PxrsError, StoreBusy, StoreUnavailable
from pxrs.stores.api import Atomic, CoordStore, LogStore, QueueStore, Session, Stores, Watch
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


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How often what goes wrong, each as a probability per call.

    `unknown_late` commits arrive up to `longest_delay` seconds later.
    """

    unknown_applied: float = 0.0
    unknown_lost: float = 0.0
    unknown_late: float = 0.0
    unavailable: float = 0.0
    busy: float = 0.0
    reads: float = 0.0
    renewals: float = 0.0
    wake_lost: float = 0.0
    wake_late: float = 0.0
    longest_delay: float = 5.0


NOTHING = Rates()


class Faults:
    """Decides what fails.

    `before_call` is told of every call before it is made, `no_answer` of the keys of every
    commit whose outcome stays unknown to its caller.
    """

    def __init__(
        self,
        rng: Random,
        clock: Clock,
        rates: Rates = NOTHING,
        before_call: Callable[[str, str], None] | None = None,
        no_answer: Callable[[str, str, Sequence[str]], None] | None = None,
    ) -> None:
        self.rng = rng
        self.clock = clock
        self.rates = rates
        self._before_call = before_call
        self._no_answer = no_answer
        self._cut_off: dict[str, float] = {}
        self._all_cut_off = 0.0
        self._late: list[_Late] = []

    def cut_off(self, who: str | None, until: float) -> None:
        """Let nobody, or not this one, reach the store until then."""
        if who is None:
            self._all_cut_off = max(self._all_cut_off, until)
        else:
            self._cut_off[who] = max(self._cut_off.get(who, until), until)

    def heal(self) -> None:
        """No faults from now on; commits that are still on their way arrive now."""
        self.rates = NOTHING
        self._cut_off.clear()
        self._all_cut_off = 0.0
        for late in self._take_late(lambda late: True):
            late.arrive()

    def arrive(self) -> None:
        """Do the late commits whose time has come."""
        now = self.clock.monotonic()
        if self._late:
            for late in self._take_late(lambda late: late.at <= now):
                late.arrive()

    def call(self, who: str, what: str, rate: float = 0.0) -> None:
        """Before a call: raises if it does not get through."""
        if self._before_call is not None:
            self._before_call(who, what)
        self.arrive()
        now = self.clock.monotonic()
        if now < self._all_cut_off or now < self._cut_off.get(who, now):
            raise StoreUnavailable(f"{who} can't reach the store ({what})")
        if self.happens(rate):
            raise StoreUnavailable(f"{what} failed")

    def happens(self, rate: float) -> bool:
        """Whether something that happens so often happens now."""
        return rate > 0 and self.rng.random() < rate

    def unknown(self, who: str, why: str, writes: Sequence[Write]) -> OutcomeUnknown:
        """The error for a commit that gets no answer."""
        if self._no_answer is not None:
            self._no_answer(who, why, [write.key for write in writes])
        return OutcomeUnknown(f"no answer came ({why})")

    def put_off(self, commit: Callable[[], object]) -> None:
        """Do the commit later."""
        delay = self.rng.random() * self.rates.longest_delay
        self._late.append(_Late(self.clock.monotonic() + delay, commit))

    def _take_late(self, wanted: Callable[[_Late], bool]) -> list[_Late]:
        taken = [late for late in self._late if wanted(late)]
        self._late = [late for late in self._late if not wanted(late)]
        return sorted(taken, key=lambda late: late.at)


class _Late(NamedTuple):
    """A commit on its way."""

    at: float
    commit: Callable[[], object]

    def arrive(self) -> None:
        """Do it, if the store still takes it; nobody hears the answer."""
        try:
            self.commit()
        except PxrsError:
            return


class FaultyStores:
    """`Stores` that fail now and then."""

    def __init__(self, inner: Stores, faults: Faults, who: str = "") -> None:
        self._inner = inner
        self._coord = FaultyCoord(inner.coord, faults, who)
        self._log = FaultyLog(inner.log, faults, who)

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
    def queues(self) -> QueueStore:
        """The inner stores' own."""
        return self._inner.queues

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        """The inner stores' own: transactions do not fail here."""
        return self._inner.atomic(connection)

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


class FaultyWatch:
    """A `Watch` that loses wake-ups, or tells of them one wait late."""

    def __init__(self, inner: Watch, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._owed = False

    def wait(self, timeout: float | None = None) -> bool:
        woken, self._owed = self._owed, False
        if self._inner.wait(0 if woken else timeout):
            rates = self._faults.rates
            self._owed = self._faults.happens(rates.wake_late)
            woken = woken or not (self._owed or self._faults.happens(rates.wake_lost))
        return woken

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


class FaultyLog:
    """A `LogStore` that can't be reached now and then. Appends fail only before they are done."""

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
        return self._inner.append(appends)

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
