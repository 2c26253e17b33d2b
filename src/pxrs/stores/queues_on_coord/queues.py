"""A `QueueStore` that needs nothing but a `CoordStore`: work queues on etcd and ZooKeeper.

An item is held by a lock that is bound to the holder's session, so the engine itself frees what
a dead process held. Removing, giving back and putting items is one commit, conditional on
everything that it builds on. `layout` shows the records. Good for some thousands of items in a
queue.

Delays and dedupe windows are counted by the wall clocks of the processes that use the queue. Holds
are not: those end with sessions, which the engine ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import islice

from msgspec.structs import replace

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.core.queue import (
    LIVE,
    NOT_HELD,
    delay_ms,
    held_in,
    is_suspect,
    page_size,
    require_same,
    states_or,
    validate_change,
    validate_for,
    validate_lock,
    validate_name,
    validate_releases,
    validate_restored,
    validate_take,
)
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    PxrsError,
    QueueNotFound,
    SessionLost,
    StoreError,
    TransactionConflict,
)
from pxrs.forks import Origin
from pxrs.stores.api import CoordStore, Watch, lots
from pxrs.stores.queues_on_coord.drafts import Attempts, Context, Draft, cost
from pxrs.stores.queues_on_coord.holds import Deadlines, Holds, Reaper
from pxrs.stores.queues_on_coord.layout import (
    NUMBERS_END,
    Entry,
    Head,
    Item,
    Layout,
    Seen,
    Standing,
    Tail,
    decode,
    decode_item,
    encode,
    encode_item,
    entry_of,
    order_name,
)
from pxrs.stores.queues_on_coord.listing import Stored, live_items, shown_items, standing_in
from pxrs.stores.queues_on_coord.receipts import Receipts
from pxrs.stores.queues_on_coord.taking import Taker, TakeRequest
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    NewItem,
    Outcome,
    Queue,
    QueueChange,
    QueueStats,
    Release,
    StoredItem,
    Taken,
    Versioned,
)

_PAGE = 100
# How many records a restored item takes in a commit, which must not exist yet, ...
_PER_RESTORED = 3
# ... and its key: the order itself, the one that showed so far, and the one that shows now.
_PER_RESTORED_KEY = 8
# The most bytes in one lot of restored items, and the bytes of an item besides body and error.
_LOT_BYTES = 500_000
_ITEM_BYTES = 1_000


class RecipeQueues:
    """See `pxrs.stores.api.QueueStore`."""

    def __init__(self, coord: CoordStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._coord = coord
        self._clock = clock
        self._context = Context(coord, clock)
        self.limits = self._context.limits
        self._directory = self._context.directory
        self._holds = Holds(coord)
        self._deadlines = Deadlines(coord, self._holds)
        self._receipts = Receipts(self._context)
        self._reaper = Reaper(self._context)
        self._taker = Taker(self._context, self._holds, self._deadlines, self._reaper)
        self._closed = False
        self._origin = Origin()

    def close(self) -> None:
        """Close this handle. Not the coordination store; and nothing in a forked child."""
        if not self._closed and not self._origin.is_parent:
            self._closed = True
            self._deadlines.close()

    def _begin(self) -> None:
        if self._closed:
            raise Closed("the store was closed")

    # Queues

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        self._begin()
        validate_name(name)

        def build(draft: Draft) -> Queue:
            found = self._directory.find(name)
            if found is not None:
                return require_same(found, fifo)
            draft.make_queue(name, fifo)
            return Queue(name=name, fifo=fifo, created_ms=draft.now_ms)

        return self._context.commit(f"queue {name!r} could not be made", build)

    def find(self, name: str) -> Queue | None:
        self._begin()
        return self._directory.find(name)

    def all(self) -> list[Queue]:
        self._begin()
        return self._directory.all()

    def delete(self, name: str) -> None:
        """Mark it as deleted: then it is gone. Any process can finish removing its records."""
        self._begin()
        at = Layout(name)

        def build(draft: Draft) -> None:
            found = self._coord.get(at.head)
            self._directory.forget(name)
            if found is not None and not (head := decode(found.value, Head)).deleting:
                draft.put(at.head, encode(replace(head, deleting=True)), version=found.version)
                draft.delete(at.tail)

        self._context.commit(f"queue {name!r} could not be deleted", build)
        self._directory.finish_deletion(at)

    def reap(self) -> float | None:
        self._begin()
        waits: list[float] = []
        for queue in self._directory.all():
            at = Layout(queue.name)
            waits += [*self._reaper.reap(at).waits, *self._next_due(at)]
            self._context.sweep(at.all_seen, self._is_over)
        self._receipts.sweep()
        for name in self._directory.deleting():
            with suppress(StoreError, TransactionConflict):
                self._directory.finish_deletion(Layout(name))
        return min(waits, default=None)

    def _is_over(self, seen: Versioned) -> bool:
        return not _is_seen(seen, self._clock.wall_ms())

    def _next_due(self, at: Layout) -> list[float]:
        """Seconds until the next delayed item that is not due yet."""
        now_ms = self._clock.wall_ms()
        last_due = f"{at.delayed}{now_ms:015d}.~"
        first = self._coord.list(at.delayed, after=last_due, limit=1)
        return [(entry_of(record).standing.visible_ms - now_ms) / 1000 for record in first]

    def watch(self, *queues: str) -> Watch:
        """See `QueueStore`. Takes of others wake it, too: it is a hint, an empty take is cheap."""
        self._begin()
        folders = []
        for at in map(Layout, queues):
            folders += [at.ready, at.delayed, at.locks, at.key_orders]
        return self._coord.watch(*folders)

    # Calls of holders

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
        return self._taker.take(
            TakeRequest(Layout(queue), holder, count, most, lock_for, unit, suspects)
        )

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._begin()
        self._taker.give_up(holder, unit)
        return held_in(self, queue, holder)

    def apply(self, change: QueueChange) -> list[int | None]:
        self._begin()
        validate_change(change, self.limits)

        def build(draft: Draft) -> tuple[list[Entry], list[int | None]]:
            self._receipts.write(draft, change)
            entries = self._require_held(draft, change.holder, change.remove)
            for held, entry in zip(change.remove, entries, strict=True):
                draft.remove(Layout(held.queue), entry)
            seen: set[str] = set()
            return entries, [_put(draft, item, seen) for item in change.put]

        try:
            entries, numbers = self._context.commit("a transaction could not be applied", build)
        except SessionLost:
            raise self._who_ended(change.holder, change.remove) from None
        self._let_go(change.holder, change.remove, entries)
        self._receipts.forget(change.holder.session, change.forget)
        return numbers

    def outcome(self, session: str, unit: str) -> Outcome:
        self._begin()
        return self._receipts.outcome(session, unit)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        """Give items back: each dead one in its own commit, the others in lots that fit one."""
        validate_releases(releases)
        self._begin()
        found = [(each, self._holds.find(holder, each.held)) for each in dict.fromkeys(releases)]
        known = [(release, entry) for release, entry in found if entry is not None]
        room = (self._context.room,)

        def weigh(each: tuple[Release, Entry]) -> tuple[int]:
            release, entry = each
            return room if release.dead else cost(entry)

        for lot in lots(known, weigh, room):
            self._release(holder, [release for release, _ in lot])

    def _release(self, holder: Holder, releases: Sequence[Release]) -> None:
        def build(draft: Draft) -> list[Entry]:
            entries: list[Entry] = []
            for release in releases:
                entry = self._holds.find(holder, release.held, fresh=draft.refused is not None)
                if entry is not None:
                    _give_back(draft, entry, release)
                    entries.append(entry)
            _vouch(draft, holder, entries)
            return entries

        entries: list[Entry] = []
        try:
            entries = self._context.commit("items could not be given back", build)
        except SessionLost:
            if len(releases) > 1 and self._context.has_session(holder.session):
                # Some of the holds have ended.
                for release in releases:
                    self._release(holder, [release])
                return
        self._let_go(holder, [release.held for release in releases], entries)

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        self._begin()
        wanted = list(dict.fromkeys(held))
        if not wanted:
            self._context.require_session(holder.session)
            return
        before: list[Entry] = []

        def build(draft: Draft) -> tuple[Draft, list[Standing]]:
            before[:] = self._require_held(draft, holder, wanted)
            until_ms = draft.now_ms + delay_ms(lock_for)
            longer = [
                replace(each.standing, until=deadline.id, until_ms=until_ms) for each in before
            ]
            for each, entry, standing in zip(wanted, before, longer, strict=True):
                draft.put(entry.key, encode(standing), version=entry.version)
                draft.put(Layout(each.queue).until(each.id), b"", deadline.id)
            return draft, longer

        try:
            with self._deadlines.counting(lock_for) as deadline:
                draft, longer = self._context.commit("items could not be held for longer", build)
                for each, entry, standing in zip(wanted, before, longer, strict=True):
                    extended = Entry(entry.key, draft.versions[entry.key], standing)
                    self._holds.add(holder, each.queue, extended)
        except SessionLost:
            raise self._who_ended(holder, wanted) from None
        finally:
            self._deadlines.release(*(entry.standing.until for entry in before))

    def _require_held(self, draft: Draft, holder: Holder, held: Sequence[Held]) -> list[Entry]:
        """Find items that the holder holds, and require them to be held at the commit, too."""
        entries = []
        for each in held:
            entry = self._holds.find(holder, each, fresh=draft.refused is not None)
            if entry is None:
                self._holds.forget(holder, each)
                raise Fenced(f"item {each.id} of queue {each.queue!r} is not held any more")
            entries.append(entry)
        _vouch(draft, holder, entries)
        return entries

    def _let_go(self, holder: Holder, held: Sequence[Held], entries: Sequence[Entry]) -> None:
        for each in held:
            self._holds.forget(holder, each)
        self._deadlines.release(*(entry.standing.until for entry in entries))

    def _who_ended(self, holder: Holder, held: Sequence[Held]) -> PxrsError:
        """The error for the end of the holder's session, or of one that ended a hold."""
        if not self._context.has_session(holder.session):
            return SessionLost(f"session {holder.session} is over, and what it held is free")
        names = ", ".join(f"{each.id} of queue {each.queue!r}" for each in held)
        return Fenced(f"one of these items was held for too long and is not held any more: {names}")

    # Administration

    def stats(self, queue: str) -> QueueStats:
        """Count the items; repeats until nothing was put meanwhile."""
        self._begin()
        at = Layout(queue)
        self._reaper.reap(at)
        attempts = Attempts(f"queue {queue!r} could not be counted")
        while True:
            attempts.begin()
            before = self._coord.get(at.tail)
            if before is None:
                self._directory.forget(queue)
                if self._directory.known(queue) is None:
                    return QueueStats()
                continue
            live = live_items(self._coord, at)
            dead = len(self._coord.list(at.dlq))
            after = self._coord.get(at.tail)
            if after is not None and after.version == before.version:
                return self._count(at, decode(after.value, Tail), live, dead)

    def _count(self, at: Layout, tail: Tail, live: Sequence[Stored], dead: int) -> QueueStats:
        now_ms = self._clock.wall_ms()
        states = [each.state(at, now_ms) for each in live]
        return QueueStats(
            ready=states.count(ItemState.READY),
            delayed=states.count(ItemState.DELAYED),
            held=states.count(ItemState.HELD),
            waiting=states.count(ItemState.WAITING),
            dead=dead,
            oldest_ms=min((each.item.put_ms for each in live), default=None),
            put=tail.put,
            done=tail.put - tail.dropped - len(live) - dead,
        )

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
        at, wanted, first = Layout(queue), states_or(states, LIVE), max(0, after or 0)
        # The items of a deleted queue are still being removed.
        if first >= NUMBERS_END or self._directory.find(queue) is None:
            return []
        self._reaper.reap(at)
        page, now_ms = min(most, _PAGE), self._clock.wall_ms()
        return list(islice(shown_items(self._coord, at, wanted, first, page, now_ms), most))

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        return self._remove(Layout(queue), set(ids), (*NOT_HELD, ItemState.DEAD))

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        return self._remove(Layout(queue), None, states_or(states, NOT_HELD))

    def _remove(self, at: Layout, ids: set[int] | None, states: Sequence[ItemState]) -> int:
        """Remove items, the last of each key first: else every removal would show another."""
        self._begin()
        self._reaper.reap(at)
        picked = standing_in(self._coord, at, ids, states, self._clock.wall_ms())
        by_cost = lots(picked, cost, (self._context.room,))
        return sum(self._remove_lot(at, lot, states) for lot in by_cost)

    def _remove_lot(self, at: Layout, lot: list[Entry], states: Container[ItemState]) -> int:
        """Remove items in one commit; looks up those again that have moved meanwhile."""
        numbers = {entry.standing.number for entry in lot}

        def build(draft: Draft) -> int:
            entries = lot
            if draft.refused is not None:
                entries = standing_in(self._coord, at, numbers, states, draft.now_ms)
            if not entries or draft.queue(at.queue) is None:
                return 0
            for entry in entries:
                draft.remove(at, entry)
            draft.count_dropped(at.queue, len(entries))
            return len(entries)

        return self._context.commit(f"items of queue {at.queue!r} could not be removed", build)

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        self._begin()
        return sum(self._redrive(Layout(queue), number) for number in dict.fromkeys(ids))

    def _redrive(self, at: Layout, number: int) -> bool:
        def build(draft: Draft) -> bool:
            record = self._coord.get(at.dead(number))
            if record is None:
                return False
            item, body = decode_item(record.value)
            if draft.queue(at.queue) is None or item.standing is None:
                return False
            standing = Standing(
                number=draft.next_number(at.queue, put=0),
                key_order=item.standing.key_order,
                priority=item.priority,
                visible_ms=draft.now_ms,
                error=item.standing.error,
            )
            fresh = replace(item, standing=None, dead_ms=None, put_ms=draft.now_ms)
            draft.delete(record.key, record.version)
            draft.add(at, standing, fresh, body)
            return True

        return self._context.commit(f"items of queue {at.queue!r} could not be put back", build)

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`.

        In lots that fit into a commit, each conditional on the queue's tail: so two processes that
        restore the same item can't both find it missing. Below the tail no other process creates an
        item of a given number, and an existing item goes one way only, from live to dead: when read
        in this order, it is not missed.
        """
        self._begin()
        validate_restored(items, self.limits)
        for item in items:
            if item.id >= NUMBERS_END:
                raise InvalidRequest(
                    f"item id must be below {NUMBERS_END} in this store, got {item.id}"
                )
        into = self._directory.find(queue)
        if into is None:
            raise QueueNotFound(queue)

        def weigh(item: StoredItem) -> tuple[int, int]:
            has_order = order_name(into, item.key) is not None
            size = len(item.body) + len(item.error.encode()) + _ITEM_BYTES
            return _PER_RESTORED + (_PER_RESTORED_KEY if has_order else 0), size

        room = (self._context.room, _LOT_BYTES)
        return sum(self._restore(Layout(queue), lot) for lot in lots(items, weigh, room))

    def _restore(self, at: Layout, lot: Sequence[StoredItem]) -> int:
        def is_there(number: int) -> bool:
            keys = (at.item(number), at.dead(number))
            return any(self._coord.get(key) is not None for key in keys)

        def build(draft: Draft) -> int:
            queue = draft.queue(at.queue)
            if queue is None:
                raise QueueNotFound(at.queue)
            # Also if all are found: they may be those of a queue that is being deleted.
            draft.require_queue(at)
            end = draft.end(at.queue)
            fresh = [item for item in lot if item.id >= end or not is_there(item.id)]
            for item in fresh:
                _add_restored(draft, at, queue, item)
                draft.admit(at.queue, item.id)
            return len(fresh)

        return self._context.commit(f"items could not be restored to queue {at.queue!r}", build)


def _put(draft: Draft, new: NewItem, seen: set[str]) -> int | None:
    """Add an item; returns its number, None if its dedupe key was seen, before or in this draft.

    Until a deleted queue's folder is empty it has the dedupe keys of that queue, which count no
    more. So they are read only if there is a queue, and after it; and a duplicate is one only if
    that very queue is still there at the commit. All the time in between the folder was its own.
    """
    at = Layout(new.queue)
    existing = draft.queue(new.queue)
    queue = existing or Queue(name=new.queue)
    validate_for(queue, new)
    if new.dedupe is not None:
        key = at.seen(new.dedupe)
        if key in seen:
            return None
        found = None if existing is None else draft.coord.get(key)
        if found is not None and _is_seen(found, draft.now_ms):
            draft.require_queue(at)
            return None
        seen.add(key)
        record = Seen(draft.now_ms + delay_ms(new.dedupe_window))
        draft.put(key, encode(record), version=0 if found is None else found.version)
    standing = Standing(
        number=draft.next_number(new.queue),
        key_order=order_name(queue, new.key),
        priority=new.priority,
        visible_ms=draft.now_ms + delay_ms(new.delay),
    )
    item = Item(key=new.key, priority=new.priority, put_ms=draft.now_ms)
    draft.add(at, standing, item, bytes(new.body))
    return standing.number


def _is_seen(record: Versioned, now_ms: int) -> bool:
    """Whether a dedupe key still counts."""
    return decode(record.value, Seen).until_ms > now_ms


def _give_back(draft: Draft, entry: Entry, release: Release) -> None:
    at = Layout(release.held.queue)
    error = release.error or entry.standing.error
    if release.dead:
        draft.bury(at, entry, error)
    else:
        visible_ms = draft.now_ms + delay_ms(release.delay)
        draft.give_back(at, entry, visible_ms, suspect=False, error=error)


def _vouch(draft: Draft, holder: Holder, entries: Sequence[Entry]) -> None:
    """Make the commit fail if the holder's session, or one that ends a hold, is over."""
    if entries:
        ends = {entry.standing.until for entry in entries if entry.standing.until is not None}
        draft.vouch(holder.session, *sorted(ends))


def _add_restored(draft: Draft, at: Layout, queue: Queue, stored: StoredItem) -> None:
    standing = Standing(
        number=stored.id,
        key_order=order_name(queue, stored.key),
        priority=stored.priority,
        visible_ms=stored.visible_ms or stored.put_ms,
        deliveries=stored.deliveries,
        suspect=is_suspect(stored),
        error=stored.error,
        taken_ms=stored.taken_ms,
    )
    item = Item(key=stored.key, priority=stored.priority, put_ms=stored.put_ms)
    if stored.state is ItemState.DEAD:
        dead = replace(item, standing=standing, dead_ms=stored.dead_ms)
        draft.put(at.dead(stored.id), encode_item(dead, stored.body), version=0)
    else:
        draft.require(at.item(stored.id), 0)
        draft.add(at, standing, item, stored.body)
