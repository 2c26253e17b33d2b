"""The two threads beside a consumer's caller.

One renews the session, whatever the handler does. The other looks at the group when a watch wakes
it, and commits what was handled. An error that will never pass by itself ends the second one and is
raised to the caller; after any other error it tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.consuming.in_hand import Extent
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.outage import Outage
from pxrs.core.records import head_key, members_prefix
from pxrs.errors import (
    Closed,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreFull,
    StoreReadOnly,
)
from pxrs.groups.owned_claims import fenced, names_of
from pxrs.stores.api import CoordStore, Watch
from pxrs.types import TopicPartition

_LOG = logging.getLogger("pxrs.groups")
_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
# To repeat the call is no use, but the next look may succeed: it joins anew, it settles what is in
# doubt, and an operator may have made room or given back the rights.
_MAY_PASS = (SessionLost, OutcomeUnknown, StoreFull, StoreReadOnly)


class Asked(NamedTuple):
    """A commit in the background: how far it goes, and the future for its outcome."""

    extent: Extent
    answer: Future[None]


class Background:
    """Keeps a member in its group. `look` is that of its membership."""

    def __init__(
        self,
        coord: CoordStore,
        clock: Clock,
        settings: ConsumerSettings,
        steps: MemberSteps,
        wake_consumer: Callable[[], None],
    ) -> None:
        self._coord = coord
        self._clock = clock
        self._settings = settings
        self._steps = steps
        self._membership = steps.membership
        self._wake_consumer = wake_consumer
        self._who = f"group {settings.group!r}, member {settings.member_name!r}"
        self._watch: Watch | None = None
        self._stop = threading.Event()
        # Commits that callers wait for, or may.
        self._asked: list[Asked] = []
        self._asking = threading.Lock()
        # The error that ended it.
        self.fatal: Exception | None = None
        self.outage = Outage(self._who, clock)
        self._warned_of: float | None = None
        self._abandoned: tuple[Callable[[], None], ...] | None = None
        self._threads = [
            threading.Thread(target=target, name=f"pxrs-{name}", daemon=True)
            for name, target in (("session", self._keep_session), ("background", self._attend))
        ]

    def start(self) -> None:
        """Start the threads. The member has joined already."""
        for thread in self._threads:
            thread.start()

    def stop_soon(self) -> None:
        """Have both threads end after the call that they wait for; not for it."""
        self._stop.set()

    def stop(self) -> None:
        """End both threads; returns when they have ended."""
        self._stop.set()
        self.wake()
        for thread in self._threads:
            thread.join()

    def abandon(self, *closing: Callable[[], None]) -> None:
        """Leave with the next look, as the consumer was dropped, and then call `closing`.

        For a finalizer, which may interrupt any code, so it takes no lock and wakes no thread.
        """
        self._abandoned = closing

    def close(self) -> None:
        """Close the watch."""
        if self._watch is not None:
            self._watch.close()
        _answer(self._take_asked(), Closed("the consumer was closed before it was committed"))

    def wake(self) -> None:
        """Look at the group now. From any thread."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def commit_soon(self) -> Future[None]:
        """Commit what the caller has seen, with a look at once; the future has the outcome."""
        asked = Asked(self._steps.ask(), Future())
        # It can't be cancelled: the commit may be on its way.
        asked.answer.set_running_or_notify_cancel()
        with self._asking:
            self._asked.append(asked)
        self.wake()
        return asked.answer

    def commit_what_was_asked(self) -> None:
        """Commit if a caller has asked for it and got no answer yet."""
        if not (asked := self._take_asked()):
            return
        try:
            lost = self._steps.commit_asked(each.extent for each in asked)
        except Exception as error:
            if _may_pass(error) and not self._stop.is_set():
                with self._asking:
                    self._asked += asked
            else:
                _answer(asked, error)
            raise
        if lost:
            self.wake()
        for each in asked:
            theirs = lost & {owned.part for owned in each.extent.partitions} | each.extent.lost
            _answer([each], fenced(theirs) if theirs else None)

    def _take_asked(self) -> list[Asked]:
        with self._asking:
            asked, self._asked = self._asked, []
            return asked

    def _keep_session(self) -> None:
        while not self._stop.wait(self._settings.session_ttl / 3):
            session = self._membership.session
            if session is None:
                continue
            if self.fatal is not None:
                # No thread looks at the group any more: others must not wait for this member.
                return
            try:
                session.renew()
            except SessionLost:
                self.wake()
            except Exception:  # noqa: BLE001 - a thread that dies in silence is worse
                # The store may come back; the session's own deadline decides.
                continue

    def _attend(self) -> None:
        self._steps.owned_claims.beside = threading.get_ident()
        watched: frozenset[str] | None = None
        commit_at = self._clock.monotonic() + self._settings.auto_commit_interval
        while not self._stop.is_set():
            if self._abandoned is not None:
                self._leave_for_good(self._abandoned)
                return
            try:
                if watched != self._membership.waiting_for:
                    wanted = self._membership.waiting_for
                    self._watch_group(wanted)
                    watched = wanted
                look_at = self._look()
                commit_at = self._commit_when_due(commit_at)
                self.outage.over()
                self._watch_progress()
            except Exception as error:  # noqa: BLE001 - a thread that dies in silence is worse
                if not _may_pass(error):
                    self._give_up(error)
                    return
                self.outage.began(error)
                # Not on the watch: it may not be armed, and with work due it would not wait.
                self._stop.wait(_RETRY_PAUSE)
                continue
            if watched == self._membership.waiting_for and self._watch is not None:
                now = self._clock.monotonic()
                times = [now + _CAREFUL_WAIT, commit_at]
                times += [look_at] if look_at is not None else []
                self._watch.wait(max(0.0, min(times) - now))

    def _leave_for_good(self, closing: tuple[Callable[[], None], ...]) -> None:
        """Leave because the consumer was dropped: no one would take messages of its partitions."""
        _LOG.warning("%s: was dropped without close(), and leaves the group", self._who)
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with suppress(PxrsError):
            self._steps.leave_loop()
            self._membership.leave()
        self.close()
        for close in closing:
            close()

    def _look(self) -> float | None:
        """Look at the group; wakes the consumer for any change, even if a look fails."""
        table = self._steps.table
        version, before = table.version, self._steps.owned_claims.parts
        missing = self._membership.missing
        try:
            return self._membership.look()
        finally:
            self._tell_missing(set(self._membership.missing) - set(missing))
            if table.version != version:
                self._wake_consumer()
                self._tell_moves(before, self._steps.owned_claims.parts)

    def _commit_when_due(self, due: float) -> float:
        self.commit_what_was_asked()
        now = self._clock.monotonic()
        if now < due:
            return due
        steps = self._steps
        lost = steps.commit_handled() if self._settings.auto_commit else steps.commit_empty()
        if lost:
            self.wake()
        return now + self._settings.auto_commit_interval

    # What operators read

    def _watch_progress(self) -> None:
        """Warn once of messages that a handler has had for too long."""
        since = self._steps.in_hand_since()
        if since is None or since == self._warned_of:
            return
        held = self._clock.monotonic() - since
        if held > self._settings.stuck_after:
            self._warned_of = since
            _LOG.warning("%s: the handler has been at it for %.0f s", self._who, held)

    def _tell_moves(
        self, before: frozenset[TopicPartition], now: frozenset[TopicPartition]
    ) -> None:
        if gained := now - before:
            _LOG.info("%s: claimed %s", self._who, names_of(gained))
        if gone := before - now:
            _LOG.info("%s: gave up %s", self._who, names_of(gone))

    def _tell_missing(self, topics: set[str]) -> None:
        if topics:
            _LOG.warning(
                "%s: no topic any more: %s; it waits for them to be made again",
                self._who,
                ", ".join(sorted(topics)),
            )

    def _give_up(self, error: Exception) -> None:
        self.fatal = error
        _LOG.error("%s: can't go on: %s", self._who, error)
        _answer(self._take_asked(), error)
        self._wake_consumer()

    def _watch_group(self, claims: frozenset[str]) -> None:
        if self._watch is not None:
            self._watch.close()
        group = self._settings.group
        self._watch = self._coord.watch(
            head_key(group), members_prefix(group), "topics/", *sorted(claims)
        )


def _answer(asked: list[Asked], error: Exception | None) -> None:
    for each in asked:
        if error is None:
            each.answer.set_result(None)
        else:
            each.answer.set_exception(error)


def _may_pass(error: Exception) -> bool:
    """Whether another look can help."""
    return isinstance(error, PxrsError) and (error.retryable or isinstance(error, _MAY_PASS))
