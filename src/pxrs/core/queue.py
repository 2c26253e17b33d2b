"""A work queue: its items, how they move, and the rules that every store keeps for them.

States of an item (`MOVES` is the table, the diagram in `docs/queues.md` is drawn from it):

    waiting   behind another item of its key, or of its fifo queue
    delayed   next of its key, but its time has not come
    ready     can be taken
    held      taken by one holder
    dead      out of deliveries, or given up by its handler

The memory store runs `WorkQueue`; other engines keep the same rules in their own language and are
tested against it. Nothing here reads a clock or a store.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from pxrs.errors import Fenced, IllegalMove, InvalidRequest, MessageTooLarge, QueueExists, quoted
from pxrs.types import (
    RESERVED,
    Delivery,
    Held,
    Holder,
    ItemState,
    NewItem,
    Queue,
    QueueChange,
    QueueLimits,
    Release,
    StoredItem,
)

# The key order of a fifo queue's items: there is only one.
FIFO_KEY_ORDER = ""
LIVE = (ItemState.READY, ItemState.DELAYED, ItemState.HELD, ItemState.WAITING)
NOT_HELD = (ItemState.READY, ItemState.DELAYED, ItemState.WAITING)
# For how long at least after a session's end a store knows the outcome of its units.
REMEMBERED_FOR = 600.0
DIED_HOLDING = "its holder died, or held it for too long"
USED_UP = "all its deliveries were used up"
_MOST_PRIORITY = 2**31
_LONGEST_DELAY = 10 * 365 * 24 * 3600.0
_LONGEST_NAME = 249
_LONGEST_KEY = 1024
_LONGEST_ERROR = 10_000
_PAGE = 500


ItemEvent = Literal["delayed", "shown", "hidden", "taken", "given back", "buried"]

# An item is hidden when one before it in its key's order comes back. A waiting item can be taken by
# the holder of the one that it waits for.
MOVES: dict[tuple[ItemState, ItemEvent], ItemState] = {
    (ItemState.WAITING, "shown"): ItemState.READY,
    (ItemState.WAITING, "delayed"): ItemState.DELAYED,
    (ItemState.WAITING, "taken"): ItemState.HELD,
    (ItemState.WAITING, "buried"): ItemState.DEAD,
    (ItemState.DELAYED, "shown"): ItemState.READY,
    (ItemState.DELAYED, "hidden"): ItemState.WAITING,
    (ItemState.READY, "taken"): ItemState.HELD,
    (ItemState.READY, "hidden"): ItemState.WAITING,
    (ItemState.READY, "buried"): ItemState.DEAD,
    (ItemState.HELD, "given back"): ItemState.WAITING,
    (ItemState.HELD, "buried"): ItemState.DEAD,
}


def move(state: ItemState, event: ItemEvent) -> ItemState:
    """The state after the event."""
    try:
        return MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"an item that is {state.value} can't be {event}") from None


class Counted(Protocol):
    """The properties of an item that `pick` needs. Suspect: its last holder died holding it."""

    @property
    def deliveries(self) -> int: ...

    @property
    def suspect(self) -> bool: ...


C = TypeVar("C", bound=Counted)


class Picked(NamedTuple, Generic[C]):
    """Items to hand out, and those that have had all their deliveries.

    `suspect`: there is none to hand out because a suspect is next.
    """

    chosen: list[C]
    used_up: list[C]
    suspect: bool = False


def pick(
    candidates: Iterable[C], count: int, most: int | None, *, suspects: bool = True
) -> Picked[C]:
    """Chooses from items in order which to hand out, and which are dead.

    A suspect goes out alone: if it kills again, the others lose no delivery. It goes out only if
    `suspects` is true: a process that holds other items does not want it.
    """
    chosen: list[C] = []
    used_up: list[C] = []
    for item in candidates:
        if most is not None and item.deliveries >= most:
            used_up.append(item)
        elif item.suspect:
            if not chosen and not suspects:
                return Picked(chosen, used_up, suspect=True)
            if not chosen:
                chosen.append(item)
            break
        else:
            chosen.append(item)
            if len(chosen) == count:
                break
    return Picked(chosen, used_up)


def given_up(unit: str) -> Fenced:
    """Builds the error for a unit that arrives after its outcome was reported as never."""
    return Fenced(f"unit {unit!r} was given up before it arrived; begin another")


class _Peeks(Protocol):
    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]: ...


def held_in(store: _Peeks, queue: str, holder: Holder) -> list[Delivery]:
    """Lists the items of the queue that the holder holds."""
    found: list[Delivery] = []
    after = 0
    while page := store.peek(queue, [ItemState.HELD], after=after, limit=_PAGE):
        after = page[-1].id
        found += [delivery_of(queue, item) for item in page if item.holder == holder]
    return found


def delivery_of(queue: str, item: QueueItem | StoredItem) -> Delivery:
    """Returns a held item as its holder gets it."""
    return Delivery(
        held=Held(queue, item.id, item.deliveries),
        body=item.body,
        key=item.key,
        priority=item.priority,
        put_ms=item.put_ms,
        error=item.error,
    )


def key_order_of(queue: Queue, key: str | None) -> str | None:
    """Returns the key order of an item: its key, or the one key order of a fifo queue."""
    return FIFO_KEY_ORDER if queue.fifo else key


def indexed(key: str, most_bytes: int) -> str:
    """Returns the index entry of a key: the key, or a digest if it is too long for the index."""
    data = key.encode()
    return f"k{key}" if len(data) < most_bytes else f"h{sha256(data).hexdigest()}"


def require_same(queue: Queue, fifo: bool) -> Queue:
    """Returns the existing queue; raises `QueueExists` if its order differs."""
    if queue.fifo != fifo:
        kind = "fifo" if queue.fifo else "not fifo"
        raise QueueExists(f"queue {queue.name!r} exists and is {kind}; delete it first")
    return queue


def validate_name(name: str) -> str:
    """Rejects names that a queue can't have."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _LONGEST_NAME
        or not name.isprintable()
        or "/" in name
        or name.startswith(RESERVED)
    ):
        raise InvalidRequest(
            f"queue name must be 1 to {_LONGEST_NAME} printable characters without a slash and "
            f"must not begin with {RESERVED!r}, got {quoted(name)}"
        )
    return name


