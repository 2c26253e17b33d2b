"""Reading without a group: by offset, by time, and as messages come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, Literal

from pxrs.arguments import check_time, check_whole
from pxrs.clock import Clock
from pxrs.codec.messages import Decoder, cut, has_messages, messages_of
from pxrs.consuming.continuity import LastRead, goes_on, last_read
from pxrs.errors import (
    InvalidRequest,
    MessagesLost,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
    quoted,
)
from pxrs.stores.api import LogStore, Watch
from pxrs.topics import is_virtual, offset_at, require_in_range
from pxrs.types import Bounds, Fence, Fetched, LogPartition, Message, StoredBatch, Topic, Value

FETCH_BYTES = 2**20
# How many messages `follow` decodes at a time, give or take a batch.
_FOLLOW_RECORDS = 500
_CAREFUL_WAIT = 1.0
_LAST_OFFSET = 2**63 - 1

Start = int | Literal["earliest", "latest"]


class Reader(Generic[Value]):
    """Reads a topic. Thread-safe."""

    def __init__(
        self,
        topic: Topic,
        log: LogStore,
        clock: Clock,
        decoder: Decoder,
    ) -> None:
        self.topic = topic
        self._log = log
        self._clock = clock
        self._decoder = decoder
        self._where = [LogPartition(topic.id, number) for number in range(topic.partitions)]
        self._fences = [Fence(topic.name, number, 0) for number in range(topic.partitions)]
        # The batch decoded last: small reads walk through it without decoding it again.
        self._last: dict[int, tuple[int, int, list[Message]]] = {}

    def read(self, partition: int, offset: int, max_records: int = 1000) -> list[Message[Value]]:
        """Messages from `offset` on, at most `max_records`; none at the end, it does not wait.

        `OffsetOutOfRange` before the start or past the end. `DamagedBatch` where a stored
        batch fails its checksum; its `next_offset` is where to go on without it. An error of a
        serde has a note that names the message. All are raised only for the message at `offset`:
        messages before it are returned first.
        """
        where = self._partition(partition)
        check_whole("offset", offset)
        check_whole("max_records", max_records, least=1)
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
        base, end, last = self._last.get(where.partition, (0, 0, []))
        if base <= offset < end:
            self._decoder.deserialize_into(found, cut(last, offset)[:most])
            offset = end
        while len(found) < most:
            batches = self._fetch(where, offset).batches
            if not batches:
                return
            for batch in batches:
                messages = self._cut(where.partition, batch, offset)
                self._decoder.deserialize_into(found, messages[: most - len(found)])
                if len(found) == most:
                    return
                offset = batch.next

    def bounds(self, partition: int) -> Bounds:
        """The partition's first offset, and the one its next message will get."""
        self._partition(partition)
        with self._named():
            return self._log.bounds(self.topic.id)[partition]

    def offset_at(self, partition: int, timestamp: int) -> int | None:
        """Offset of the first message of `timestamp` (ms) or later; None if there is none yet."""
        where = self._partition(partition)
        check_time("timestamp", timestamp)
        with self._named():
            return offset_at(self._log, where, self._fences[partition], timestamp)

    def follow(
        self,
        partitions: Sequence[int] | None = None,
        start: Start | Mapping[int, Start] = "latest",
        timeout: float | None = None,
    ) -> Iterator[Message[Value]]:
        """Messages as they come, of all partitions unless some are named; blocks in between.

        Ends when nothing has come for `timeout` seconds, never by default. Positions are fixed
        when this is called: messages sent after that are seen. A `start` for each partition names
        the partitions too. No message is skipped in silence: it ends with `OffsetOutOfRange` where
        retention has removed the next one (follow again from its `start`), with `MessagesLost`
        where the engine lost messages, and with `DamagedBatch` and serde errors as `read`.
        """
        return Follower(self, partitions, start, timeout).messages()

    def _start(self, partition: int, start: Start) -> int:
        held = self.bounds(partition)
        if start == "earliest":
            return held.start
        if start == "latest":
            return held.end
        if not isinstance(start, int) or isinstance(start, bool):
            raise InvalidRequest(
                f"start must be an offset, 'earliest' or 'latest', got {quoted(start)}"
            )
        if not held.start <= start <= held.end:
            require_in_range(self._log, self._where[partition], self.topic.name, start)
        return start

    def _fetch(self, where: LogPartition, offset: int) -> Fetched:
        with self._named():
            return self._log.fetch(where, offset, FETCH_BYTES)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Puts the topic's name into errors of the log, which only knows its id."""
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
        messages = messages_of(batch, self._fences[partition])
        self._last[partition] = (batch.base, batch.next, messages)
        return cut(messages, offset)

    def _partition(self, partition: int) -> LogPartition:
        known = isinstance(partition, int) and not isinstance(partition, bool)
        if not known or not 0 <= partition < self.topic.partitions:
            raise PartitionNotFound(self.topic.name, partition, self.topic.partitions)
        return self._where[partition]


