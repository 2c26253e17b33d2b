"""The store as nobody in the simulation sees it: every commit that was applied is told."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pxrs.stores.api import Atomic, LogStore, QueueStore, Session, Watch
from pxrs.stores.memory.stores import MemoryStores
from pxrs.types import Check, Committed, Conflict, Limits, Versioned, Write
from simulator.effects import Landed

# Who has committed what on top of what; `Landed` if it was a transaction.
Heard = Callable[[str, Mapping[str, Versioned | None], Sequence[Write], Landed | None], None]


class ObservedStores:
    """Memory stores as one member reaches them. Faults are injected above this."""

    def __init__(self, stores: MemoryStores, who: str, heard: Heard) -> None:
        self._stores = stores
        self._who = who
        self._heard = heard
        self._coord = ObservedCoord(stores, who, heard)

    @property
    def url(self) -> str:
        return self._stores.url

    @property
    def coord(self) -> ObservedCoord:
        return self._coord

    @property
    def log(self) -> LogStore:
        return self._stores.log

    @property
    def queues(self) -> QueueStore:
        return self._stores.queues

    @contextmanager
    def atomic(self, connection: Any = None) -> Iterator[Atomic]:
        with self._stores.atomic(connection) as block:
            yield block
            writes, landed = block._writes, Landed(block._appends, block._change)
            before = {write.key: self._stores.coord.get(write.key) for write in writes}
        self._heard(self._who, before, writes, landed)

    def close(self) -> None:
        """The stores outlive their members."""


class ObservedCoord:
    """A `CoordStore` that tells who has committed what on top of what."""

    def __init__(self, stores: MemoryStores, who: str, heard: Heard) -> None:
        self._inner = stores.coord
        self._who = who
        self._heard = heard

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def get(self, key: str) -> Versioned | None:
        return self._inner.get(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> builtins.list[Versioned]:
        return self._inner.list(prefix, after, limit)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        before = {write.key: self._inner.get(write.key) for write in writes}
        outcome = self._inner.commit(checks, writes)
        if isinstance(outcome, Committed):
            self._heard(self._who, before, writes, None)
        return outcome

    def watch(self, *prefixes: str) -> Watch:
        return self._inner.watch(*prefixes)

    def session(self, ttl: float) -> Session:
        return self._inner.session(ttl)

    def close(self) -> None:
        """The store outlives its members."""
