"""A thread's lanes: which topics it sends to, and whether it can do so without waiting."""

from __future__ import annotations

import threading
import time
from random import Random

from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.core.routing import hasher, partitioner
from pxrs.errors import DeliveryFailed, StoreError, TopicExists
from pxrs.producing.buffer import REPORT_BYTES, Lane, Outbox
from pxrs.topics import Topics
from pxrs.types import Topic


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
        partitioner_name: str,
        delivery_timeout: float,
    ) -> None:
        partitioner(partitioner_name)
        self._topics = topics
        self._clock = clock
        self._delivery_timeout = delivery_timeout
        self._partitioner = partitioner_name
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
        hash_key = hasher(self._partitioner, topic.partitions)
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
