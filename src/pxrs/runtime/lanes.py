"""A thread's lanes: which topics it sends to, and whether it can do so without waiting."""

from __future__ import annotations

import threading
import time

from pxrs.core.routing import hasher, partitioner
from pxrs.errors import TopicExists
from pxrs.runtime.outbox import REPORT_BYTES, Lane, Outbox
from pxrs.runtime.topics import Topics
from pxrs.types import Topic


class Lanes:
    """The lanes of all threads, each thread seeing its own.

    Opening a lane takes two steps, so that a thread that must not wait can have the first one
    done elsewhere: `find` asks the store, `use` opens or renews the calling thread's lane.
    """

    def __init__(self, topics: Topics, outbox: Outbox, partitioner_name: str) -> None:
        partitioner(partitioner_name)
        self._topics = topics
        self._partitioner = partitioner_name
        self.outbox = outbox
        # `lanes`: by topic name. Read by `send` without a call in between.
        self.local = threading.local()

    def get(self, topic: str) -> Lane | None:
        """This thread's lane to the topic, if it has one."""
        try:
            lane: Lane = self.local.lanes[topic]
        except (AttributeError, KeyError):
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
            del self.local.lanes[found.name]
            raise TopicExists(
                f"topic {found.name!r} was made again with {found.partitions} partitions instead "
                f"of {lane.partitions}; send again"
            )
        lane.topic = found
        lane.stale = False
