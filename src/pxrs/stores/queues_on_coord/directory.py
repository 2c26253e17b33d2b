"""Which queues there are, where they end, and their making and deleting."""

from __future__ import annotations

import threading
from typing import NamedTuple

from msgspec.structs import replace

from pxrs.clock import Clock
from pxrs.core.queue import require_same
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.draft import Draft, attempts
from pxrs.stores.queues_on_coord.layout import LIST, Head, Layout, Tail, decode, encode
from pxrs.types import Check, Committed, Delete, Put, Queue

# Items have bodies: not too many at once.
_SWEPT_AT_ONCE = 20


class Known(NamedTuple):
    """A queue as it was last seen. Every commit that builds on it checks the version it needs."""

    queue: Queue
    head_version: int
    tail: Tail
    tail_version: int


class Directory:
    """The queues of one handle, remembered until a check fails."""

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}

    def find(self, name: str) -> Queue | None:
        """As of now."""
        found = self._coord.get(Layout(name).head)
        if found is None or (head := decode(found.value, Head)).deleting:
            return None
        return _queue(name, head)

    def all(self) -> list[Queue]:
        return [_queue(name, head) for name, head in self._heads() if not head.deleting]

    def deleting(self) -> list[str]:
        """Those whose deletion somebody has begun and not ended."""
        return [name for name, head in self._heads() if head.deleting]

    def known(self, name: str) -> Known | None:
        """As it was lately; None if there is none now."""
        with self._lock:
            if name in self._known:
                return self._known[name]
        at = Layout(name)
        head, tail = self._coord.get(at.head), self._coord.get(at.tail)
        if head is None or tail is None or decode(head.value, Head).deleting:
            return None
        known = Known(
            _queue(name, decode(head.value, Head)),
            head.version,
            decode(tail.value, Tail),
            tail.version,
        )
        self._learn(name, known)
        return known

    def forget(self, name: str) -> None:
        """A check failed: read it again when it is needed."""
        with self._lock:
            self._known.pop(name, None)

    def learn(self, name: str, tail: Tail, outcome: Committed, now_ms: int) -> None:
        """What a commit that moved the tail, or made the queue at `now_ms`, has made."""
        at, versions = Layout(name), outcome.versions
        with self._lock:
            before = self._known.get(name)
            if at.head in versions:
                queue = Queue(name=name, fifo=False, created_ms=now_ms)
                before = Known(queue, versions[at.head], tail, 0)
            if before is not None and versions[at.tail] > before.tail_version:
                self._known[name] = before._replace(tail=tail, tail_version=versions[at.tail])

    def create(self, name: str, fifo: bool) -> Queue:
        for _ in attempts(f"queue {name!r} could not be made"):
            found = self._coord.get(Layout(name).head)
            if found is not None and not (head := decode(found.value, Head)).deleting:
                return require_same(_queue(name, head), fifo)
            draft = Draft(self._coord, self._clock.wall_ms())
            self.write_new(draft, name, fifo, Tail())
            if isinstance(draft.commit(), Committed):
                break
        return require_same(self.find(name) or Queue(name=name, fifo=fifo), fifo)

    def write_new(self, draft: Draft, name: str, fifo: bool, tail: Tail) -> None:
        """Make the queue with the draft. What is left of an older one of the name goes first."""
        at = Layout(name)
        if self._coord.get(at.head) is not None:
            self._end_deletion(at)
        draft.require(at.head, 0)
        draft.put(at.head, encode(Head(fifo, draft.now_ms)))
        draft.require(at.tail, 0)
        draft.put(at.tail, encode(tail))

    def delete(self, name: str) -> None:
        """It is gone when it is marked; the rest is tidying, which anybody can end."""
        at = Layout(name)
        for _ in attempts(f"queue {name!r} could not be deleted"):
            found = self._coord.get(at.head)
            self.forget(name)
            if found is None:
                return
            head = decode(found.value, Head)
            if head.deleting:
                break
            marked = encode(replace(head, deleting=True))
            outcome = self._coord.commit(
                [Check(at.head, found.version)], [Put(at.head, marked), Delete(at.tail)]
            )
            if isinstance(outcome, Committed):
                break
        self._end_deletion(at)

    def _end_deletion(self, at: Layout) -> None:
        """Remove every record, then the mark.

        Nothing can be taken or put any more, but what is given back meanwhile moves once, maybe
        past us: so it has to be found empty twice.
        """
        head = self._coord.get(at.head)
        if head is None or not decode(head.value, Head).deleting:
            return
        empty = 0
        while empty < 2:
            records = self._coord.list(at.folder, limit=_SWEPT_AT_ONCE)
            empty = 0 if records else empty + 1
            if records:
                self._coord.commit([], [Delete(record.key) for record in records])
        self._coord.commit([Check(at.head, head.version)], [Delete(at.head)])

    def _heads(self) -> list[tuple[str, Head]]:
        records = self._coord.list(LIST)
        return [(record.key[len(LIST) :], decode(record.value, Head)) for record in records]

    def _learn(self, name: str, known: Known) -> None:
        with self._lock:
            before = self._known.get(name)
            if before is None or before.tail_version < known.tail_version:
                self._known[name] = known


class Tails:
    """The ends of queues as one draft moves them."""

    def __init__(self, directory: Directory, draft: Draft) -> None:
        self._directory = directory
        self._draft = draft
        self._tails: dict[str, Tail] = {}
        self._known: dict[str, Known | None] = {}

    def queue(self, name: str) -> Queue | None:
        if name not in self._known:
            self._known[name] = self._directory.known(name)
        known = self._known[name]
        return None if known is None else known.queue

    def next(self, name: str, *, put: int = 1) -> int:
        """A number for an item at the end of the queue, which is made if need be."""
        tail = self._tail(name)
        self._tails[name] = Tail(tail.next + 1, tail.put + put, tail.dropped)
        return tail.next

    def end(self, name: str) -> int:
        """The first number that no item can have yet."""
        return self._tail(name).next

    def admit(self, name: str, number: int) -> None:
        """An item comes with a number of its own; later ones come after it."""
        tail = self._tail(name)
        self._tails[name] = Tail(max(tail.next, number + 1), tail.put + 1, tail.dropped)

    def drop(self, name: str, count: int) -> None:
        tail = self._tail(name)
        self._tails[name] = replace(tail, dropped=tail.dropped + count)

    def write(self) -> None:
        """Into the draft."""
        for name, tail in self._tails.items():
            known, at = self._known[name], Layout(name)
            if known is None:
                self._directory.write_new(self._draft, name, False, tail)
            else:
                self._draft.require(at.tail, known.tail_version)
                self._draft.put(at.tail, encode(tail))

    def committed(self, outcome: Committed) -> None:
        for name, tail in self._tails.items():
            self._directory.learn(name, tail, outcome, self._draft.now_ms)

    def refused(self) -> None:
        for name in self._known:
            self._directory.forget(name)

    def _tail(self, name: str) -> Tail:
        self.queue(name)
        known = self._known[name]
        return self._tails.get(name) or (Tail() if known is None else known.tail)


def _queue(name: str, head: Head) -> Queue:
    return Queue(name=name, fifo=head.fifo, created_ms=head.created_ms)
