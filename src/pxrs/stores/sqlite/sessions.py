"""Sessions as locked, stamped files in `<database>-pxrs/sessions/`.

A session is alive while its file is there, its stamp lies ahead and its lock is held. It
needs the database's writer for nothing, so a long transaction expires nobody; the kernel
drops the lock of a killed process, so its death is seen at once.

Why a verdict can't be taken back:

- An observer reads the clock, then the stamp. It removes the file if the stamp lies behind.
- A holder writes the new stamp, then reads the clock. It has renewed only if the old stamp
  still lay ahead; the write happened before that, so no observer can have read the old stamp
  after its time. If it came too late it ends the session itself.
- A file is named only after it is locked and stamped, and a name is never used twice. So a
  free lock means that the holder let go, and a missing file means that the session is over.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress

from pxrs.clock import Clock
from pxrs.errors import InvalidRequest, SessionLost
from pxrs.stores.sqlite.posix import try_lock

_STAMP = struct.Struct("=d")


class SessionFiles:
    """The folder of sessions, as observers see it."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self.path = os.path.join(folder, "sessions")
        os.makedirs(self.path, exist_ok=True)
        self._clock = clock

    def open(self, ttl: float, on_close: Callable[[str], None]) -> FileSession:
        """Start a session of this process."""
        if not 0.05 <= ttl <= 86_400:
            raise InvalidRequest(f"a session of {ttl} s; 0.05 s to a day can be had")
        name = secrets.token_hex(12)
        hidden = os.path.join(self.path, f".{name}")
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try_lock(fd)
        deadline = self._clock.monotonic() + ttl
        os.pwrite(fd, _STAMP.pack(deadline), 0)
        path = os.path.join(self.path, name)
        os.rename(hidden, path)
        return FileSession(name, ttl, fd, path, deadline, self._clock, on_close)

    def alive(self, name: str) -> bool:
        """Whether the session lives. A dead one's file is removed: the verdict is final."""
        path = os.path.join(self.path, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            now = self._clock.monotonic()
            expired = _read_stamp(fd) <= now
            if expired or try_lock(fd, shared=True):
                _remove(path)
                return False
            return True
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """The sessions that may be alive."""
        return [name for name in os.listdir(self.path) if not name.startswith(".")]

    def deadline(self, name: str) -> float | None:
        """When the session will expire unless it is renewed; None if it is over."""
        try:
            fd = os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _read_stamp(fd)
        finally:
            os.close(fd)

    def sweep_unborn(self) -> None:
        """Remove files whose process died before it could name them."""
        for name in os.listdir(self.path):
            if name.startswith("."):
                path = os.path.join(self.path, name)
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
                stamped = os.fstat(fd).st_size > 0
                if stamped and try_lock(fd, shared=True):
                    _remove(path)
                os.close(fd)


class FileSession:
    """A session held by this process. See `pxrs.stores.api.Session`."""

    def __init__(
        self,
        name: str,
        ttl: float,
        fd: int,
        path: str,
        deadline: float,
        clock: Clock,
        on_close: Callable[[str], None],
    ) -> None:
        self.id = name
        self.ttl = ttl
        self._fd = fd
        self._path = path
        self._deadline = deadline
        self._clock = clock
        self._on_close = on_close
        self._over = False

    def renew(self) -> None:
        sent = self._clock.monotonic()
        if self._over or sent >= self._deadline:
            self._end()
            raise SessionLost(f"session {self.id} expired before it was renewed")
        os.pwrite(self._fd, _STAMP.pack(sent + self.ttl), 0)
        in_time = self._clock.monotonic() < self._deadline
        if not in_time or not os.path.exists(self._path):
            self._end()
            raise SessionLost(f"session {self.id} was ended before it could be renewed")
        self._deadline = sent + self.ttl

    def remaining(self) -> float:
        if self._over:
            return 0.0
        return max(0.0, self._deadline - self._clock.monotonic())

    def close(self) -> None:
        if not self._over:
            self._end()
            self._on_close(self.id)

    def forget(self) -> None:
        """In a forked child: let go of the parent's lock without ending its session."""
        if not self._over:
            self._over = True
            os.close(self._fd)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            _remove(self._path)
            os.close(self._fd)


def _read_stamp(fd: int) -> float:
    data = os.pread(fd, _STAMP.size, 0)
    return float(_STAMP.unpack(data)[0]) if len(data) == _STAMP.size else 0.0


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
