"""What comes from outside while members live: messages, retention, and an operator who meddles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

from pxrs.clock import Clock
from pxrs.codec.batches import encode
from pxrs.core.routing import xxhash
from pxrs.errors import (
    GroupNotEmpty,
    GroupNotFound,
    OffsetOutOfRange,
    PartitionNotFound,
    StoreError,
    TopicNotFound,
)
from pxrs.groups.admin import Groups, Target
from pxrs.stores.api import Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.topics import Topics
from pxrs.types import Append, LogPartition, Topic, TopicPartition
from simulator.groups.judge import OUTPUT, Ledger
from simulator.groups.plan import GROUP, OPERATOR
from simulator.groups.tables import SimulatedTable

# The topic may be another one, or gone, by the time that it is asked for.
_REFUSED = (GroupNotEmpty, GroupNotFound, OffsetOutOfRange, PartitionNotFound, TopicNotFound)
_ENDS: tuple[Target, ...] = ("earliest", "latest")


class Operator:
    """Does one thing after the other, over a store that fails for him, too."""

    def __init__(
        self, stores: Stores, clock: Clock, rng: Random, say: Callable[[str], None]
    ) -> None:
        self._topics = Topics(stores.coord, stores.log, clock)
        self._groups = Groups(stores.coord, stores.log, self._topics, clock)
        self._rng = rng
        self._say = say

    def reset(self, topics: WorldTopics) -> None:
        """Set checkpoints of a topic: all to one end of it, or one anywhere."""
        topic = topics.there[self._rng.choice(sorted(topics.there))]
        partitions: list[int] | None = None
        to: Target = self._rng.choice(_ENDS)
        if self._rng.random() < 0.7:
            partitions = [self._rng.randrange(topic.partitions)]
            to = self._rng.randint(0, topics.end_of(TopicPartition(topic.name, partitions[0])))
        force = self._rng.random() < 0.9
        self._say(
            f"{OPERATOR} resets {topic.name} {'all' if partitions is None else partitions[0]} "
            f"to {to}{' by force' if force else ''}"
        )
        with self._tolerating():
            self._groups.reset(GROUP, topic.name, to=to, partitions=partitions, force=force)

    def delete(self, topics: WorldTopics) -> None:
        """Delete a topic under the group."""
        topic = self._rng.choice(sorted(topics.there))
        self._say(f"{OPERATOR} deletes {topic}")
        with self._tolerating():
            self._topics.delete(topic)

    def forget_group(self) -> None:
        """Delete the group; members that live begin a new one of the same name."""
        force = self._rng.random() < 0.9
        self._say(f"{OPERATOR} deletes the group{' by force' if force else ''}")
        with self._tolerating():
            self._groups.delete(GROUP, force=force)

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except (*_REFUSED, StoreError) as error:
            self._say(f"{OPERATOR}: {type(error).__name__}: {error}")


class WorldTopics:
    """Made, deleted and made again. Nothing fails in here."""

    def __init__(
        self, stores: MemoryStores, clock: Clock, ledger: Ledger, rng: Random, *, sources: bool
    ) -> None:
        self._log = stores.log
        # By topic id, where topics lie over tables.
        self.tables: dict[str, tuple[Topic, SimulatedTable]] = {}
        self._has_sources = sources
        self._ledger = ledger
        self._rng = rng
        self._messages = 0
        numbers = count()
        self._topics = Topics(stores.coord, stores.log, clock, lambda: f"id{next(numbers)}")
        self.there: dict[str, Topic] = {}
        # Of topics that are there or were.
        self.names: set[str] = set()
        self._topics.create(OUTPUT, 2)

    def create(self, name: str, partitions: int) -> None:
        if not self._has_sources:
            self._topics.create(name, partitions)
            self.look()
            return
        topic = self._topics._attach(name, partitions, {"kind": "simulated"}, partitioner="md5")
        self.look()
        if topic.id not in self.tables:
            self.tables[topic.id] = (topic, SimulatedTable(topic, self._ledger, self._rng))

    def look(self) -> None:
        """Which topics there are now, made or deleted by whomever and whenever."""
        there = {topic.name: topic for topic in self._topics.list() if topic.name != OUTPUT}
        for name, topic in self.there.items():
            if there.get(name) != topic:
                self._ledger.topic_gone(name)
        for name, topic in there.items():
            if self.there.get(name) != topic:
                self._ledger.add_topic(name, topic.id, topic.partitions)
        self.names |= there.keys()
        self.there = there

    def has(self, part: TopicPartition) -> bool:
        topic = self.there.get(part.topic)
        return topic is not None and part.partition < topic.partitions

    def end_of(self, part: TopicPartition) -> int:
        topic = self.there[part.topic]
        if self._has_sources:
            return self.tables[topic.id][1].end
        return self._log.bounds(topic.id)[part.partition].end

    def writers_end(self) -> None:
        """Nobody writes to tables any more."""
        for _, table in self.tables.values():
            table.end_all()

    def produce(self) -> None:
        """Some messages for one of them."""
        if not self.there:
            return
        topic = self.there[self._rng.choice(sorted(self.there))]
        for _ in range(self._rng.randint(1, 4)):
            if self._has_sources:
                self.tables[topic.id][1].write()
                continue
            keys = [b"%d" % self._rng.randrange(30) for _ in range(self._rng.randint(1, 6))]
            partition = xxhash(keys[0], topic.partitions)
            keys = [key for key in keys if xxhash(key, topic.partitions) == partition]
            self._messages += len(keys)
            batch = encode((key, b"%d" % self._messages, [], 0) for key in keys)
            self._log.append([Append(LogPartition(topic.id, partition), batch)])

    def trim(self) -> str:
        """Remove the first messages of a partition; says of which, and where it begins now."""
        topic = self.there[self._rng.choice(sorted(self.there))]
        part = TopicPartition(topic.name, self._rng.randrange(topic.partitions))
        start, end = self._log.bounds(topic.id)[part.partition]
        before = self._rng.randint(start, end)
        start = self._log.trim(LogPartition(topic.id, part.partition), before)
        self._ledger.accounts[part].log_start = start
        return f"{part.topic}/{part.partition} begins at {start} of {end} now"
