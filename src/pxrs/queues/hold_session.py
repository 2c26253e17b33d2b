"""The session under which a process's transactions hold their items.

All of them share one. When it is lost, everything that it held is free in one step; transactions
that began under it end, and those that begin later get a new one. A session that was once found to
have ended is never used or renewed again: a transaction that has raised `SessionLost` must not
leave its items locked.

Three background threads take turns of one step each. Two of them may have to wait for the store's
writer, and renewing must not: `renew`; `tidy` (gives back items of transactions that were dropped
without an end, ends sessions that were given up, frees what dead processes held in queues that no
other process takes from); `settle` (gives back what a caller's own transaction has rolled back).
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.errors import Closed, InsideTransaction, OutcomeUnknown, PxrsError, SessionLost
from pxrs.forks import Origin
from pxrs.loop import Loop
from pxrs.stores.api import Session, Stores
from pxrs.types import Holder, QueueChange, Release

_SWEEP_EVERY = 5.0
_RENEWALS_PER_TTL = 4
_RETRY = Backoff(first=0.01, longest=1.0)
_LONG = 3600.0
# How many units whose outcome is known are forgotten by one commit.
_FORGET_AT_ONCE = 64


class Asked(NamedTuple):
    """A `take` without an answer: its queue, and the name of the call."""

    queue: str
    unit: str


class GivenBack(NamedTuple):
    """Items that a holder gives back. It may hold more of them, by the takes in `doubts`."""

    holder: Holder
    releases: tuple[Release, ...]
    doubts: tuple[Asked, ...] = ()


class HoldSession:
    """Opens, renews and ends the session. Thread-safe."""

    def __init__(self, stores: Stores, clock: Clock, ttl: float, *, threads: bool = True) -> None:
        self._stores = stores
        self._clock = clock
        self._ttl = ttl
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._given_up: deque[Session] = deque()
        self._dropped: deque[GivenBack] = deque()
        self._joined: deque[GivenBack] = deque()
        self._name, self._names = secrets.token_hex(4), itertools.count(1)
        # By session, units whose outcome is known: their evidence may be removed.
        self._known: dict[str, list[str]] = {}
        self._sweep_at = 0.0
        self._failures = 0
        self._random = random.Random()
        self._closing = threading.Event()
        self.origin = Origin()
        self._renewing = Loop("pxrs-hold-session", self.renew)
        self._tidying = Loop("pxrs-sweeper", self.tidy)
        self._settling = Loop("pxrs-release", self.settle)
        self._loops = (self._renewing, self._tidying) if threads else ()

    # The session

    def session(self) -> Session:
        """The live session; opens a new one if need be."""
        self.origin.refuse_child()
        with self._lock:
            if self._closing.is_set():
                raise Closed("the store was closed")
            if self._session is None or self._session.remaining() <= 0:
                # Before the session: no interrupt may leave one that is never renewed.
                for loop in self._loops:
                    loop.start()
                self._give_up()
                self._session = self._stores.coord.session(self._ttl)
            return self._session

    def next_name(self) -> str:
        """Makes a unique name for a transaction or a unit."""
        return f"{self._name}{next(self._names):x}"

    def answered(self, session: str, unit: str) -> None:
        """Notes that the outcome of the unit is known: a later unit may forget its evidence."""
        with self._lock:
            self._known.setdefault(session, []).append(unit)

    def to_forget(self, session: str) -> tuple[str, ...]:
        """Takes the units that the next commit is to forget: none, until there are many.

        A caller whose commit fails has to call `answered` for them again. If it does not, the store
        forgets them some time after the session's end.
        """
        with self._lock:
            if len(self._known.get(session, ())) < _FORGET_AT_ONCE:
                return ()
            known = self._known[session]
            names, known[:] = tuple(known[:_FORGET_AT_ONCE]), known[_FORGET_AT_ONCE:]
            return names

    def _forget_known(self) -> None:
        """Forgets, at the end, evidence that the store would keep until long after the session."""
        with self._lock:
            session = self._session
            units = [] if session is None else self._known.pop(session.id, [])
        if session is not None and units:
            # Without a name: nobody would be left to have the evidence of this one forgotten.
            change = QueueChange(Holder(session.id, "end"), unit="", forget=tuple(units))
            with suppress(PxrsError):
                self._stores.queues.apply(change)

    def holds(self, session: Session) -> bool:
        """Whether the session lives, so that all its items are still held."""
        if self._session is session and session.remaining() > 0:
            return True
        self.give_up(session)
        return False

    def give_up(self, session: Session) -> None:
        """Stop using and renewing the session; it is ended as soon as the store can be reached."""
        with self._lock:
            if self._session is session:
                self._give_up()
        self._tidying.wake()

    def _give_up(self) -> None:
        if self._session is not None:
            self._known.pop(self._session.id, None)
            self._given_up.append(self._session)
            self._session = None

    def pause(self, failures: int) -> None:
        """Wait before the next try to reach the store, longer after each failure."""
        threading.Event().wait(_RETRY.delay(failures, self._random))

    # Giving back

    def release(self, given: GivenBack) -> bool:
        """Give items back; false if the store could not be reached and it has to be tried again."""
        session = self._session
        if session is None or session.id != given.holder.session or not self.holds(session):
            return True
        queues = self._stores.queues
        try:
            known = {release.held for release in given.releases}
            found = [
                Release(delivery.held)
                for asked in given.doubts
                for delivery in queues.held(asked.queue, given.holder, asked.unit)
                if delivery.held not in known
            ]
            queues.release(given.holder, [*given.releases, *found])
        except (SessionLost, Closed):
            return True
        except InsideTransaction:
            # This thread holds the store's writer by another transaction: another thread waits.
            self.give_back(given)
        except PxrsError as error:
            if error.retryable or isinstance(error, OutcomeUnknown):
                return False
            # The store refuses the release, so the session has to end, and all its locks with it.
            self._end(session)
        except Exception:
            self._end(session)
            raise
        return True

    def _end(self, session: Session) -> None:
        self.give_up(session)
        self._end_each()

    def give_back(self, given: GivenBack) -> None:
        """Have another thread release the items soon. Destructors call it."""
        self._dropped.append(given)
        self._tidying.wake()

    def release_unless_removed(self, given: GivenBack) -> None:
        """Release the items that are still there when the caller's transaction has ended.

        If it commits, it removes them. Releasing waits for it, as every writer does; so another
        thread waits.
        """
        self._joined.append(given)
        with self._lock:
            self._settling.start()
        self._settling.wake()

    # The loops

    def renew(self) -> float | None:
        """Renews the session once; the seconds until the next time, None at the end."""
        session = self._session
        if self._closing.is_set():
            return None
        if session is not None and self.holds(session):
            try:
                session.renew()
            except SessionLost:
                self.give_up(session)
            except PxrsError:
                # The store can't be reached. If that lasts, the session ends by itself.
                pass
        return self._ttl / _RENEWALS_PER_TTL

    def tidy(self) -> float | None:
        """Releases, ends and sweeps once; the seconds until the next time, None at the end."""
        if self._closing.is_set():
            return None
        done = self._release_each(self._dropped)
        done = self._end_each() and done
        now = self._clock.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_EVERY
            with suppress(PxrsError):
                self._stores.queues.reap()
        self._failures = 0 if done else self._failures + 1
        return _RETRY.delay(self._failures, self._random) if self._failures else _SWEEP_EVERY

    def settle(self) -> float | None:
        """Releases what callers' transactions have rolled back; None at the end."""
        if self._closing.is_set():
            return None
        return _LONG if self._release_each(self._joined) else _RETRY.first

    def _release_each(self, waiting: deque[GivenBack]) -> bool:
        while waiting:
            given = waiting.popleft()
            done = False
            try:
                done = self.release(given)
            finally:
                if not done:
                    waiting.append(given)
            if not done:
                return False
        return True

    def _end_each(self) -> bool:
        while self._given_up:
            session = self._given_up.popleft()
            try:
                session.close()
            except PxrsError as error:
                if error.retryable:
                    self._given_up.append(session)
                    return False
        return True

    def close(self) -> None:
        """End the session; all that it still holds is free."""
        if self.origin.is_parent:
            return
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        for loop in (self._renewing, self._tidying, self._settling):
            loop.wake()
            loop.join()
        if self._release_each(self._dropped):
            # Otherwise the store can't be reached, and each more call would wait for it as well.
            self._forget_known()
        with self._lock:
            self._give_up()
        self._end_each()
