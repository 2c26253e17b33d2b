"""`px.queues`: what operators do with queues and their dead letters."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Generic, Unpack

import msgspec

from pxrs.clock import Clock
from pxrs.errors import InvalidRequest, QueueNotFound, quoted
from pxrs.options import DeadOptions, filled, refuse_unknown, takes
from pxrs.queues.item import decode_body
from pxrs.serde import Serde
from pxrs.stores.api import QueueStore
from pxrs.types import Header, ItemState, Plain, Queue, StoredItem, Value

_PAGE = 500


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue and what it holds. `put` and `done` count since it was made; ages are in seconds."""

    name: str
    fifo: bool
    created_ms: int
    ready: int
    delayed: int
    held: int
    waiting: int
    dead: int
    depth: int
    oldest_age: float | None
    put: int
    done: int


class QueueRates(msgspec.Struct, frozen=True):
    """Items per second that were put and that were handled."""

    put: float
    done: float


class ItemInfo(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """An item as it lies in its queue. `value` is what was put, read by the serde if any.

    A value that can't be decoded is shown as the stored bytes.
    """

    queue: str
    id: int
    state: ItemState
    value: Value | bytes
    headers: tuple[Header, ...]
    key: str | None
    priority: int
    deliveries: int
    put_ms: int
    taken_ms: int | None
    visible_ms: int | None
    dead_ms: int | None
    error: str


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects dead items: those that match all given fields."""

    ids: Collection[int] | None = None
    key: str | None = None
    error: str | None = None
    dead_for: float | None = None

    def matches(self, item: StoredItem, now_ms: int) -> bool:
        """Whether it is selected. `error` is a part of its error, `dead_for` the least age."""
        return (
            (self.ids is None or item.id in self.ids)
            and (self.key is None or item.key == self.key)
            and (self.error is None or self.error in item.error)
            and (self.dead_for is None or now_ms - (item.dead_ms or 0) >= self.dead_for * 1000)
        )


class Queues:
    """Make, list, describe, look into and clear out queues and their dead letters."""

    def __init__(self, store: QueueStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue, or return an equal one that exists; raises `QueueExists` if it differs."""
        return self._store.create(name, fifo=fifo)

    def list(self) -> list[QueueInfo]:
        """All queues, by name."""
        return [self._info(queue) for queue in self._store.all()]

    def describe(self, name: str) -> QueueInfo:
        """One queue: how many items it has in each state, and how old the oldest is."""
        return self._info(self._find(name))

    def rates(self, name: str, seconds: float = 1.0) -> QueueRates:
        """Measure for `seconds` how many items per second are put and done."""
        if not seconds > 0:
            raise InvalidRequest(f"seconds must be a positive number, got {seconds}")
        self._find(name)
        before, began = self._store.stats(name), self._clock.monotonic()
        threading.Event().wait(seconds)
        after, took = self._store.stats(name), self._clock.monotonic() - began
        return QueueRates((after.put - before.put) / took, (after.done - before.done) / took)

    def peek(
        self,
        name: str,
        limit: int = 10,
        *,
        states: Sequence[str] = (),
        after: int | None = None,
        serde: Serde[Plain] | None = None,
    ) -> Sequence[ItemInfo[Plain]]:
        """Items in the queue, oldest first; nothing is taken or counted."""
        self._find(name)
        wanted = [_state(state) for state in states]
        found = self._store.peek(name, wanted, after=after, limit=limit)
        return [_shown(name, item, serde) for item in found]

    def purge(self, name: str) -> int:
        """Remove all items that are neither held nor dead; returns how many."""
        self._find(name)
        return self._store.purge(name)

    def delete(self, name: str) -> None:
        """Remove the queue and all its items. Transactions that hold some fail when they commit."""
        self._find(name)
        self._store.delete(name)

    # Dead letters

    @takes(DeadOptions, defaults=[DeadFilter])
    def dead(
        self,
        name: str,
        limit: int | None = 100,
        *,
        serde: Serde[Plain] | None = None,
        **options: Unpack[DeadOptions],
    ) -> Sequence[ItemInfo[Plain]]:
        """Items that used up their deliveries, with the error of the last one."""
        found = []
        for item in self._matching(name, "dead", options):
            found.append(_shown(name, item, serde))
            if len(found) == limit:
                break
        return found

    @takes(DeadOptions, defaults=[DeadFilter])
    def redrive(self, name: str, **options: Unpack[DeadOptions]) -> int:
        """Put dead items back at the end of the queue and reset their delivery counts; how many."""
        found = [item.id for item in self._matching(name, "redrive", options)]
        pages = (found[start : start + _PAGE] for start in range(0, len(found), _PAGE))
        return sum(self._store.redrive(name, page) for page in pages)

    @takes(DeadOptions, defaults=[DeadFilter])
    def drop(self, name: str, **options: Unpack[DeadOptions]) -> int:
        """Remove dead items for good; returns how many."""
        found = [item.id for item in self._matching(name, "drop", options)]
        pages = (found[start : start + _PAGE] for start in range(0, len(found), _PAGE))
        return sum(self._store.drop(name, page) for page in pages)

    def _matching(self, name: str, call: str, options: DeadOptions) -> Iterator[StoredItem]:
        refuse_unknown(call, options, DeadOptions)
        ids = options.get("ids")
        wanted = filled(DeadFilter, options, ids=None if ids is None else frozenset(ids))
        self._find(name)
        now_ms, after = self._clock.wall_ms(), 0
        while page := self._store.peek(name, [ItemState.DEAD], after=after, limit=_PAGE):
            yield from (item for item in page if wanted.matches(item, now_ms))
            after = page[-1].id

    def _find(self, name: str) -> Queue:
        queue = self._store.find(name)
        if queue is None:
            raise QueueNotFound(name)
        return queue

    def _info(self, queue: Queue) -> QueueInfo:
        stats = self._store.stats(queue.name)
        age = None
        if stats.oldest_ms is not None:
            age = max(0.0, (self._clock.wall_ms() - stats.oldest_ms) / 1000)
        return QueueInfo(
            name=queue.name,
            fifo=queue.fifo,
            created_ms=queue.created_ms,
            ready=stats.ready,
            delayed=stats.delayed,
            held=stats.held,
            waiting=stats.waiting,
            dead=stats.dead,
            depth=stats.depth,
            oldest_age=age,
            put=stats.put,
            done=stats.done,
        )


def _state(name: str) -> ItemState:
    try:
        return ItemState(name)
    except ValueError:
        states = ", ".join(ItemState)
        raise InvalidRequest(f"state must be one of {states}, got {quoted(name)}") from None


def _shown(queue: str, item: StoredItem, serde: Serde[Value] | None) -> ItemInfo[Value]:
    try:
        value, headers = decode_body(item.body, serde)
    except Exception:  # noqa: BLE001 - shown as bytes then: that may be why it died
        value, headers = item.body, ()
    return ItemInfo(
        queue=queue,
        id=item.id,
        state=item.state,
        value=value,
        headers=headers,
        key=item.key,
        priority=item.priority,
        deliveries=item.deliveries,
        put_ms=item.put_ms,
        taken_ms=item.taken_ms,
        visible_ms=item.visible_ms,
        dead_ms=item.dead_ms,
        error=item.error,
    )
