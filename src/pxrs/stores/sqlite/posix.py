"""The few system calls that the standard library lacks or wraps at a cost.

`fcntl.flock` gives up the interpreter lock for a call that never blocks; beside a computing
thread, getting it back can take 5 ms. `PyDLL` keeps it. inotify has no wrapper at all, and
the packages that offer one start a compiler to find libc.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN

IN_MODIFY = 0x2
IN_CLOSE_WRITE = 0x8
IN_MOVED_FROM = 0x40
IN_DELETE = 0x200
IN_Q_OVERFLOW = 0x4000

_libc = ctypes.PyDLL(None, use_errno=True)


@contextmanager
def closing_on_failure() -> Iterator[Callable[[int], int]]:
    """Hands out a function that notes descriptors; they are closed if the block fails."""
    noted: list[int] = []

    def opened(fd: int) -> int:
        noted.append(fd)
        return fd

    try:
        yield opened
    except BaseException:
        for fd in noted:
            os.close(fd)
        raise


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the file's lock if it is free; returns whether it was."""
    if _libc.flock(fd, (LOCK_SH if shared else LOCK_EX) | LOCK_NB) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EWOULDBLOCK, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))


def unlock(fd: int) -> None:
    """Release the file's lock."""
    _libc.flock(fd, LOCK_UN)


def open_inotify() -> int | None:
    """A non-blocking inotify descriptor; None where there is none or the user has too many."""
    if not hasattr(_libc, "inotify_init1"):
        return None
    fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    return fd if fd >= 0 else None


def add_watch(inotify: int, path: str, mask: int) -> int | None:
    """Watch a path; None if the kernel refuses."""
    watch = int(_libc.inotify_add_watch(inotify, os.fsencode(path), mask))
    return watch if watch >= 0 else None


def drain(fd: int) -> bytes:
    """All that can be read from a non-blocking descriptor now."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""


def boot_id() -> str:
    """Returns an id of this start of the machine; empty if it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()[:8]
    except OSError:
        return ""