def validate_take(count: int, most: int | None, lock_for: float | None) -> None:
    """Rejects counts and times that no store accepts."""
    if count < 1:
        raise InvalidRequest(f"the number of items to take must be at least 1, got {count}")
    if most is not None and most < 1:
        raise InvalidRequest(f"the most deliveries of an item must be at least 1, got {most}")
    if lock_for is not None:
        validate_lock(lock_for)


def validate_lock(lock_for: float) -> None:
    """Rejects times that an item can't be held for."""
    if not 0 < lock_for <= _LONGEST_DELAY:
        raise InvalidRequest(f"lock_for must be a positive number of seconds, got {lock_for}")


def validate_releases(releases: Iterable[Release]) -> None:
    """Rejects delays that are negative or above ten years."""
    for release in releases:
        if not 0 <= release.delay <= _LONGEST_DELAY:
            raise InvalidRequest(
                f"a release's delay must be 0 s to ten years, got {release.delay} s"
            )


def page_size(limit: int) -> int:
    """Returns the limit, cut to the largest number that engines take."""
    if limit < 1:
        raise InvalidRequest(f"limit must be at least 1, got {limit}")
    return min(limit, sys.maxsize)


def tidy(error: str) -> str:
    """Makes an error's text storable on every engine. A release must not fail because of it."""
    text = error[:_LONGEST_ERROR].encode("utf-8", "replace").decode()
    return text.replace("\0", "\ufffd")


def validate_change(change: QueueChange, limits: QueueLimits) -> None:
    """Rejects changes that some engine could not apply, on every engine alike."""
    total = len(change.remove) + len(change.put)
    if total > limits.items:
        raise InvalidRequest(
            f"the transaction changes {total} items; the limit of this store is {limits.items}"
        )
    if len(set(change.remove)) < len(change.remove):
        raise InvalidRequest("the transaction removes an item twice; an item can be removed once")
    for name in {item.queue for item in change.put}:
        validate_name(name)
    for item in change.put:
        _validate_content(item, limits)


def validate_restored(items: Sequence[StoredItem], limits: QueueLimits) -> None:
    """Rejects items that this store could not hold."""
    if len(items) > limits.items:
        raise InvalidRequest(
            f"{len(items)} items are restored at once; the limit of this store is {limits.items}"
        )
    for item in items:
        if item.id < 1:
            raise InvalidRequest(f"the id of an item must be at least 1, got {item.id}")
        if len(item.body) > limits.body_bytes:
            raise MessageTooLarge(
                f"item {item.id} is {len(item.body)} bytes long; "
                f"the limit of this store is {limits.body_bytes}"
            )


def is_suspect(item: StoredItem) -> bool:
    """Whether an item that comes from elsewhere may have killed its last holder."""
    return item.state is ItemState.HELD or item.error == DIED_HOLDING


def require_first(change: QueueChange | None) -> None:
    """Rejects a second change in one transaction: it has one holder."""
    if change is not None:
        raise InvalidRequest("a transaction changes queues once, when it commits")


def validate_item(item: NewItem, limits: QueueLimits) -> None:
    """Rejects items that no queue could hold."""
    validate_name(item.queue)
    _validate_content(item, limits)


