"""Queues that fail. See `pxrs.testing.faults`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pxrs.errors import StoreBusy
from pxrs.stores.api import ItemRestorer, QueueStore, Watch
from pxrs.testing.trouble import Faults, FaultyWatch
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

T = TypeVar("T")

# Calls that a program makes by itself. The others are also made by threads, which no signal meets.
_CALLERS = ("take", "apply")


class FaultyQueues:
    """A `QueueStore` that fails now and then."""

    def __init__(self, inner: QueueStore, faults: Faults, who: str = "") -> None:
        self._inner = inner
        self._faults = faults
        self._who = who

    def _read(self, what: str) -> None:
        self._faults.call(self._who, what, self._faults.rates.reads)

    def _write(self, what: str, unit: Holder, change: Callable[[], T]) -> T:
        faults = self._faults
        faults.call(self._who, what, faults.rates.unavailable)
        if faults.happens(faults.rates.busy):
            raise StoreBusy("somebody else is writing")
        if what in _CALLERS:
            faults.interrupt(self._who, what, change, unit)
        if faults.happens(faults.rates.unknown_lost):
            raise faults.unknown(self._who, f"{what} was lost", ())
        if faults.happens(faults.rates.unknown_late):
            faults.put_off(change, unit)
            raise faults.unknown(self._who, f"{what} is on its way", ())
        result = change()
        if faults.happens(faults.rates.unknown_applied):
            raise faults.unknown(self._who, f"the answer to {what} was lost", ())
        return result

    @property
    def limits(self) -> QueueLimits:
        return self._inner.limits

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        self._read("create")
        return self._inner.create(name, fifo=fifo)

    def find(self, name: str) -> Queue | None:
        self._read("find")
        return self._inner.find(name)

    def all(self) -> list[Queue]:
        self._read("all")
        return self._inner.all()

    def delete(self, name: str) -> None:
        self._read("delete")
        self._inner.delete(name)

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
        return self._write(
            "take",
            Holder(holder.session, unit),
            lambda: self._inner.take(
                queue, holder, count, most=most, lock_for=lock_for, unit=unit, suspects=suspects
            ),
        )

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._read("held")
        self._faults.wait_out(Holder(holder.session, unit))
        return self._inner.held(queue, holder, unit)

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        self._write("extend", holder, lambda: self._inner.extend(holder, held, lock_for))

    def apply(self, change: QueueChange) -> list[int | None]:
        unit = Holder(change.holder.session, change.unit)
        return self._write("apply", unit, lambda: self._inner.apply(change))

    def outcome(self, session: str, unit: str) -> Outcome:
        self._read("outcome")
        self._faults.wait_out(Holder(session, unit))
        return self._inner.outcome(session, unit)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        self._write("release", holder, lambda: self._inner.release(holder, releases))

    def reap(self) -> float | None:
        self._read("reap")
        return self._inner.reap()

    def stats(self, queue: str) -> QueueStats:
        self._read("stats")
        return self._inner.stats(queue)

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        self._read("peek")
        return self._inner.peek(queue, states, after=after, limit=limit)

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        self._read("drop")
        return self._inner.drop(queue, ids)

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        inner = self._inner
        assert isinstance(inner, ItemRestorer), "the inner queues can't be filled from elsewhere"
        return self._write("restore", Holder("", "restore"), lambda: inner.restore(queue, items))

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        self._read("redrive")
        return self._inner.redrive(queue, ids)

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        self._read("purge")
        return self._inner.purge(queue, states)

    def watch(self, *queues: str) -> Watch:
        self._read("watch")
        return FaultyWatch(self._inner.watch(*queues), self._faults)

    def close(self) -> None:
        self._inner.close()
