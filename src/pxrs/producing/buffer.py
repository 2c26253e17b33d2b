"""The producer's outbox: a buffer for each thread and topic, filled without a lock.

Every thread fills batches of its own, so order is kept per thread and partition, which is all
that a caller can know. A lock per message would cost as much as encoding it. Instead the owner
sets `busy` before it looks at its box and clears it when it is done with it; the committer
puts an empty box in its place, then waits until the owner is not busy. If the owner saw the old
box it was busy before the exchange, so the committer waits for it; if not, it saw the new one.
Either way no thread writes to a box that was taken.

A batch moves one way: from the buffer's box to `taking` to the outbox's `_waiting`, where it stays
until it is settled. Each move leaves it in one place at least, at every point where Python may
raise an exception from outside (Ctrl-C): after a call and at a loop's end. A thread that looks for
a batch in this order finds it, without a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from random import Random

from pxrs.clock import Clock
from pxrs.codec.batches import new_builder
from pxrs.core.retry import Backoff
from pxrs.core.routing import hasher
from pxrs.errors import BufferFull, DeliveryFailed, InsideTransaction, StoreError, TopicExists
from pxrs.producing.handles import Driver, PendingBatch
from pxrs.topics import Topics
from pxrs.types import LogPartition, Topic

# A log recognises repeats of a producer's last five batches: a commit whose outcome is unknown is
# repeated whole, so it must not carry more of one partition.
BATCHES_PER_COMMIT = 5
# Engines limit how many values a statement can carry.
MOST_BATCHES = 1000
# What a message takes in the buffer beside its bytes: empty messages need memory, too.
RECORD_BYTES = 16
# How many bytes a thread adds before it looks at the buffer that all share.
REPORT_BYTES = 20 * 2**10
_BUSY_PAUSE = 1e-5


class Box:
    """Batches that one thread fills: the open one of each partition, and those that are full."""

    __slots__ = ("full", "open")

    def __init__(self, partitions: int) -> None:
        self.open: list[PendingBatch | None] = [None] * partitions
        self.full: list[PendingBatch] = []

    def batches(self) -> list[PendingBatch]:
        """All batches with messages, in order for each partition."""
        return self.full + [
            pending for pending in self.open if pending is not None and pending.count
        ]

    def retire(self) -> None:
        """Close the open batches to further messages.

        After an interrupt a batch may hold a message that was not counted; one more would then
        get the same number.
        """
        retired = self.batches()
        self.open, self.full = [None] * len(self.open), retired


class ThreadBuffer:
    """The buffer of one thread for one topic."""

    __slots__ = (
        "box", "busy", "hash", "left_behind", "ms", "next_ms", "owner", "partitions", "spare",
        "stale", "sticky", "taking", "this_ms", "thread", "topic", "unreported",
    )  # fmt: skip

    def __init__(self, topic: Topic, hash_key: Callable[[bytes], int], sticky: int) -> None:
        self.topic = topic
        self.partitions = topic.partitions
        self.hash = hash_key
        self.box = Box(topic.partitions)
        self.busy = False
        self.sticky = sticky
        self.unreported = 0
        self.stale = False
        self.left_behind = False
        self.thread = threading.current_thread()
        self.owner = threading.get_ident()
        # For a signal handler or destructor that sends while this very thread is inside `send`.
        self.spare: ThreadBuffer | None = None
        # The box that the committer has exchanged. The committer's own.
        self.taking: Box | None = None
        self.tick(0.0)

    def tick(self, now: float) -> None:
        """Set the time in milliseconds, whose integers are too dear to make for every message."""
        self.ms = int(now * 1000)
        self.this_ms, self.next_ms = self.ms / 1000, (self.ms + 1) / 1000

    @property
    def finished(self) -> bool:
        """Whether it is empty, and no thread will add to it."""
        if self.thread.is_alive() and not self.left_behind:
            return False
        return self.taking is None and not self.box.batches()


class Outbox:
    """All buffers, and the room they share."""

    def __init__(
        self,
        clock: Clock,
        *,
        batch_bytes: int,
        buffer_bytes: int,
        compression: int,
        max_block: float,
    ) -> None:
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._compression = compression
        self.max_block = max_block
        self._room = threading.Condition()
        self._want_room: list[Callable[[], None]] = []
        self._buffers: list[ThreadBuffer] = []
        # Bytes reported and not yet settled.
        self.held = 0
        # Taken from the buffers and not settled, first come, first served. The committer's own.
        self._waiting: list[PendingBatch] = []
        # When the first batch since the last `take` was opened; None if none was.
        self.oldest: float | None = None

    def add_buffer(self, buffer: ThreadBuffer) -> None:
        with self._room:
            self._buffers.append(buffer)

    @property
    def has_room(self) -> bool:
        """Whether `report` would not block."""
        return self.held <= self._buffer_bytes

    @property
    def waiting(self) -> bool:
        """Whether there are batches that were taken from the buffers and are not settled."""
        return any(not pending.settled for pending in self._waiting)

    def unsettled(self) -> list[PendingBatch]:
        """All batches on their way, each once."""
        # In the order in which they move, from a box to those that wait: none is missed.
        found: list[PendingBatch] = []
        for buffer in self._buffers:
            found += buffer.box.batches()
            if (taking := buffer.taking) is not None:
                found += taking.batches()
        found += self._waiting
        return [pending for pending in dict.fromkeys(found) if not pending.settled]

    def open_batch(
        self, buffer: ThreadBuffer, box: Box, partition: int, driver: Driver
    ) -> PendingBatch:
        """A new batch for the partition; the one before, if any, is full. By a busy owner."""
        now = self._clock.monotonic()
        builder = new_builder(self._batch_bytes, self._compression)
        pending = PendingBatch(buffer.topic, partition, builder, driver, now)
        before = box.open[partition]
        box.open[partition] = pending
        if before is not None:
            box.full.append(before)
        if self.oldest is None:
            self.oldest = now
        return pending

    def report(self, buffer: ThreadBuffer) -> None:
        """Count what the buffer has added; blocks while the buffer is full, then raises."""
        with self._room:
            if not self._room.wait_for(lambda: self.has_room, self.max_block):
                raise self.full()
            self.held += buffer.unreported
            buffer.unreported = 0

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once there is room, in the thread that makes it; at once if there is."""
        with self._room:
            if not self.has_room:
                self._want_room.append(callback)
                return
        callback()

    def full(self) -> BufferFull:
        """Builds the error for a buffer that stayed full for `max_block` seconds."""
        return BufferFull(
            f"{self.held} bytes wait to be written and none went for "
            f"{self.max_block:g} s; is the store busy? This message was not kept"
        )

    def refuse_own_sender(self) -> None:
        """Raise if this very thread is inside `send`: it can't wait for itself to finish."""
        me = threading.get_ident()
        if any(buffer.busy and buffer.owner == me for buffer in self._buffers):
            raise InsideTransaction(
                "this thread is inside send(), and a signal handler or destructor can't wait for "
                "it to come out; let it set a flag and do this afterwards"
            )

    def await_senders(self) -> None:
        """Return when every thread that is inside `send` now has left it."""
        for buffer in self._buffers.copy():
            while buffer.busy:
                time.sleep(_BUSY_PAUSE)

    def take(self, paused: frozenset[LogPartition] = frozenset()) -> list[PendingBatch]:
        """All batches that may go into one commit, in order; they take room until `release`.

        Those of paused partitions go on waiting.
        """
        self._drop_finished_buffers()
        self.oldest = None
        for buffer in self._buffers.copy():
            self._empty(buffer)
        taken: list[PendingBatch] = []
        counts: dict[LogPartition, int] = {}
        for pending in self._waiting:
            where = pending.where
            if where in paused:
                continue
            counts[where] = count = counts.get(where, 0) + 1
            if count <= BATCHES_PER_COMMIT and not pending.settled:
                taken.append(pending)
                if len(taken) == MOST_BATCHES:
                    break
        return taken

    def unsettled_in(self, where: LogPartition) -> list[PendingBatch]:
        """Returns the unsettled batches of a partition, in order."""
        return [each for each in self._waiting if each.where == where and not each.settled]

    def only_for(self, wheres: Container[LogPartition]) -> bool:
        """Whether the unsettled batches that were taken are for these partitions only."""
        return all(each.settled or each.where in wheres for each in self._waiting)

    def release(self, batches: list[PendingBatch]) -> None:
        """Free the room of settled batches; to repeat the call changes nothing."""
        with self._room:
            for pending in batches:
                self.held -= pending.weight
                pending.weight = 0
            self._room.notify_all()
            wanted: list[Callable[[], None]] = []
            if self.has_room:
                wanted, self._want_room = self._want_room, wanted
        self._waiting = [pending for pending in self._waiting if not pending.settled]
        for callback in wanted:
            callback()

    def mark_stale(self, topic: Topic) -> None:
        """Note that the topic is gone: it is looked up again before the next message."""
        with self._room:
            for buffer in self._buffers:
                if buffer.topic.id == topic.id:
                    buffer.stale = True

    def _empty(self, buffer: ThreadBuffer) -> None:
        """Move the buffer's batches to those that wait."""
        if buffer.taking is None:
            empty = Box(buffer.partitions)
            buffer.taking, buffer.box = buffer.box, empty
        while buffer.busy:
            time.sleep(_BUSY_PAUSE)
        waiting = self._waiting + buffer.taking.batches()
        self._waiting, buffer.taking = waiting, None

    def _drop_finished_buffers(self) -> None:
        with self._room:
            buffers = [buffer for buffer in self._buffers if not buffer.finished]
            if len(buffers) == len(self._buffers):
                return
            kept = set(map(id, buffers))
            for buffer in self._buffers:
                if id(buffer) not in kept:
                    self.held += buffer.unreported
                    buffer.unreported = 0
            self._buffers = buffers


