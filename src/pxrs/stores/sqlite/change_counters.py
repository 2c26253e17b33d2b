"""The control file: a few pages of shared memory beside the database.

It records which process holds the writer and since when, and how much the write-ahead log has
grown, and it carries the change counters: one per slot, raised by a writer after its commit. A
watcher knows from its slots whether a commit concerns it. Counters are hints; nothing is decided by
them. After raising them a writer touches the file `bell` beside it, and inotify wakes the watchers.
It does so only for slots that a process has watched since the file was made: to wake a thread in
every process for messages that no process waits for would cost a busy writer several percent of its
time.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from pxrs.stores.sqlite.beside import open_beside
from pxrs.stores.sqlite.posix import closing_on_failure

# Every group that a node serves watches its keys: two groups in one slot wake each other.
_SLOTS = 16_384
_HOLDER = struct.Struct("=Qd")
_WAL_BYTES_AT = 16
_RINGS_AT = 24
_SLOTS_AT = 4096
_WATCHED_AT = _SLOTS_AT + 8 * _SLOTS
_SIZE = _WATCHED_AT + _SLOTS
_COUNTER = struct.Struct("=Q")


class WriterHolder(NamedTuple):
    """The process that holds the writer, and the host's monotonic time when it took it."""

    pid: int
    since: float


def slot(name: str) -> int:
    """The slot of a name, the same in every process."""
    return crc32(name.encode(errors="surrogatepass")) % _SLOTS


def key_slots(key: str) -> frozenset[int]:
    """Returns the slots that a change of the key raises: its own and those of its folders."""
    return _folder_slots(key[: key.rfind("/") + 1]) | {slot(key)}


@lru_cache(maxsize=4096)
def _folder_slots(folder: str) -> frozenset[int]:
    ends = [at + 1 for at, letter in enumerate(folder) if letter == "/"]
    return frozenset(slot(folder[:end]) for end in (0, *ends))


class Control:
    """The mapped control file."""

    def __init__(self, folder: str, database: str) -> None:
        self.path = os.path.join(folder, "control")
        self.touched_path = os.path.join(folder, "bell")
        with closing_on_failure() as opened:
            self._fd = opened(open_beside(self.path, database))
            self._touched = opened(open_beside(self.touched_path, database))
            # A full disk has to be an error here: in a mapped hole it would be a SIGBUS later.
            os.posix_fallocate(self._fd, 0, _SIZE)
            os.posix_fallocate(self._touched, 0, 1)
            self._map = mmap.mmap(self._fd, _SIZE)
        # Held to write to the bell and to close it, by threads of one process. A commit in a
        # transaction of the caller's has no turn, so it can ring while another thread closes the
        # store; the next file that the process opens then gets the bell's number, and it can be
        # a database.
        self._closing = threading.Lock()

    @property
    def holder(self) -> WriterHolder | None:
        pid, since = _HOLDER.unpack_from(self._map, 0)
        return WriterHolder(pid, since) if pid else None

    def set_holder(self, pid: int, since: float) -> None:
        _HOLDER.pack_into(self._map, 0, pid, since)

    @property
    def wal_bytes(self) -> int:
        """Bytes written since the write-ahead log was last restarted, roughly."""
        value: int = _COUNTER.unpack_from(self._map, _WAL_BYTES_AT)[0]
        return value

    @wal_bytes.setter
    def wal_bytes(self, value: int) -> None:
        _COUNTER.pack_into(self._map, _WAL_BYTES_AT, value)

    def note_watched(self, slots: Iterable[int]) -> None:
        """Make writers ring the bell for these slots, from now on and for good.

        Call it before reading their counters. A writer that looks at the very same moment may miss
        the note, and then does not ring; the counter that it raised is found at the next tick.
        """
        for number in slots:
            self._map[_WATCHED_AT + number] = 1

    def counters(self, slots: Iterable[int]) -> tuple[int, ...]:
        """The counters of the slots, to be compared with an earlier answer."""
        return tuple(
            [_COUNTER.unpack_from(self._map, _SLOTS_AT + 8 * number)[0] for number in slots]
        )

    @property
    def rings(self) -> int:
        """How often slots were raised."""
        value: int = _COUNTER.unpack_from(self._map, _RINGS_AT)[0]
        return value

    def ring(self, slots: Iterable[int]) -> None:
        """Raise the slots' counters and wake the watchers; after `close`, only raise the counters.

        Only the holder of the writer calls it. The change has been committed by then, so no
        failure in here may raise an error.
        """
        watched = 0
        for number in slots:
            self._raise(_SLOTS_AT + 8 * number)
            watched |= self._map[_WATCHED_AT + number]
        self._raise(_RINGS_AT)
        if not watched:
            return
        with self._closing:
            if self._touched < 0:
                return
            try:
                os.pwrite(self._touched, b"!", 0)
            except OSError:
                return

    def _raise(self, at: int) -> None:
        _COUNTER.pack_into(self._map, at, (_COUNTER.unpack_from(self._map, at)[0] + 1) % 2**64)

    def close(self) -> None:
        """Close the files. The mapped page is freed with the last watcher that uses it."""
        with self._closing:
            fd, self._fd = self._fd, -1
            touched, self._touched = self._touched, -1
        os.close(fd)
        os.close(touched)
