"""One work queue in memory: its items, and where each of them stands."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice

from pxrs.stores.queue_rules import delay_ms, is_suspect, lane_of
from pxrs.types import Delivery, Held, Holder, ItemState, NewItem, Queue, StoredItem


class MemoryItem:
    """An item and everything that is known of it."""

    def __init__(self, number: int, new: NewItem, lane: str | None, now_ms: int) -> None:
        self.id = number
        self.body = bytes(new.body)
        self.key = new.key
        self.priority = new.priority
        self.lane = lane
        self.state = ItemState.WAITING
        self.visible_ms = now_ms + delay_ms(new.delay)
        self.put_ms = now_ms
        self.taken_ms: int | None = None
        self.dead_ms: int | None = None
        self.deliveries = 0
        self.most: int | None = None
        self.suspect = False
        self.holder: Holder | None = None
        self.lock_until: float | None = None
        self.error = ""

    @property
    def rank(self) -> tuple[int, int]:
        """What it is handed out by: the smallest first."""
        return -self.priority, self.id

    @classmethod
    def restored(cls, stored: StoredItem, lane: str | None) -> MemoryItem:
        """An item as it stood in another store."""
        new = NewItem(queue="", body=stored.body, key=stored.key, priority=stored.priority)
        item = cls(stored.id, new, lane, stored.put_ms)
        item.visible_ms = stored.visible_ms or stored.put_ms
        item.deliveries = stored.deliveries
        item.taken_ms, item.dead_ms = stored.taken_ms, stored.dead_ms
        item.error, item.suspect = stored.error, is_suspect(stored)
        return item

    def shown(self, now_ms: int) -> StoredItem:
        """For people to look at, and to be copied."""
        later = self.visible_ms > now_ms and self.state in (ItemState.DELAYED, ItemState.WAITING)
        return StoredItem(
            id=self.id,
            state=self.state,
            body=self.body,
            key=self.key,
            priority=self.priority,
            deliveries=self.deliveries,
            put_ms=self.put_ms,
            taken_ms=self.taken_ms,
            visible_ms=self.visible_ms if later else None,
            dead_ms=self.dead_ms,
            error=self.error,
            holder=self.holder,
        )

    def is_held_as(self, holder: Holder, delivery: int, now: float) -> bool:
        """The fence: whether this very delivery is still this holder's."""
        in_time = self.lock_until is None or now < self.lock_until
        return self.holder == holder and self.deliveries == delivery and in_time


