"""Messages on their way: batches, the handles that `send` returns, and delivery failures.

Nothing here takes a lock: failed batches are noted by the thread that commits, reported by the
first that asks (a handle, or a flush), and Ctrl-C may come anywhere. A batch may be noted twice;
`told` is what counts.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from pxrs.clock import SYSTEM_CLOCK
from pxrs.codec.batches import Builder
from pxrs.errors import DeliveryFailed, OutcomeUnknown, PxrsError
from pxrs.types import Batch, LogPartition, Position, Topic


class Driver(Protocol):
    """Delivers batches: the committer."""

    def deliver(self, pending: PendingBatch, timeout: float | None) -> None:
        """Return when the batch is settled; `TimeoutError` if that takes too long."""
        ...

    def hurry(self) -> None:
        """Have all batches delivered now, by another thread; does not wait."""
        ...


class PendingBatch:
    """A batch being filled, then under way, then settled: `base` or `error` is set.

    Filled by its buffer's owner; sealed and settled by the holder of the producer's commit lock.
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
        # Whether `error` was reported, and the callbacks of those that wait for it.
        self.told = False
        self.waiters: list[None] = []

    def settle(self, base: int, error: PxrsError | None) -> None:
        """Set the outcome, once. The buffers go at once: handles may be kept for long."""
        if self.settled:
            return
        self.base = base
        self.error = error
        self.settled = True
        self.batch = None
        del self.builder, self.append
        self.call_back()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once this is settled, in the thread that settles it; at once if it is."""
        self.callbacks.append(callback)
        if self.settled:
            self.call_back()

    def wake(self, callback: Callable[[], None]) -> None:
        """Have it delivered now, and call `callback` once it is settled; does not wait.

        The callback's owner may have gone by then: only asking for the result reports a failure.
        """
        self.when_settled(callback)
        if not self.settled:
            self.driver.hurry()

    def call_back(self) -> None:
        """Call the callbacks that were not called yet. The batch is settled."""
        # Settling and registering may meet here: the thread that pops a callback calls it.
        while self.callbacks:
            try:
                callback = self.callbacks.pop()
            except IndexError:
                return
            callback()

    def offset(self, index: int) -> int:
        """The offset of the message at `index`; raises the error of the batch."""
        if self.error is not None:
            self.told = True
            # All messages of the batch share it, and its traceback would grow with each.
            raise self.error.with_traceback(None)
        return self.base + index


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A message that was handed over. `result()` returns where it was written, or raises."""

    _pending: Any
    _index: int

    def done(self) -> bool:
        """Whether the outcome is known."""
        settled: bool = self._pending.settled
        return settled

    def result(self, timeout: float | None = None) -> Position:
        """Wait until the message is durable.

        The calling thread commits by itself if no other thread does, so the timeout is checked
        between commits. Raises the error that kept the message from being appended,
        `OutcomeUnknown` if that is not known, or `TimeoutError` or `InsideTransaction` (this
        thread holds a write transaction): after these two it is still being tried.
        """
        pending: PendingBatch = self._pending
        if pending.settled:
            return self._position()
        pending.waiters.append(None)
        try:
            pending.driver.deliver(pending, timeout)
            return self._position()
        finally:
            pending.waiters.pop()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is known, at once if it is; does not wait.

        It runs in the thread that commits and holds up all others: no waiting, no exceptions.
        A failure counts as reported: the callback must ask for the `result()`.
        """
        pending: PendingBatch = self._pending

        def tell() -> None:
            pending.told = True
            callback()

        pending.wake(tell)

    def _position(self) -> Position:
        pending: PendingBatch = self._pending
        return Position(pending.topic.name, pending.partition, pending.offset(self._index))


class SentMany(Sequence[Sent]):
    """The handles of a `send_many`, in the order of its messages."""

    __slots__ = ("_batches", "_indexes")

    def __init__(self, batches: list[PendingBatch], indexes: list[int]) -> None:
        self._batches = batches
        self._indexes = indexes

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return SentMany(self._batches[at], self._indexes[at])
        return Sent(self._batches[at], self._indexes[at])

    def __iter__(self) -> Iterator[Sent]:
        return map(Sent, self._batches, self._indexes)

    def done(self) -> bool:
        """Whether all outcomes are known."""
        return all(pending.settled for pending in self._batches)

    def result(self, timeout: float | None = None) -> list[Position]:
        """Wait until all are durable, `timeout` seconds in all; returns where each was written."""
        deadline = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        with self._waited_for():
            found = []
            for pending, index in zip(self._batches, self._indexes, strict=True):
                if not pending.settled:
                    left = None if deadline is None else deadline - SYSTEM_CLOCK.monotonic()
                    pending.driver.deliver(pending, left)
                # No call for each message, except for a failed one: there may be thousands.
                offset = pending.base + index if pending.error is None else pending.offset(index)
                found.append(Position(pending.topic.name, pending.partition, offset))
            return found

    @contextmanager
    def _waited_for(self) -> Iterator[Iterable[PendingBatch]]:
        """Mark all batches as waited for; the first failure also reports the other known ones."""
        batches = dict.fromkeys(self._batches)
        for pending in batches:
            pending.waiters.append(None)
        try:
            yield batches
        finally:
            told = any(pending.told for pending in batches)
            for pending in batches:
                pending.told = pending.told or (told and pending.error is not None)
                pending.waiters.pop()


@contextmanager
def counted(sent: SentMany) -> Iterator[None]:
    """Adds to an error in the middle of a `send_many` how many messages went before."""
    try:
        yield
    except Exception as error:
        if sent:
            error.add_note(f"the first {len(sent)} messages of this send_many are sent")
        raise


LOG = logging.getLogger("pxrs.producer")
# A program that never flushes only gets log lines: its failures must not fill the memory.
_MOST = 1000


class Undelivered:
    """The failures of one producer."""

    def __init__(self) -> None:
        self._failed: deque[PendingBatch] = deque()
        self._forgot = False

    def note(self, pending: PendingBatch, error: PxrsError) -> None:
        """Note the error with which the batch is about to be settled."""
        if self._failed:
            # The frames hold the messages; to keep those of the first is enough.
            _drop_frames(error)
        if len(self._failed) >= _MOST:
            self._make_room()
        self._failed.append(pending)

    def log(self, batches: Iterable[PendingBatch]) -> None:
        """Log one line for the messages of a round that failed, unless a thread waits for them."""
        lost = [each for each in batches if _is_untold(each) and not each.waiters]
        if lost:
            LOG.error("%s: %s", _what_happened(lost), _why(lost))

    def error(self) -> PxrsError | None:
        """Return one error for all failures not yet reported; they count as reported now."""
        lost: list[PendingBatch] = []
        for _ in range(len(self._failed)):
            try:
                pending = self._failed.popleft()
            except IndexError:
                break
            if not pending.settled or (pending.waiters and not pending.told):
                # It is still being settled, or a thread that waits for it is about to get it.
                self._failed.append(pending)
            elif _is_untold(pending):
                lost.append(pending)
        if not lost:
            return None
        at_least, self._forgot = self._forgot, False
        for pending in lost:
            pending.told = True
        return _to_raise(lost, at_least=at_least)

    def _make_room(self) -> None:
        kept = [pending for pending in self._failed.copy() if not pending.told]
        if len(kept) >= _MOST:
            self._forgot = True
            kept = kept[len(kept) - _MOST // 2 :]
        self._failed = deque(kept)


def described(batches: Iterable[PendingBatch]) -> str:
    """Describes how many messages to which topics these are."""
    counts: Counter[str] = Counter()
    for pending in batches:
        counts[pending.topic.name] += pending.count
    first, *others = (f"{number:,} to {topic!r}" for topic, number in counts.items())
    noun = "message" if first.startswith("1 ") else "messages"
    return ", ".join([first.replace(" ", f" {noun} ", 1), *others])


def _is_untold(pending: PendingBatch) -> bool:
    return pending.error is not None and not pending.told


def _what_happened(lost: list[PendingBatch]) -> str:
    """Describes which messages are not in the log, and which may be."""
    unknown = [each for each in lost if isinstance(each.error, OutcomeUnknown)]
    missing = [each for each in lost if not isinstance(each.error, OutcomeUnknown)]
    parts = [f"not delivered: {described(missing)}"] if missing else []
    if unknown:
        parts.append(f"not known whether delivered: {described(unknown)}")
    return "; ".join(parts)


def _to_raise(lost: list[PendingBatch], *, at_least: bool) -> PxrsError:
    """`DeliveryFailed` if it is certain that none is in the log, else `OutcomeUnknown`."""
    sure = not any(isinstance(each.error, OutcomeUnknown) for each in lost)
    advice = "" if sure else "look for them in the topic, then "
    more = ", and others before" if at_least else ""
    error = (DeliveryFailed if sure else OutcomeUnknown)(
        f"{_what_happened(lost)}{more}; {advice}send again (the result() of each handle that "
        f"send() returned says which). What went wrong: {_why(lost)}"
    )
    error.__cause__ = _cause(lost[0])
    return error


def _cause(pending: PendingBatch) -> BaseException | None:
    error = pending.error
    return error if error is None or error.__cause__ is None else error.__cause__


def _why(lost: list[PendingBatch]) -> str:
    """The cause of the first one."""
    cause = _cause(lost[0])
    return str(cause) or type(cause).__name__


def _drop_frames(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
