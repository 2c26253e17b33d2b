"""Messages on their way: parcels, and the handles that `send` gives out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from pxrs.errors import PxrsError
from pxrs.log.batches import Builder
from pxrs.types import Batch, LogPartition, Position, Topic


class Driver(Protocol):
    """Whoever can get a parcel delivered."""

    def deliver(self, parcel: Parcel, timeout: float | None) -> None:
        """Return when the parcel is settled; `TimeoutError` if that takes too long."""
        ...

    def hurry(self) -> None:
        """Have all parcels delivered now, by another thread; does not wait."""
        ...


class Parcel:
    """A batch being filled, then under way, then settled: `base` or `error` is set.

    Filled under its lane's lock; settled by whoever holds the producer's commit lock.
    """

    __slots__ = (
        "append", "base", "batch", "born", "builder", "callbacks", "count", "driver", "error",
        "partition", "settled", "topic", "weight", "where",
    )  # fmt: skip

    def __init__(
        self, topic: Topic, partition: int, builder: Builder, driver: Driver, born: float
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.where = LogPartition(topic.id, partition)
        self.builder = builder
        self.append = builder.append
        self.driver = driver
        self.born = born
        self.count = 0
        self.weight = 0
        self.batch: Batch | None = None
        self.base = -1
        self.error: PxrsError | None = None
        self.settled = False
        self.callbacks: list[Callable[[], None]] = []

    def settle(self, base: int, error: PxrsError | None) -> None:
        """Say how it ended. The buffers go at once: handles may be kept for long."""
        self.base = base
        self.error = error
        self.batch = None
        del self.builder, self.append
        self.settled = True
        self._call_back()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once this is settled, by whoever settles it; at once if it is."""
        self.callbacks.append(callback)
        if self.settled:
            self._call_back()

    def _call_back(self) -> None:
        # Settling and registering may meet here: each callback is called by whoever pops it.
        while self.callbacks:
            try:
                callback = self.callbacks.pop()
            except IndexError:
                return
            callback()

    def offset(self, index: int) -> int:
        """The offset of the message at `index`; raises what went wrong."""
        if self.error is not None:
            raise self.error
        return self.base + index


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A message that was handed over. `result()` says where it was written, or what happened."""

    _parcel: Any
    _index: int

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        settled: bool = self._parcel.settled
        return settled

    def result(self, timeout: float | None = None) -> Position:
        """Wait until the message is durable.

        The calling thread commits by itself if nobody else is at it. Raises what kept the
        message from being appended, or `TimeoutError`; then it may still be appended later.
        """
        parcel: Parcel = self._parcel
        if not parcel.settled:
            parcel.driver.deliver(parcel, timeout)
        return Position(parcel.topic.name, parcel.partition, parcel.offset(self._index))

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is known, at once if it is; and get on with it.

        It runs in the thread that commits and holds up all others: no waiting, no exceptions.
        """
        parcel: Parcel = self._parcel
        parcel.when_settled(callback)
        if not parcel.settled:
            parcel.driver.hurry()


class SentMany(Sequence[Sent]):
    """The handles of a `send_many`, in the order of its messages."""

    __slots__ = ("indexes", "parcels")

    def __init__(self, parcels: list[Parcel], indexes: list[int]) -> None:
        self.parcels = parcels
        self.indexes = indexes

    def __len__(self) -> int:
        return len(self.parcels)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return SentMany(self.parcels[at], self.indexes[at])
        return Sent(self.parcels[at], self.indexes[at])

    def __iter__(self) -> Iterator[Sent]:
        return map(Sent, self.parcels, self.indexes)

    def result(self, timeout: float | None = None) -> list[Position]:
        """Wait until all are durable; where each was written."""
        return [sent.result(timeout) for sent in self]