def _validate_content(item: NewItem, limits: QueueLimits) -> None:
    if len(item.body) > limits.body_bytes:
        raise MessageTooLarge(
            f"the item for {item.queue!r} is {len(item.body)} bytes long; "
            f"the limit of this store is {limits.body_bytes}"
        )
    if type(item.priority) is not int or not abs(item.priority) < _MOST_PRIORITY:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {quoted(item.priority)}")
    # Most items have none of these, and every item comes through here twice.
    if item.delay != 0.0:
        _validate_seconds("delay", item.delay)
    if item.key is not None:
        _validate_text("key", item.key)
    if item.dedupe is not None:
        _validate_text("dedupe key", item.dedupe)
        _validate_seconds("dedupe_window", item.dedupe_window)
        if item.dedupe_window <= 0:
            raise InvalidRequest(
                f"dedupe_window must be more than 0 s, got {quoted(item.dedupe_window)}"
            )


def _validate_seconds(name: str, seconds: float) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_DELAY:
        raise InvalidRequest(f"{name} must be seconds from 0 to ten years, got {quoted(seconds)}")


def _validate_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be text, got {type(text).__name__}")
    if not 0 < len(text) <= _LONGEST_KEY:
        raise InvalidRequest(
            f"{name} is {len(text)} characters long; the limit is 1 to {_LONGEST_KEY}"
        )
    if not _is_text(text):
        raise InvalidRequest(
            f"{name} must be Unicode text without zero characters, got {quoted(text)}"
        )


def _is_text(text: str) -> bool:
    """Whether it is Unicode without NUL: PostgreSQL stores no other text."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def validate_for(queue: Queue, item: NewItem) -> None:
    """Rejects items with a priority or delay for a fifo queue."""
    if queue.fifo and (item.priority != 0 or item.delay > 0):
        raise InvalidRequest(
            f"queue {queue.name!r} is fifo: its items can't have a priority or a delay"
        )


def states_or(states: Sequence[ItemState], default: Sequence[ItemState]) -> tuple[ItemState, ...]:
    """Returns the given states, or the default if there are none."""
    return tuple(states) or tuple(default)


def delay_ms(seconds: float) -> int:
    """Converts seconds to whole milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


class QueueItem:
    """An item of the memory store with all its state."""

    def __init__(self, number: int, new: NewItem, key_order: str | None, now_ms: int) -> None:
        self.id = number
        self.body = bytes(new.body)
        self.key = new.key
        self.priority = new.priority
        self.key_order = key_order
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
        """The order of hand-out: the smallest first."""
        return -self.priority, self.id

    @classmethod
    def restored(cls, stored: StoredItem, key_order: str | None) -> QueueItem:
        """Builds an item as it was in another store."""
        new = NewItem(queue="", body=stored.body, key=stored.key, priority=stored.priority)
        item = cls(stored.id, new, key_order, stored.put_ms)
        item.visible_ms = stored.visible_ms or stored.put_ms
        item.deliveries = stored.deliveries
        item.taken_ms, item.dead_ms = stored.taken_ms, stored.dead_ms
        item.error, item.suspect = stored.error, is_suspect(stored)
        return item

    def shown(self, now_ms: int) -> StoredItem:
        """Returns the item as `peek` and copies show it."""
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
        """The fence: whether the holder still has this very delivery."""
        in_time = self.lock_until is None or now < self.lock_until
        return self.holder == holder and self.deliveries == delivery and in_time


