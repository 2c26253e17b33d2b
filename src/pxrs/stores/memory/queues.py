"""Work queues in one process's memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.queue import (
    DIED_HOLDING,
    LIVE,
    NOT_HELD,
    USED_UP,
    Picked,
    QueueItem,
    WorkQueue,
    delay_ms,
    given_up,
    held_in,
    page_size,
    pick,
    require_same,
    states_or,
    tidy,
    validate_change,
    validate_for,
    validate_lock,
    validate_name,
    validate_releases,
    validate_restored,
    validate_take,
)
from pxrs.errors import Closed, Fenced, QueueNotFound, SessionLost
from pxrs.stores.api import Watch
from pxrs.stores.memory.coord import MemoryCoord
from pxrs.stores.wakeups import Wakeups
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

LIMITS = QueueLimits(items=10_000, body_bytes=64 * 2**20)


class Wish(NamedTuple):
    """The arguments of a `take`."""

    holder: Holder
    number: int
    most: int | None
    suspects: bool


class MemoryQueues:
    """A `QueueStore`. Every call holds the one lock that is handed in."""

    limits = LIMITS

    def __init__(self, lock: threading.RLock, coord: MemoryCoord, clock: Clock) -> None:
        self._lock = lock
        self._coord = coord
        self._clock = clock
        self._queues: dict[str, WorkQueue] = {}
        # By session, the outcome of its units: done, or given up. They outlive the session: one
        # process does not have many of them.
        self._outcomes: defaultdict[str, dict[str, Outcome]] = defaultdict(dict)
        self._wakeups: Wakeups[str] = Wakeups(lock, coord.settle)
        self._closed = False
        coord.on_session_end(self._session_ended)

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        validate_name(name)
        with self._lock:
            self._begin()
            if name in self._queues:
                return require_same(self._queues[name].info, fifo)
            return self._make(name, fifo).info

    def find(self, name: str) -> Queue | None:
        with self._lock:
            self._begin()
            return self._queues[name].info if name in self._queues else None

    def all(self) -> list[Queue]:
        with self._lock:
            self._begin()
            return [self._queues[name].info for name in sorted(self._queues)]

    def delete(self, name: str) -> None:
        with self._lock:
            self._begin()
            self._queues.pop(name, None)
            self._wakeups.ring([name])

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
        with self._lock:
            self._begin()
            self._require_session(holder.session)
            self._refuse_given_up(holder.session, unit)
            found = self._queues.get(queue)
            if found is None:
                return Taken([], None)
            self._reap(found)
            now_ms = self._clock.wall_ms()
            found.promote_due(now_ms)
            until = None if lock_for is None else self._clock.monotonic() + lock_for
            number = min(count, LIMITS.items)
            wish = Wish(holder, number, most, suspects)
            chosen, _, suspect = self._choose(found, wish, now_ms)
            items = [found.hold(item, holder, most, until, now_ms) for item in chosen]
            return Taken(items, self._due(found, holder), suspect)

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        """Chooses items to hand out. Buries used-up items, after which others may show."""
        holder, count, most, suspects = wish
        while True:
            candidates = queue.candidates(holder, count, now_ms)
            picked = pick(candidates, count, most, suspects=suspects)
            if not picked.used_up:
                return picked
            for item in picked.used_up:
                queue.bury(item, item.error or USED_UP, now_ms)
            self._wakeups.ring([queue.info.name])

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        with self._lock:
            self._begin()
            self._require_session(holder.session)
            items = self._held_items(holder, held)
            until = self._clock.monotonic() + lock_for
            sooner = {
                queue.info.name
                for queue, item in items
                if item.lock_until is None or until < item.lock_until
            }
            for _, item in items:
                item.lock_until = until
            # Waiting threads know a later time, or none.
            self._wakeups.ring(sooner)

    def apply(self, change: QueueChange) -> list[int | None]:
        with self._lock:
            self.examine(change)
            return self.place(change)

    def examine(self, change: QueueChange) -> None:
        """Raise the error that keeps the change from being applied, if any. Under the lock."""
        self._begin()
        validate_change(change, LIMITS)
        self._refuse_given_up(change.holder.session, change.unit)
        if change.remove:
            self._require_session(change.holder.session)
            self._held_items(change.holder, change.remove)
        for item in change.put:
            if item.queue in self._queues:
                validate_for(self._queues[item.queue].info, item)

    def place(self, change: QueueChange) -> list[int | None]:
        """Apply a change that `examine` let pass. Under the lock."""
        now_ms = self._clock.wall_ms()
        for queue, item in self._held_items(change.holder, change.remove):
            queue.remove(item, now_ms)
            queue.done_count += 1
        numbers = [
            (self._queues.get(new.queue) or self._make(new.queue, fifo=False)).put(new, now_ms)
            for new in change.put
        ]
        self._remember(change)
        self._wakeups.ring(
            [*(held.queue for held in change.remove), *(n.queue for n in change.put)]
        )
        return numbers

    def _remember(self, change: QueueChange) -> None:
        units = self._outcomes[change.holder.session]
        for known in change.forget:
            units.pop(known, None)
        if change.unit:
            units[change.unit] = Outcome.DONE

    def _refuse_given_up(self, session: str, unit: str) -> None:
        if self._outcomes[session].get(unit) is Outcome.NEVER:
            raise given_up(unit)

    def outcome(self, session: str, unit: str) -> Outcome:
        with self._lock:
            self._begin()
            units = self._outcomes[session]
            if unit not in units:
                if not self._coord.has_session(session):
                    return Outcome.UNKNOWN
                units[unit] = Outcome.NEVER
            return units[unit]

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        with self._lock:
            self.outcome(holder.session, unit)
            return held_in(self, queue, holder)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        with self._lock:
            self._begin()
            now_ms = self._clock.wall_ms()
            for release in releases:
                queue = self._queues.get(release.held.queue)
                item = queue.items.get(release.held.id) if queue else None
                if queue is None or item is None or not self._is_held(holder, release.held, item):
                    continue
                item.error = tidy(release.error) or item.error
                if release.dead:
                    queue.bury(item, item.error, now_ms)
                else:
                    item.suspect = False
                    item.visible_ms = now_ms + delay_ms(release.delay)
                    queue.give_back(item, now_ms)
            self._wakeups.ring({release.held.queue for release in releases})

    def reap(self) -> float | None:
        with self._lock:
            self._begin()
            for queue in self._queues.values():
                self._reap(queue)
                queue.promote_due(self._clock.wall_ms())
            dues = [due for queue in self._queues.values() if (due := self._due(queue)) is not None]
            return min(dues, default=None)

    def stats(self, queue: str) -> QueueStats:
        with self._lock:
            self._begin()
            found = self._queues.get(queue)
            if found is None:
                return QueueStats()
            self._reap(found)
            found.promote_due(self._clock.wall_ms())
            items = found.items.values()
            counts = {state: sum(item.state is state for item in items) for state in ItemState}
            live = [item.put_ms for item in items if item.state is not ItemState.DEAD]
            return QueueStats(
                ready=counts[ItemState.READY],
                delayed=counts[ItemState.DELAYED],
                held=counts[ItemState.HELD],
                waiting=counts[ItemState.WAITING],
                dead=counts[ItemState.DEAD],
                oldest_ms=min(live, default=None),
                put=found.put_count,
                done=found.done_count,
            )

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        wanted, most = states_or(states, LIVE), page_size(limit)
        with self._lock:
            self._begin()
            found = self._queues.get(queue)
            if found is None:
                return []
            self._reap(found)
            found.promote_due(self._clock.wall_ms())
            items = (
                item
                for item in found.items.values()
                if item.state in wanted and item.id > (after or 0)
            )
            return [item.shown(self._clock.wall_ms()) for item in islice(items, most)]

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        with self._lock:
            return self._remove(queue, ids, (*NOT_HELD, ItemState.DEAD))

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        with self._lock:
            self._begin()
            found = self._queues.get(queue)
            now_ms = self._clock.wall_ms()
            if found is None:
                return 0
            again = [
                item
                for number in dict.fromkeys(ids)
                if (item := found.items.get(number)) is not None and item.state is ItemState.DEAD
            ]
            for item in again:
                found.revive(item, now_ms)
            self._wakeups.ring([queue])
            return len(again)

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        validate_restored(items, LIMITS)
        with self._lock:
            self._begin()
            if queue not in self._queues:
                raise QueueNotFound(queue)
            added = self._queues[queue].restore(items, self._clock.wall_ms())
            self._wakeups.ring([queue])
            return added

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        with self._lock:
            found = self._queues.get(queue)
            ids = list(found.items) if found is not None else []
            return self._remove(queue, ids, states_or(states, NOT_HELD))

    def watch(self, *queues: str) -> Watch:
        with self._lock:
            self._begin()
            wanted = frozenset(queues)
            return self._wakeups.watch(lambda name: name in wanted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wakeups.close()

    def _begin(self) -> None:
        if self._closed:
            raise Closed("the store was closed")
        self._coord.settle()

    def _make(self, name: str, fifo: bool) -> WorkQueue:
        info = Queue(name=name, fifo=fifo, created_ms=self._clock.wall_ms())
        queue = self._queues[name] = WorkQueue(info)
        return queue

    def _require_session(self, session: str) -> None:
        if not self._coord.has_session(session):
            raise SessionLost(f"session {session} is over, and what it held is free")

    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        in_session = self._coord.has_session(holder.session)
        return in_session and item.is_held_as(holder, held.delivery, self._clock.monotonic())

    def _held_items(
        self, holder: Holder, held: Iterable[Held]
    ) -> list[tuple[WorkQueue, QueueItem]]:
        found = []
        for each in held:
            queue = self._queues.get(each.queue)
            item = queue.items.get(each.id) if queue else None
            if queue is None or item is None or not self._is_held(holder, each, item):
                raise Fenced(f"item {each.id} of queue {each.queue!r} is not held any more")
            found.append((queue, item))
        return found

    def _reap(self, queue: WorkQueue) -> None:
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        for item in [queue.items[number] for number in sorted(queue.held)]:
            if item.holder is None:
                continue
            late = item.lock_until is not None and item.lock_until <= now
            if not late and self._coord.has_session(item.holder.session):
                continue
            item.error = DIED_HOLDING
            if item.most is not None and item.deliveries >= item.most:
                queue.bury(item, DIED_HOLDING, now_ms)
            else:
                item.suspect = True
                item.visible_ms = now_ms
                queue.give_back(item, now_ms)

    def _due(self, queue: WorkQueue, holder: Holder | None = None) -> float | None:
        """In how many seconds there may be something to take that can't be taken now."""
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        shows = [visible_ms for visible_ms, _ in queue.delayed[:1]]
        shows += queue.due_behind(holder) if holder is not None else []
        waits = [max(0.0, (visible_ms - now_ms) / 1000) for visible_ms in shows]
        waits += [
            max(0.0, until - now)
            for number in queue.held
            if (until := queue.items[number].lock_until) is not None
        ]
        return min(waits, default=None)

    def _remove(self, queue: str, ids: Iterable[int], states: Sequence[ItemState]) -> int:
        self._begin()
        found = self._queues.get(queue)
        if found is None:
            return 0
        found.promote_due(self._clock.wall_ms())
        # Those at the end of a key order first: else every removal would show the next one.
        gone = [
            item
            for number in sorted(set(ids), reverse=True)
            if (item := found.items.get(number)) is not None and item.state in states
        ]
        for item in gone:
            found.remove(item, self._clock.wall_ms())
        self._wakeups.ring([queue])
        return len(gone)

    def _session_ended(self, session: str) -> None:
        self._wakeups.ring(
            {
                name
                for name, queue in self._queues.items()
                for number in queue.held
                if (holder := queue.items[number].holder) and holder.session == session
            }
        )
