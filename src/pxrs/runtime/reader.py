"""Reading without a group: by offset, by time, and as messages come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pxrs.clock import Clock
from pxrs.errors import (
    DamagedBatch,
    InvalidRequest,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from pxrs.log.batches import decode
from pxrs.serde import Serde
from pxrs.stores.api import LogStore
from pxrs.types import Bounds, Fence, LogPartition, Message, StoredBatch, Topic

FETCH_BYTES = 2**20
_CAREFUL_WAIT = 1.0

Start = int | Literal["earliest", "latest"]


class Reader:
    """Reads a topic. Not thread-safe: one reader per thread."""

    def __init__(
        self,
        topic: Topic,
        log: LogStore,
        clock: Clock,
        key_serde: Serde | None = None,
        value_serde: Serde | None = None,
    ) -> None:
        self.topic = topic
        self._log = log
        self._clock = clock
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._where = [LogPartition(topic.id, number) for number in range(topic.partitions)]
        self._fences = [Fence(topic.name, number, 0) for number in range(topic.partitions)]
        # The batch decoded last: small reads walk through it without decoding it again.
        self._last: dict[int, tuple[int, int, list[Message]]] = {}

    def read(self, partition: int, offset: int, max_records: int = 1000) -> list[Message]:
        """Messages from `offset` on, at most `max_records`; none at the end, it does not wait.

        `OffsetOutOfRange` before the start or past the end. `DamagedBatch` where a stored
        batch fails its checksum; its `next_offset` is where to go on without it. What comes
        before that batch is returned first.
        """
        where = self._partition(partition)
        if max_records < 1:
            raise InvalidRequest(f"max_records = {max_records}; at least 1 is needed")
        found = self._from_last(partition, offset, max_records)
        while len(found) < max_records:
            batches = self._fetch(where, offset + len(found))
            if not batches:
                break
            for batch in batches:
                try:
                    found += self._cut(partition, batch, offset + len(found))
                except DamagedBatch:
                    if found:
                        return found
                    raise
                if len(found) >= max_records:
                    break
        return found[:max_records]

    def bounds(self, partition: int) -> Bounds:
        """The partition's first offset, and the one its next message will get."""
        self._partition(partition)
        try:
            return self._log.bounds(self.topic.id)[partition]
        except TopicNotFound:
            raise TopicNotFound(self.topic.name) from None

    def offset_at(self, partition: int, timestamp: int) -> int | None:
        """Offset of the first message of `timestamp` (ms) or later; None if there is none yet."""
        where = self._partition(partition)
        base = self._log.batch_at(where, timestamp)
        if base is None:
            return None
        for batch in self._fetch(where, base)[:1]:
            for message in self._decode(partition, batch):
                if message.timestamp >= timestamp:
                    return message.offset
        return None

    def follow(
        self,
        partitions: Sequence[int] | None = None,
        start: Start | Mapping[int, Start] = "latest",
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Messages as they come, of all partitions unless some are named; blocks in between.

        Ends when nothing has come for `timeout` seconds, never by default. Positions are fixed
        when this is called: what is sent after that is seen. A `start` for each partition names
        the partitions too.
        """
        if isinstance(start, Mapping):
            if partitions is not None:
                raise InvalidRequest("name the partitions either in `start` or in `partitions`")
            positions = {number: self._start(number, where) for number, where in start.items()}
        else:
            numbers = range(self.topic.partitions) if partitions is None else partitions
            positions = {number: self._start(number, start) for number in numbers}
        return self._follow(positions, timeout)

    def _follow(self, positions: dict[int, int], timeout: float | None) -> Iterator[Message]:
        watch = self._log.watch(*(self._where[number] for number in positions))
        try:
            quiet_since = self._clock.monotonic()
            while True:
                came = False
                for number in positions:
                    for batch in self._fetch(self._where[number], positions[number]):
                        came = True
                        messages = self._cut(number, batch, positions[number])
                        positions[number] = batch.next
                        yield from messages
                if came:
                    quiet_since = self._clock.monotonic()
                    continue
                wait = _CAREFUL_WAIT
                if timeout is not None:
                    left = quiet_since + timeout - self._clock.monotonic()
                    if left <= 0:
                        return
                    wait = min(wait, left)
                watch.wait(wait)
        finally:
            watch.close()

    def _start(self, partition: int, start: Start) -> int:
        held = self.bounds(partition)
        if start == "earliest":
            return held.start
        if start == "latest":
            return held.end
        if not isinstance(start, int):
            raise InvalidRequest(f"start = {start!r}; an offset, 'earliest' or 'latest'")
        if not held.start <= start <= held.end:
            raise OffsetOutOfRange(self.topic.name, partition, start, *held)
        return start

    def _fetch(self, where: LogPartition, offset: int) -> list[StoredBatch]:
        try:
            return self._log.fetch(where, offset, FETCH_BYTES).batches
        except TopicNotFound:
            raise TopicNotFound(self.topic.name) from None
        except OffsetOutOfRange as error:
            raise OffsetOutOfRange(
                self.topic.name, where.partition, offset, error.start, error.end
            ) from None

    def _cut(self, partition: int, batch: StoredBatch, offset: int) -> list[Message]:
        """The batch's messages from `offset` on."""
        messages = self._decode(partition, batch)
        self._last[partition] = (batch.base, batch.next, messages)
        return messages[offset - batch.base :] if offset > batch.base else messages

    def _from_last(self, partition: int, offset: int, most: int) -> list[Message]:
        base, end, messages = self._last.get(partition, (0, 0, []))
        return messages[offset - base : offset - base + most] if base <= offset < end else []

    def _decode(self, partition: int, batch: StoredBatch) -> list[Message]:
        messages = decode(batch, self._fences[partition])
        if self._key_serde is None and self._value_serde is None:
            return messages
        return [self._deserialize(message) for message in messages]

    def _deserialize(self, message: Message) -> Message:
        return Message(
            message.fence,
            message.offset,
            message.timestamp,
            _decoded(self._key_serde, message.key),
            _decoded(self._value_serde, message.value),
            message.headers,
        )

    def _partition(self, partition: int) -> LogPartition:
        if not isinstance(partition, int) or not 0 <= partition < self.topic.partitions:
            raise PartitionNotFound(self.topic.name, partition, self.topic.partitions)
        return self._where[partition]


def _decoded(serde: Serde | None, data: Any) -> Any:
    return data if serde is None or data is None else serde.decode(data)
