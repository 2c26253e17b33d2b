"""Commits: how one is drafted, and the one loop in which drafts are committed.

A `Draft` collects the checks and the writes of a commit. It moves items between the records of
their states, keeps each key's items in order, and moves the ends of queues. The `Directory`
remembers which queues there are and where they end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from pxrs.chance import CHANCE
from pxrs.clock import Clock
from pxrs.core.queue import tidy
from pxrs.errors import InvalidRequest, SessionLost, TransactionConflict
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.layout import (
    LIST,
    Entry,
    Head,
    Item,
    KeyOrderRecord,
    Layout,
    Standing,
    Tail,
    decode,
    decode_item,
    encode,
    encode_item,
    entry_of,
    holder_key,
    number_of,
)
from pxrs.types import (
    Check,
    Committed,
    Conflict,
    Delete,
    Holder,
    Put,
    Queue,
    QueueLimits,
    Versioned,
    Write,
)

T = TypeVar("T")

_MOST_ATTEMPTS = 500
_LONGEST_PAUSE = 0.05

# How many records take part in a commit: of the transaction itself and of one queue, ...
_OVERHEAD = 9
# ... of an item that is removed (meta twice, item, two locks), ...
_PER_ITEM = 5
# ... and of its key (its order twice, and the one that shows next twice).
_PER_KEY = 4
# Bytes for everything about an item but its body.
_HEADER_BYTES = 32 * 1024
# Errors of all items of a transaction have to fit into one commit.
_LONGEST_ERROR = 2_000
_SWEPT_AT_ONCE = 50
# Items have bodies, so not too many are read at once.
_DELETED_AT_ONCE = 20


class Attempts:
    """Counts the attempts at a commit that other processes may cause to fail."""

    def __init__(self, failure: str) -> None:
        self._failure = failure
        self._made = 0

    def begin(self) -> None:
        """Pause before every attempt but the first, for a random time, to separate rivals.

        Raises `TransactionConflict` after too many.
        """
        if self._made == _MOST_ATTEMPTS:
            raise TransactionConflict(
                f"{self._failure}: the records changed faster than they were read; try again"
            )
        if self._made:
            time.sleep(CHANCE.random() * min(0.0005 * 2 ** min(self._made, 10), _LONGEST_PAUSE))
        self._made += 1


class Known(NamedTuple):
    """A queue as it was last seen. Every commit that builds on it checks the version it needs."""

    queue: Queue
    head_version: int
    tail: Tail
    tail_version: int


class Directory:
    """The queues of one handle, remembered until a check fails."""

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}

    def find(self, name: str) -> Queue | None:
        """The queue as of now."""
        found = self._coord.get(Layout(name).head)
        if found is None or (head := decode(found.value, Head)).deleting:
            return None
        return _queue(name, head)

    def all(self) -> list[Queue]:
        return [_queue(name, head) for name, head in self._heads() if not head.deleting]

    def deleting(self) -> list[str]:
        """Queues whose deletion has begun and is not finished."""
        return [name for name, head in self._heads() if head.deleting]

    def known(self, name: str) -> Known | None:
        """The queue as it was read lately; None if there is none now."""
        with self._lock:
            if name in self._known:
                return self._known[name]
        at = Layout(name)
        while True:
            # In this order, because deletion removes the tail. If the tail is still this one at a
            # commit, the queue was the same all the time since it was read: so the head is its own.
            tail = self._coord.get(at.tail)
            head = self._coord.get(at.head)
            if head is None or decode(head.value, Head).deleting:
                return None
            if tail is not None:
                break
            self._make_tail(at, head.version)
        known = Known(
            _queue(name, decode(head.value, Head)),
            head.version,
            decode(tail.value, Tail),
            tail.version,
        )
        with self._lock:
            before = self._known.get(name)
            if before is None or before.tail_version < known.tail_version:
                self._known[name] = known
        return known

    def _make_tail(self, at: Layout, head_version: int) -> None:
        """Make the tail of a queue that has lost it, behind its items, unless the queue is gone.

        Deletions of earlier releases could remove the tail of a queue that was made meanwhile.
        While there is no tail nothing is put, so the items read here are all there are; and the
        commit is conditional on the head, so a queue that is deleted by now gets no tail.
        """
        live = [number_of(each) for each in self._coord.list(at.items)]
        dead = [number_of(each) for each in self._coord.list(at.dlq)]
        put = len(live) + len(dead)
        tail = encode(Tail(max(live + dead, default=0) + 1, put))
        checks = [Check(at.head, head_version), Check(at.tail, 0)]
        self._coord.commit(checks, [Put(at.tail, tail)])

    def forget(self, name: str) -> None:
        """Forget the queue, because a check failed: it is read again when it is needed."""
        with self._lock:
            self._known.pop(name, None)

    def learn(self, name: str, tail: Tail, outcome: Committed, now_ms: int) -> None:
        """Remember the result of a commit that moved the tail, or made the queue at `now_ms`."""
        at, versions = Layout(name), outcome.versions
        with self._lock:
            before = self._known.get(name)
            if at.head in versions:
                queue = Queue(name=name, fifo=False, created_ms=now_ms)
                before = Known(queue, versions[at.head], tail, 0)
            if before is not None and versions[at.tail] > before.tail_version:
                self._known[name] = before._replace(tail=tail, tail_version=versions[at.tail])

    def finish_deletion(self, at: Layout) -> None:
        """Remove every record of a queue that is marked as deleted, then the mark. In any process.

        Nothing can be taken or put any more, but an item that is given back meanwhile moves once,
        maybe to where this has looked already: so the queue has to be found empty twice.

        The version of the mark identifies the incarnation that is deleted, and every commit is
        conditional on it. When another process has removed the mark, a producer may have made
        the queue anew: then the records in the folder must not be removed.
        """
        head = self._coord.get(at.head)
        if head is None or not decode(head.value, Head).deleting:
            return
        marked = [Check(at.head, head.version)]
        empty = 0
        while empty < 2:
            records = self._coord.list(at.folder, limit=_DELETED_AT_ONCE)
            empty = 0 if records else empty + 1
            if records:
                outcome = self._coord.commit(marked, [Delete(each.key) for each in records])
                if isinstance(outcome, Conflict):
                    return
        self._coord.commit(marked, [Delete(at.head)])

    def _heads(self) -> list[tuple[str, Head]]:
        records = self._coord.list(LIST)
        return [(record.key[len(LIST) :], decode(record.value, Head)) for record in records]


def _queue(name: str, head: Head) -> Queue:
    return Queue(name=name, fifo=head.fifo, created_ms=head.created_ms)


class Context:
    """Shared by the parts of one handle: the store, the clock, and the queues it knows."""

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self.coord = coord
        self.clock = clock
        self.directory = Directory(coord)
        # How many records of items fit into one commit.
        self.room = coord.limits.operations - _OVERHEAD
        # A change within these limits surely fits into one commit, for items without a key, in one
        # queue.
        self.limits = QueueLimits(
            items=self.room // _PER_ITEM,
            body_bytes=coord.limits.value_bytes - _HEADER_BYTES,
        )
        # For each folder, the last record that was swept.
        self._swept: dict[str, str] = {}

    def draft(self, refused: Conflict | None = None) -> Draft:
        return Draft(self.coord, self.directory, self.clock.wall_ms(), refused)

    def commit(self, failure: str, build: Callable[[Draft], T]) -> T:
        """Commit what `build` drafts; returns its result.

        `build` is called again, to read afresh, whenever a record that the draft builds on has
        changed: then `Draft.refused` has these records. A draft without writes is not sent.
        """
        attempts = Attempts(failure)
        refused: Conflict | None = None
        while True:
            attempts.begin()
            draft = self.draft(refused)
            result = build(draft)
            if draft.is_empty:
                return result
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                return result
            refused = outcome

    def sweep(self, folder: str, is_old: Callable[[Versioned], bool]) -> None:
        """Remove some old records of a folder; each call goes on where the last one stopped."""
        found = self.coord.list(folder, after=self._swept.get(folder), limit=_SWEPT_AT_ONCE)
        self._swept.pop(folder, None)
        if len(found) == _SWEPT_AT_ONCE:
            self._swept[folder] = found[-1].key
        old = list(filter(is_old, found))[: self.coord.limits.operations // 2]
        if old:
            self.coord.commit(
                [Check(record.key, record.version) for record in old],
                [Delete(record.key) for record in old],
            )

    def has_session(self, session: str) -> bool:
        """Whether it lives. Writes only if nothing was written with the session yet."""
        try:
            self.require_session(session)
        except SessionLost:
            return False
        return True

    def require_session(self, session: str) -> None:
        """Raise `SessionLost` if it is over: then a record that was put with it is gone."""
        if self.coord.get(holder_key(session)) is None:
            draft = self.draft()
            draft.vouch(session)
            draft.commit()


class Draft:
    """Collects checks and writes. Nothing is done until `commit`.

    `refused`: the records that the attempt before found changed; None if this is the first.
    `versions`: those of the records that were put, once the draft is committed.
    """

    def __init__(
        self,
        coord: CoordStore,
        directory: Directory,
        now_ms: int,
        refused: Conflict | None,
    ) -> None:
        self.coord = coord
        self.now_ms = now_ms
        self.refused = refused
        self.versions: dict[str, int] = {}
        self._directory = directory
        self._checks: dict[str, int] = {}
        self._writes: dict[str, Write] = {}
        self._orders: dict[str, KeyOrder] = {}
        self._queues: dict[str, Known | None] = {}
        self._tails: dict[str, Tail] = {}

    def require(self, key: str, version: int) -> None:
        """Commit only if the record has this version; 0: only if there is none, and it is put."""
        self._checks[key] = version

    def put(
        self, key: str, value: bytes, session: str | None = None, *, version: int | None = None
    ) -> None:
        """Write a record; `version`: see `require`."""
        if version is not None:
            self.require(key, version)
        self._writes[key] = Put(key, value, session)

    def delete(self, key: str, version: int | None = None) -> None:
        """Remove a record, if it is there; `version`: see `require`."""
        if version is not None:
            self.require(key, version)
        self._writes[key] = Delete(key)

    def vouch(self, *sessions: str) -> None:
        """Commit only if the sessions live: puts a record with each."""
        for session in sessions:
            self.put(holder_key(session), b"", session)

    @property
    def is_empty(self) -> bool:
        return not (self._checks or self._writes or self._orders or self._tails)

    def commit(self) -> Committed | Conflict:
        self._write_tails()
        for order in self._orders.values():
            order.settle(self)
        self._orders.clear()
        self._refuse_too_much()
        outcome = self.coord.commit(
            [Check(key, version) for key, version in self._checks.items()],
            list(self._writes.values()),
        )
        if isinstance(outcome, Conflict):
            for name in self._queues:
                self._directory.forget(name)
            return outcome
        for name, tail in self._tails.items():
            self._directory.learn(name, tail, outcome, self.now_ms)
        self.versions = dict(outcome.versions)
        return outcome

    def _refuse_too_much(self) -> None:
        limits = self.coord.limits
        operations = len(self._checks) + len(self._writes)
        if operations > limits.operations:
            raise InvalidRequest(
                f"the transaction checks and writes {operations} records; the limit of this store "
                f"is {limits.operations}; take or put fewer items, of fewer keys and queues"
            )
        size = sum(len(write.value) for write in self._writes.values() if isinstance(write, Put))
        if size > limits.value_bytes:
            raise InvalidRequest(
                f"the transaction writes {size} bytes; the limit of this store is "
                f"{limits.value_bytes}; put fewer items at once, or keep their bodies elsewhere"
            )

    # Queues and their ends

    def queue(self, name: str) -> Queue | None:
        known = self._known(name)
        return None if known is None else known.queue

    def require_queue(self, at: Layout) -> bool:
        """Commit only if the queue is not deleted meanwhile; returns false if there is none now."""
        known = self._known(at.queue)
        if known is not None:
            self.require(at.head, known.head_version)
        return known is not None

    def make_queue(self, name: str, fifo: bool, tail: Tail | None = None) -> None:
        """Make the queue, after removing what is left of a deleted one of that name."""
        at = Layout(name)
        if self.coord.get(at.head) is not None:
            self._directory.finish_deletion(at)
        self.put(at.head, encode(Head(fifo, self.now_ms)), version=0)
        self.put(at.tail, encode(tail or Tail()), version=0)

    def end(self, name: str) -> int:
        """The first number above all items of the queue."""
        return self._tail(name).next

    def next_number(self, name: str, *, put: int = 1) -> int:
        """A number for an item at the end of the queue, which is made if need be."""
        tail = self._tail(name)
        self._tails[name] = Tail(tail.next + 1, tail.put + put, tail.dropped)
        return tail.next

    def admit(self, name: str, number: int) -> None:
        """Count an item that has a number already; later items come after it."""
        tail = self._tail(name)
        self._tails[name] = Tail(max(tail.next, number + 1), tail.put + 1, tail.dropped)

    def count_dropped(self, name: str, count: int) -> None:
        tail = self._tail(name)
        self._tails[name] = replace(tail, dropped=tail.dropped + count)

    def _known(self, name: str) -> Known | None:
        if name not in self._queues:
            self._queues[name] = self._directory.known(name)
        return self._queues[name]

    def _tail(self, name: str) -> Tail:
        known = self._known(name)
        return self._tails.get(name) or (Tail() if known is None else known.tail)

    def _write_tails(self) -> None:
        for name, tail in self._tails.items():
            known, at = self._queues[name], Layout(name)
            if known is None:
                self.make_queue(name, False, tail)
            else:
                self.put(at.tail, encode(tail), version=known.tail_version)

    # Items

    def order(self, at: Layout, name: str) -> KeyOrder:
        key = at.key_order(name)
        if key not in self._orders:
            self._orders[key] = KeyOrder(self.coord, at, name)
        return self._orders[key]

    def add(self, at: Layout, standing: Standing, item: Item, body: bytes) -> None:
        """Add a new item, or a dead one that begins again."""
        self.put(at.item(standing.number), encode_item(item, body))
        self.attach(at, standing)

    def attach(self, at: Layout, standing: Standing) -> None:
        """Add the record by which the item is handed out when its time and its turn have come."""
        if standing.key_order is None:
            self.put(at.shown(standing, self.now_ms), encode(standing))
        else:
            self.order(at, standing.key_order).add(standing)

    def detach(self, at: Layout, entry: Entry) -> None:
        """Remove the item's record, if it is unchanged at the commit."""
        standing = entry.standing
        self.delete(entry.key, entry.version)
        order = None if standing.key_order is None else self.order(at, standing.key_order)
        if standing.holder is None:
            if order is not None:
                order.leave(entry)
            return
        self.delete(at.lock(standing.number))
        if standing.until is not None:
            self.delete(at.until(standing.number))
        if order is not None:
            order.held.discard(standing.number)

    def hold(self, at: Layout, entry: Entry, held: Standing, holder: Holder) -> bool:
        """Hold it: counted and locked in the same commit. Returns false if it is not its turn."""
        order = None if held.key_order is None else self.order(at, held.key_order)
        if order is not None and not order.yields(entry, holder):
            return False
        self.detach(at, entry)
        self.put(at.meta(held.number), encode(held))
        self.put(at.lock(held.number), b"", holder.session)
        if held.until is not None:
            self.put(at.until(held.number), b"", held.until)
        if order is not None:
            order.hold(held.number, holder)
        return True

    def give_back(
        self, at: Layout, entry: Entry, visible_ms: int, *, suspect: bool, error: str
    ) -> None:
        """Let an item be handed out again from `visible_ms` on."""
        self.detach(at, entry)
        self.attach(at, _freed(entry.standing, visible_ms, suspect=suspect, error=error))

    def remove(self, at: Layout, entry: Entry) -> None:
        if entry.key.startswith(at.dlq):
            self.delete(entry.key, entry.version)
        else:
            self.detach(at, entry)
            self.delete(at.item(entry.standing.number))

    def bury(self, at: Layout, entry: Entry, error: str) -> bool:
        """Make it a dead item; returns false if it is gone."""
        number = entry.standing.number
        found = self.coord.get(at.item(number))
        if found is None:
            return False
        item, body = decode_item(found.value)
        self.remove(at, entry)
        standing = _freed(entry.standing, 0, suspect=False, error=error)
        dead = replace(item, standing=standing, dead_ms=self.now_ms)
        self.put(at.dead(number), encode_item(dead, body))
        return True


