"""Which queues there are and where they end, as one handle remembers it."""

from __future__ import annotations

import threading
from typing import NamedTuple

from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.layout import LIST, Head, Layout, Tail, decode
from pxrs.types import Check, Committed, Delete, Queue

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
        """Queues whose deletion was begun and not finished."""
        return [name for name, head in self._heads() if head.deleting]

    def known(self, name: str) -> Known | None:
        """The queue as it was lately; None if there is none now."""
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
        with self._lock:
            before = self._known.get(name)
            if before is None or before.tail_version < known.tail_version:
                self._known[name] = known
        return known

    def forget(self, name: str) -> None:
        """Read the queue again when it is needed: a check failed."""
        with self._lock:
            self._known.pop(name, None)

    def learn(self, name: str, tail: Tail, outcome: Committed, now_ms: int) -> None:
        """Remember what a commit has made that moved the tail, or made the queue at `now_ms`."""
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


def _queue(name: str, head: Head) -> Queue:
    return Queue(name=name, fifo=head.fifo, created_ms=head.created_ms)