class Patience:
    """Retries the look-up of a topic, for as long as a message may wait for its append."""

    def __init__(self, topic: str, clock: Clock, seconds: float) -> None:
        self._topic = topic
        self._clock = clock
        self._seconds = seconds
        self._until = clock.monotonic() + seconds
        self._backoff = Backoff(first=0.01, longest=1.0)
        self._random = Random(time.monotonic_ns())
        self._failures = 0

    def pause(self, error: StoreError) -> float:
        """Seconds until the next try after this error; raises if no try is left."""
        if not error.retryable:
            raise error
        left = self._until - self._clock.monotonic()
        if left <= 0:
            raise DeliveryFailed(
                f"not appended, and given up: topic {self._topic!r} could not be looked up within "
                f"{self._seconds:g} s: {error}"
            ) from error
        self._failures += 1
        return min(left, self._backoff.delay(self._failures, self._random) or 0.0)


class ThreadBuffers:
    """The buffers of all threads, each thread seeing its own.

    Opening a buffer takes two steps, so that a thread that must not wait can have the first one
    done elsewhere: `find` asks the store, `use` opens or renews the calling thread's buffer.
    """

    def __init__(
        self,
        topics: Topics,
        outbox: Outbox,
        clock: Clock,
        delivery_timeout: float,
    ) -> None:
        self._topics = topics
        self._clock = clock
        self._delivery_timeout = delivery_timeout
        self.outbox = outbox
        # `buffers`: by topic name. Read by `send` without a call in between.
        self.local = threading.local()

    def get(self, topic: str) -> ThreadBuffer | None:
        """This thread's buffer to the topic, if it has one."""
        try:
            buffer: ThreadBuffer = self.local.buffers[topic]
        except (AttributeError, KeyError, TypeError):
            return None
        return buffer

    def ready(self, topic: str) -> bool:
        """Whether this thread can send a message now without waiting."""
        buffer = self.get(topic)
        return buffer is not None and not buffer.stale and buffer.unreported <= REPORT_BYTES

    def known(self, topic: str) -> bool:
        """Whether this thread has a buffer to the topic that is not known to be stale."""
        buffer = self.get(topic)
        return buffer is not None and not buffer.stale

    def find(self, topic: str) -> Topic:
        """Look the topic up, in the store."""
        return self._topics._find_writable(topic)

    def patience(self, topic: str) -> Patience:
        """The patience for a look-up of the topic."""
        return Patience(topic, self._clock, self._delivery_timeout)

    def use(self, topic: Topic) -> ThreadBuffer:
        """This thread's buffer to the topic that was found."""
        buffer = self.get(topic.name)
        if buffer is None:
            buffer = self.extra(topic)
            if not hasattr(self.local, "buffers"):
                self.local.buffers = {}
            self.local.buffers[topic.name] = buffer
        elif buffer.stale:
            self.renew(buffer, topic)
        return buffer

    def extra(self, topic: Topic) -> ThreadBuffer:
        """A buffer beside those that `get` finds."""
        hash_key = hasher(topic.partitioner, topic.partitions)
        buffer = ThreadBuffer(topic, hash_key, sticky=time.monotonic_ns() % topic.partitions)
        self.outbox.add_buffer(buffer)
        return buffer

    def renew(self, buffer: ThreadBuffer, found: Topic) -> None:
        """Go on with a topic that was deleted and made again; raises if it differs."""
        if found.partitions != buffer.partitions:
            self.local.buffers.pop(found.name, None)
            buffer.left_behind = True
            raise TopicExists(
                f"topic {found.name!r} was made again with {found.partitions} partitions instead "
                f"of {buffer.partitions}; send again"
            )
        buffer.topic = found
        buffer.stale = False
