"""The two threads beside a consumer's caller.

One renews the session, whatever the handler does. The other looks at the group when a watch wakes
it, and commits what was handled. What will never pass by itself ends the second one and is told to
the caller; all else is tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.core.records import head_key, members_prefix
from pxrs.errors import (
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreFull,
    StoreReadOnly,
)
from pxrs.runtime.worker import Worker
from pxrs.stores.api import CoordStore, Watch

_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
# Not worth the same call again, but the next look may well do: it joins anew, it settles what is
# in doubt, and somebody may have made room or given back the rights.
_MAY_PASS = (SessionLost, OutcomeUnknown, StoreFull, StoreReadOnly)


class Steward:
    """Keeps a member in its group. Its `look` is the worker's membership's."""

    def __init__(
        self,
        coord: CoordStore,
        clock: Clock,
        settings: ConsumerSettings,
        worker: Worker,
        wake_consumer: Callable[[], None],
    ) -> None:
        self._coord = coord
        self._clock = clock
        self._settings = settings
        self._worker = worker
        self._membership = worker.membership
        self._wake_consumer = wake_consumer
        self._watch: Watch | None = None
        self._stop = threading.Event()
        self._commit_soon = threading.Event()
        # What ended it, and since when the store has not answered.
        self.fatal: Exception | None = None
        self.store_lost_since: float | None = None
        self._threads = [
            threading.Thread(target=target, name=f"pxrs-{name}", daemon=True)
            for name, target in (("session", self._keep_session), ("steward", self._attend))
        ]

    def start(self) -> None:
        """Begin. The member has joined already."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; returns when they have ended."""
        self._stop.set()
        self.wake()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Let go of the watch."""
        if self._watch is not None:
            self._watch.close()

    def wake(self) -> None:
        """Look at the group now. From any thread."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def commit_soon(self) -> None:
        """Commit what was handled with the next look, which is now."""
        self._commit_soon.set()
        self.wake()

    def _keep_session(self) -> None:
        while not self._stop.wait(self._settings.session_ttl / 3):
            session = self._membership.session
            if session is None:
                continue
            if self.fatal is not None:
                # Nobody looks at the group any more: others must not wait for this member.
                return
            try:
                session.renew()
            except SessionLost:
                self.wake()
            except Exception:  # noqa: BLE001 - as below
                # The store may come back; the session's own deadline decides.
                continue

    def _attend(self) -> None:
        watched: frozenset[str] | None = None
        commit_at = self._clock.monotonic() + self._settings.auto_commit_interval
        while not self._stop.is_set():
            try:
                if watched != self._membership.waiting_for:
                    wanted = self._membership.waiting_for
                    self._watch_group(wanted)
                    watched = wanted
                version = self._worker.desk.version
                look_at = self._membership.look()
                commit_at = self._commit_when_due(commit_at)
                self.store_lost_since = None
                if self._worker.desk.version != version:
                    self._wake_consumer()
            except Exception as error:  # noqa: BLE001 - a thread that dies in silence is worse
                if not _may_pass(error):
                    self.fatal = error
                    self._wake_consumer()
                    return
                self.store_lost_since = self.store_lost_since or self._clock.monotonic()
                # Not on the watch: it may be closed, and what wakes it can't be looked at.
                self._stop.wait(_RETRY_PAUSE)
                continue
            if watched == self._membership.waiting_for and self._watch is not None:
                now = self._clock.monotonic()
                times = [now + _CAREFUL_WAIT, commit_at]
                times += [look_at] if look_at is not None else []
                self._watch.wait(max(0.0, min(times) - now))

    def _commit_when_due(self, due: float) -> float:
        now = self._clock.monotonic()
        soon = self._commit_soon.is_set()
        if now < due and not soon:
            return due
        self._commit_soon.clear()
        worker = self._worker
        try:
            lost = worker.commit_handled() if self._settings.auto_commit else worker.commit_asked()
        except BaseException:
            if soon:
                self._commit_soon.set()
            raise
        if lost:
            self.wake()
        return now + self._settings.auto_commit_interval

    def _watch_group(self, claims: frozenset[str]) -> None:
        if self._watch is not None:
            self._watch.close()
        group = self._settings.group
        self._watch = self._coord.watch(
            head_key(group), members_prefix(group), "topics/", *sorted(claims)
        )


def _may_pass(error: Exception) -> bool:
    """Whether looking again can help."""
    return isinstance(error, PxrsError) and (error.retryable or isinstance(error, _MAY_PASS))
