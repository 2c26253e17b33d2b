"""A Kafka topic as a source: each of its partitions is a stream.

It is read without a Kafka group: pxrs has the checkpoints. One client reads all wanted streams, in
a thread of its own, into bounded buffers from which reads are answered. A read from another
offset moves the stream there; one reader does so at a time.

Tests run on the mock cluster of librdkafka, which speaks the protocol and is not Kafka. It knows no
times, hides no aborted transactions and keeps five megabytes: none of these was tested.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import (
    Closed,
    ConfigError,
    InvalidRequest,
    MissingExtra,
    OffsetOutOfRange,
    PxrsError,
    SourceChanged,
    StoreUnavailable,
    quoted,
)
from pxrs.forks import Origin
from pxrs.redaction import remember
from pxrs.sources.api import SourceRead
from pxrs.sources.rows import READ_BYTES, first_within
from pxrs.stores.api import Watch
from pxrs.stores.wakeups import Wakeups
from pxrs.types import Bounds, Row
from pxrs.urls import is_secret

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

_LOG = logging.getLogger(__name__)
# Settings that correctness depends on; users can't change them.
_FIXED = {
    # The client requires one; nothing is ever committed in its name.
    "group.id": "pxrs-source",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
}
_FETCH_BYTES, _FETCH_MS = 2**20, 100
_BUFFER_ROWS = 10_000
# Seconds to wait for an answer of the brokers, and for rows that are known to be there.
_ANSWER, _PATIENCE = 10.0, 30.0
# Seconds that the thread waits for messages: after something happened, and when it is quiet.
_SOON, _QUIET = 0.01, 0.2
# Seconds between two looks for new partitions.
_LOOK = 30.0
_MOST_AT_ONCE = 500


@dataclasses.dataclass(frozen=True)
class KafkaTopic:
    """A Kafka topic. `partitions=` of the virtual topic must be a multiple of its partitions.

    Each of Kafka's partitions is split by the hash of the key, so that more members than there are
    partitions work at a time; offsets are Kafka's. Transactions that are not committed are not
    read, and the markers of committed ones leave gaps.

    The number of partitions is recorded: if it grows, `SourceChanged` stops the readers, as keys
    would move. `config` has settings of librdkafka, such as `security.protocol` and
    `sasl.password`. It is not recorded: each process that needs it attaches the topic. It needs
    `pip install 'pxrs[kafka]'`.
    """

    bootstrap: str
    topic: str
    streams: int | None = None
    config: Mapping[str, Any] | None = None

    partitioner = "xxhash"

    def __post_init__(self) -> None:
        for name in ("bootstrap", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{name} must be text, got {quoted(value)}")
        fixed = sorted((_FIXED.keys() | {"bootstrap.servers"}) & set(self.config or ()))
        if fixed:
            raise InvalidRequest(f"config must leave {', '.join(fixed)} to pxrs")

    def settings(self) -> dict[str, Any]:
        """The settings that are kept with the virtual topic; without `config`."""
        kept = {"kind": "kafka_topic", "bootstrap": self.bootstrap, "topic": self.topic}
        return kept if self.streams is None else {**kept, "streams": self.streams}

    def __repr__(self) -> str:
        return f"KafkaTopic({self.settings()})"

    def open(self, store_url: str) -> OpenKafkaTopic:
        """Connect, and read the number of partitions."""
        remember(
            *(
                str(value)
                for name, value in (self.config or {}).items()
                if is_secret(name) or name.endswith(".pem") or "jaas" in name
            )
        )
        try:
            import confluent_kafka
        except ImportError as error:
            raise MissingExtra("KafkaTopic", "kafka") from error
        settings = {
            # A reader that moves a stream waits until a fetch under way has ended.
            "fetch.wait.max.ms": _FETCH_MS,
            "fetch.message.max.bytes": _FETCH_BYTES,
            "queued.max.messages.kbytes": READ_BYTES // 2**10,
            **(self.config or {}),
            **_FIXED,
            "bootstrap.servers": self.bootstrap,
        }
        consumers: list[Consumer] = []
        try:
            # Queries have connections of their own: brokers answer in turn, and the answer to a
            # fetch takes its time.
            consumers += [confluent_kafka.Consumer(settings, logger=_LOG) for _ in range(2)]
            return OpenKafkaTopic(self, *consumers)
        except confluent_kafka.KafkaException as error:
            raise ConfigError(f"config is refused: {error}") from error
        except BaseException:
            for consumer in consumers:
                consumer.close()
            raise


class OpenKafkaTopic:
    """See `Source`."""

    def __init__(self, topic: KafkaTopic, consumer: Consumer, asking: Consumer) -> None:
        self.topic = topic
        self._consumer = consumer
        self._asking = asking
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._wakeups: Wakeups[None] = Wakeups(self._lock)
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._looked = float("-inf")
        self.streams = topic.streams or self._partitions()
        self._check_partitions()
        self._states = [_Stream() for _ in range(self.streams)]
        self._thread: threading.Thread | None = None

    @property
    def found(self) -> dict[str, Any]:
        """Settings that are known only now that it is open, to be recorded with the others."""
        return {"streams": self.streams}

    def _partitions(self) -> int:
        with self._translated():
            found = self._asking.list_topics(self.topic.topic, timeout=_ANSWER)
        metadata = found.topics.get(self.topic.topic)
        if metadata is None or metadata.error is not None or not metadata.partitions:
            raise ConfigError(f"there is no topic {self.topic.topic!r} at {self.topic.bootstrap}")
        return len(metadata.partitions)

    def _check_partitions(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now - self._looked < _LOOK:
            return
        partitions = self._partitions()
        if partitions != self.streams:
            raise SourceChanged(
                f"topic {self.topic.topic!r} had {self.streams} partitions when it was attached, "
                f"and has {partitions} now, which moves keys between them. Let the groups finish "
                "what was written before, detach the topic, and attach it under another name"
            )
        self._looked = now

    # Reading

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        self._refuse()
        state = self._states[stream]
        with state.turn:
            with self._lock:
                found = state.read(offset, limit, until)
            if found is not None and (found.next > offset or (until or offset + 1) <= offset):
                return found
            start, end = self.bounds(stream)
            if offset < start:
                raise OffsetOutOfRange(self.topic.topic, stream, offset, start, end)
            if offset > end:
                return SourceRead([], offset)
            with self._lock:
                if found is None:
                    self._go_to(state, offset)
                if offset == end:
                    return SourceRead([], offset)
                return self._await(state, stream, offset, limit, until)

    def _go_to(self, state: _Stream, offset: int) -> None:
        state.go_to(offset)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pxrs-kafka-topic", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _await(
        self, state: _Stream, stream: int, offset: int, limit: int, until: int | None
    ) -> SourceRead:
        """Waits for rows that are known to be there."""
        deadline = SYSTEM_CLOCK.monotonic() + _PATIENCE
        while True:
            self._refuse()
            if state.error is not None:
                error, state.error, state.start = state.error, None, None
                raise error
            found = state.read(offset, limit, until)
            if found is not None and found.next > offset:
                return found
            left = deadline - SYSTEM_CLOCK.monotonic()
            if left <= 0:
                raise StoreUnavailable(
                    f"partition {stream} of {self.topic.topic!r} has more than offset {offset}, "
                    f"and nothing came for {_PATIENCE:.0f} s"
                )
            self._changed.wait(left)

    def bounds(self, stream: int) -> Bounds:
        """The end is that of committed transactions: open ones come later."""
        from confluent_kafka import TopicPartition

        self._refuse()
        with self._translated():
            self._check_partitions()
            place = TopicPartition(self.topic.topic, stream)
            with self._lock:
                read = self._states[stream].next
            start, end = self._asking.get_watermark_offsets(place, timeout=_ANSWER)
        if end < read:
            # Asked before and answered after: the end can't be an older one.
            raise SourceChanged(
                f"partition {stream} of {self.topic.topic!r} was read up to offset {read}, and "
                f"ends at {end} now: the topic was made anew, or has lost its last messages. "
                "Messages with offsets up to there would never be delivered. Detach the topic "
                "and attach it under another name, or stop its members and reset the groups to "
                "where they are to go on"
            )
        with self._lock:
            # A fetch may have seen more than the answer that came after it.
            return Bounds(max(start, 0), max(end, self._states[stream].next))

    def final(self, stream: int) -> int | None:
        return self.bounds(stream).end

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        from confluent_kafka import TopicPartition

        self._refuse()
        with self._translated():
            wanted = TopicPartition(self.topic.topic, stream, max(0, timestamp))
            [found] = self._asking.offsets_for_times([wanted], timeout=_ANSWER)
        if found.error is not None:
            raise StoreUnavailable(f"Kafka failed to look up a time: {found.error}")
        return int(found.offset) if found.offset >= 0 else None

    def watch(self) -> Watch:
        self._refuse()
        with self._lock:
            watch = self._wakeups.watch(lambda _: True)
            listening = [state for state in self._states if state.start is not None]
            if not listening or any(state.has_unread for state in listening):
                # There may be something to read already, for which no wake-up would come.
                watch.wake()
            return watch

    def close(self) -> None:
        if self._origin.is_parent:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._wakeups.ring([None])
        if self._thread is not None:
            self._thread.join(_ANSWER)
        self._consumer.close()
        self._asking.close()

    def _refuse(self) -> None:
        self._origin.refuse_child()
        if self._closed:
            raise Closed(f"the source over topic {self.topic.topic!r} was closed")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as error:
            raise StoreUnavailable(f"{self.topic.bootstrap} does not answer: {error}") from error

    # The thread

    def _run(self) -> None:
        pause = _SOON
        while not self._closed:
            try:
                with self._lock:
                    if not self._move():
                        self._changed.wait(_QUIET)
                        continue
                # Outside of the lock; readers leave moving a stream to this thread, so what comes
                # here is never from a place that was left.
                first = self._consumer.poll(pause)
                pause = _SOON if first is not None else min(2 * pause, _QUIET)
                if first is None:
                    continue
                rest = self._consumer.consume(_MOST_AT_ONCE, 0)
                with self._lock:
                    self._take([first, *rest])
            except Exception as error:  # noqa: BLE001 - reads raise it
                with self._lock:
                    self._fail(StoreUnavailable(f"the client failed: {error}"))

    def _move(self) -> bool:
        """Assigns streams where readers want them, pauses full ones; false if there are none."""
        from confluent_kafka import TopicPartition

        name = self.topic.topic
        for number, state in enumerate(self._states):
            if state.start is None:
                continue
            if state.wanted is not None:
                # Assigned anew rather than moved: so nothing that was fetched before is left.
                if state.is_assigned:
                    self._consumer.incremental_unassign([TopicPartition(name, number)])
                self._consumer.incremental_assign([TopicPartition(name, number, state.wanted)])
                state.wanted, state.is_assigned, state.is_paused = None, True, False
            if state.is_full != state.is_paused:
                turn = self._consumer.pause if state.is_full else self._consumer.resume
                turn([TopicPartition(name, number)])
                state.is_paused = state.is_full
        return any(state.is_assigned for state in self._states)

    def _take(self, messages: list[Message]) -> None:
        from confluent_kafka import KafkaError

        for message in messages:
            number, error = message.partition(), message.error()
            if number is None or not 0 <= number < self.streams:
                self._fail(StoreUnavailable(f"Kafka reports: {error}"))
            elif self._states[number].wanted is not None:
                # It is read from another offset from now on.
                continue
            elif error is None:
                self._states[number].take(_row(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                # Markers of transactions have offsets, too: all up to there was read.
                self._states[number].complete_up_to(message.offset() or 0)
            else:
                failed = StoreUnavailable(f"partition {number} can't be read: {error}")
                self._states[number].error = failed
        self._changed.notify_all()
        self._wakeups.ring([None])

    def _fail(self, error: PxrsError) -> None:
        for state in self._states:
            if state.start is not None:
                state.error = error
        self._changed.notify_all()
        self._wakeups.ring([None])


class _Stream:
    """One of Kafka's partitions and what was read ahead of it. All but `turn` is under the lock."""

    def __init__(self) -> None:
        # Held by the reader that reads from one place: another may move it afterwards.
        self.turn = threading.Lock()
        # The buffer has all rows from `start` up to `next`; None: it is not being read.
        self.start: int | None = None
        self.next = 0
        self.wanted: int | None = None
        self.is_assigned = False
        self.is_paused = False
        self.error: PxrsError | None = None
        self._rows: deque[Row] = deque()
        self._size = 0
        self._read_up_to = 0

    @property
    def is_full(self) -> bool:
        return self._size >= READ_BYTES or len(self._rows) >= _BUFFER_ROWS

    @property
    def has_unread(self) -> bool:
        return self._read_up_to < self.next

    def go_to(self, offset: int) -> None:
        self.start = self.next = self.wanted = self._read_up_to = offset
        self.error = None
        self._rows.clear()
        self._size = 0

    def complete_up_to(self, offset: int) -> None:
        self.next = max(self.next, offset)

    def take(self, row: Row) -> None:
        if row.offset < self.next:
            return
        self._rows.append(row)
        self._size += _size(row)
        self.next = row.offset + 1

    def read(self, offset: int, limit: int, until: int | None) -> SourceRead | None:
        """The buffered rows from `offset` on; None if the stream is read at another place."""
        if self.start is None or not self.start <= offset <= self.next:
            return None
        while self._rows and self._rows[0].offset < offset:
            self._size -= _size(self._rows.popleft())
        self.start = offset
        found: list[Row] = []
        for row in self._rows:
            if len(found) == limit or (until is not None and row.offset >= until):
                break
            found.append(row)
        found = found[: first_within(found)]
        if len(found) < len(self._rows):
            behind = self._rows[len(found)].offset
            following = found[-1].offset + 1 if found else offset
            if until is not None and behind >= until:
                following = max(until, offset)
        else:
            following = self.next if until is None else max(min(self.next, until), offset)
        self._read_up_to = max(self._read_up_to, following)
        return SourceRead(found, following)


def _row(message: Any) -> Row:
    kind, time = message.timestamp()
    headers = tuple(
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in message.headers() or ()
    )
    return Row(message.offset(), time if kind else 0, message.key(), message.value(), headers)


def _size(row: Row) -> int:
    return len(row.key or b"") + len(row.value or b"")
