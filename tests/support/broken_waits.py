"""Queue stores whose upkeep, wake-ups or locking are broken, one rule each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from pxrs.core import queue as queue_rules
from pxrs.core.queue import WorkQueue
from pxrs.stores.api import Watch
from pxrs.stores.memory.queues import MemoryQueues, Wish
from pxrs.types import (
    Holder,
    ItemState,
    NewItem,
    QueueChange,
    QueueStats,
    Release,
    StoredItem,
    Taken,
)

T = TypeVar("T")


def in_silence(queues: MemoryQueues, work: Callable[[], T]) -> T:
    ring, queues._wakeups.ring = queues._wakeups.ring, lambda changed: None  # type: ignore[method-assign]
    try:
        return work()
    finally:
        queues._wakeups.ring = ring  # type: ignore[method-assign]


class DropsTheHeld(MemoryQueues):
    def drop(self, queue: str, ids: Sequence[int]) -> int:
        with self._lock:
            return self._remove(queue, ids, tuple(ItemState))


class PurgesTheHeld(MemoryQueues):
    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        return super().purge(queue, states or (*queue_rules.LIVE,))


class RedrivesTheLiving(MemoryQueues):
    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        with self._lock:
            found = self._queues.get(queue)
            loose = [n for n in ids if found and (i := found.items.get(n)) and i.holder is None]
            for number in dict.fromkeys(loose):
                assert found is not None
                item = found.items[number]
                if item.state is not ItemState.DEAD:
                    found.bury(item, "", self._clock.wall_ms())
            return super().redrive(queue, ids)


class DeletesTheNameOnly(MemoryQueues):
    def delete(self, name: str) -> None:
        self._graves = {**getattr(self, "_graves", {}), name: self._queues.get(name)}
        super().delete(name)

    def _make(self, name: str, fifo: bool) -> WorkQueue:
        made = super()._make(name, fifo)
        old = getattr(self, "_graves", {}).get(name)
        if old is not None:
            made.seen, made.put_count = old.seen, old.put_count
        return made


class CountsTheDeadAsDepth(MemoryQueues):
    def stats(self, queue: str) -> QueueStats:
        stats = super().stats(queue)
        return msgspec.structs.replace(stats, ready=stats.ready + stats.dead)


class ForgetsWhatWasDone(MemoryQueues):
    def stats(self, queue: str) -> QueueStats:
        return msgspec.structs.replace(super().stats(queue), done=0)


class PagesOverlap(MemoryQueues):
    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        below = after - 1 if after else None
        return super().peek(queue, states, after=below, limit=limit)


class PeekHidesTheHolder(MemoryQueues):
    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        found = super().peek(queue, states, after=after, limit=limit)
        return [msgspec.structs.replace(item, holder=None) for item in found]


class TakesFifoPriorities(MemoryQueues):
    def examine(self, change: QueueChange) -> None:
        put = tuple(msgspec.structs.replace(new, priority=0, delay=0.0) for new in change.put)
        super().examine(QueueChange(change.holder, change.remove, put))


class MakesEveryQueueFifo(MemoryQueues):
    def _make(self, name: str, fifo: bool) -> WorkQueue:
        return super()._make(name, fifo=True)


class CreatesOverTheOld(MemoryQueues):
    def create(self, name: str, *, fifo: bool = False) -> Any:
        with self._lock:
            return self._make(queue_rules.validate_name(name), fifo).info


class TakesMakeQueues(MemoryQueues):
    def take(self, queue: str, holder: Holder, *args: Any, **options: Any) -> Taken:
        if self.find(queue) is None:
            self.create(queue)
        return super().take(queue, holder, *args, **options)


class PutsInSilence(MemoryQueues):
    def place(self, change: QueueChange) -> list[int | None]:
        return in_silence(self, lambda: MemoryQueues.place(self, change))


class PutsBehindInSilence(MemoryQueues):
    """Thinks that nobody can have what is behind a held item."""

    def place(self, change: QueueChange) -> list[int | None]:
        held = {
            (name, item.key)
            for name, queue in self._queues.items()
            for item in queue.items.values()
            if item.holder is not None
        }
        if any(new.key and (new.queue, new.key) in held for new in change.put):
            return in_silence(self, lambda: MemoryQueues.place(self, change))
        return super().place(change)


class ReleasesInSilence(MemoryQueues):
    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        in_silence(self, lambda: MemoryQueues.release(self, holder, releases))


class RedrivesInSilence(MemoryQueues):
    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        return in_silence(self, lambda: MemoryQueues.redrive(self, queue, ids))


class DropsInSilence(MemoryQueues):
    def drop(self, queue: str, ids: Sequence[int]) -> int:
        return in_silence(self, lambda: MemoryQueues.drop(self, queue, ids))


class WatchesOneQueue(MemoryQueues):
    def watch(self, *queues: str) -> Watch:
        return super().watch(queues[0])


class NothingIsEverDue(MemoryQueues):
    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        return None


class DueIsForTheDelayedOnly(MemoryQueues):
    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        held, queue.held = queue.held, set()
        try:
            return super()._due(queue)
        finally:
            queue.held = held


class DueIsForTheHeldOnly(MemoryQueues):
    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        delayed, queue.delayed = queue.delayed, []
        try:
            return super()._due(queue)
        finally:
            queue.delayed = delayed


class DueForgetsTheHoldersKeys(MemoryQueues):
    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        return super()._due(queue)


class DueIsAlwaysSoon(MemoryQueues):
    """Nobody oversleeps, but whoever waits asks again and again."""

    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        due = super()._due(queue, holder)
        return None if due is None else min(due, 0.05)


class DueIsTheLast(MemoryQueues):
    """Says when everything will be there, not when something is."""

    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        now_ms = self._clock.wall_ms()
        waits = [max(0.0, (visible - now_ms) / 1000) for visible, _ in queue.delayed[-1:]]
        return max(waits, default=super()._due(queue, holder))


class TakesOutsideTheLock(MemoryQueues):
    """Chooses, then lets others choose the same, then holds."""

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
        now_ms = self._clock.wall_ms()
        with self._lock:
            self._require_session(holder.session)
            found = self._queues[queue]
            self._reap(found)
            wish = Wish(holder, count, most, suspects)
            chosen, _, suspect = self._choose(found, wish, now_ms)
        threading.Event().wait(0.001)
        with self._lock:
            here = [item for item in chosen if item.id in found.items]
            items = [found.hold(item, holder, most, None, now_ms) for item in here]
            return Taken(items, None, suspect)


class DedupesOutsideTheLock(MemoryQueues):
    def apply(self, change: QueueChange) -> list[int | None]:
        with self._lock:
            seen = {new.dedupe for new in change.put if self._has_seen(new)}
        threading.Event().wait(0.02)
        with self._lock:
            plain = [
                msgspec.structs.replace(new, dedupe=None)
                for new in change.put
                if new.dedupe not in seen
            ]
            numbers = iter(super().apply(QueueChange(change.holder, change.remove, tuple(plain))))
            for new in change.put:
                if new.dedupe is not None:
                    self._queues[new.queue].seen[new.dedupe] = 2**60
            return [None if new.dedupe in seen else next(numbers) for new in change.put]

    def _has_seen(self, new: NewItem) -> bool:
        return new.queue in self._queues and new.dedupe in self._queues[new.queue].seen


class TellsIdsByQueue(MemoryQueues):
    """Groups what it puts by queue, and forgets in which order it was asked."""

    def place(self, change: QueueChange) -> list[int | None]:
        numbers = super().place(change)
        queues = [item.queue for item in change.put]
        order = sorted(range(len(numbers)), key=lambda at: queues[at])
        return [numbers[at] for at in order]


class TellsDuplicatesIds(MemoryQueues):
    """An id for what was not put."""

    def place(self, change: QueueChange) -> list[int | None]:
        return [0 if number is None else number for number in super().place(change)]
