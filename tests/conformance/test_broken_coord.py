"""Stores with one rule broken each: the coordination suite finds every one of them."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import pytest

from pxrs.clock import Clock
from pxrs.stores.api import Watch
from pxrs.stores.memory.coord import Lease, MemoryCoord, MemorySession
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import MemoryLab, coord_checks, run_suite
from pxrs.types import Check, Committed, Conflict, Delete, Limits, Put, Versioned, Write

pytestmark = pytest.mark.engine("memory")


class SkipsVersions(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        return super().examine([check for check in checks if check.version == 0], writes)


class SkipsAbsence(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        return super().examine([check for check in checks if check.version != 0], writes)


class SkipsUnwrittenKeys(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        written = {write.key for write in writes}
        return super().examine([check for check in checks if check.key in written], writes)


class TellsOneConflict(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        return dict(list(super().examine(checks, writes).items())[:1])


class WritesWhatItCan(MemoryCoord):
    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        outcome = super().commit(checks, writes)
        if isinstance(outcome, Conflict):
            self.apply([write for write in writes if write.key not in outcome.current])
        return outcome


class ChecksBeforeTheLock(MemoryCoord):
    """Two commits meet between check and write."""

    def __init__(self, lock: threading.RLock, clock: Clock) -> None:
        super().__init__(lock, clock)
        self._meeting = threading.Barrier(2)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        current = self.examine(checks, writes)
        if current:
            return Conflict(current)
        if checks and not self._meeting.broken:
            try:
                self._meeting.wait(0.2)
            except threading.BrokenBarrierError:
                self._meeting.reset()
        with self._lock:
            return Committed(self.apply(writes))


class VersionsStartAgain(MemoryCoord):
    """Counts per record, from 1 whenever it is made."""

    def apply(self, writes: Sequence[Write]) -> dict[str, int]:
        versions: dict[str, int] = {}
        for write in writes:
            record = self._records.get(write.key)
            self._revision = 0 if record is None else record.version
            versions |= super().apply([write])
        return versions


class PrefixIsAPattern(MemoryCoord):
    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        like = prefix.replace("_", "?").replace("%", "*") + "*"
        found = [
            record for record in super().list("", after, None) if fnmatchcase(record.key, like)
        ]
        return found[:limit]


class PrefixIsAFolder(MemoryCoord):
    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        folder = prefix.rstrip("/") + "/"
        found = super().list("", after)
        return [each for each in found if (each.key + "/").startswith(folder)][:limit]


class PagesOverlap(MemoryCoord):
    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        found = [each for each in super().list(prefix) if after is None or each.key >= after]
        return found[:limit]


class SortsLikeUtf16(MemoryCoord):
    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        return sorted(
            super().list(prefix, after, limit), key=lambda each: each.key.encode("utf-16-be")
        )


class IgnoresCase(MemoryCoord):
    def get(self, key: str) -> Versioned | None:
        found = [each for each in self.list("") if each.key.lower() == key.lower()]
        return found[0] if found else None


class HandsOutItsOwnList(MemoryCoord):
    def __init__(self, lock: threading.RLock, clock: Clock) -> None:
        super().__init__(lock, clock)
        self._everything: list[Versioned] | None = None

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        if (prefix, after, limit) != ("", None, None):
            return super().list(prefix, after, limit)
        if self._everything is None:
            self._everything = super().list("")
        return self._everything

    def apply(self, writes: Sequence[Write]) -> dict[str, int]:
        self._everything = None
        return super().apply(writes)


class PromisesLess(MemoryCoord):
    limits = Limits(operations=16, value_bytes=1024)


class StopsAtAMissingDelete(MemoryCoord):
    def apply(self, writes: Sequence[Write]) -> dict[str, int]:
        for write in writes:
            if isinstance(write, Delete) and write.key not in self._records:
                return {}
        return super().apply(writes)


class RenewsTheDead(MemoryCoord):
    def renew(self, session_id: str, ttl: float) -> None:
        end = self._clock.monotonic() + ttl
        self._leases.setdefault(session_id, Lease(session_id, end)).end = end


class RenewsUntilSomebodyLooks(MemoryCoord):
    """Takes a late renewal when the expiry was not noticed yet."""

    def __init__(self, lock: threading.RLock, clock: VirtualClock) -> None:
        super().__init__(lock, clock)
        assert self._unsubscribe is not None
        self._unsubscribe()

    def renew(self, session_id: str, ttl: float) -> None:
        with self._lock:
            self._lease(session_id).end = self._clock.monotonic() + ttl


class RenewsInVain(MemoryCoord):
    def renew(self, session_id: str, ttl: float) -> None:
        self._begin()
        self._lease(session_id)


class LetsTheDeadWrite(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        return super().examine(checks, [])

    def _insert(self, put: Put) -> None:
        if put.session is None or put.session in self._leases:
            super()._insert(put)
        else:
            self._records[put.key] = Versioned(put.key, put.value, self._revision, put.session)
            insort(self._keys, put.key)


class KeepsTheDeadsRecords(MemoryCoord):
    def end(self, session_id: str) -> None:
        self._leases.pop(session_id, None)


class KeepsTheExpiredsRecords(MemoryCoord):
    def settle(self) -> float | None:
        for lease in list(self._leases.values()):
            if lease.end <= self._clock.monotonic():
                del self._leases[lease.id]
        return None


class BuriesOneByOne(MemoryCoord):
    """Lets others look between one record's end and the next one's."""

    def __init__(self, lock: threading.RLock, clock: Clock) -> None:
        super().__init__(lock, clock)
        self._looks = threading.Semaphore(0)

    def get(self, key: str) -> Versioned | None:
        self._looks.release()
        return super().get(key)

    def end(self, session_id: str) -> None:
        lease = self._leases.get(session_id)
        for key in sorted(lease.keys) if lease is not None else ():
            self.apply([Delete(key)])
            for _ in range(50):
                self._looks.acquire(timeout=0.02)
        super().end(session_id)


class BindsForEver(MemoryCoord):
    """Remembers every record a session ever wrote as the session's."""

    def _remove(self, key: str) -> None:
        holders = [lease for lease in self._leases.values() if key in lease.keys]
        super()._remove(key)
        for lease in holders:
            lease.keys.add(key)


