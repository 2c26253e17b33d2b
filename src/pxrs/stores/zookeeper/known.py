"""What this handle knows of records: how a version is checked in ZooKeeper.

Outside a version is the id of the transaction that wrote the record (mzxid), which only rises.
A multi can only check a znode's own counter, which starts again when the znode is deleted and
made anew. So each folder has a *guard*, a znode that every delete in the folder writes: the
counter, together with the guard as it was when the counter was read or before, stands for one
write only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

_MOST = 100_000


class Known(NamedTuple):
    """A record as it was seen: `version` outside, `counter` and `guard` inside ZooKeeper."""

    version: int
    counter: int
    guard: int
    session: str | None = None


class Knowledge:
    """Bounded: what was not used for longest is read again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Known] = OrderedDict()
        self._guards: OrderedDict[str, int] = OrderedDict()

    def record(self, path: str) -> Known | None:
        with self._lock:
            return self._records.get(path)

    def learn(self, path: str, known: Known | None) -> None:
        with self._lock:
            self._records.pop(path, None)
            if known is not None:
                self._records[path] = known
                if len(self._records) > _MOST:
                    self._records.popitem(last=False)

    def guard(self, folder: str) -> int | None:
        """A version that the folder's guard had at some time; None if the folder is not known."""
        with self._lock:
            return self._guards.get(folder)

    def learn_guard(self, folder: str, version: int) -> None:
        with self._lock:
            self._guards[folder] = max(version, self._guards.pop(folder, 0))
            if len(self._guards) > _MOST:
                self._guards.popitem(last=False)
