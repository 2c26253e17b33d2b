"""Somebody at a terminal, who meddles with the group and its topics while its members live."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pxrs.clock import Clock
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
from pxrs.topics import Topics
from pxrs.types import TopicPartition
from simulator.plan import GROUP, OPERATOR
from simulator.topics import WorldTopics

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
        try:
            self._groups.reset(GROUP, topic.name, to=to, partitions=partitions, force=force)
        except (*_REFUSED, StoreError) as error:
            self._say(f"{OPERATOR}: {type(error).__name__}: {error}")

    def delete(self, topics: WorldTopics) -> None:
        """Delete a topic under the group."""
        topic = self._rng.choice(sorted(topics.there))
        self._say(f"{OPERATOR} deletes {topic}")
        try:
            self._topics.delete(topic)
        except (*_REFUSED, StoreError) as error:
            self._say(f"{OPERATOR}: {type(error).__name__}: {error}")

    def forget_group(self) -> None:
        """Delete the group; members that live begin a new one of the same name."""
        force = self._rng.random() < 0.9
        self._say(f"{OPERATOR} deletes the group{' by force' if force else ''}")
        try:
            self._groups.delete(GROUP, force=force)
        except (*_REFUSED, StoreError) as error:
            self._say(f"{OPERATOR}: {type(error).__name__}: {error}")