class AlwaysHasTime(MemoryCoord):
    def session(self, ttl: float) -> MemorySession:
        session = super().session(ttl)
        session._safe_until = float("inf")
        return session


class ChecksBoundVersions(MemoryCoord):
    def examine(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> dict[str, Versioned | None]:
        bound = [check for check in checks if self._bound(check)]
        return super().examine([check for check in checks if check not in bound], writes)

    def _bound(self, check: Check) -> bool:
        record = self._records.get(check.key)
        return record is not None and record.session is not None and check.version != 0


class DiesInSilence(MemoryCoord):
    def end(self, session_id: str) -> None:
        lease = self._leases.pop(session_id, None)
        for key in lease.keys if lease is not None else ():
            self._remove(key)


class DeletesInSilence(MemoryCoord):
    def apply(self, writes: Sequence[Write]) -> dict[str, int]:
        ring, self._wakeups.ring = self._wakeups.ring, lambda changed: None  # type: ignore[method-assign]
        try:
            versions = super().apply(writes)
        finally:
            self._wakeups.ring = ring  # type: ignore[method-assign]
        ring(list(versions))
        return versions


class WatchesOnePlace(MemoryCoord):
    def watch(self, *prefixes: str) -> Watch:
        return super().watch(prefixes[0])


class WrappedWatch:
    """A watch of the store, to be broken."""

    def __init__(self, coord: MemoryCoord, prefixes: tuple[str, ...]) -> None:
        self.rearm: Callable[[], Watch] = lambda: MemoryCoord.watch(coord, *prefixes)
        self.inner = self.rearm()

    def wait(self, timeout: float | None = None) -> bool:
        return self.inner.wait(timeout)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


class IgnoresWake(WrappedWatch):
    def wake(self) -> None:
        pass


class ArmedByWaiting(WrappedWatch):
    def wait(self, timeout: float | None = None) -> bool:
        self.inner = self.rearm()
        return self.inner.wait(timeout)


class ForgetsBetweenWaits(WrappedWatch):
    waited = False

    def wait(self, timeout: float | None = None) -> bool:
        if self.waited:
            self.inner.wait(0)
        self.waited = True
        return self.inner.wait(timeout)


class ClosesInSilence(WrappedWatch):
    def close(self) -> None:
        pass


def watching(broken: type[WrappedWatch]) -> type[MemoryCoord]:
    class Watching(MemoryCoord):
        def watch(self, *prefixes: str) -> Watch:
            return broken(self, prefixes)

    Watching.__name__ = broken.__name__
    return Watching


BROKEN: list[tuple[type[MemoryCoord], str]] = [
    (SkipsVersions, "check_wrong_version_conflicts"),
    (SkipsAbsence, "check_absence_creates_once"),
    (SkipsUnwrittenKeys, "check_unwritten_keys_are_checked"),
    (SkipsUnwrittenKeys, "check_write_skew_is_impossible"),
    (TellsOneConflict, "check_conflict_tells_what_is_there"),
    (WritesWhatItCan, "check_conflict_writes_nothing"),
    (ChecksBeforeTheLock, "check_concurrent_increments_lose_nothing"),
    (ChecksBeforeTheLock, "check_one_creator_wins"),
    (ChecksBeforeTheLock, "check_write_skew_is_impossible"),
    (VersionsStartAgain, "check_recreated_record_is_another"),
    (PrefixIsAPattern, "check_no_character_is_a_pattern"),
    (PrefixIsAFolder, "check_prefix_boundaries"),
    (PagesOverlap, "check_list_pages"),
    (SortsLikeUtf16, "check_list_is_sorted"),
    (IgnoresCase, "check_keys_are_exact"),
    (HandsOutItsOwnList, "check_results_are_the_callers_own"),
    (PromisesLess, "check_limits_hold"),
    (StopsAtAMissingDelete, "check_delete_is_idempotent"),
    (RenewsTheDead, "check_expired_session_is_dead"),
    (RenewsUntilSomebodyLooks, "check_late_renewal_is_refused"),
    (RenewsInVain, "check_renewal_extends"),
    (LetsTheDeadWrite, "check_expired_session_writes_nothing"),
    (LetsTheDeadWrite, "check_unknown_session_is_dead"),
    (KeepsTheDeadsRecords, "check_records_vanish_on_close"),
    (KeepsTheExpiredsRecords, "check_records_vanish_on_expiry"),
    (KeepsTheExpiredsRecords, "check_dead_record_is_absent"),
    (BuriesOneByOne, "check_records_vanish_all_at_once"),
    (BindsForEver, "check_persistent_put_unbinds"),
    (BindsForEver, "check_other_sessions_put_rebinds"),
    (AlwaysHasTime, "check_remaining_time"),
    (ChecksBoundVersions, "check_bound_versions_are_not_checked"),
    (DiesInSilence, "check_expiry_wakes_a_sleeper"),
    (DiesInSilence, "check_every_kind_of_change_wakes"),
    (DeletesInSilence, "check_every_kind_of_change_wakes"),
    (WatchesOnePlace, "check_every_place_is_watched"),
    (watching(IgnoresWake), "check_a_watch_can_be_woken"),
    (watching(ArmedByWaiting), "check_watch_is_armed_on_return"),
    (watching(ForgetsBetweenWaits), "check_no_change_between_waits_is_lost"),
    (watching(ClosesInSilence), "check_close_wakes_a_sleeper"),
]


def lab_of(broken: type[MemoryCoord]) -> MemoryLab:
    class BrokenStores(MemoryStores):
        def __init__(self, clock: VirtualClock) -> None:
            super().__init__(clock=clock)
            self.coord = broken(self.lock, clock)

    return MemoryLab(BrokenStores, patience=0.3)


def name_of(parameter: type[MemoryCoord] | str) -> str:
    return parameter if isinstance(parameter, str) else parameter.__name__


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=name_of)
def test_is_caught(broken: type[MemoryCoord], check: str) -> None:
    rules = [rule for rule in coord_checks() if rule.__name__ == check]
    failures = run_suite(rules, lambda: lab_of(broken))
    assert [failure.check for failure in failures] == [check]