class KeyOrder:
    """A key's items, in order: the first shows, unless one of them is held.

    Every change writes the order's record under a check, so only one can happen at a time.
    """

    def __init__(self, coord: CoordStore, at: Layout, name: str) -> None:
        self._coord = coord
        self._at = at
        self._name = name
        found = coord.get(at.key_order(name))
        record = KeyOrderRecord() if found is None else decode(found.value, KeyOrderRecord)
        self._version = 0 if found is None else found.version
        self.held_before = frozenset(record.held)
        self.held = set(record.held)
        self._holder = record.holder
        self._front = record.front
        self._added: dict[int, Standing] = {}
        self._gone: set[int] = set()

    def add(self, standing: Standing) -> None:
        """Add an item at the place of its number."""
        self._added[standing.number] = standing

    def leave(self, entry: Entry) -> None:
        """Take out an item that was not held."""
        if self._front == entry.key:
            self._front = None
        else:
            self._gone.add(entry.standing.number)

    def yields(self, entry: Entry, holder: Holder) -> bool:
        """Whether the holder may take it: as the front, or behind items that it holds."""
        if self.held:
            return self._holder == holder
        return self._front == entry.key

    def hold(self, number: int, holder: Holder) -> None:
        self.held.add(number)
        self._holder = holder

    def settle(self, draft: Draft) -> None:
        """Show the first item, unless some are held; write the order's record."""
        if not self.held:
            self._holder = None
            self._hide_front(draft)
            if self._front is None:
                self._show_first(draft)
        for number, standing in self._added.items():
            draft.put(self._at.waiting(self._name, number), encode(standing))
        key = self._at.key_order(self._name)
        if self.held or self._front is not None:
            record = KeyOrderRecord(tuple(sorted(self.held)), self._holder, self._front)
            draft.put(key, encode(record), version=self._version)
        elif self._version:
            draft.delete(key, self._version)

    def _hide_front(self, draft: Draft) -> None:
        """Move the item that shows back to the waiting ones if one with a lower number came."""
        if self._front is None or not self._added:
            return
        if int(self._front.rpartition(".")[2]) < min(self._added):
            return
        found = self._coord.get(self._front)
        if found is not None:
            entry = entry_of(found)
            draft.delete(entry.key, entry.version)
            self._added[entry.standing.number] = entry.standing
            self._front = None

    def _show_first(self, draft: Draft) -> None:
        stored: list[Standing] = []
        if self._version:
            prefix = self._at.waiting_in(self._name)
            waiting = map(entry_of, self._coord.list(prefix, limit=len(self._gone) + 1))
            stored = [each.standing for each in waiting if each.standing.number not in self._gone]
        first = min([*stored, *self._added.values()], key=lambda each: each.number, default=None)
        if first is None:
            return
        if self._added.pop(first.number, None) is None:
            draft.delete(self._at.waiting(self._name, first.number))
        self._front = self._at.shown(first, draft.now_ms)
        draft.put(self._front, encode(first))


def _freed(standing: Standing, visible_ms: int, *, suspect: bool, error: str) -> Standing:
    """Returns the state of an item that is no longer held."""
    return replace(
        standing,
        visible_ms=visible_ms,
        suspect=suspect,
        error=tidy(error[:_LONGEST_ERROR]),
        holder=None,
        most=None,
        until=None,
        until_ms=None,
    )


def cost(entry: Entry) -> tuple[int]:
    """Returns how many records take part in removing an item; see `pxrs.stores.api.lots`."""
    return (_PER_ITEM + (0 if entry.standing.key_order is None else _PER_KEY),)