class Follower:
    """The iterator of `follow`: positions, and a watch on messages after them."""

    def __init__(
        self,
        reader: Reader,
        partitions: Sequence[int] | None,
        start: Start | Mapping[int, Start],
        timeout: float | None,
    ) -> None:
        self._reader = reader
        self._positions = {
            number: reader._start(number, where)
            for number, where in _starts(reader.topic, partitions, start)
        }
        # The order in which partitions are fetched: a busy one must not keep the others waiting.
        self._turns = deque(self._positions)
        self._timeout = timeout
        self._fetched: deque[tuple[int, StoredBatch]] = deque()
        self._last_read: dict[int, LastRead | None] = {}
        self._watch: Watch | None = None
        self._interrupted = False
        self._quiet_since: float | None = None

    def messages(self) -> Iterator[Message]:
        """Messages as they come."""
        try:
            while (found := self.take()) is not None:
                yield from found
        finally:
            self.interrupt()

    def take(self) -> list[Message] | None:
        """Wait for the next messages; None when nothing came for `timeout` seconds.

        Empty if it was interrupted.
        """
        if self._watch is None:
            self._watch = self._reader._log.watch(
                *(self._reader._where[number] for number in self._positions)
            )
        while not self._interrupted:
            if found := self._look():
                self._quiet_since = None
                return found
            if not self._wait():
                return None
        self.interrupt()  # again: the watch may have been made since
        return []

    def interrupt(self) -> None:
        """End a `take` that waits in another thread, and all later ones until `resume`."""
        self._interrupted = True
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def resume(self) -> None:
        """Allow `take` again. Nothing is lost in between."""
        self._interrupted = False

    def _look(self) -> list[Message]:
        """Some of the messages there are, in order per partition."""
        if not self._fetched:
            self._fetch()
        found: list[Message] = []
        while self._fetched and len(found) < _FOLLOW_RECORDS:
            number, batch = self._fetched[0]
            before = len(found)
            try:
                messages = self._reader._cut(number, batch, self._positions[number])
                self._reader._decoder.deserialize_into(found, messages)
            except Exception:
                # A damaged batch or bad message stays next; messages before it are handed out
                # first.
                if len(found) > before:
                    self._positions[number] = found[-1].offset + 1
                if found:
                    break
                raise
            self._positions[number] = batch.next
            self._last_read[number] = last_read(batch)
            self._fetched.popleft()
        return found

    def _fetch(self) -> None:
        where = self._reader._where
        for _ in range(len(self._turns)):
            number = self._turns[0]
            self._turns.rotate(-1)
            while batches := self._next_batches(where[number]):
                if any(map(has_messages, batches)):
                    self._fetched.extend((number, batch) for batch in batches)
                    return
                # A source has no rows for this partition up to there.
                self._positions[number] = batches[-1].next

    def _next_batches(self, where: LogPartition) -> list[StoredBatch]:
        position = self._positions[where.partition]
        try:
            fetched = self._reader._fetch(where, position)
        except OffsetOutOfRange as error:
            if error.offset <= error.end or is_virtual(where.topic_id):
                raise
            raise MessagesLost(
                error.topic, where.partition, position, error.start, error.end
            ) from error
        if fetched.batches and not goes_on(
            self._last_read.get(where.partition), position, fetched.batches[0]
        ):
            topic = self._reader.topic.name
            raise MessagesLost(topic, where.partition, position, fetched.start, fetched.end)
        return fetched.batches

    def _wait(self) -> bool:
        """Wait until messages may have come; false when it has been quiet for too long."""
        now = self._reader._clock.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
        wait = _CAREFUL_WAIT
        if self._timeout is not None:
            left = self._quiet_since + self._timeout - now
            if left <= 0:
                return False
            wait = min(wait, left)
        watch = self._watch
        if watch is not None:
            watch.wait(wait)
        return True


def _starts(
    topic: Topic, partitions: Sequence[int] | None, start: Start | Mapping[int, Start]
) -> list[tuple[int, Start]]:
    """Returns the start of each wanted partition."""
    if isinstance(start, Mapping):
        if partitions is not None:
            raise InvalidRequest("partitions must be named either in `start` or in `partitions`")
        if not start:
            raise InvalidRequest("start must name at least one partition, got {}")
        return list(start.items())
    if partitions is None:
        partitions = range(topic.partitions)
    elif not isinstance(partitions, Sequence) or not partitions:
        raise InvalidRequest(f"partitions must be a list of numbers, got {quoted(partitions)}")
    return [(number, start) for number in partitions]
