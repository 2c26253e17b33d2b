"""Sessions as locked, stamped files in `<database>-pxrs/sessions/`.

A session is alive while its file exists, its stamp lies ahead and its lock is held. It never
needs the database's writer, so a long transaction expires no session; the kernel drops the lock of
a killed process, so its death is noticed at once.

Why a verdict can't be taken back:

- An observer reads the clock, then the stamp. It removes the file if the stamp lies behind.
- A holder writes the new stamp, then reads the clock. It has renewed only if the old stamp
  still lay ahead; the write happened before that, so no observer can have read the old stamp
  after its time. If the holder was too late it ends the session itself.
- A file is named only after it is locked and stamped, and a name is never used twice. So a
  free lock means that the holder let go, and a missing file means that the session is over.

Renewing and ending exclude each other: a stamp written after the file was closed would go to
whatever file has its descriptor number by then, and that may be the database.

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
from pxrs.stores.sqlite.beside import folder_of, make_folder_beside, open_beside, open_found
from pxrs.stores.sqlite.failures import translate_os
from pxrs.stores.sqlite.posix import try_lock
from pxrs.stores.timed_sessions import is_lent, require_ttl

_STAMP = struct.Struct("=d")
# In the file of a lent session, behind its stamp: its TTL, and the mark of its last adopter.
_TTL_AT = _STAMP.size
MARK_AT = 2 * _STAMP.size
_MOST_KEPT = 100
_NAME = re.compile("(lent-)?[0-9a-f]{24}")


def is_session_name(name: str) -> bool:
    """Whether this is a possible name of a session."""
    return _NAME.fullmatch(name) is not None


class SessionFiles:
    """The folder of sessions, as observers see it."""

    def __init__(self, folder: str, database: str, clock: Clock) -> None:
        self.path = os.path.join(folder, "sessions")
        with typed_errors(self.path):
            make_folder_beside(self.path, database)
        self._database = database
        self._clock = clock
        # Files of lent sessions that were looked at, by name; the oldest is first.
        self._kept: dict[str, int] = {}
        self._keeping = threading.Lock()

    def open(self, ttl: float, on_end: Callable[[FileSession], None]) -> FileSession:
        """Start a session of this process; `on_end` is called when it is over for its holder."""
        name = secrets.token_hex(12)
        fd, deadline = self.make(name, ttl)
        return FileSession(name, ttl, fd, self, deadline, self._clock, on_end)

    def make(self, name: str, ttl: float) -> tuple[int, float]:
        """Make the file of a session; returns it open and locked, and its stamp."""
        require_ttl(ttl)
        hidden = f".{name}"
        with typed_errors(self.path):
            fd = open_beside(os.path.join(self.path, hidden), self._database, os.O_EXCL)
            try:
                try_lock(fd)
                deadline = self._clock.monotonic() + ttl
                os.pwrite(fd, _STAMP.pack(deadline) + _STAMP.pack(ttl), 0)
                with self._folder() as folder:
                    os.rename(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                try:
                    self.remove(hidden)
                finally:
                    os.close(fd)
                raise
        return fd, deadline

    def alive(self, name: str) -> bool:
        """Whether the session lives. A dead one's file is removed: the verdict is final."""
        with self._kept_open(name) if is_lent(name) else self._opened(name) as fd:
            if fd is None:
                return False
            now = self._clock.monotonic()
            stamp = read_stamp(fd)
            over = self._lies_too_far_ahead(fd, stamp) if is_lent(name) else _is_free(fd)
            if stamp <= now or over:
                self.remove(name)
                return False
            return True

    def _lies_too_far_ahead(self, fd: int, stamp: float) -> bool:
        """Whether the stamp was written before the machine started: the clock began anew.

        The clock is read after the stamp, because the session may have been renewed in between.
        """
        return stamp > self._clock.monotonic() + read_ttl(fd)

    def names(self) -> list[str]:
        """The sessions that may be alive."""
        return [name for name in self._all() if is_session_name(name)]

    def deadline(self, name: str) -> float | None:
        """Returns when the session will expire unless it is renewed; None if it is over."""
        with self._opened(name) as fd:
            return None if fd is None else read_stamp(fd)

    def sweep_unborn(self) -> None:
        """Remove files whose process died before it could name them."""
        for name in self._all():
            if not name.startswith("."):
                continue
            with self._opened(name, hidden=True) as fd:
                if fd is not None and os.fstat(fd).st_size > 0 and try_lock(fd, shared=True):
                    self.remove(name)

    def _all(self) -> list[str]:
        with typed_errors(self.path), self._folder() as folder:
            return os.listdir(folder)

    @contextmanager
    def _folder(self) -> Iterator[int]:
        """The folder by a handle, opened anew each time: a link put in its place is refused.

        Whoever can write beside the database could else lead root to other folders, to judge and
        remove what has the name of a session there.
        """
        with folder_of(os.path.join(self.path, "any"), self._database) as folder:
            yield folder

    def remove(self, name: str) -> None:
        """Remove the file of a session, if it is there."""
        with typed_errors(self.path), suppress(FileNotFoundError), self._folder() as folder:
            os.unlink(name, dir_fd=folder)

    def has(self, name: str) -> bool:
        """Whether the file of a session is there."""
        with typed_errors(self.path), suppress(FileNotFoundError), self._folder() as folder:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            return True
        return False

    def open_file(self, name: str, flags: int) -> int | None:
        """Open the file of a session; None if it is not there."""
        path = os.path.join(self.path, name)
        with typed_errors(path), suppress(FileNotFoundError), self._folder() as folder:
            return open_found(path, flags, name, folder)
        return None

    @contextmanager
    def _kept_open(self, name: str) -> Iterator[int | None]:
        """`_opened`, of a lent session. A node asks for each call of a client whether its session
        lives, and most of the cost is to open and close the file: it stays open for the next look.

        A name is never used twice, and a file that was removed has none.
        """
        with self._keeping:
            fd = self._kept.get(name)
            if fd is not None and os.fstat(fd).st_nlink != 1:
                self._let_go(name)
                fd = None
            if fd is None and is_session_name(name):
                fd = self.open_file(name, os.O_RDONLY)
                if fd is not None:
                    self._keep_few(_MOST_KEPT - 1)
                    self._kept[name] = fd
            with typed_errors(os.path.join(self.path, name)):
                yield fd

    def _let_go(self, name: str) -> None:
        # Closed last: its number may be another file's by the next look.
        os.close(self._kept.pop(name))

    def _keep_few(self, most: int) -> None:
        while len(self._kept) > most:
            self._let_go(next(iter(self._kept)))

    def close(self) -> None:
        """Closes the files that were kept open."""
        with self._keeping:
            self._keep_few(0)

    def forget(self) -> None:
        """In a forked child: keep nothing, whatever another thread of the parent was at."""
        self._keeping = threading.Lock()
        self.close()

    @contextmanager
    def _opened(self, name: str, *, hidden: bool = False) -> Iterator[int | None]:
        """Open the session's file; None if there is none, or if that is no session's name.

        Names come from callers and from the folder: a name with a slash in it would lead to a
        foreign file, and pxrs would open, judge and remove that.
        """
        if not is_session_name(name[1:] if hidden else name):
            yield None
            return
        fd = self.open_file(name, os.O_RDONLY)
        if fd is None:
            yield None
            return
        try:
            with typed_errors(os.path.join(self.path, name)):
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
        files: SessionFiles,
        deadline: float,
        clock: Clock,
        on_end: Callable[[FileSession], None],
    ) -> None:
        self.id = name
        self.ttl = ttl
        self._fd = fd
        self._files = files
        self._deadline = deadline
        self._clock = clock
        self._on_end = on_end
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
        with typed_errors(self._files.path):
            write_stamp(self._fd, sent + self.ttl)
        if self._clock.monotonic() >= self._deadline or not self._files.has(self.id):
            return False
        self._deadline = sent + self.ttl
        return True

    def remaining(self) -> float:
        if self._over:
            return 0.0
        return max(0.0, self._deadline - self._clock.monotonic())

    def close(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            try:
                self._files.remove(self.id)
            finally:
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
    """Raises an error of a system call as an error of pxrs."""
    try:
        yield
    except OSError as error:
        raise translate_os(error, path) from error


def read_stamp(fd: int) -> float:
    """Read until when the session lives; 0 if the file is cut off."""
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
