"""Sessions that outlive the process that opened them: stamped files without a lock.

Any process can renew one by its name. It is alive while its file exists and its stamp lies ahead,
but by no more than its TTL: a stamp further ahead was written before the machine restarted.

Why a verdict can't be taken back: an observer reads the clock, then the stamp, and removes the
file if the stamp lies behind. A process that renews reads the old stamp, writes the new one and
then reads the clock: it has renewed only if the old stamp still lay ahead, so no observer can have
read that after its time, and only if the file still exists. If it was too late it removes the file
itself.

A handle that adopts a session puts its mark into the file: a handle with another mark neither
renews nor abandons the session. Processes that renew exclude each other by a lock on the file for
that moment: one that was frozen between reading the clock and writing would otherwise put the stamp
back. A process that is frozen inside makes the others wait until the session's time is over, not
longer.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pxrs.clock import Clock
from pxrs.errors import SessionLost, StoreBusy
from pxrs.stores.sqlite.posix import try_lock
from pxrs.stores.sqlite.sessions import (
    MARK_AT,
    SessionFiles,
    is_session_name,
    read_stamp,
    read_ttl,
    typed_errors,
    write_stamp,
)
from pxrs.stores.timed_sessions import AdoptedSession, lent_name, require_lent

# How often, and how many seconds apart, a process tries to lock the file of a session that another
# process is just renewing.
_TRIES = 20
_PAUSE = 0.005
_MARK_SIZE = 12


class LentSessions:
    """Opens and adopts lent sessions. `on_end` is called when this process has ended one."""

    def __init__(self, files: SessionFiles, clock: Clock, on_end: Callable[[str], None]) -> None:
        self._files = files
        self._clock = clock
        self._on_end = on_end

    def lend(self, ttl: float) -> AdoptedSession:
        """Open a new session, which any process may adopt."""
        name = lent_name()
        fd, _ = self._files.make(name, ttl)
        os.close(fd)
        return self.adopt(name)

    def adopt(self, name: str) -> AdoptedSession:
        """Take over a living session; raises `SessionLost` if it is over."""
        require_lent(name)
        if not is_session_name(name):
            raise SessionLost(f"there is no session {name!r}")
        sent = self._clock.monotonic()
        file = LentFile(self._files, name, self._clock)
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

    def __init__(self, files: SessionFiles, name: str, clock: Clock) -> None:
        self._files = files
        self._name = name
        self._clock = clock
        self._mark = secrets.token_bytes(_MARK_SIZE)
        self.ttl = 0.0

    def adopt(self) -> bool:
        """Mark and renew it, whichever handle has it; false if it is over."""
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
        self._files.remove(self._name)

    def end_unless_adopted(self) -> bool:
        """End it if this handle has adopted it last; returns whether it did."""
        with self._locked() as fd:
            if fd is None or not self._is_mine(fd):
                return False
            self._files.remove(self._name)
            return True

    def _is_mine(self, fd: int) -> bool:
        return os.pread(fd, _MARK_SIZE, MARK_AT) == self._mark

    def _extend(self, fd: int) -> bool:
        before, now = read_stamp(fd), self._clock.monotonic()
        if now < before:
            write_stamp(fd, now + self.ttl)
        if self._clock.monotonic() >= before:
            self._files.remove(self._name)
            return False
        return self._files.has(self._name)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The file, locked so that no other process renews it meanwhile; None if there is none."""
        fd = self._files.open_file(self._name, os.O_RDWR)
        if fd is None:
            yield None
            return
        try:
            with typed_errors(self._files.path):
                self._lock(fd)
                yield fd
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        for _ in range(_TRIES):
            if try_lock(fd):
                return
            threading.Event().wait(_PAUSE)
        raise StoreBusy(f"another process is renewing session {self._name}")