class WorkQueue:
    """One queue. Each key order has at most one item, or one holder's items, at its front."""

    def __init__(self, info: Queue) -> None:
        self.info = info
        self.items: dict[int, QueueItem] = {}
        self.ready: list[tuple[int, int]] = []
        self.delayed: list[tuple[int, int]] = []
        self.held: set[int] = set()
        self.key_orders: dict[str, list[int]] = {}
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
        self.add(QueueItem(self.next_id, new, key_order_of(self.info, new.key), now_ms), now_ms)
        self.put_count += 1
        return self.next_id - 1

    def add(self, item: QueueItem, now_ms: int) -> None:
        self.next_id += 1
        self.items[item.id] = item
        if item.key_order is None:
            self._show(item, now_ms)
        else:
            self.key_orders.setdefault(item.key_order, []).append(item.id)
            self.settle_key_order(item.key_order, now_ms)

    def revive(self, dead: QueueItem, now_ms: int) -> None:
        """Put a dead item at the end, as if it had never been handed out."""
        del self.items[dead.id]
        new = NewItem(queue="", body=dead.body, key=dead.key, priority=dead.priority)
        item = QueueItem(self.next_id, new, dead.key_order, now_ms)
        item.error = dead.error
        self.add(item, now_ms)

    def restore(self, items: Sequence[StoredItem], now_ms: int) -> int:
        """Add items under their own numbers, wherever these stand among the others."""
        fresh = [stored for stored in items if stored.id not in self.items]
        key_orders: set[str] = set()
        for stored in fresh:
            item = QueueItem.restored(stored, key_order_of(self.info, stored.key))
            self.items[item.id] = item
            if stored.state is ItemState.DEAD:
                item.state = move(item.state, "buried")
            elif item.key_order is None:
                self._show(item, now_ms)
            else:
                insort(self.key_orders.setdefault(item.key_order, []), item.id)
                key_orders.add(item.key_order)
        for key_order in key_orders:
            self.settle_key_order(key_order, now_ms)
        self.items = dict(sorted(self.items.items()))
        self.next_id = max([self.next_id, *(stored.id + 1 for stored in fresh)])
        self.put_count += len(fresh)
        return len(fresh)

    def promote_due(self, now_ms: int) -> None:
        """Show delayed items whose time has come."""
        while self.delayed and self.delayed[0][0] <= now_ms:
            item = self.items[self.delayed[0][1]]
            self._unlist(item)
            self._show(item, now_ms)

    def candidates(self, holder: Holder, count: int, now_ms: int) -> list[QueueItem]:
        """Lists items that the holder may take, in order: fronts, then those behind held ones."""
        found = [self.items[number] for _, number in self.ready[:count]]
        key_orders = [front.key_order for front in found if front.key_order is not None]
        for key_order in key_orders + self.key_orders_held(holder):
            for item in self._waiting(key_order)[: count - len(found)]:
                if item.visible_ms > now_ms:
                    break
                found.append(item)
        return found

    def key_orders_held(self, holder: Holder) -> list[str]:
        """Lists the key orders in which the holder holds an item, and may take the next."""
        mine = [self.items[number] for number in self.held if self.items[number].holder == holder]
        return sorted({item.key_order for item in mine if item.key_order is not None})

    def due_behind(self, holder: Holder) -> list[int]:
        """Returns when the next item of each key order of the holder is due."""
        nexts = [self._waiting(key_order)[:1] for key_order in self.key_orders_held(holder)]
        return [item.visible_ms for items in nexts for item in items]

    def _waiting(self, key_order: str) -> list[QueueItem]:
        run = [self.items[number] for number in self.key_orders[key_order]]
        return [item for item in run if item.state is ItemState.WAITING]

    def hold(
        self,
        item: QueueItem,
        holder: Holder,
        most: int | None,
        lock_until: float | None,
        now_ms: int,
    ) -> Delivery:
        self._unlist(item)
        item.state = move(item.state, "taken")
        self.held.add(item.id)
        item.deliveries += 1
        item.holder, item.most, item.lock_until = holder, most, lock_until
        item.taken_ms = now_ms
        return delivery_of(self.info.name, item)

    def give_back(self, item: QueueItem, now_ms: int) -> None:
        """Let it be handed out again when its time comes."""
        self._unlist(item)
        item.state = move(item.state, "given back")
        if item.key_order is None:
            self._show(item, now_ms)
        else:
            self.settle_key_order(item.key_order, now_ms)

    def bury(self, item: QueueItem, error: str, now_ms: int) -> None:
        self._leave(item, now_ms)
        item.state = move(item.state, "buried")
        item.dead_ms = now_ms
        item.error = error

    def remove(self, item: QueueItem, now_ms: int) -> None:
        self._leave(item, now_ms)
        del self.items[item.id]

    def settle_key_order(self, key_order: str, now_ms: int) -> None:
        """Show the key order's first item, unless it is held."""
        numbers = self.key_orders.get(key_order)
        if not numbers:
            self.key_orders.pop(key_order, None)
            return
        run = [self.items[number] for number in numbers]
        for item in run:
            if item.state in (ItemState.READY, ItemState.DELAYED):
                self._unlist(item)
                item.state = move(item.state, "hidden")
        if not any(item.state is ItemState.HELD for item in run):
            self._show(run[0], now_ms)

    def _leave(self, item: QueueItem, now_ms: int) -> None:
        dead = item.state is ItemState.DEAD
        self._unlist(item)
        if item.key_order is not None and not dead:
            self.key_orders[item.key_order].remove(item.id)
            self.settle_key_order(item.key_order, now_ms)

    def _show(self, item: QueueItem, now_ms: int) -> None:
        if item.visible_ms > now_ms:
            item.state = move(item.state, "delayed")
            insort(self.delayed, (item.visible_ms, item.id))
        else:
            item.state = move(item.state, "shown")
            insort(self.ready, item.rank)

    def _unlist(self, item: QueueItem) -> None:
        """Take the item out of the list it is in, so that it can't be taken."""
        if item.state is ItemState.READY:
            del self.ready[bisect_left(self.ready, item.rank)]
        elif item.state is ItemState.DELAYED:
            del self.delayed[bisect_left(self.delayed, (item.visible_ms, item.id))]
        elif item.state is ItemState.HELD:
            self.held.remove(item.id)
            item.holder = item.lock_until = None
