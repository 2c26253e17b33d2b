"""Queue stores whose fence, sessions, deadlines or counts are broken, one rule each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pxrs.core import queue as queue_rules
from pxrs.core.queue import Picked, QueueItem, WorkQueue
from pxrs.errors import Fenced
from pxrs.stores.memory.queues import MemoryQueues, Wish
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    Outcome,
    QueueChange,
    Release,
    Taken,
)
from support.broken_waits import in_silence


class FenceIgnoresTheDelivery(MemoryQueues):
    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        return super()._is_held(holder, held._replace(delivery=item.deliveries), item)


class FenceIgnoresTheTransaction(MemoryQueues):
    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        same_session = item.holder is not None and item.holder.session == holder.session
        return super()._is_held(item.holder if same_session and item.holder else holder, held, item)


class FenceIgnoresTheHolder(MemoryQueues):
    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        return item.holder is not None and super()._is_held(item.holder, held, item)


class FenceIgnoresTheSession(MemoryQueues):
    def _require_session(self, session: str) -> None:
        pass

    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        return item.is_held_as(holder, held.delivery, self._clock.monotonic())


class FenceIgnoresTheDeadline(MemoryQueues):
    def _is_held(self, holder: Holder, held: Held, item: QueueItem) -> bool:
        in_session = self._coord.has_session(holder.session)
        return in_session and item.is_held_as(holder, held.delivery, float("-inf"))


class AnybodyReleases(MemoryQueues):
    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        for release in releases:
            queue = self._queues.get(release.held.queue)
            item = queue.items.get(release.held.id) if queue else None
            owner = item.holder if item is not None and item.holder is not None else holder
            super().release(owner, [release])


class AnybodyExtends(MemoryQueues):
    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        try:
            super().extend(holder, held, lock_for)
        except Fenced:
            return


class ExtendsWhatItCan(MemoryQueues):
    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        for each in held:
            super().extend(holder, [each], lock_for)


class ExtendsFromTheTake(MemoryQueues):
    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        self._held_items(holder, held)


class ExtendsInSilence(MemoryQueues):
    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        in_silence(self, lambda: MemoryQueues.extend(self, holder, held, lock_for))


class AppliesOneByOne(MemoryQueues):
    def apply(self, change: QueueChange) -> list[int | None]:
        numbers = []
        for new in change.put:
            numbers += super().apply(QueueChange(change.holder, (), (new,)))
        for held in change.remove:
            super().apply(QueueChange(change.holder, (held,), ()))
        return numbers


class RemovesWhatItCan(MemoryQueues):
    def apply(self, change: QueueChange) -> list[int | None]:
        try:
            return super().apply(change)
        except Fenced:
            for held in change.remove:
                try:
                    super().apply(QueueChange(change.holder, (held,)))
                except Fenced:
                    continue
            raise


class PutsDespiteTheFence(MemoryQueues):
    def apply(self, change: QueueChange) -> list[int | None]:
        try:
            return super().apply(change)
        except Fenced:
            super().apply(QueueChange(change.holder, (), change.put))
            raise


class ExaminesBeforeTheLock(MemoryQueues):
    """Between the look and the deed another may take the item that its holder lets go of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._taken = threading.Event()

    def take(self, queue: str, holder: Holder, *args: Any, **options: Any) -> Taken:
        taken = super().take(queue, holder, *args, **options)
        if taken.items:
            self._taken.set()
        return taken

    def apply(self, change: QueueChange) -> list[int | None]:
        self._taken.clear()
        self.examine(change)
        if change.remove:
            self._taken.wait(1.0)
        with self._lock:
            for held in change.remove:
                queue = self._queues[held.queue]
                if held.id in queue.items:
                    queue.remove(queue.items[held.id], self._clock.wall_ms())
            return self.place(QueueChange(change.holder, (), change.put))


class DeadSessionsKeepLocks(MemoryQueues):
    def _reap(self, queue: WorkQueue) -> None:
        pass


