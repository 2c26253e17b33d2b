"""Sessions that outlive the process that opened them: stamped files without a lock.

Any process renews one by its name. It is alive while its file is there and its stamp lies ahead,
though not further than its TTL: such a stamp was written before the machine started anew.

Why a verdict can't be taken back: an observer reads the clock, then the stamp, and removes the
file if that lies behind. Who renews reads the old stamp, writes the new one and then reads the
clock: it has renewed only if the old stamp still lay ahead, so no observer can have read that
after its time, and only if the file is still there. If it came too late it removes the file itself.

Who adopts a session puts a mark into the file: a handle with another one neither renews it nor
abandons it. Those who renew exclude each other by a lock on the file for that moment: one that was
frozen between reading the clock and writing would else put the stamp back. Who is frozen inside
lets the others wait until the session's time is over, not longer.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pxrs.clock import Clock
from pxrs.errors import SessionLost, StoreBusy
from pxrs.stores.sqlite.beside import open_found
from pxrs.stores.sqlite.posix import try_lock
from pxrs.stores.sqlite.sessions import (
    MARK_AT,
    SessionFiles,
    is_session_name,
    read_stamp,
    read_ttl,
    remove,
    typed_errors,
    write_stamp,
)
from pxrs.stores.timed_sessions import AdoptedSession, lent_name, require_lent

# How often, and how many seconds apart, one looks whether another has renewed the same session.
_TRIES = 20
_PAUSE = 0.005
_MARK_SIZE = 12


class LentSessions:
    """Opens and adopts them. `on_end` hears when this process has ended one."""

    def __init__(self, files: SessionFiles, clock: Clock, on_end: Callable[[str], None]) -> None:
        self._files = files
        self._clock = clock
        self._on_end = on_end

    def lend(self, ttl: float) -> AdoptedSession:
        """A new session, with which any process may go on."""
        name = lent_name()
        fd, _ = self._files.make(name, ttl)
        os.close(fd)
        return self.adopt(name)

    def adopt(self, name: str) -> AdoptedSession:
        """Go on with a session that lives; raises `SessionLost` if it does not."""
        require_lent(name)
        if not is_session_name(name):
            raise SessionLost(f"there is no session {name!r}")
        sent = self._clock.monotonic()
        file = LentFile(os.path.join(self._files.path, name), self._clock)
        if not file.adopt():
            raise SessionLost(f"session {name} is over; open a new one")

        def end() -> None:
            file.end()
            self._on_end(name)

        def end_unless_adopted() -> None:
            if file.end_unless_adopted():
                self._on_end(name)

        return AdoptedSession(
            name,
            file.ttl,
            sent,
            self._clock,
            renew=file.renew,
            end=end,
            end_unless_adopted=end_unless_adopted,
        )


class LentFile:
    """The file of one session, and the mark of this handle."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._mark = secrets.token_bytes(_MARK_SIZE)
        self.ttl = 0.0

    def adopt(self) -> bool:
        """Mark and renew it, whoever has it; false if it is over."""
        with self._locked() as fd:
            if fd is None:
                return False
            self.ttl = read_ttl(fd)
            os.pwrite(fd, self._mark, MARK_AT)
            return self._extend(fd)

    def renew(self) -> bool:
        """Extend it by one TTL; false if it is over, or another handle has adopted it."""
        with self._locked() as fd:
            return fd is not None and self._is_mine(fd) and self._extend(fd)

    def end(self) -> None:
        with typed_errors(self._path):
            remove(self._path)

    def end_unless_adopted(self) -> bool:
        """End it if this handle has adopted it last; whether it was."""
        with self._locked() as fd:
            if fd is None or not self._is_mine(fd):
                return False
            remove(self._path)
            return True

    def _is_mine(self, fd: int) -> bool:
        return os.pread(fd, _MARK_SIZE, MARK_AT) == self._mark

    def _extend(self, fd: int) -> bool:
        before, now = read_stamp(fd), self._clock.monotonic()
        if now < before:
            write_stamp(fd, now + self.ttl)
        if self._clock.monotonic() >= before:
            remove(self._path)
            return False
        return os.path.exists(self._path)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The file, which nobody else renews meanwhile; None if there is none."""
        with typed_errors(self._path):
            try:
                fd = open_found(self._path, os.O_RDWR)
            except FileNotFoundError:
                yield None
                return
            try:
                self._lock(fd)
                yield fd
            finally:
                os.close(fd)

    def _lock(self, fd: int) -> None:
        for _ in range(_TRIES):
            if try_lock(fd):
                return
            threading.Event().wait(_PAUSE)
        raise StoreBusy(f"another process is at session {os.path.basename(self._path)}")
