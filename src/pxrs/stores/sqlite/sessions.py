"""Sessions as locked, stamped files in `<database>-pxrs/sessions/`.

A session is alive while its file is there, its stamp lies ahead and its lock is held. It
needs the database's writer for nothing, so a long transaction expires no session; the kernel
drops the lock of a killed process, so its death is seen at once.

Why a verdict can't be taken back:

- An observer reads the clock, then the stamp. It removes the file if the stamp lies behind.
- A holder writes the new stamp, then reads the clock. It has renewed only if the old stamp
  still lay ahead; the write happened before that, so no observer can have read the old stamp
  after its time. If it came too late it ends the session itself.
- A file is named only after it is locked and stamped, and a name is never used twice. So a
  free lock means that the holder let go, and a missing file means that the session is over.

Renewing and ending exclude each other: a stamp written after the file was closed would go to
whatever file has its number by then, and that may be the database.

Sessions that are lent have no lock, as they outlive their process: see `lent_sessions.py`.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pxrs.clock import Clock
from pxrs.errors import SessionLost
from pxrs.stores.sqlite.beside import make_folder_beside, open_beside, open_found
from pxrs.stores.sqlite.failures import translate_os
from pxrs.stores.sqlite.posix import try_lock
from pxrs.stores.timed_sessions import is_lent, validate_ttl

_STAMP = struct.Struct("=d")
# Of one that is lent, behind its stamp: its TTL, and the mark of who has adopted it last.
_TTL_AT = _STAMP.size
MARK_AT = 2 * _STAMP.size
_NAME = re.compile("(lent-)?[0-9a-f]{24}")


def is_session_name(name: str) -> bool:
    """Whether a session can have this name."""
    return _NAME.fullmatch(name) is not None


class SessionFiles:
    """The folder of sessions, as observers see it."""

    def __init__(self, folder: str, database: str, clock: Clock) -> None:
        self.path = os.path.join(folder, "sessions")
        with typed_errors(self.path):
            make_folder_beside(self.path, database)
        self._database = database
        self._clock = clock

    def open(
        self,
        ttl: float,
        on_end: Callable[[FileSession], None],
        before_end: Callable[[], None] = lambda: None,
    ) -> FileSession:
        """Start a session of this process; `on_end` hears when it is over for its holder.

        `before_end` is called when the holder ends it: whatever it holds is still its own.
        """
        name = secrets.token_hex(12)
        fd, deadline = self.make(name, ttl)
        path = os.path.join(self.path, name)
        return FileSession(name, ttl, fd, path, deadline, self._clock, on_end, before_end)

    def make(self, name: str, ttl: float) -> tuple[int, float]:
        """Make the file of a session; returns it open and locked, and its stamp."""
        validate_ttl(ttl)
        path, hidden = os.path.join(self.path, name), os.path.join(self.path, f".{name}")
        with typed_errors(self.path):
            fd = open_beside(hidden, self._database, os.O_EXCL)
            try:
                try_lock(fd)
                deadline = self._clock.monotonic() + ttl
                os.pwrite(fd, _STAMP.pack(deadline) + _STAMP.pack(ttl), 0)
                os.rename(hidden, path)
            except BaseException:
                remove(hidden)
                os.close(fd)
                raise
        return fd, deadline

    def alive(self, name: str) -> bool:
        """Whether the session lives. A dead one's file is removed: the verdict is final."""
        with self._opened(name) as fd:
            if fd is None:
                return False
            now = self._clock.monotonic()
            stamp = read_stamp(fd)
            over = self._lies_too_far_ahead(fd, stamp) if is_lent(name) else _is_free(fd)
            if stamp <= now or over:
                remove(os.path.join(self.path, name))
                return False
            return True

    def _lies_too_far_ahead(self, fd: int, stamp: float) -> bool:
        """Whether it was written before the machine started: the clock began anew.

        The clock is read after the stamp: it may have been renewed in between.
        """
        return stamp > self._clock.monotonic() + read_ttl(fd)

    def names(self) -> list[str]:
        """The sessions that may be alive."""
        with typed_errors(self.path):
            return [name for name in os.listdir(self.path) if is_session_name(name)]

    def deadline(self, name: str) -> float | None:
        """Returns when the session will expire unless it is renewed; None if it is over."""
        with self._opened(name) as fd:
            return None if fd is None else read_stamp(fd)

    def sweep_unborn(self) -> None:
        """Remove files whose process died before it could name them."""
        with typed_errors(self.path):
            names = [name for name in os.listdir(self.path) if name.startswith(".")]
        for name in names:
            with self._opened(name, hidden=True) as fd:
                if fd is not None and os.fstat(fd).st_size > 0 and try_lock(fd, shared=True):
                    remove(os.path.join(self.path, name))

    @contextmanager
    def _opened(self, name: str, *, hidden: bool = False) -> Iterator[int | None]:
        """The session's file to look at; None if there is none, or if that is no session's name.

        Names come from callers and from the folder: one with a slash in it would be a file
        that is none of ours, to be opened, judged and removed.
        """
        if not is_session_name(name[1:] if hidden else name):
            yield None
            return
        path = os.path.join(self.path, name)
        with typed_errors(path):
            try:
                fd = open_found(path, os.O_RDONLY)
            except FileNotFoundError:
                yield None
                return
            try:
                yield fd
            finally:
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
        on_end: Callable[[FileSession], None],
        before_end: Callable[[], None],
    ) -> None:
        self.id = name
        self.ttl = ttl
        self._fd = fd
        self._path = path
        self._deadline = deadline
        self._clock = clock
        self._on_end = on_end
        self._before_end = before_end
        self._lock = threading.Lock()
        self._over = False

    def renew(self) -> None:
        with self._lock:
            renewed = not self._over and self._stamp()
        if not renewed:
            self.close()
            raise SessionLost(f"session {self.id} expired or was ended before it was renewed")

    def _stamp(self) -> bool:
        sent = self._clock.monotonic()
        if sent >= self._deadline:
            return False
        with typed_errors(self._path):
            write_stamp(self._fd, sent + self.ttl)
        if self._clock.monotonic() >= self._deadline or not os.path.exists(self._path):
            return False
        self._deadline = sent + self.ttl
        return True

    def remaining(self) -> float:
        if self._over:
            return 0.0
        return max(0.0, self._deadline - self._clock.monotonic())

    def close(self) -> None:
        if not self._over:
            self._before_end()
        with self._lock:
            if self._over:
                return
            self._over = True
            remove(self._path)
            os.close(self._fd)
        self._on_end(self)

    def forget(self) -> None:
        """In a forked child: let go of the parent's lock without ending its session."""
        self._lock = threading.Lock()
        if not self._over:
            self._over = True
            os.close(self._fd)


@contextmanager
def typed_errors(path: str) -> Iterator[None]:
    """Raises what a call of the system says as an error of ours."""
    try:
        yield
    except OSError as error:
        raise translate_os(error, path) from error


def read_stamp(fd: int) -> float:
    """Until when the session lives; 0 if the file is cut off."""
    return _read_seconds(fd, 0)


def write_stamp(fd: int, deadline: float) -> None:
    os.pwrite(fd, _STAMP.pack(deadline), 0)


def read_ttl(fd: int) -> float:
    return _read_seconds(fd, _TTL_AT)


def _read_seconds(fd: int, at: int) -> float:
    data = os.pread(fd, _STAMP.size, at)
    return float(_STAMP.unpack(data)[0]) if len(data) == _STAMP.size else 0.0


def _is_free(fd: int) -> bool:
    """Whether no process holds the session's lock."""
    return try_lock(fd, shared=True)


def remove(path: str) -> None:
    """Remove the file of a session, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)
