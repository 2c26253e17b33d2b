"""Reading without a group: by offset, by time, and as messages come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pxrs.clock import Clock
from pxrs.errors import InvalidRequest, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from pxrs.log.batches import MAX_TIMESTAMP, decode
from pxrs.serde import Serde
from pxrs.stores.api import LogStore
from pxrs.types import Bounds, Fence, LogPartition, Message, StoredBatch, Topic

FETCH_BYTES = 2**20
_CAREFUL_WAIT = 1.0
_LAST_OFFSET = 2**63 - 1

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
        self._serdes = key_serde is not None or value_serde is not None
        self._where = [LogPartition(topic.id, number) for number in range(topic.partitions)]
        self._fences = [Fence(topic.name, number, 0) for number in range(topic.partitions)]
        # The batch decoded last: small reads walk through it without decoding it again.
        self._last: dict[int, tuple[int, int, list[Message]]] = {}

    def read(self, partition: int, offset: int, max_records: int = 1000) -> list[Message]:
        """Messages from `offset` on, at most `max_records`; none at the end, it does not wait.

        `OffsetOutOfRange` before the start or past the end. `DamagedBatch` where a stored
        batch fails its checksum; its `next_offset` is where to go on without it. What a serde
        raises comes with a note that names the message. All are raised only when they stand
        at `offset`: what lies before them is returned first.
        """
        where = self._partition(partition)
        _whole("offset", offset, least=None)
        _whole("max_records", max_records, least=1)
        if not 0 <= offset <= _LAST_OFFSET:
            raise OffsetOutOfRange(self.topic.name, partition, offset, *self.bounds(partition))
        found: list[Message] = []
        try:
            self._collect(where, offset, max_records, found)
        except Exception:
            if not found:
                raise
        return found

    def _collect(self, where: LogPartition, offset: int, most: int, found: list[Message]) -> None:
        self._add(found, self._from_last(where.partition, offset, most))
        while len(found) < most:
            batches = self._fetch(where, offset + len(found))
            if not batches:
                return
            for batch in batches:
                messages = self._cut(where.partition, batch, offset + len(found))
                self._add(found, messages[: most - len(found)])
                if len(found) == most:
                    return

    def _add(self, found: list[Message], messages: list[Message]) -> None:
        if not self._serdes:
            found += messages
            return
        for message in messages:
            found.append(self._deserialize(message))

    def bounds(self, partition: int) -> Bounds:
        """The partition's first offset, and the one its next message will get."""
        self._partition(partition)
        with self._named():
            return self._log.bounds(self.topic.id)[partition]

    def offset_at(self, partition: int, timestamp: int) -> int | None:
        """Offset of the first message of `timestamp` (ms) or later; None if there is none yet."""
        where = self._partition(partition)
        _whole("timestamp", timestamp, least=None)
        while True:
            with self._named():
                base = self._log.batch_at(where, max(0, min(timestamp, MAX_TIMESTAMP)))
            if base is None or timestamp > MAX_TIMESTAMP:
                return None
            try:
                batch = self._fetch(where, base, max_bytes=1)[0]
            except OffsetOutOfRange:
                # Retention has just removed it: look again.
                continue
            return next(
                message.offset
                for message in decode(batch, self._fences[partition])
                if message.timestamp >= timestamp
            )

    def follow(
        self,
        partitions: Sequence[int] | None = None,
        start: Start = "latest",
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Messages as they come, of all partitions unless some are named; blocks in between.

        Ends when nothing has come for `timeout` seconds, never by default. Positions are fixed
        when this is called: what is sent after that is seen. Nothing is passed over in silence:
        where retention has removed what comes next it ends with `OffsetOutOfRange`, whose
        `start` is where to follow again, and with `DamagedBatch` and serde errors as `read`.
        """
        numbers: Sequence[int] = range(self.topic.partitions)
        if partitions is not None:
            if not isinstance(partitions, Sequence) or not partitions:
                raise InvalidRequest(f"partitions = {partitions!r}; a list of numbers is needed")
            numbers = partitions
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
                        for message in messages:
                            yield self._deserialize(message) if self._serdes else message
                        positions[number] = batch.next
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
        if not isinstance(start, int) or isinstance(start, bool):
            raise InvalidRequest(f"start = {start!r}; an offset, 'earliest' or 'latest'")
        if not held.start <= start <= held.end:
            raise OffsetOutOfRange(self.topic.name, partition, start, *held)
        return start

    def _fetch(
        self, where: LogPartition, offset: int, max_bytes: int = FETCH_BYTES
    ) -> list[StoredBatch]:
        with self._named():
            return self._log.fetch(where, offset, max_bytes).batches

    @contextmanager
    def _named(self) -> Iterator[None]:
        """The log knows topics by their id only; people know them by their name."""
        try:
            yield
        except TopicNotFound:
            raise TopicNotFound(self.topic.name) from None
        except OffsetOutOfRange as error:
            raise OffsetOutOfRange(
                self.topic.name, error.partition, error.offset, error.start, error.end
            ) from None

    def _cut(self, partition: int, batch: StoredBatch, offset: int) -> list[Message]:
        """The batch's messages from `offset` on."""
        messages = decode(batch, self._fences[partition])
        self._last[partition] = (batch.base, batch.next, messages)
        return messages[offset - batch.base :] if offset > batch.base else messages

    def _from_last(self, partition: int, offset: int, most: int) -> list[Message]:
        base, end, messages = self._last.get(partition, (0, 0, []))
        return messages[offset - base : offset - base + most] if base <= offset < end else []

    def _deserialize(self, message: Message) -> Message:
        try:
            return Message(
                message.fence,
                message.offset,
                message.timestamp,
                _decoded(self._key_serde, message.key),
                _decoded(self._value_serde, message.value),
                message.headers,
            )
        except Exception as error:
            error.add_note(
                f"while decoding offset {message.offset} of {message.topic!r} partition "
                f"{message.partition}; to go on without it, read from offset {message.offset + 1}"
            )
            raise

    def _partition(self, partition: int) -> LogPartition:
        known = isinstance(partition, int) and not isinstance(partition, bool)
        if not known or not 0 <= partition < self.topic.partitions:
            raise PartitionNotFound(self.topic.name, partition, self.topic.partitions)
        return self._where[partition]


def _decoded(serde: Serde | None, data: Any) -> Any:
    return data if serde is None or data is None else serde.decode(data)


def _whole(name: str, value: object, least: int | None) -> None:
    """Refuse what is not a whole number, such as a bool, or less than the least."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} = {value!r}; a whole number is needed")
    if least is not None and value < least:
        raise InvalidRequest(f"{name} = {value}; at least {least} is needed")