class MemoryQueue:
    """One queue. Each lane has at most one item, or one holder's items, at its front."""

    def __init__(self, info: Queue) -> None:
        self.info = info
        self.items: dict[int, MemoryItem] = {}
        self.ready: list[tuple[int, int]] = []
        self.delayed: list[tuple[int, int]] = []
        self.held: set[int] = set()
        self.lanes: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}
        self.next_id = 1
        self.put_count = 0
        self.done_count = 0

    def put(self, new: NewItem, now_ms: int) -> int | None:
        """Add an item at the end; None if it was put before, within its window."""
        if new.dedupe is not None:
            if self.seen.get(new.dedupe, now_ms) > now_ms:
                return None
            # It goes to the end, so that those whose time is over gather at the front, roughly.
            self.seen.pop(new.dedupe, None)
            for key in list(islice(self.seen, 2)):
                if self.seen[key] <= now_ms:
                    del self.seen[key]
            self.seen[new.dedupe] = now_ms + delay_ms(new.dedupe_window)
        self.add(MemoryItem(self.next_id, new, lane_of(self.info, new.key), now_ms), now_ms)
        self.put_count += 1
        return self.next_id - 1

    def add(self, item: MemoryItem, now_ms: int) -> None:
        self.next_id += 1
        self.items[item.id] = item
        if item.lane is None:
            self._show(item, now_ms)
        else:
            self.lanes.setdefault(item.lane, []).append(item.id)
            self.settle_lane(item.lane, now_ms)

    def revive(self, dead: MemoryItem, now_ms: int) -> None:
        """Put a dead item at the end, as if it had never been handed out."""
        del self.items[dead.id]
        new = NewItem(queue="", body=dead.body, key=dead.key, priority=dead.priority)
        item = MemoryItem(self.next_id, new, dead.lane, now_ms)
        item.error = dead.error
        self.add(item, now_ms)

    def restore(self, items: Sequence[StoredItem], now_ms: int) -> int:
        """Add items under their own numbers, wherever these stand among the others."""
        fresh = [stored for stored in items if stored.id not in self.items]
        lanes: set[str] = set()
        for stored in fresh:
            item = MemoryItem.restored(stored, lane_of(self.info, stored.key))
            self.items[item.id] = item
            if stored.state is ItemState.DEAD:
                item.state = ItemState.DEAD
            elif item.lane is None:
                self._show(item, now_ms)
            else:
                insort(self.lanes.setdefault(item.lane, []), item.id)
                lanes.add(item.lane)
        for lane in lanes:
            self.settle_lane(lane, now_ms)
        self.items = dict(sorted(self.items.items()))
        self.next_id = max([self.next_id, *(stored.id + 1 for stored in fresh)])
        self.put_count += len(fresh)
        return len(fresh)

    def promote_due(self, now_ms: int) -> None:
        """Show delayed items whose time has come."""
        while self.delayed and self.delayed[0][0] <= now_ms:
            item = self.items[self.delayed[0][1]]
            self._hide(item)
            self._show(item, now_ms)

    def candidates(self, holder: Holder, count: int, now_ms: int) -> list[MemoryItem]:
        """What the holder may have, in order: fronts, then what follows what it holds."""
        found = [self.items[number] for _, number in self.ready[:count]]
        lanes = [front.lane for front in found if front.lane is not None]
        for lane in lanes + self.lanes_held(holder):
            for item in self._waiting(lane)[: count - len(found)]:
                if item.visible_ms > now_ms:
                    break
                found.append(item)
        return found

    def lanes_held(self, holder: Holder) -> list[str]:
        """The lanes that the holder may go on with."""
        mine = [self.items[number] for number in self.held if self.items[number].holder == holder]
        return sorted({item.lane for item in mine if item.lane is not None})

    def due_behind(self, holder: Holder) -> list[int]:
        """When the next item shows in each of the lanes that the holder may go on with."""
        nexts = [self._waiting(lane)[:1] for lane in self.lanes_held(holder)]
        return [item.visible_ms for items in nexts for item in items]

    def _waiting(self, lane: str) -> list[MemoryItem]:
        run = [self.items[number] for number in self.lanes[lane]]
        return [item for item in run if item.state is ItemState.WAITING]

    def hold(
        self,
        item: MemoryItem,
        holder: Holder,
        most: int | None,
        lock_until: float | None,
        now_ms: int,
    ) -> Delivery:
        self._hide(item)
        item.state = ItemState.HELD
        self.held.add(item.id)
        item.deliveries += 1
        item.holder, item.most, item.lock_until = holder, most, lock_until
        item.taken_ms = now_ms
        return Delivery(
            held=Held(self.info.name, item.id, item.deliveries),
            body=item.body,
            key=item.key,
            priority=item.priority,
            put_ms=item.put_ms,
            error=item.error,
        )

    def give_back(self, item: MemoryItem, now_ms: int) -> None:
        """Let it be handed out again when its time comes."""
        self._hide(item)
        if item.lane is None:
            self._show(item, now_ms)
        else:
            self.settle_lane(item.lane, now_ms)

    def bury(self, item: MemoryItem, error: str, now_ms: int) -> None:
        self._leave(item, now_ms)
        item.state = ItemState.DEAD
        item.dead_ms = now_ms
        item.error = error

    def remove(self, item: MemoryItem, now_ms: int) -> None:
        self._leave(item, now_ms)
        del self.items[item.id]

    def settle_lane(self, lane: str, now_ms: int) -> None:
        """Show the lane's first item, unless somebody holds it."""
        numbers = self.lanes.get(lane)
        if not numbers:
            self.lanes.pop(lane, None)
            return
        run = [self.items[number] for number in numbers]
        for item in run:
            if item.state is not ItemState.HELD:
                self._hide(item)
        if not any(item.state is ItemState.HELD for item in run):
            self._show(run[0], now_ms)

    def _leave(self, item: MemoryItem, now_ms: int) -> None:
        dead = item.state is ItemState.DEAD
        self._hide(item)
        if item.lane is not None and not dead:
            self.lanes[item.lane].remove(item.id)
            self.settle_lane(item.lane, now_ms)

    def _show(self, item: MemoryItem, now_ms: int) -> None:
        if item.visible_ms > now_ms:
            item.state = ItemState.DELAYED
            insort(self.delayed, (item.visible_ms, item.id))
        else:
            item.state = ItemState.READY
            insort(self.ready, item.rank)

    def _hide(self, item: MemoryItem) -> None:
        """Take it out of wherever it stands; nobody can have it then."""
        if item.state is ItemState.READY:
            del self.ready[bisect_left(self.ready, item.rank)]
        elif item.state is ItemState.DELAYED:
            del self.delayed[bisect_left(self.delayed, (item.visible_ms, item.id))]
        self.held.discard(item.id)
        item.holder = item.lock_until = None
        item.state = ItemState.WAITING
