"""Queues that keep their items in the wrong order, or forget, one rule broken each."""

from __future__ import annotations

from pxrs.core.queue import QueueItem, WorkQueue
from pxrs.stores.memory.queues import MemoryQueues
from pxrs.types import (
    Delivery,
    Holder,
    ItemState,
    NewItem,
)


def with_queue(broken: type[WorkQueue]) -> type[MemoryQueues]:
    class Broken(MemoryQueues):
        def _make(self, name: str, fifo: bool) -> WorkQueue:
            made = broken(super()._make(name, fifo).info)
            self._queues[name] = made
            return made

    Broken.__name__ = broken.__name__
    return Broken


class RedriveKeepsTheCount(WorkQueue):
    def revive(self, dead: QueueItem, now_ms: int) -> None:
        super().revive(dead, now_ms)
        self.items[self.next_id - 1].deliveries = dead.deliveries


class RedriveTakesTheOldPlace(WorkQueue):
    def revive(self, dead: QueueItem, now_ms: int) -> None:
        after = self.next_id
        self.next_id = dead.id
        super().revive(dead, now_ms)
        self.next_id = after


class RedriveCountsAsAPut(WorkQueue):
    def revive(self, dead: QueueItem, now_ms: int) -> None:
        super().revive(dead, now_ms)
        self.put_count += 1


class KeyOrderByItemLock(WorkQueue):
    """Whoever looks when the front is held takes what is behind it."""

    def hold(
        self,
        item: QueueItem,
        holder: Holder,
        most: int | None,
        lock_until: float | None,
        now_ms: int,
    ) -> Delivery:
        delivery = super().hold(item, holder, most, lock_until, now_ms)
        if item.key_order is not None and not self.info.fifo:
            self._show_next(item.key_order, now_ms)
        return delivery

    def _show_next(self, key_order: str, now_ms: int) -> None:
        for number in self.key_orders[key_order]:
            if self.items[number].state is not ItemState.HELD:
                if self.items[number].state is ItemState.WAITING:
                    self._show(self.items[number], now_ms)
                return


class FifoByItemLock(KeyOrderByItemLock):
    def hold(
        self,
        item: QueueItem,
        holder: Holder,
        most: int | None,
        lock_until: float | None,
        now_ms: int,
    ) -> Delivery:
        delivery = WorkQueue.hold(self, item, holder, most, lock_until, now_ms)
        if self.info.fifo and item.key_order is not None:
            self._show_next(item.key_order, now_ms)
        return delivery


class FifoRunsByKey(WorkQueue):
    def add(self, item: QueueItem, now_ms: int) -> None:
        item.key_order = item.key
        super().add(item, now_ms)


class HoldersStopAtOne(WorkQueue):
    def key_orders_held(self, holder: Holder) -> list[str]:
        return []


class KeysAreForAnybody(WorkQueue):
    def key_orders_held(self, holder: Holder) -> list[str]:
        return sorted(self.key_orders)


class GivesBackAtTheEnd(WorkQueue):
    def give_back(self, item: QueueItem, now_ms: int) -> None:
        if item.key_order is not None:
            self.key_orders[item.key_order].remove(item.id)
            self.key_orders[item.key_order].append(item.id)
        super().give_back(item, now_ms)


class DeadFrontsBlock(WorkQueue):
    def bury(self, item: QueueItem, error: str, now_ms: int) -> None:
        key_order, item.key_order = item.key_order, None
        super().bury(item, error, now_ms)
        item.key_order = key_order


class DelayedFrontsArePassed(WorkQueue):
    def settle_key_order(self, key_order: str, now_ms: int) -> None:
        super().settle_key_order(key_order, now_ms)
        run = [self.items[number] for number in self.key_orders.get(key_order, ())]
        if run and run[0].state is ItemState.DELAYED:
            for item in run[1:]:
                if item.visible_ms <= now_ms:
                    self._show(item, now_ms)
                    return


class DelaysBehindAreForgotten(WorkQueue):
    def candidates(self, holder: Holder, count: int, now_ms: int) -> list[QueueItem]:
        return super().candidates(holder, count, 2**60)


class ShowsDelayedEarly(WorkQueue):
    def promote_due(self, now_ms: int) -> None:
        super().promote_due(2**60)


class NeverShowsTheDelayed(WorkQueue):
    def promote_due(self, now_ms: int) -> None:
        pass


class PriorityAboveKeys(WorkQueue):
    def settle_key_order(self, key_order: str, now_ms: int) -> None:
        self.key_orders.get(key_order, []).sort(key=lambda number: self.items[number].rank)
        super().settle_key_order(key_order, now_ms)


class NewestFirst(WorkQueue):
    def candidates(self, holder: Holder, count: int, now_ms: int) -> list[QueueItem]:
        return super().candidates(holder, len(self.items), now_ms)[::-1]


class IgnoresPriority(WorkQueue):
    def candidates(self, holder: Holder, count: int, now_ms: int) -> list[QueueItem]:
        found = super().candidates(holder, len(self.items), now_ms)
        return sorted(found, key=lambda item: item.id)


class KeysIgnoreCase(WorkQueue):
    def add(self, item: QueueItem, now_ms: int) -> None:
        item.key_order = item.key_order and item.key_order.lower().strip()
        super().add(item, now_ms)


class DedupeForgets(WorkQueue):
    def remove(self, item: QueueItem, now_ms: int) -> None:
        super().remove(item, now_ms)
        self.seen.clear()


class DedupeLooksAtTheStart(WorkQueue):
    """Knows what was there before the change, not what the change itself puts."""

    def put(self, new: NewItem, now_ms: int) -> int | None:
        known = dict(self.seen)
        if new.dedupe is not None and known.get(new.dedupe) and self.items:
            last = next(reversed(self.items.values()))
            if last.deliveries == 0:
                self.seen.pop(new.dedupe)
        return super().put(new, now_ms)


class DedupesForEver(WorkQueue):
    def put(self, new: NewItem, now_ms: int) -> int | None:
        number = super().put(new, now_ms)
        if new.dedupe is not None:
            self.seen[new.dedupe] = 2**60
        return number


class IdsStartAgain(WorkQueue):
    def put(self, new: NewItem, now_ms: int) -> int | None:
        if not self.items:
            self.next_id = 1
        return super().put(new, now_ms)


class LosesErrors(WorkQueue):
    def give_back(self, item: QueueItem, now_ms: int) -> None:
        item.error = ""
        super().give_back(item, now_ms)


class IgnoresReleaseDelays(WorkQueue):
    def give_back(self, item: QueueItem, now_ms: int) -> None:
        item.visible_ms = now_ms
        super().give_back(item, now_ms)


class SharesTheCallersBuffer(WorkQueue):
    def put(self, new: NewItem, now_ms: int) -> int | None:
        number = super().put(new, now_ms)
        if number is not None:
            self.items[number].body = new.body
        return number
