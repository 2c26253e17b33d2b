"""Items that come from another store, under the numbers they had there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pxrs.errors import InvalidRequest, QueueNotFound
from pxrs.stores.queue_rules import is_suspect, lane_of, validate_restored
from pxrs.stores.queues_on_coord.directory import Tails
from pxrs.stores.queues_on_coord.draft import Draft, attempts
from pxrs.stores.queues_on_coord.layout import (
    NUMBERS_END,
    Item,
    Layout,
    Standing,
    encode_item,
    lane_name,
)
from pxrs.stores.queues_on_coord.moves import add
from pxrs.stores.queues_on_coord.shared import Tools
from pxrs.types import Committed, ItemState, Queue, StoredItem

# Records that have a part in a commit: of an item, which must not be there yet, ...
_PER_ITEM = 3
# ... and of its key: the lane itself, the one that showed so far, and the one that shows now.
_PER_LANE = 8
# What a lot may weigh, and what an item weighs besides its body and its error.
_LOT_BYTES = 500_000
_HEADER_BYTES = 1_000


class Restorer:
    """Adds in lots that fit into a commit; each of them is conditional on the queue's tail.

    So two who restore the same can't both find it missing. Below the tail nobody else makes an
    item of a given number, and one that is there goes one way only, from live to dead: read in
    this order, it is not missed.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def restore(self, at: Layout, items: Sequence[StoredItem]) -> int:
        validate_restored(items, self._tools.limits)
        for item in items:
            if item.id >= NUMBERS_END:
                raise InvalidRequest(f"item {item.id}: numbers end at {NUMBERS_END - 1} here")
        queue = self._tools.directory.find(at.queue)
        if queue is None:
            raise QueueNotFound(at.queue)
        return sum(self._restore(at, lot) for lot in self._lots(queue, items))

    def _lots(self, queue: Queue, items: Sequence[StoredItem]) -> Iterator[list[StoredItem]]:
        lot: list[StoredItem] = []
        room, weight = self._tools.room, 0
        for item in items:
            cost = _PER_ITEM + (0 if lane_of(queue, item.key) is None else _PER_LANE)
            size = len(item.body) + len(item.error.encode()) + _HEADER_BYTES
            if lot and (cost > room or weight + size > _LOT_BYTES):
                yield lot
                lot, room, weight = [], self._tools.room, 0
            lot.append(item)
            room, weight = room - cost, weight + size
        if lot:
            yield lot

    def _restore(self, at: Layout, lot: Sequence[StoredItem]) -> int:
        for _ in attempts(f"items could not be restored to queue {at.queue!r}"):
            draft = self._tools.draft()
            tails = Tails(self._tools.directory, draft)
            queue = tails.queue(at.queue)
            if queue is None:
                raise QueueNotFound(at.queue)
            end = tails.end(at.queue)
            fresh = [item for item in lot if item.id >= end or not self._is_there(at, item.id)]
            if not fresh:
                return 0
            for item in fresh:
                _add(draft, at, queue, item)
                tails.admit(at.queue, item.id)
            tails.write()
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                tails.committed(outcome)
                return len(fresh)
            tails.refused()
        raise AssertionError("attempts raise in the end")

    def _is_there(self, at: Layout, number: int) -> bool:
        coord = self._tools.coord
        return coord.get(at.item(number)) is not None or coord.get(at.dead(number)) is not None


def _add(draft: Draft, at: Layout, queue: Queue, stored: StoredItem) -> None:
    standing = Standing(
        number=stored.id,
        lane=lane_name(lane_of(queue, stored.key)),
        priority=stored.priority,
        visible_ms=stored.visible_ms or stored.put_ms,
        deliveries=stored.deliveries,
        suspect=is_suspect(stored),
        error=stored.error,
        taken_ms=stored.taken_ms,
    )
    item = Item(key=stored.key, priority=stored.priority, put_ms=stored.put_ms)
    if stored.state is ItemState.DEAD:
        draft.require(at.dead(stored.id), 0)
        dead = Item(
            key=stored.key,
            priority=stored.priority,
            put_ms=stored.put_ms,
            standing=standing,
            dead_ms=stored.dead_ms,
        )
        draft.put(at.dead(stored.id), encode_item(dead, stored.body))
        return
    draft.require(at.item(stored.id), 0)
    add(draft, at, standing, item, stored.body)
