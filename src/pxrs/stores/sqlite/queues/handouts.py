"""Which items that were set aside have been handed out: a counter that outlives its process.

Items set aside have numbers, and are handed out by this process alone. It raises the counter, in
a page of shared memory, before anybody gets them. The kernel keeps the page when the process is
killed; then its lock on the file is free, the counter stands still for ever, and whatever has a
higher number was in nobody's hands.

Whoever can't tell has to assume that it was: the process may be alive, the file gone, the machine
restarted.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import struct
from contextlib import suppress

from pxrs.stores.sqlite.posix import (
    boot_id,
    closing_on_failure,
    make_folder_beside,
    open_beside,
    try_lock,
)

_PAGE = struct.Struct("=8sQ")
_COUNTER_AT = 8
_COUNTER = struct.Struct("=Q")
_BOOT = boot_id().encode()
_NAME = re.compile("[0-9a-f]{12}")

# Where nobody can tell one start of the machine from another nothing is set aside.
CAN_TELL = bool(_BOOT)


class Handouts:
    """The counter of this process."""

    def __init__(self, folder: str, database: str) -> None:
        folder = os.path.join(folder, "ahead")
        make_folder_beside(folder, database)
        self.name = secrets.token_hex(6)
        self._path = os.path.join(folder, self.name)
        hidden = os.path.join(folder, f".{self.name}")
        with closing_on_failure() as opened:
            self._fd = opened(open_beside(hidden, database, os.O_EXCL))
            try_lock(self._fd)
            os.posix_fallocate(self._fd, 0, _PAGE.size)
            os.pwrite(self._fd, _PAGE.pack(_BOOT, 0), 0)
            self._map = mmap.mmap(self._fd, _PAGE.size)
            # Named once it is locked: whoever finds the lock free knows that the process is gone.
            os.rename(hidden, self._path)

    def note(self, number: int) -> None:
        """What has this number is about to be handed out, and all below it may have been."""
        if number > _COUNTER.unpack_from(self._map, _COUNTER_AT)[0]:
            _COUNTER.pack_into(self._map, _COUNTER_AT, number)

    def close(self) -> None:
        """Nothing is set aside any more."""
        with suppress(OSError):
            os.unlink(self._path)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the counter is the parent's."""
        self._map.close()
        os.close(self._fd)


class Verdicts:
    """What other processes have handed out, for those who look after what they left behind."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "ahead")

    def may_be_out(self, name: str, number: int) -> bool:
        """Whether something with this number may be in somebody's hands, or have been."""
        if not _NAME.fullmatch(name):
            return True
        try:
            fd = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            if not try_lock(fd, shared=True):
                return True
            page = os.pread(fd, _PAGE.size, 0)
        except OSError:
            return True
        finally:
            os.close(fd)
        if len(page) < _PAGE.size:
            return True
        boot, counter = _PAGE.unpack(page)
        return bool(boot != _BOOT) or number <= counter

    def left_behind(self) -> list[str]:
        """The names of those who are gone."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [name for name in names if self._is_free(name)]

    def forget(self, name: str) -> None:
        """Nothing is left of it."""
        with suppress(OSError):
            os.unlink(os.path.join(self._folder, name))

    def _is_free(self, name: str) -> bool:
        try:
            fd = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # One that is not named yet may not be locked yet, either.
            return os.fstat(fd).st_size >= _PAGE.size and try_lock(fd, shared=True)
        except OSError:
            return False
        finally:
            os.close(fd)
