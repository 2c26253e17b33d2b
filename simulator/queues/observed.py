"""A store that tells a judge what was done to its queues."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from pxrs.stores.api import Atomic
from pxrs.stores.memory.coord import MemoryCoord
from pxrs.stores.memory.queues import MemoryQueues
from pxrs.stores.memory.stores import MemoryStores
from pxrs.types import Held, Holder, QueueChange, Release, Taken
from simulator.queues.judge import Judge


class ObservedStores:
    """The memory store, with queues that are observed."""

    def __init__(self, stores: MemoryStores, judge: Judge) -> None:
        self._stores = stores
        self.queues = ObservedQueues(stores.queues, judge)

    @property
    def url(self) -> str:
        return self._stores.url

    @property
    def coord(self) -> MemoryCoord:
        return self._stores.coord

    @property
    def log(self) -> Any:
        return self._stores.log

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        return self._stores.atomic(connection)

    def close(self) -> None:
        """The stores outlive their users."""


class ObservedQueues:
    """A `QueueStore`: whatever is not observed is the inner one's."""

    def __init__(self, inner: MemoryQueues, judge: Judge) -> None:
        self._inner = inner
        self._judge = judge
        self.limits = inner.limits
        self.create, self.find, self.all, self.delete = (
            inner.create,
            inner.find,
            inner.all,
            inner.delete,
        )
        self.outcome, self.reap, self.stats, self.peek = (
            inner.outcome,
            inner.reap,
            inner.stats,
            inner.peek,
        )
        self.held = inner.held
        self.drop, self.redrive, self.purge, self.watch = (
            inner.drop,
            inner.redrive,
            inner.purge,
            inner.watch,
        )

    def take(
        self,
        queue: str,
        holder: Holder,
        count: int,
        *,
        most: int | None = None,
        lock_for: float | None = None,
        unit: str = "",
        suspects: bool = True,
    ) -> Taken:
        taken = self._inner.take(
            queue, holder, count, most=most, lock_for=lock_for, unit=unit, suspects=suspects
        )
        self._judge.taken(holder, taken.items, lock_for)
        return taken

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        self._inner.extend(holder, held, lock_for)
        self._judge.extended(holder, held, lock_for)

    def apply(self, change: QueueChange) -> list[int | None]:
        numbers = self._inner.apply(change)
        self._judge.applied(change, numbers)
        return numbers

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        self._inner.release(holder, releases)
        self._judge.released(holder, releases)

    def close(self) -> None:
        """The store outlives its users."""
