"""The judge of queues: hears of everything that reached the store, and of every hand-out.

It keeps its own account, by the items' values, and raises `Broken` at the first thing that the
promises exclude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pxrs.queues.item import Item, decode_body
from pxrs.stores.api import QueueStore, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.forwarding import Forwarding
from pxrs.types import Delivery, Held, Holder, ItemState, NewItem, QueueChange, Release, Taken
from simulator.queues.plan import Plan
from simulator.stage import Broken

_EPSILON = 1e-3


class Entry:
    """What is known of an item that was put."""

    def __init__(self, new: NewItem, number: int, now: float) -> None:
        self.queue = new.queue
        self.number = number
        self.key: str | None = new.key
        self.not_before = now + new.delay
        self.holder: Holder | None = None
        self.delivery = 0
        self.handed: set[int] = set()
        self.lock_until: float | None = None
        self.done = False


class Judge:
    """What has happened to every item, and whether it may have."""

    def __init__(self, stores: MemoryStores, plan: Plan, now: Callable[[], float]) -> None:
        self._stores = stores
        self._plan = plan
        self._now = now
        self.entries: dict[str, Entry] = {}
        self._by_number: dict[tuple[str, int], Entry] = {}
        self._applied: set[str] = set()
        self._settled: set[str] = set()

    # What reached the store

    def taken(self, holder: Holder, items: Sequence[Delivery], lock_for: float | None) -> None:
        """These are held by this transaction from now on."""
        now = self._now()
        for delivery in items:
            entry = self._entry(delivery.held)
            value = value_of(delivery.body)
            if entry.done:
                raise Broken(f"{value} was handed out though it was done")
            if self._is_held(entry):
                raise Broken(f"{value} is in two living hands: {entry.holder} and {holder}")
            if delivery.held.delivery != entry.delivery + 1:
                raise Broken(
                    f"{value} was delivered {entry.delivery} times; the next one counts as "
                    f"{delivery.held.delivery}"
                )
            if now < entry.not_before - _EPSILON:
                raise Broken(f"{value} was handed out {entry.not_before - now:.3f} s too early")
            self._check_order(value, entry, holder)
            entry.holder = holder
            entry.delivery = delivery.held.delivery
            entry.lock_until = None if lock_for is None else now + lock_for

    def _check_order(self, value: str, entry: Entry, holder: Holder) -> None:
        fifo = self._plan.queues[entry.queue].fifo
        if entry.key is None and not fifo:
            return
        for other, earlier in self.entries.items():
            if (
                earlier.queue == entry.queue
                and earlier.number < entry.number
                and (fifo or earlier.key == entry.key)
                and not earlier.done
                and not (earlier.holder == holder and self._is_held(earlier))
                and self._state(earlier) is not ItemState.DEAD
            ):
                raise Broken(f"{value} was handed out before {other}, which was put before it")

    def extended(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        for each in held:
            entry = self._entry(each)
            self._check_fence(holder, each, entry, "extended")
            entry.lock_until = self._now() + lock_for

    def applied(self, change: QueueChange, numbers: Sequence[int | None]) -> None:
        """A commit was done."""
        if change.unit in self._settled:
            raise Broken("a unit came after it had been given up")
        self._applied.add(change.holder.transaction)
        for held in change.remove:
            entry = self._entry(held)
            if entry.done:
                raise Broken(f"item {held.id} of {held.queue} was done twice")
            self._check_fence(change.holder, held, entry, "removed")
            entry.done, entry.holder = True, None
        for new, number in zip(change.put, numbers, strict=True):
            assert number is not None
            value = value_of(new.body)
            if value in self.entries:
                raise Broken(f"{value} was put twice")
            self.entries[value] = entry = Entry(new, number, self._now())
            self._by_number[(new.queue, number)] = entry

    def _check_fence(self, holder: Holder, held: Held, entry: Entry, what: str) -> None:
        if entry.holder != holder or not self._is_held(entry):
            raise Broken(f"item {held.id} was {what} by {holder}, but {entry.holder} holds it")
        if entry.delivery != held.delivery:
            raise Broken(
                f"item {held.id} was {what} as delivery {held.delivery}, not {entry.delivery}"
            )

    def released(self, holder: Holder, releases: Sequence[Release]) -> None:
        for release in releases:
            entry = self._by_number.get((release.held.queue, release.held.id))
            if (
                entry is not None
                and entry.holder == holder
                and entry.delivery == release.held.delivery
                and self._is_held(entry)
            ):
                entry.holder = None
                entry.not_before = self._now() + release.delay

    # What workers were told

    def handed(self, items: Sequence[Item]) -> None:
        """A worker has these in hand and goes to work."""
        for item in items:
            entry = self.entries[item.value]
            if item.deliveries in entry.handed:
                raise Broken(f"{item.value} was handed out twice as delivery {item.deliveries}")
            entry.handed.add(item.deliveries)
            times = len(entry.handed)
            most = self._plan.queues[item.queue].retry.attempts
            if most is not None and times > most:
                raise Broken(f"{item.value} was handed out {times} times, {most} at most")
            # A take without an answer may come back late: others have had the item since.
            if times > max(entry.delivery, item.deliveries):
                raise Broken(f"{item.value} was handed out {times} times, counted {entry.delivery}")

    def committed(self, transaction: str, *, empty: bool) -> None:
        if not empty and transaction not in self._applied:
            raise Broken("commit returned, and nothing was committed")

    def settled(self, unit: str) -> None:
        """Somebody was told what became of the unit: that is how it stays."""
        self._settled.add(unit)

    def not_committed(self, transaction: str) -> None:
        if transaction in self._applied:
            raise Broken("commit was said to have failed, and was done")

    # At any time

    def check(self) -> None:
        """Conservation: everything that was put is done, dead or there, and only one of these."""
        there = {
            value_of(item.body): item.state
            for queue in self._plan.queues
            for item in self._stores.queues.peek(queue, list(ItemState), limit=10_000)
        }
        for value, entry in self.entries.items():
            if entry.done == (value in there):
                raise Broken(f"{value} is {'done and there' if entry.done else 'lost'}")
        if len(there) > len(self.entries):
            raise Broken("there is something that nobody put")

    def left(self) -> str | None:
        """What is neither done nor dead."""
        for value, entry in self.entries.items():
            if not entry.done and (state := self._state(entry)) is not ItemState.DEAD:
                return f"{value} of {entry.queue} is {state}, in the hands of {entry.holder}"
        return None

    def _is_held(self, entry: Entry) -> bool:
        return (
            entry.holder is not None
            and self._stores.coord.has_session(entry.holder.session)
            and (entry.lock_until is None or self._now() < entry.lock_until)
        )

    def _state(self, entry: Entry) -> ItemState | None:
        found = self._stores.queues.peek(
            entry.queue, list(ItemState), after=entry.number - 1, limit=1
        )
        return found[0].state if found and found[0].id == entry.number else None

    def _entry(self, held: Held) -> Entry:
        return self._by_number[(held.queue, held.id)]


def value_of(body: bytes) -> str:
    return str(decode_body(body)[0])


class ObservedStores(Forwarding, seam=Stores):
    """The memory store, with queues of which the judge hears."""

    def __init__(self, stores: MemoryStores, judge: Judge) -> None:
        super().__init__(stores)
        self.queues = ObservedQueues(stores.queues, judge)

    def close(self) -> None:
        """The stores outlive their users."""


class ObservedQueues(Forwarding, seam=QueueStore):
    """A `QueueStore` that tells the judge what was done."""

    def __init__(self, inner: QueueStore, judge: Judge) -> None:
        super().__init__(inner)
        self._judge = judge

    def take(
        self, queue: str, holder: Holder, count: int, *, lock_for: float | None = None, **more: Any
    ) -> Taken:
        taken: Taken = self._inner.take(queue, holder, count, lock_for=lock_for, **more)
        self._judge.taken(holder, taken.items, lock_for)
        return taken

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        self._inner.extend(holder, held, lock_for)
        self._judge.extended(holder, held, lock_for)

    def apply(self, change: QueueChange) -> list[int | None]:
        numbers: list[int | None] = self._inner.apply(change)
        self._judge.applied(change, numbers)
        return numbers

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        self._inner.release(holder, releases)
        self._judge.released(holder, releases)

    def close(self) -> None:
        """The store outlives its users."""
