"""The producer's buffer: a lane per thread and topic, filled without waiting for each other.

Every thread fills batches of its own, so order is kept per thread and partition, which is all
that a caller can know. A lock per message would cost as much as encoding it. Instead the owner
says `busy` before it looks at its box and takes that back when it is done with it; the committer
puts an empty box in its place, then waits until the owner is not busy. If the owner saw the old
box it was busy before the exchange, so the committer waits for it; if not, it saw the new one.
Either way nobody writes to what was taken.

A batch moves one way: from the lane's box to `taking` to the outbox's `_waiting`, where it stays
until it is settled. Each move leaves it in one place at least, at every point where Python may
raise what comes from outside (Ctrl-C): after a call and at a loop's end. Whoever looks for
a batch in this order finds it, without a lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from random import Random

from pxrs.clock import Clock
from pxrs.codec.batches import new_builder
from pxrs.core.retry import Backoff
from pxrs.core.routing import hasher
from pxrs.errors import BufferFull, DeliveryFailed, InsideTransaction, StoreError, TopicExists
from pxrs.producing.handles import Driver, PendingBatch
from pxrs.topics import Topics
from pxrs.types import LogPartition, Topic

# A log recognises the last five batches of a producer when they come again: a commit whose
# outcome is unknown is repeated whole, so it must not carry more of one partition.
BATCHES_PER_COMMIT = 5
# Engines limit how many values a statement can carry.
MOST_BATCHES = 1000
# What a message takes in the buffer beside its bytes: empty ones are not for nothing.
RECORD_BYTES = 16
# How much a thread adds before it looks at the buffer that all share.
REPORT_BYTES = 20 * 2**10
_BUSY_PAUSE = 1e-5


class Box:
    """Batches that one thread fills: the open one of each partition, and those that are full."""

    __slots__ = ("full", "open")

    def __init__(self, partitions: int) -> None:
        self.open: list[PendingBatch | None] = [None] * partitions
        self.full: list[PendingBatch] = []

    def parcels(self) -> list[PendingBatch]:
        """All that hold messages, each partition's in order."""
        return self.full + [parcel for parcel in self.open if parcel is not None and parcel.count]

    def retire(self) -> None:
        """Add nothing more to what is open.

        After an interrupt a batch may hold a message that was not counted; one more would then
        get the same number.
        """
        retired = self.parcels()
        self.open, self.full = [None] * len(self.open), retired


class Lane:
    """One thread's way to one topic."""

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
        self.spare: Lane | None = None
        # The box that the committer has exchanged. The committer's own.
        self.taking: Box | None = None
        self.tick(0.0)

    def tick(self, now: float) -> None:
        """It is another millisecond. Whole numbers of it are dear to make for every message."""
        self.ms = int(now * 1000)
        self.this_ms, self.next_ms = self.ms / 1000, (self.ms + 1) / 1000

    @property
    def finished(self) -> bool:
        """Whether nothing is here and nobody will put anything here."""
        if self.thread.is_alive() and not self.left_behind:
            return False
        return self.taking is None and not self.box.parcels()


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
        # Taken from the lanes and not settled, first come, first served. The committer's own.
        self._waiting: list[PendingBatch] = []
        # When the first batch since the last `take` was opened; None if none was.
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

    @property
    def waiting(self) -> bool:
        """Whether something was taken from the lanes and is not settled."""
        return any(not parcel.settled for parcel in self._waiting)

    def holds(self, before: float) -> bool:
        """Whether anything put up to then is not settled."""
        return any(
            parcel.born <= before and not parcel.settled for parcel in self._from_box_to_waiting()
        )

    def unsettled(self) -> list[PendingBatch]:
        """All that is on its way, each once."""
        found = dict.fromkeys(self._from_box_to_waiting())
        return [parcel for parcel in found if not parcel.settled]

    def _from_box_to_waiting(self) -> Iterator[PendingBatch]:
        for lane in self._lanes:
            yield from lane.box.parcels()
            if (taking := lane.taking) is not None:
                yield from taking.parcels()
        yield from self._waiting

    def open_parcel(self, lane: Lane, box: Box, partition: int) -> PendingBatch:
        """A new batch for the partition; the one before, if any, is full. By a busy owner."""
        now = self._clock.monotonic()
        builder = new_builder(self._batch_bytes, self._compression)
        parcel = PendingBatch(lane.topic, partition, builder, self._driver, now)
        before = box.open[partition]
        box.open[partition] = parcel
        if before is not None:
            box.full.append(before)
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

    def refuse_own_sender(self) -> None:
        """Raise if this very thread is inside `send`: nobody can wait for itself to finish."""
        me = threading.get_ident()
        if any(lane.busy and lane.owner == me for lane in self._lanes):
            raise InsideTransaction(
                "this thread is inside send(), and a signal handler or destructor can't wait for "
                "it to come out; let it set a flag and do this afterwards"
            )

    def await_senders(self) -> None:
        """Return when everybody who is inside `send` now has come out."""
        for lane in self._lanes.copy():
            while lane.busy:
                time.sleep(_BUSY_PAUSE)

    def take(self, paused: frozenset[LogPartition] = frozenset()) -> list[PendingBatch]:
        """All batches that may go into one commit, in order; they count until `release`.

        Those of paused partitions wait on.
        """
        self._drop_finished_lanes()
        self.oldest = None
        for lane in self._lanes.copy():
            self._empty(lane)
        taken: list[PendingBatch] = []
        counts: Counter[LogPartition] = Counter()
        for parcel in self._waiting:
            if parcel.where in paused:
                continue
            counts[parcel.where] += 1
            if counts[parcel.where] <= BATCHES_PER_COMMIT and not parcel.settled:
                taken.append(parcel)
                if len(taken) == MOST_BATCHES:
                    break
        return taken

    def unsettled_in(self, where: LogPartition) -> list[PendingBatch]:
        """What was taken for a partition and is not settled, in order."""
        return [each for each in self._waiting if each.where == where and not each.settled]

    def only_for(self, wheres: Container[LogPartition]) -> bool:
        """Whether what was taken and is not settled is for these partitions only."""
        return all(each.settled or each.where in wheres for each in self._waiting)

    def release(self, parcels: list[PendingBatch]) -> None:
        """These are settled: there is room again. Once more changes nothing."""
        with self._room:
            for parcel in parcels:
                self._held -= parcel.weight
                parcel.weight = 0
            self._room.notify_all()
            wanted: list[Callable[[], None]] = []
            if self.has_room:
                wanted, self._want_room = self._want_room, wanted
        self._waiting = [parcel for parcel in self._waiting if not parcel.settled]
        for callback in wanted:
            callback()

    def mark_stale(self, topic: Topic) -> None:
        """The topic is gone: look it up again before anything more is put."""
        with self._room:
            for lane in self._lanes:
                if lane.topic.id == topic.id:
                    lane.stale = True

    def _empty(self, lane: Lane) -> None:
        """Move what the lane holds to those that wait."""
        if lane.taking is None:
            empty = Box(lane.partitions)
            lane.taking, lane.box = lane.box, empty
        while lane.busy:
            time.sleep(_BUSY_PAUSE)
        waiting = self._waiting + lane.taking.parcels()
        self._waiting, lane.taking = waiting, None

    def _drop_finished_lanes(self) -> None:
        with self._room:
            lanes = [lane for lane in self._lanes if not lane.finished]
            if len(lanes) == len(self._lanes):
                return
            kept = set(map(id, lanes))
            for lane in self._lanes:
                if id(lane) not in kept:
                    self._held += lane.unreported
                    lane.unreported = 0
            self._lanes = lanes


