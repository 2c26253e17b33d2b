"""The producer's buffer: a lane per thread and topic, filled without waiting for each other.

Every thread fills batches of its own, so order is kept per thread and partition, which is all
that a caller can know. A lock per message would cost as much as encoding it. Instead the owner
says `busy` before it looks at its box and takes that back when it is done with it; the committer
puts an empty box in its place, then waits until the owner is not busy. If the owner saw the old
box it was busy before the exchange, so the committer waits for it; if not, it saw the new one.
Either way nobody writes to what was taken.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from pxrs.clock import Clock
from pxrs.errors import BufferFull
from pxrs.log.batches import new_builder
from pxrs.runtime.sent import Driver, Parcel
from pxrs.types import LogPartition, Topic

# A log recognises the last five batches of a producer when they come again: a commit whose
# outcome is unknown is repeated whole, so it must not carry more of one partition.
BATCHES_PER_COMMIT = 5
# How much a thread adds before it looks at the buffer that all share.
REPORT_BYTES = 16 * 2**10
_BUSY_PAUSE = 1e-5


class Box:
    """Batches that one thread fills: the open one of each partition, and those that are full."""

    __slots__ = ("full", "open")

    def __init__(self, partitions: int) -> None:
        self.open: list[Parcel | None] = [None] * partitions
        self.full: list[Parcel] = []

    def parcels(self) -> list[Parcel]:
        """All that hold messages, each partition's in order."""
        return self.full + [parcel for parcel in self.open if parcel is not None and parcel.count]


class Lane:
    """One thread's way to one topic."""

    __slots__ = (
        "box", "busy", "hash", "left", "partitions", "stale", "sticky", "thread", "topic",
        "unreported",
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
        self.thread = threading.current_thread()
        # Taken from a box and not fitting into the commit at hand. The committer's own.
        self.left: list[Parcel] = []

    @property
    def finished(self) -> bool:
        """Whether nothing is here and nobody will put anything here."""
        return not self.thread.is_alive() and not self.left and not self.box.parcels()


class Outbox:
    """All lanes, and the room they share."""

    def __init__(
        self,
        driver: Driver,
        clock: Clock,
        *,
        batch_bytes: int,
        buffer_bytes: int,
        compression: int,
        max_block: float,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._compression = compression
        self.max_block = max_block
        self._room = threading.Condition()
        self._want_room: list[Callable[[], None]] = []
        self._lanes: list[Lane] = []
        self._held = 0
        # When the oldest message that nobody has taken away was put, roughly; None if none is.
        self.oldest: float | None = None

    def add_lane(self, lane: Lane) -> None:
        with self._room:
            self._lanes.append(lane)

    @property
    def held(self) -> int:
        """Bytes reported and not yet settled."""
        return self._held

    @property
    def has_room(self) -> bool:
        """Whether `report` would not block."""
        return self._held <= self._buffer_bytes

    def open_parcel(self, lane: Lane, box: Box, partition: int) -> Parcel:
        """A new batch for the partition; the one before, if any, is full. By a busy owner."""
        before = box.open[partition]
        if before is not None:
            box.full.append(before)
        now = self._clock.monotonic()
        builder = new_builder(self._batch_bytes, self._compression)
        parcel = Parcel(lane.topic, partition, builder, self._driver, now)
        box.open[partition] = parcel
        if self.oldest is None:
            self.oldest = now
        return parcel

    def report(self, lane: Lane) -> None:
        """Count what the lane has added; blocks while the buffer is full, then raises."""
        with self._room:
            if not self._room.wait_for(lambda: self.has_room, self.max_block):
                raise self.full()
            self._held += lane.unreported
            lane.unreported = 0

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once there is room, by whoever makes it; at once if there is."""
        with self._room:
            if not self.has_room:
                self._want_room.append(callback)
                return
        callback()

    def full(self) -> BufferFull:
        """What to raise when there was no room for `max_block` seconds."""
        return BufferFull(
            f"{self._held} bytes wait to be written and none went for "
            f"{self.max_block:g} s; is the store busy? This message was not kept"
        )

    def take(self) -> list[Parcel]:
        """All batches that may go into one commit, in order; they count until `release`."""
        self._drop_finished_lanes()
        self.oldest = None
        taken: list[Parcel] = []
        counts: Counter[LogPartition] = Counter()
        for lane in self._lanes.copy():
            waiting = lane.left + self._empty(lane)
            lane.left = []
            for parcel in waiting:
                counts[parcel.where] += 1
                fits = counts[parcel.where] <= BATCHES_PER_COMMIT
                (taken if fits else lane.left).append(parcel)
            if lane.left:
                self.oldest = lane.left[0].born
        return taken

    def release(self, size: int) -> None:
        """These bytes are settled: there is room again."""
        with self._room:
            self._held -= size
            self._room.notify_all()
            if not self.has_room:
                return
            wanted, self._want_room = self._want_room, []
        for callback in wanted:
            callback()

    def mark_stale(self, topic: Topic) -> None:
        """The topic is gone: look it up again before anything more is put."""
        with self._room:
            for lane in self._lanes:
                if lane.topic.id == topic.id:
                    lane.stale = True

    def _empty(self, lane: Lane) -> list[Parcel]:
        box, lane.box = lane.box, Box(lane.partitions)
        while lane.busy:
            time.sleep(_BUSY_PAUSE)
        return box.parcels()

    def _drop_finished_lanes(self) -> None:
        with self._room:
            finished = [lane for lane in self._lanes if lane.finished]
            self._held += sum(lane.unreported for lane in finished)
            self._lanes = [lane for lane in self._lanes if lane not in finished]
