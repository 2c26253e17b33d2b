"""`px.topics`: topics, and the dead letters that runs have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from pxrs import topics
from pxrs.clock import Clock
from pxrs.codec.messages import Decoder
from pxrs.config import SUFFIX, DeadLetter
from pxrs.consuming.reader import Reader
from pxrs.errors import InvalidRequest, OffsetOutOfRange, TopicNotFound
from pxrs.running.dead_letters import Death, without_origin
from pxrs.serde import Serde
from pxrs.stores.api import CoordStore, LogStore
from pxrs.types import Header, Message, Read, Topic, Value

if TYPE_CHECKING:
    from pxrs.consuming.consumer import Consumer
    from pxrs.groups.admin import Groups
    from pxrs.producing.producer import Producer


class DeadMessage(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """A message that a run has given up. `value` and `key` are bytes unless a serde read them.

    `topic`, `partition`, `offset` and `timestamp` are those of the message; `id` is where its dead
    letter is: partition and offset in the dead-letter topic. `deliveries` is how often its handler
    was called, for `group`, and `error` and `traceback` are what the handler raised at last.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    id: str
    value: Value | bytes
    headers: tuple[Header, ...]
    key: Any
    deliveries: int
    dead_ms: int
    error: str
    traceback: str
    group: str


class Topics(topics.Topics):
    """Make, find, list, describe and delete topics; look at dead letters and send them back."""

    def __init__(
        self,
        coord: CoordStore,
        log: LogStore,
        clock: Clock,
        *,
        groups: Callable[[], Groups],
        consumer: Callable[[str, str], Consumer],
        producer: Callable[[], Producer],
    ) -> None:
        super().__init__(coord, log, clock)
        self._groups = groups
        self._consumer = consumer
        self._producer = producer

    def dead(
        self,
        topic: str | DeadLetter,
        limit: int | None = 100,
        *,
        ids: Sequence[str] | None = None,
        key: str | bytes | None = None,
        error: str | None = None,
        dead_for: float | None = None,
        serde: Serde[Read] | None = None,
        key_serde: Serde | None = None,
    ) -> Sequence[DeadMessage[Read]]:
        """Messages of `topic` that a run has given up and that were not sent back, oldest first.

        A run with `on_failure=DeadLetter("failures")` writes to a topic of that name: pass the same
        `DeadLetter("failures")` as `topic`. `error` is a part of its error, `dead_for` the least
        age in seconds; `ids` are those of `DeadMessage`.
        """
        letters = self._letters(topic)
        if letters is None:
            return []
        raw_key = key.encode() if isinstance(key, str) else key
        found = (
            _shown(letter, death, Decoder(key_serde, serde))
            for letter, death in self._waiting(letters)
            if (ids is None or _id(letter) in ids)
            and (raw_key is None or letter.key == raw_key)
            and (error is None or error in death.error)
            and (dead_for is None or self._clock.wall_ms() - letter.timestamp >= dead_for * 1000)
        )
        return list(islice(found, limit))

    def redrive(self, topic: str | DeadLetter, *, to: str | None = None) -> int:
        """Send dead letters of `topic` back to where they came from, or all to `to`; how many.

        For `topic` see `dead`. Each letter is sent back once: those that were are below the
        checkpoint of the group `<dead-letter topic>.redrive`. Letters that come meanwhile are left
        for the next time.
        """
        from pxrs.running.redriving import Redriving

        if (letters := self._letters(topic)) is None:
            return 0
        redriving = Redriving(self, self._groups(), letters.name, to)
        if not redriving.is_finished():
            with (
                self._consumer(letters.name, redriving.group) as consumer,
                self._producer() as producer,
            ):
                redriving.run(consumer, producer)
        return sum(redriving.sent.values())

    def _letters(self, topic: str | DeadLetter) -> Topic | None:
        """The topic that has the dead letters; None if none was ever written."""
        if isinstance(topic, DeadLetter):
            if topic.topic is None:
                raise InvalidRequest(
                    "DeadLetter() writes the letters of each topic to a topic of their own; pass "
                    "the name of the topic that they come from, such as 'orders'"
                )
            return self.find(topic.topic)
        try:
            return self.find(DeadLetter().name_for(topic))
        except TopicNotFound:
            self.find(topic)
            if topic.endswith(SUFFIX):
                raise InvalidRequest(
                    f"{topic!r} has dead letters itself; pass the name of the topic that they come "
                    f"from, {topic.removesuffix(SUFFIX)!r}, or DeadLetter({topic!r})"
                ) from None
            return None

    def _waiting(self, letters: Topic) -> Iterator[tuple[Message, Death]]:
        """Letters that were not sent back, by their time."""
        from pxrs.running.redriving import to_redrive

        reader = Reader(letters, self._log, self._clock, Decoder())
        parts = [
            _read(reader, partition, *bounds)
            for partition, bounds in to_redrive(self, self._groups(), letters).items()
        ]
        for letter in merge(*parts, key=lambda each: each.timestamp):
            if (death := Death.of(letter)) is not None:
                yield letter, death


def _read(reader: Reader, partition: int, start: int, end: int) -> Iterator[Message]:
    """The messages of a partition in `[start, end)`, without those that retention removes."""
    while start < end:
        try:
            found = reader.read(partition, start, min(1000, end - start))
        except OffsetOutOfRange as error:
            if error.start <= start:
                raise
            start = error.start
            continue
        if not found:
            return
        yield from found
        start = found[-1].offset + 1


def _shown(letter: Message, death: Death, decoder: Decoder) -> DeadMessage:
    headers = tuple(without_origin(letter))
    with suppress(
        Exception
    ):  # a value that can't be decoded is shown as bytes: that may be why it died
        letter = decoder.deserialize(letter)
    return DeadMessage(
        topic=death.topic,
        partition=death.partition,
        offset=death.offset,
        timestamp=death.timestamp,
        id=_id(letter),
        value=letter.value,
        headers=headers,
        key=letter.key,
        deliveries=death.deliveries,
        dead_ms=letter.timestamp,
        error=death.error,
        traceback=death.traceback,
        group=death.group,
    )


def _id(letter: Message) -> str:
    return f"{letter.partition}:{letter.offset}"
