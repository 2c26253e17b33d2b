"""The control file: a few pages of shared memory beside the database.

It says who holds the writer and since when, how much the write-ahead log has grown, and it
carries the change counters: one per slot, raised by a writer after its commit. A watcher knows
from its slots whether a commit concerns it. Counters are hints; nothing is decided by them. After
raising them a writer touches the file `bell` beside it, which inotify tells watchers of.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from pxrs.stores.sqlite.beside import open_beside
from pxrs.stores.sqlite.posix import closing_on_failure

# As many groups as a node serves watch their keys: two in one slot wake each other.
_SLOTS = 16_384
_HOLDER = struct.Struct("=Qd")
_WAL_BYTES_AT = 16
_RINGS_AT = 24
_SLOTS_AT = 4096
_SIZE = _SLOTS_AT + 8 * _SLOTS
_COUNTER = struct.Struct("=Q")


class Holder(NamedTuple):
    """The process that holds the writer, and the host's monotonic time when it took it."""

    pid: int
    since: float


def slot(name: str) -> int:
    """The slot of a name, the same in every process."""
    return crc32(name.encode(errors="surrogatepass")) % _SLOTS


def key_slots(key: str) -> frozenset[int]:
    """Returns what a change of the key raises: its own slot, and those of the folders above it."""
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

    @property
    def holder(self) -> Holder | None:
        pid, since = _HOLDER.unpack_from(self._map, 0)
        return Holder(pid, since) if pid else None

    def set_holder(self, pid: int, since: float) -> None:
        _HOLDER.pack_into(self._map, 0, pid, since)

    @property
    def wal_bytes(self) -> int:
        """Bytes written since the write-ahead log was last started anew, roughly."""
        value: int = _COUNTER.unpack_from(self._map, _WAL_BYTES_AT)[0]
        return value

    @wal_bytes.setter
    def wal_bytes(self, value: int) -> None:
        _COUNTER.pack_into(self._map, _WAL_BYTES_AT, value)

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
        """Raise the slots' counters and wake the watchers. For the holder of the writer.

        What it tells of has been committed, so nothing it meets is an error.
        """
        for number in slots:
            self._raise(_SLOTS_AT + 8 * number)
        self._raise(_RINGS_AT)
        try:
            os.pwrite(self._touched, b"!", 0)
        except OSError:
            return

    def _raise(self, at: int) -> None:
        _COUNTER.pack_into(self._map, at, (_COUNTER.unpack_from(self._map, at)[0] + 1) % 2**64)

    def close(self) -> None:
        """Close the files. The page goes with the last watcher that looks at it."""
        os.close(self._fd)
        os.close(self._touched)
