"""The session that a process's transactions hold their items with.

One for all of them, renewed by a thread of its own. When it is lost, everything that it held is
free in one step; transactions that began under it end, and those that begin later get a new one.
The same thread gives back what was dropped without an end, and frees what dead processes held in
queues that nobody takes from.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from pxrs.clock import Clock
from pxrs.errors import Closed, PxrsError, SessionLost
from pxrs.stores.api import Session, Stores
from pxrs.types import Held, Holder, Release

_SWEEP_EVERY = 5.0
_RENEWALS_PER_TTL = 4


class Keeper:
    """Opens, renews and ends the session. Thread-safe."""

    def __init__(self, stores: Stores, clock: Clock, ttl: float) -> None:
        self._stores = stores
        self._clock = clock
        self._ttl = ttl
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._dropped: deque[tuple[Holder, Sequence[Held]]] = deque()
        self._closed = False
        self._pid = os.getpid()

    def session(self) -> Session:
        """The session that lives now, a new one if need be."""
        with self._lock:
            if self._closed:
                raise Closed("the store was closed")
            self.refuse_after_fork()
            if self._session is None or self._session.remaining() <= 0:
                self._session = self._stores.coord.session(self._ttl)
                self._start()
            return self._session

    def refuse_after_fork(self) -> None:
        """Raise in a child of the process that opened this: its locks are the parent's."""
        if os.getpid() != self._pid:
            raise Closed("this store was opened before a fork; open it again in the child")

    def give_back(self, holder: Holder, held: Sequence[Held]) -> None:
        """Have items released soon, by another thread. For a transaction nobody ended."""
        self._dropped.append((holder, held))
        self._wake.set()

    def release_unless_removed(self, holder: Holder, held: Sequence[Held]) -> None:
        """Release what is still there once the transaction that may remove it has ended.

        Releasing waits for that transaction, as every writer does; so a thread of its own waits.
        """
        threading.Thread(
            target=self._release_patiently, args=(holder, held), name="pxrs-release", daemon=True
        ).start()

    def _release_patiently(self, holder: Holder, held: Sequence[Held]) -> None:
        while not self._closed:
            try:
                self._stores.queues.release(holder, [Release(each) for each in held])
                return
            except PxrsError as error:
                if not error.retryable:
                    return

    def end(self, session: Session) -> None:
        """End the session and free all it holds: the last resort of a rollback."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.close()

    def close(self) -> None:
        """End the session; whatever it still holds is free."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            session, self._session = self._session, None
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()
        self._release_dropped()
        if session is not None:
            with suppress(PxrsError):
                session.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_keep, args=(weakref.ref(self), self._wake), name="pxrs-keeper", daemon=True
            )
            self._thread.start()

    def keep(self, sweep: bool) -> float | None:
        """Renew, release and sweep once; the seconds until the next time, None at the end."""
        with self._lock:
            session = self._session
            if self._closed:
                return None
        if session is not None:
            self._renew(session)
        self._release_dropped()
        if sweep:
            with suppress(PxrsError):
                self._stores.queues.reap()
        return self._ttl / _RENEWALS_PER_TTL

    def _renew(self, session: Session) -> None:
        try:
            session.renew()
        except SessionLost:
            with self._lock:
                if self._session is session:
                    self._session = None
        except PxrsError:
            # The store is away. If that lasts, the session ends by itself.
            return

    def _release_dropped(self) -> None:
        while self._dropped:
            holder, held = self._dropped.popleft()
            try:
                self._stores.queues.release(holder, [Release(each) for each in held])
            except PxrsError as error:
                if error.retryable and not self._closed:
                    self._dropped.append((holder, held))
                return


def _keep(owner: weakref.ref[Keeper], wake: threading.Event) -> None:
    """Until the keeper is closed, or dropped by a program that never closed it."""
    pause: float | None = 0.0
    slept = _SWEEP_EVERY
    while True:
        wake.wait(pause)
        wake.clear()
        keeper = owner()
        if keeper is None:
            return
        slept += pause or 0.0
        pause = keeper.keep(sweep=slept >= _SWEEP_EVERY)
        if slept >= _SWEEP_EVERY:
            slept = 0.0
        if pause is None:
            return
        del keeper
