"""The coordination store in one process's memory."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import count, islice, takewhile
from typing import Protocol, runtime_checkable

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.errors import Closed, SessionLost
from pxrs.stores.api import Watch, failed_checks, validate_commit, validate_limit, validate_ttl
from pxrs.stores.wakeups import Wakeups
from pxrs.types import Check, Committed, Conflict, Limits, Put, Versioned, Write

LIMITS = Limits(operations=128, value_bytes=1_100_000)


@runtime_checkable
class SteppedClock(Clock, Protocol):
    """A clock that is moved by hand and notifies subscribers of it."""

    def subscribe(self, moved: Callable[[], object]) -> Callable[[], None]:
        """Call `moved` after every move; returns a function that ends the subscription."""
        ...


class MemoryCoord:
    """A `CoordStore`. Its versions come from one revision that rises with every commit."""

    limits = LIMITS

    def __init__(self, lock: threading.RLock, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lock = lock
        self._clock = clock
        self._records: dict[str, Versioned] = {}
        self._keys: list[str] = []
        self._revision = 0
        self._leases: dict[str, Lease] = {}
        self._session_numbers = count(1)
        # No lease ends before this; renewals only move their ends away from it.
        self._next_end = math.inf
        self._wakeups: Wakeups[str] = Wakeups(lock, self.settle)
        self._unsubscribe = (
            clock.subscribe(self.settle) if isinstance(clock, SteppedClock) else None
        )
        self._ended: list[Callable[[str], None]] = []
        self._closed = False

    def get(self, key: str) -> Versioned | None:
        with self._lock:
            self._begin()
            return self._records.get(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        with self._lock:
            self._begin()
            first = bisect_left(self._keys, prefix)
            if after is not None:
                first = max(first, bisect_right(self._keys, after))
            rest = (self._keys[index] for index in range(first, len(self._keys)))
            found = takewhile(lambda key: key.startswith(prefix), rest)
            return [self._records[key] for key in islice(found, limit)]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, LIMITS)
        with self._lock:
            current = self.examine(checks, writes)
            if current:
                return Conflict(current)
            return Committed(self.apply(writes))

    def watch(self, *where: str) -> Watch:
        with self._lock:
            self._begin()
            return self._wakeups.watch(lambda key: key.startswith(where))

    def now_ms(self) -> int:
        """See `pxrs.stores.api.TellsTime`."""
        return self._clock.wall_ms()

    def session(self, ttl: float) -> MemorySession:
        validate_ttl(ttl)
        with self._lock:
            now = self._begin()
            lease = Lease(f"s{next(self._session_numbers)}", now + ttl)
            self._leases[lease.id] = lease
            if lease.end < self._next_end:
                self._next_end = lease.end
                self._wakeups.reconsider()
            return MemorySession(self, self._clock, lease.id, ttl, now)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wakeups.close()
        if self._unsubscribe is not None:
            self._unsubscribe()

    def renew(self, session_id: str, ttl: float) -> None:
        """Let the session end `ttl` seconds from now; raises `SessionLost` if it has ended."""
        with self._lock:
            now = self._begin()
            self._lease(session_id).end = now + ttl

    def end(self, session_id: str) -> None:
        """End the session, if it has not ended, and everything written with it."""
        with self._lock:
            lease = self._leases.pop(session_id, None)
            if lease is not None:
                for key in lease.keys:
                    self._remove(key)
                self._wakeups.ring(lease.keys)
                for told in self._ended:
                    told(session_id)

    def has_session(self, session_id: str) -> bool:
        """Whether the session lives. Under the lock, after `settle`."""
        return session_id in self._leases

    def on_session_end(self, told: Callable[[str], None]) -> None:
        """Call `told`, under the lock, with the id of every session that ends."""
        self._ended.append(told)

    def settle(self) -> float | None:
        """End sessions that are past their time; returns the seconds until the next may be.

        None if there is nothing to wait for, or if the clock itself will call again.
        """
        with self._lock:
            now = self._clock.monotonic()
            if now >= self._next_end:
                for lease in [each for each in self._leases.values() if each.end <= now]:
                    self.end(lease.id)
                self._next_end = min((each.end for each in self._leases.values()), default=math.inf)
            if self._unsubscribe is not None or not self._leases:
                return None
            return self._next_end - now

    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        """Return the checked records that are not as expected. Under the lock.

        Raises `SessionLost` when a put names a session that has ended.
        """
        self._begin()
        for write in writes:
            if isinstance(write, Put) and write.session is not None:
                self._lease(write.session)
        return failed_checks(checks, self._records)

    def apply(self, writes: Sequence[Write]) -> dict[str, int]:
        """Do the writes, which `examine` let pass; returns the new versions. Under the lock."""
        self._revision += 1
        versions = {}
        for write in writes:
            self._remove(write.key)
            if isinstance(write, Put):
                self._insert(write)
                versions[write.key] = self._revision
        self._wakeups.ring([write.key for write in writes])
        return versions

    def _insert(self, put: Put) -> None:
        record = Versioned(put.key, bytes(put.value), self._revision, put.session)
        self._records[put.key] = record
        insort(self._keys, put.key)
        if put.session is not None:
            self._leases[put.session].keys.add(put.key)

    def _remove(self, key: str) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        del self._keys[bisect_left(self._keys, key)]
        if record.session in self._leases:
            self._leases[record.session].keys.discard(key)

    def _lease(self, session_id: str) -> Lease:
        try:
            return self._leases[session_id]
        except KeyError:
            raise SessionLost(f"session {session_id} has ended") from None

    def _begin(self) -> float:
        if self._closed:
            raise Closed("the store was closed")
        self.settle()
        return self._clock.monotonic()


class Lease:
    """A session: when it ends and which records end with it."""

    def __init__(self, session_id: str, end: float) -> None:
        self.id = session_id
        self.end = end
        self.keys: set[str] = set()


class MemorySession:
    """A `Session`: the holder's side of a lease."""

    def __init__(
        self, coord: MemoryCoord, clock: Clock, session_id: str, ttl: float, sent: float
    ) -> None:
        self._coord = coord
        self._clock = clock
        self.id = session_id
        self.ttl = ttl
        self._safe_until = sent + ttl
        self._over = False

    def renew(self) -> None:
        sent = self._clock.monotonic()
        try:
            self._coord.renew(self.id, self.ttl)
        except SessionLost:
            self._over = True
            raise
        self._safe_until = sent + self.ttl

    def remaining(self) -> float:
        return 0.0 if self._over else max(0.0, self._safe_until - self._clock.monotonic())

    def close(self) -> None:
        self._coord.end(self.id)
        self._over = True
