"""All stores in one process's memory: for tests, simulations and single-process programs.

As strict as the engines that it stands in for. One lock guards everything, so a commit over
several stores needs no machinery of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.errors import Closed, CommitConflict, NotAtomic
from pxrs.stores.api import Stores
from pxrs.stores.block import Block
from pxrs.stores.memory.coord import MemoryCoord
from pxrs.stores.memory.log import MemoryLog
from pxrs.stores.memory.queues import MemoryQueues


def open_memory(name: str) -> Stores:
    """Stores of this process: new ones without a name; with a name, shared by all who open it.

    Named stores are gone when their last handle is closed.
    """
    return _NAMED.open(name) if name else MemoryStores()


class MemoryStores:
    """`Stores` that live as long as this object. Callers that share it share the data."""

    def __init__(self, name: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        self.lock = threading.RLock()
        self.url = f"memory://{name}"
        self.coord = MemoryCoord(self.lock, clock)
        self.log = MemoryLog(self.lock)
        self.queues = MemoryQueues(self.lock, self.coord, clock)

    def atomic(self, connection: Any = None) -> MemoryAtomic:
        if connection is not None:
            raise NotAtomic("the memory store can't commit on a connection; pass none")
        return MemoryAtomic(self)

    def close(self) -> None:
        self.coord.close()
        self.log.close()
        self.queues.close()


class MemoryAtomic(Block[threading.RLock]):
    """An `Atomic`: examines everything under the lock, then does everything."""

    connection = None
    joined = False

    def __init__(self, stores: MemoryStores) -> None:
        super().__init__(stores.coord.limits, stores.queues.limits)
        self._lock = stores.lock
        self._coord, self._log, self._queues = stores.coord, stores.log, stores.queues

    def __enter__(self) -> MemoryAtomic:
        self._require_new()
        self._enter(self._lock)
        return self

    def _end(self, on: threading.RLock, error: BaseException | None) -> None:
        self._leave()
        if error is None:
            self._apply()

    def _apply(self) -> None:
        self._validate()
        with self._lock:
            current = self._coord.examine(self._checks, self._writes)
            if current:
                raise CommitConflict(current)
            for where, _ in self._appends:
                self._log.find(where)
            if self._change is not None:
                self._queues.examine(self._change)
                self.queued = self._queues.place(self._change)
            self.versions = self._coord.apply(self._writes)
            self.appended = [self._log.place(where, batch) for where, batch in self._appends]


class _Register:
    """The named stores that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, MemoryStores] = {}
        self._handles: Counter[str] = Counter()

    def open(self, name: str) -> Stores:
        with self._lock:
            if not self._handles[name]:
                self._stores[name] = MemoryStores(name)
            self._handles[name] += 1
            return cast(Stores, NamedStores(self._stores[name], partial(self._release, name)))

    def _release(self, name: str) -> None:
        with self._lock:
            self._handles[name] -= 1
            if not self._handles[name]:
                self._stores.pop(name).close()


_NAMED = _Register()


class NamedStores:
    """One of several handles on the memory stores of a name."""

    def __init__(self, stores: MemoryStores, release: Callable[[], None]) -> None:
        self.url = stores.url
        self._stores = stores
        self._release = release
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        """The parts of the shared stores, as long as this handle is open."""
        if self._closed:
            raise Closed("the store was closed")
        return getattr(self._stores, name)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()