class HoldersAreKnownByTheQueuesName(MemoryQueues):
    """Notes a holder in the queue that was there at its first take from one of that name."""

    def take(self, queue: str, holder: Holder, *args: Any, **options: Any) -> Taken:
        taken = super().take(queue, holder, *args, **options)
        if taken.items:
            self._noted.setdefault((queue, holder.session), self._queues[queue])
        return taken

    @cached_property
    def _noted(self) -> dict[tuple[str, str], WorkQueue]:
        return {}

    def _reap(self, queue: WorkQueue) -> None:
        name, held = queue.info.name, set(queue.held)
        for number in held:
            holder = queue.items[number].holder
            noted = self._noted.get((name, holder.session)) if holder is not None else None
            if noted is not None and noted is not queue:
                queue.held.discard(number)
        super()._reap(queue)
        queue.held |= {number for number in held if number in queue.items}


class HandsOutWhatItRemembers(MemoryQueues):
    """Sets the next item aside for who commits, and looks at its queue no more."""

    _aside: Taken = Taken([], None)

    def apply(self, change: QueueChange) -> list[int | None]:
        numbers = super().apply(change)
        if change.remove:
            self._aside = super().take(change.remove[0].queue, change.holder, 1)
        return numbers

    def take(self, queue: str, holder: Holder, *args: Any, **options: Any) -> Taken:
        aside, self._aside = self._aside, Taken([], None)
        if aside.items:
            return aside
        return super().take(queue, holder, *args, **options)


class LateHoldersKeepLocks(MemoryQueues):
    def _reap(self, queue: WorkQueue) -> None:
        living = self._coord.has_session
        untils = {number: queue.items[number].lock_until for number in queue.held}
        for number in queue.held:
            item = queue.items[number]
            if item.holder is not None and living(item.holder.session):
                item.lock_until = None
        super()._reap(queue)
        for number in queue.held:
            queue.items[number].lock_until = untils[number]


class FreesOneTransactionOnly(MemoryQueues):
    """Takes the session's first transaction for the session."""

    def _reap(self, queue: WorkQueue) -> None:
        held = [queue.items[number] for number in sorted(queue.held)]
        firsts: dict[str, Holder] = self.__dict__.setdefault("firsts", {})
        for item in held:
            if item.holder is not None:
                firsts.setdefault(item.holder.session, item.holder)
        others = {item.id for item in held if item.holder not in firsts.values()}
        queue.held -= others
        super()._reap(queue)
        queue.held |= others


class DiesInSilence(MemoryQueues):
    def _session_ended(self, session: str) -> None:
        pass


class ForgetsUnitsWithTheSession(MemoryQueues):
    def _session_ended(self, session: str) -> None:
        super()._session_ended(session)
        self._outcomes.pop(session, None)


class RemembersTheLatestUnits(MemoryQueues):
    """A ring, as stores are tempted to have it: what is in doubt may be older."""

    def _remember(self, change: QueueChange) -> None:
        super()._remember(change)
        units = self._outcomes[change.holder.session]
        while len(units) > 64:
            del units[next(iter(units))]


class RemembersRefusedUnits(MemoryQueues):
    def apply(self, change: QueueChange) -> list[int | None]:
        self._remember(change)
        return super().apply(change)


class SaysNeverForNow(MemoryQueues):
    """Reads whether the unit was done, and does not keep it from being done later."""

    def outcome(self, session: str, unit: str) -> Outcome:
        before = self._outcomes[session].get(unit)
        found = super().outcome(session, unit)
        if before is None:
            self._outcomes[session].pop(unit, None)
        return found


class SaysNeverOfWhatIsForgotten(MemoryQueues):
    def outcome(self, session: str, unit: str) -> Outcome:
        found = super().outcome(session, unit)
        return Outcome.NEVER if found is Outcome.UNKNOWN else found


class LetsLateTakesHold(MemoryQueues):
    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        return queue_rules.held_in(self, queue, holder)


class GivesUpTheWholeTransaction(MemoryQueues):
    """Refuses whatever a holder does after one of its takes was given up."""

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        found = super().held(queue, holder, unit)
        self.__dict__.setdefault("given_up", set()).add(holder)
        return found

    def examine(self, change: QueueChange) -> None:
        if change.holder in self.__dict__.get("given_up", ()):
            raise Fenced("given up")
        super().examine(change)


