"""Messages on their way: parcels, and the handles that `send` gives out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from pxrs.clock import SYSTEM_CLOCK
from pxrs.codec.batches import Builder
from pxrs.errors import PxrsError
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

    Filled by its lane's owner; sealed and settled by whoever holds the producer's commit lock.
    """

    __slots__ = (
        "append", "base", "batch", "born", "builder", "callbacks", "count", "driver", "error",
        "partition", "settled", "told", "topic", "unsure", "waiters", "weight", "where",
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
        # Whether a try may have appended it, or may still do so, as far as is known.
        self.unsure = False
        self.base = -1
        self.error: PxrsError | None = None
        self.settled = False
        self.callbacks: list[Callable[[], None]] = []
        # Whether somebody was told of `error`, and one entry for each who waits to be.
        self.told = False
        self.waiters: list[None] = []

    def settle(self, base: int, error: PxrsError | None) -> None:
        """Say how it ended, once. The buffers go at once: handles may be kept for long."""
        if self.settled:
            return
        self.base = base
        self.error = error
        self.settled = True
        self.batch = None
        del self.builder, self.append
        self.call_back()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once this is settled, by whoever settles it; at once if it is."""
        self.callbacks.append(callback)
        if self.settled:
            self.call_back()

    def call_back(self) -> None:
        """Tell those who wait and were not told yet. It is settled."""
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
            self.told = True
            # All messages of the batch share it, and its traceback would grow with each.
            raise self.error.with_traceback(None)
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

        The calling thread commits by itself if nobody else is at it, so the timeout is looked
        at between commits. Raises what kept the message from being appended, `OutcomeUnknown`
        if nobody can tell, or `TimeoutError` or `InsideTransaction` (this thread holds a write
        transaction): after these two it is still being tried.
        """
        parcel: Parcel = self._parcel
        if parcel.settled:
            return self._position()
        parcel.waiters.append(None)
        try:
            parcel.driver.deliver(parcel, timeout)
            return self._position()
        finally:
            parcel.waiters.pop()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is known, at once if it is; and get on with it.

        It runs in the thread that commits and holds up all others: no waiting, no exceptions.
        A failure counts as told: it is the callback's to ask for the `result()`.
        """
        parcel: Parcel = self._parcel

        def tell() -> None:
            parcel.told = True
            callback()

        self._wake(tell)

    def _wake(self, callback: Callable[[], None]) -> None:
        """`when_done` for who may have gone by then: told is only who asks for the result."""
        parcel: Parcel = self._parcel
        parcel.when_settled(callback)
        if not parcel.settled:
            parcel.driver.hurry()

    def _position(self) -> Position:
        parcel: Parcel = self._parcel
        return Position(parcel.topic.name, parcel.partition, parcel.offset(self._index))


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
        """Wait until all are durable, `timeout` seconds in all; where each was written."""
        with self._waited_for():
            if timeout is None:
                return [sent.result() for sent in self]
            deadline = SYSTEM_CLOCK.monotonic() + timeout
            return [sent.result(deadline - SYSTEM_CLOCK.monotonic()) for sent in self]

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Somebody waits for all of them; the first failure tells of the others that are known."""
        parcels = dict.fromkeys(self.parcels)
        for parcel in parcels:
            parcel.waiters.append(None)
        try:
            yield
        finally:
            told = any(parcel.told for parcel in parcels)
            for parcel in parcels:
                parcel.told = parcel.told or (told and parcel.error is not None)
                parcel.waiters.pop()


@contextmanager
def counted(sent: SentMany) -> Iterator[None]:
    """What is raised in the middle of a `send_many` says how many messages went before."""
    try:
        yield
    except Exception as error:
        if sent:
            error.add_note(f"the first {len(sent)} messages of this send_many are sent")
        raise
