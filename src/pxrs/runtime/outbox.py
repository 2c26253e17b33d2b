"""The producer's buffer: a lane per thread and topic, filled without waiting for each other.

Every thread fills batches of its own under a lock that only the committer shares, and only for
the moment in which it takes them away. So order is kept per thread and partition, which is all
that a caller can know.
"""

from __future__ import annotations

import threading
from collections import Counter

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


class Lane:
    """One thread's open batches of one topic, a place for each partition."""

    __slots__ = (
        "full", "lock", "open", "partitions", "stale", "sticky", "thread", "topic", "unreported",
    )  # fmt: skip

    def __init__(self, topic: Topic, sticky: int) -> None:
        self.topic = topic
        self.partitions = topic.partitions
        self.lock = threading.Lock()
        self.open: list[Parcel | None] = [None] * topic.partitions
        self.full: list[Parcel] = []
        self.sticky = sticky
        self.unreported = 0
        self.stale = False
        self.thread = threading.current_thread()

    @property
    def finished(self) -> bool:
        """Whether nothing is here and nobody will put anything here."""
        return not self.thread.is_alive() and not self.full and not any(self.open)


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
        self._max_block = max_block
        self._room = threading.Condition()
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

    def open_parcel(self, lane: Lane, partition: int) -> Parcel:
        """A new batch for the partition; the one before, if any, is full. Under the lane's lock."""
        before = lane.open[partition]
        if before is not None:
            lane.full.append(before)
        now = self._clock.monotonic()
        builder = new_builder(self._batch_bytes, self._compression)
        parcel = Parcel(lane.topic, partition, builder, self._driver, now)
        lane.open[partition] = parcel
        if self.oldest is None:
            self.oldest = now
        return parcel

    def report(self, lane: Lane) -> None:
        """Count what the lane has added; blocks while the buffer is full, then raises."""
        with self._room:
            if not self._room.wait_for(lambda: self._held <= self._buffer_bytes, self._max_block):
                raise BufferFull(
                    f"{self._held} bytes wait to be written and none went for "
                    f"{self._max_block:g} s; is the store busy? This message was not kept"
                )
            with lane.lock:
                self._held += lane.unreported
                lane.unreported = 0

    def take(self) -> list[Parcel]:
        """All batches that may go into one commit, in order; they count until `release`."""
        with self._room:
            lanes = list(self._lanes)
        self.oldest = None
        taken: list[Parcel] = []
        counts: Counter[LogPartition] = Counter()
        unreported = 0
        for lane in lanes:
            with lane.lock:
                self._empty(lane, taken, counts)
                unreported += lane.unreported
                lane.unreported = 0
        with self._room:
            self._held += unreported
            self._lanes = [lane for lane in self._lanes if not lane.finished]
        return taken

    def mark_stale(self, topic: Topic) -> None:
        """The topic is gone: look it up again before anything more is put."""
        with self._room:
            for lane in self._lanes:
                if lane.topic.id == topic.id:
                    lane.stale = True

    def release(self, size: int) -> None:
        """These bytes are settled: there is room again."""
        with self._room:
            self._held -= size
            self._room.notify_all()

    def _empty(self, lane: Lane, taken: list[Parcel], counts: Counter[LogPartition]) -> None:
        waiting = lane.full
        for partition, parcel in enumerate(lane.open):
            if parcel is not None and parcel.count:
                lane.open[partition] = None
                waiting.append(parcel)
        lane.full = []
        for parcel in waiting:
            counts[parcel.where] += 1
            if counts[parcel.where] <= BATCHES_PER_COMMIT:
                taken.append(parcel)
            else:
                lane.full.append(parcel)
                self.oldest = parcel.born
