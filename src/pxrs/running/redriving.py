"""Dead letters of a topic, sent back to where they came from.

How far they were sent back is a checkpoint like any other: that of the group `<topic>.redrive`.
A letter counts once its message is durable, so a crash sends a few of them twice, and loses none.
Redriving ends where the letters ended when it began: a message that fails again is a letter again,
and would be sent back for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pxrs.consuming.consumer import Consumer
from pxrs.errors import GroupNotFound, InvalidRequest, TopicNotFound
from pxrs.groups.admin import Groups
from pxrs.producing.producer import Producer
from pxrs.running.dead_letters import Death, without_origin
from pxrs.topics import Topics
from pxrs.types import Bounds, Message, Topic, TopicPartition

# How often to check whether another process that sends back the same letters has finished.
_LOOK_EVERY = 0.5


class _Place(NamedTuple):
    topic: str
    partition: int | None


def redrive_group(letters: str) -> str:
    """The group whose checkpoint records which letters of this topic were sent back."""
    return f"{letters}.redrive"


def to_redrive(topics: Topics, groups: Groups, letters: Topic) -> dict[int, Bounds]:
    """The range of letters in each partition that were not sent back."""
    try:
        known = groups.describe(redrive_group(letters.name), lag_seconds=False).partitions
    except GroupNotFound:
        known = ()
    reached = {each.partition: each.checkpoint or 0 for each in known if each.topic == letters.name}
    return {
        number: Bounds(max(start, reached.get(number, 0)), end)
        for number, (start, end) in topics.bounds(letters).items()
    }


class Redriving:
    """Sends the letters of a topic back, all to topic `to` if it is given."""

    def __init__(self, topics: Topics, groups: Groups, topic: str, to: str | None) -> None:
        if to == topic:
            raise InvalidRequest(f"the letters of {topic!r} can't be sent to itself")
        self.group = redrive_group(topic)
        self.sent: Counter[str] = Counter()
        self._topics = topics
        self._groups = groups
        self._letters = topics.find(topic)
        self._to = None if to is None else topics.find(to).name
        self._known: dict[str, Topic] = {}
        bounds = topics.bounds(self._letters)
        self._ends = {number: end for number, (start, end) in bounds.items() if start < end}

    def is_finished(self) -> bool:
        """Whether all letters from the beginning were sent back, by any process, or are gone."""
        if not self._ends:
            return True
        name = self._letters.name
        if self._topics.find(name) != self._letters:
            raise TopicNotFound(name)
        left = to_redrive(self._topics, self._groups, self._letters)
        return all(left[number].start >= end for number, end in self._ends.items())

    def run(self, letters: Consumer, producer: Producer) -> None:
        """Send until it is finished. The consumer must not commit by itself."""
        while not self.is_finished():
            found = letters.poll(timeout=_LOOK_EVERY)
            meant = [each for each in found if each.offset < self._ends.get(each.partition, 0)]
            self._send(meant, producer)
            for last in {each.partition: each for each in meant}.values():
                letters.commit(last)
            for last in {each.partition: each for each in found}.values():
                if last.offset + 1 >= self._ends.get(last.partition, 0):
                    letters.pause(TopicPartition(last.topic, last.partition))

    def _send(self, letters: Sequence[Message], producer: Producer) -> None:
        """Send all of them, or none if one of them has nowhere to go."""
        places = [self._place(letter) for letter in letters]
        sent = [
            producer.send(
                place.topic,
                letter.value,
                letter.key,
                partition=place.partition,
                headers=without_origin(letter),
            )
            for letter, place in zip(letters, places, strict=True)
        ]
        for place, each in zip(places, sent, strict=True):
            each.result()
            self.sent[place.topic] += 1

    def _place(self, letter: Message) -> _Place:
        """Returns the partition it came from; if that is gone, its key decides."""
        if self._to is not None:
            return _Place(self._to, None)
        origin = Death.of(letter)
        if origin is None:
            raise InvalidRequest(
                f"offset {letter.offset} of {letter.topic!r} partition {letter.partition} has no "
                "origin in its headers: it is no dead letter. Name the topic to send all of them to"
            )
        if origin.topic not in self._known:
            self._known[origin.topic] = self._topics.find(origin.topic)
        there = origin.partition < self._known[origin.topic].partitions
        return _Place(origin.topic, origin.partition if there else None)