class UnitsOfAnySession(MemoryQueues):
    def outcome(self, session: str, unit: str) -> Outcome:
        for units in self._outcomes.values():
            if units.get(unit) is Outcome.DONE:
                return Outcome.DONE
        return super().outcome(session, unit)


class ForgetsTheCountsToo(MemoryQueues):
    def _remember(self, change: QueueChange) -> None:
        super()._remember(change)
        for queue in self._queues.values():
            queue.put_count -= len(change.forget)


class PutsNeedASession(MemoryQueues):
    def examine(self, change: QueueChange) -> None:
        self._require_session(change.holder.session)
        super().examine(change)


class CountsAtTheEnd(MemoryQueues):
    """Counts what was given back or done, not what was handed out: a crash is not counted."""

    def _reap(self, queue: WorkQueue) -> None:
        held = [queue.items[number] for number in queue.held]
        super()._reap(queue)
        for item in held:
            if item.state is not ItemState.HELD:
                item.deliveries -= 1


class IgnoresMost(MemoryQueues):
    def take(self, queue: str, holder: Holder, *args: Any, **options: Any) -> Taken:
        return super().take(queue, holder, *args, **{**options, "most": None})


class KeepsTheFirstMost(MemoryQueues):
    """Takes the bound of who took first for everybody's."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        bounds = [item.most for item in queue.items.values() if item.most is not None]
        wish = wish._replace(most=bounds[0] if bounds else wish.most)
        return super()._choose(queue, wish, now_ms)


class HandsOutOneTooMany(MemoryQueues):
    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        wish = wish._replace(most=None if wish.most is None else wish.most + 1)
        return super()._choose(queue, wish, now_ms)


class SuspectsGoWithOthers(MemoryQueues):
    def _reap(self, queue: WorkQueue) -> None:
        super()._reap(queue)
        for item in queue.items.values():
            item.suspect = False


class SuspectsGoToAnybody(MemoryQueues):
    """Hands a suspect out to who has others in hand."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        return super()._choose(queue, wish._replace(suspects=True), now_ms)


class SuspectsAreKeptSecret(MemoryQueues):
    """Hands none out to who does not want it, and does not say why."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        return super()._choose(queue, wish, now_ms)._replace(suspect=False)


class SuspectsAreCountedUnseen(MemoryQueues):
    """Counts the delivery of a suspect that it does not hand out."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        picked = super()._choose(queue, wish, now_ms)
        if picked.suspect:
            for item in queue.candidates(wish.holder, 1, now_ms):
                item.deliveries += 1
        return picked


class SuspectsLetOthersPass(MemoryQueues):
    """Passes over a suspect that nobody wants, and hands out what is behind it in its key order."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        picked = super()._choose(queue, wish, now_ms)
        if not picked.suspect:
            return picked
        others = [
            item for item in queue.candidates(wish.holder, wish.number, now_ms) if not item.suspect
        ]
        return Picked(others, [], suspect=not others)


class SuspectsForEver(MemoryQueues):
    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        found = [self._queues[r.held.queue].items.get(r.held.id) for r in releases]
        before = [item is not None and item.suspect for item in found]
        super().release(holder, releases)
        for item, suspect in zip(found, before, strict=True):
            if item is not None:
                item.suspect = suspect


class DeadStayInTheWay(MemoryQueues):
    """Finds the used-up ones, and forgets to bury them."""

    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        candidates = queue.candidates(wish.holder, wish.number, now_ms)
        return queue_rules.pick(candidates, wish.number, wish.most)


class BuriesInSilence(MemoryQueues):
    def _choose(self, queue: WorkQueue, wish: Wish, now_ms: int) -> Picked[QueueItem]:
        return in_silence(self, lambda: MemoryQueues._choose(self, queue, wish, now_ms))


class RevivesTheDying(MemoryQueues):
    """Forgets, when a holder dies, what bound it took with."""

    def _reap(self, queue: WorkQueue) -> None:
        for number in queue.held:
            queue.items[number].most = None
        super()._reap(queue)


class DiesWithoutAWord(MemoryQueues):
    def _reap(self, queue: WorkQueue) -> None:
        super()._reap(queue)
        for item in queue.items.values():
            if item.state is ItemState.DEAD:
                item.error = ""