class Patience:
    """How long a message waits for its topic to be looked up: as long as it may for its append."""

    def __init__(self, topic: str, clock: Clock, seconds: float) -> None:
        self._topic = topic
        self._clock = clock
        self._seconds = seconds
        self._until = clock.monotonic() + seconds
        self._backoff = Backoff(first=0.01, longest=1.0)
        self._random = Random(time.monotonic_ns())
        self._failures = 0

    def pause(self, error: StoreError) -> float:
        """Seconds until the next try after this error. Raises if there is none."""
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


class Lanes:
    """The lanes of all threads, each thread seeing its own.

    Opening a lane takes two steps, so that a thread that must not wait can have the first one
    done elsewhere: `find` asks the store, `use` opens or renews the calling thread's lane.
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
        # `lanes`: by topic name. Read by `send` without a call in between.
        self.local = threading.local()

    def get(self, topic: str) -> Lane | None:
        """This thread's lane to the topic, if it has one."""
        try:
            lane: Lane = self.local.lanes[topic]
        except (AttributeError, KeyError, TypeError):
            return None
        return lane

    def ready(self, topic: str) -> bool:
        """Whether this thread can send a message now without waiting for anything."""
        lane = self.get(topic)
        return lane is not None and not lane.stale and lane.unreported <= REPORT_BYTES

    def known(self, topic: str) -> bool:
        """Whether this thread has a lane to the topic as it is now, as far as anybody knows."""
        lane = self.get(topic)
        return lane is not None and not lane.stale

    def find(self, topic: str) -> Topic:
        """Look the topic up, in the store."""
        return self._topics.find(topic)

    def patience(self, topic: str) -> Patience:
        """For one who is about to look the topic up."""
        return Patience(topic, self._clock, self._delivery_timeout)

    def use(self, topic: Topic) -> Lane:
        """This thread's lane to the topic that was found."""
        lane = self.get(topic.name)
        if lane is None:
            lane = self.extra(topic)
            if not hasattr(self.local, "lanes"):
                self.local.lanes = {}
            self.local.lanes[topic.name] = lane
        elif lane.stale:
            self.renew(lane, topic)
        return lane

    def extra(self, topic: Topic) -> Lane:
        """A lane beside those that `get` finds."""
        hash_key = hasher(topic.partitioner, topic.partitions)
        lane = Lane(topic, hash_key, sticky=time.monotonic_ns() % topic.partitions)
        self.outbox.add_lane(lane)
        return lane

    def renew(self, lane: Lane, found: Topic) -> None:
        """The topic was deleted under us. Made again just so, it goes on; else it is an error."""
        if found.partitions != lane.partitions:
            self.local.lanes.pop(found.name, None)
            lane.left_behind = True
            raise TopicExists(
                f"topic {found.name!r} was made again with {found.partitions} partitions instead "
                f"of {lane.partitions}; send again"
            )
        lane.topic = found
        lane.stale = False
