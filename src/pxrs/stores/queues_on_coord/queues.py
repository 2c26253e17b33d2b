"""A `QueueStore` that needs nothing but a `CoordStore`: work queues on etcd and ZooKeeper.

An item is held by a lock that is bound to the holder's session, so the engine itself frees what
a dead process held; what was done, given back or put is one commit, conditional on everything
that it builds on. `layout` shows the records. Good for some thousands of items in a queue.

Delays and dedupe windows are counted by the wall clocks of those who use the queue. Holds are
not: those end with sessions, which the engine ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.core.queue import (
    held_in,
    page_size,
    validate_lock,
    validate_name,
    validate_releases,
    validate_take,
)
from pxrs.errors import Closed, StoreError, TransactionConflict
from pxrs.stores.api import CoordStore, Watch
from pxrs.stores.queues_on_coord.changing import Changer
from pxrs.stores.queues_on_coord.directory import Directory
from pxrs.stores.queues_on_coord.holds import Deadlines, Holds
from pxrs.stores.queues_on_coord.layout import Layout
from pxrs.stores.queues_on_coord.reaping import Reaper
from pxrs.stores.queues_on_coord.receipts import Receipts
from pxrs.stores.queues_on_coord.shared import Tools
from pxrs.stores.queues_on_coord.taking import Taker, Wish
from pxrs.stores.queues_on_coord.upkeep import Restorer, Upkeep
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    Outcome,
    Queue,
    QueueChange,
    QueueLimits,
    QueueStats,
    Release,
    StoredItem,
    Taken,
)


class RecipeQueues:
    """See `pxrs.stores.api.QueueStore`."""

    def __init__(self, coord: CoordStore, clock: Clock = SYSTEM_CLOCK) -> None:
        holds = Holds(coord)
        self._coord = coord
        self._directory = Directory(coord, clock)
        self._deadlines = Deadlines(coord, holds)
        self._tools = Tools(coord, clock, self._directory, holds, self._deadlines)
        self._receipts = Receipts(self._tools)
        self._reaper = Reaper(self._tools)
        self._taker = Taker(self._tools, self._reaper)
        self._changer = Changer(self._tools, self._receipts)
        self._upkeep = Upkeep(self._tools, self._reaper)
        self._restorer = Restorer(self._tools)
        self._closed = False

    @property
    def limits(self) -> QueueLimits:
        return self._tools.limits

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        self._begin()
        return self._directory.create(validate_name(name), fifo)

    def find(self, name: str) -> Queue | None:
        self._begin()
        return self._directory.find(name)

    def all(self) -> list[Queue]:
        self._begin()
        return self._directory.all()

    def delete(self, name: str) -> None:
        self._begin()
        self._directory.delete(name)

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
        validate_take(count, most, lock_for)
        self._begin()
        return self._taker.take(Wish(Layout(queue), holder, count, most, lock_for, unit, suspects))

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        self._begin()
        self._changer.extend(holder, held, lock_for)

    def apply(self, change: QueueChange) -> list[int | None]:
        self._begin()
        return self._changer.apply(change)

    def outcome(self, session: str, unit: str) -> Outcome:
        self._begin()
        return self._receipts.outcome(session, unit)

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._begin()
        self._taker.give_up(holder, unit)
        return held_in(self, queue, holder)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        self._begin()
        self._changer.release(holder, releases)

    def reap(self) -> float | None:
        self._begin()
        waits: list[float] = []
        for queue in self._directory.all():
            at = Layout(queue.name)
            waits += [*self._reaper.reap(at).waits, *self._upkeep.next_due(at)]
            self._upkeep.sweep(at)
        self._receipts.sweep()
        for name in self._directory.deleting():
            with suppress(StoreError, TransactionConflict):
                self._directory.delete(name)
        return min(waits, default=None)

    def stats(self, queue: str) -> QueueStats:
        self._begin()
        return self._upkeep.stats(Layout(queue))

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        most = page_size(limit)
        self._begin()
        return self._upkeep.peek(Layout(queue), states, after, most)

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        self._begin()
        return self._upkeep.drop(Layout(queue), ids)

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        self._begin()
        return self._upkeep.redrive(Layout(queue), ids)

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        self._begin()
        return self._upkeep.purge(Layout(queue), states)

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        self._begin()
        return self._restorer.restore(Layout(queue), items)

    def watch(self, *queues: str) -> Watch:
        """Takes of others wake, too: a wake-up is a hint, and an empty take writes nothing."""
        self._begin()
        folders = []
        for at in map(Layout, queues):
            folders += [at.ready, at.delayed, at.locks, at.lanes]
        return self._coord.watch(*folders)

    def close(self) -> None:
        """The coordination store is its opener's to close."""
        if not self._closed:
            self._closed = True
            self._deadlines.close()

    def _begin(self) -> None:
        if self._closed:
            raise Closed("the store was closed")
