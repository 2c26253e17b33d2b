"""The producer: `send` puts a message into a batch, one thread commits what all have put."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from time import time_ns
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ProducerSettings
from pxrs.errors import (
    Closed,
    InvalidRequest,
    MessageTooLarge,
    PartitionNotFound,
    PxrsError,
    TopicNotFound,
)
from pxrs.log.batches import compression_code
from pxrs.runtime.committer import Committer
from pxrs.runtime.lanes import Lanes
from pxrs.runtime.outbox import REPORT_BYTES, Box, Lane, Outbox
from pxrs.runtime.sent import Parcel, Sent, SentMany
from pxrs.runtime.topics import Topics
from pxrs.serde import Serde, to_bytes
from pxrs.stores.api import LogStore
from pxrs.types import Header, Topic

_Record = tuple[int, bytes | None, bytes | None, list[Header]]
_NO_HEADERS: list[Header] = []
# Long enough for the committing thread to get the interpreter, short enough not to be felt.
_YIELD = 1e-5
# How many messages `send_many` adds before the committer may take what is there.
_BUSY_MESSAGES = 128
_ITERATOR_CHUNK = 4096
_RETENTION_EVERY = 10.0
# How many empty looks the background thread takes before it goes to sleep.
_LOOKS = 20


class Producer:
    """Sends messages. Thread-safe; use it as a context manager, leaving it flushes."""

    def __init__(
        self,
        topics: Topics,
        log: LogStore,
        clock: Clock,
        settings: ProducerSettings,
        key_serde: Serde | None = None,
        value_serde: Serde | None = None,
    ) -> None:
        self._topics = topics
        self._clock = clock
        self._settings = settings
        self._serdes = key_serde is not None or value_serde is not None
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._most = settings.max_message_bytes
        self._outbox = Outbox(
            self,
            clock,
            batch_bytes=settings.batch_bytes,
            buffer_bytes=settings.buffer_bytes,
            compression=compression_code(settings.compression),
            max_block=settings.max_block,
        )
        self._committer = Committer(
            log,
            self._outbox,
            clock,
            delivery_timeout=settings.delivery_timeout,
            before_settling=self._learn,
        )
        self.lanes = Lanes(topics, self._outbox, settings.partitioner)
        self._local = self.lanes.local
        self._commit_at = min(settings.buffer_bytes // 2, 2 * 2**20)
        self._closed = False
        self._awake = False
        self._wake = threading.Event()
        self._due = threading.Event()
        self._grown: set[Topic] = set()
        self._retained: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="pxrs-producer", daemon=True)
        self._thread.start()

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: list[Header] | None = None,
        timestamp: int | None = None,
    ) -> Sent:
        """Hand a message over; `Sent.result()` waits until it is durable.

        Without a partition the key decides; without a key either, messages stick to one
        partition until its batch is full. `timestamp` is in milliseconds, now by default.
        """
        try:
            lane: Lane = self._local.lanes[topic]
        except (AttributeError, KeyError):
            lane = self._lane(topic)
        if lane.unreported > REPORT_BYTES or lane.busy or self._closed:
            lane = self._attend(lane)
        if self._serdes:
            key, value = self._encode(key, value)
        else:
            if type(value) is not bytes:
                value = _plain(value, "value")
            if type(key) is str:
                key = key.encode()
            elif type(key) is not bytes:
                key = _plain(key, "key")
        loose = False
        if partition is not None:
            if not 0 <= partition < lane.partitions:
                raise PartitionNotFound(topic, partition, lane.partitions)
        elif key is not None:
            partition = lane.hash(key) % lane.partitions
        else:
            partition, loose = lane.sticky, True
        if timestamp is None:
            timestamp = time_ns() // 1_000_000
        elif type(timestamp) is not int or timestamp < 0:
            raise InvalidRequest(f"timestamp = {timestamp!r}; milliseconds since 1970 are needed")
        if headers or key is None or value is None or len(value) + len(key) > self._most:
            size, headers = self._check_size(key, value, headers)
        else:
            size, headers = len(value) + len(key), _NO_HEADERS
        lane.busy = True
        try:
            box = lane.box
            parcel = box.open[partition]
            if (
                parcel is None
                or parcel.append(parcel.count, timestamp, key, value, headers) is None
            ):
                record = (timestamp, key, value, headers)
                parcel = self._open_and_append(lane, box, partition, loose, record)
            index = parcel.count
            parcel.count = index + 1
            parcel.weight += size
        finally:
            lane.busy = False
        lane.unreported += size
        return Sent(parcel, index)

    def send_many(self, topic: str, messages: Iterable[tuple[Any, Any]]) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each.

        A list is checked whole before anything is taken over. From an iterator, messages are
        taken a few thousand at a time: on bad input those before it are sent.
        """
        sent = SentMany([], [])
        for _ in self.sending(topic, messages, sent):
            pass
        return sent

    def sending(
        self, topic: str, messages: Iterable[tuple[Any, Any]], sent: SentMany
    ) -> Iterator[None]:
        """`send_many` in steps, adding to `sent`: between them others can have their turn."""
        self._refuse_closed()
        self._lane(topic)
        for chunk in _chunks(messages):
            ready = self._ready(chunk)
            for start in range(0, len(ready), _BUSY_MESSAGES):
                lane = self._lane(topic)
                if lane.unreported > REPORT_BYTES or lane.busy or self._closed:
                    lane = self._attend(lane)
                self._put_many(lane, ready[start : start + _BUSY_MESSAGES], sent)
                yield

    def _ready(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[bytes | None, bytes | None]]:
        """The pairs as bytes, checked."""
        ready = []
        most, serdes = self._most, self._serdes
        for key, value in pairs:
            if type(key) is str and not serdes:
                key = key.encode()
            if type(value) is not bytes or type(key) is not bytes or serdes:
                key, value = self._encode(key, value)
                self._check_size(key, value, None)
            elif len(value) + len(key) > most:
                self._check_size(key, value, None)
            ready.append((key, value))
        return ready

    def _put_many(
        self, lane: Lane, pairs: list[tuple[bytes | None, bytes | None]], sent: SentMany
    ) -> None:
        hash_key, partitions, headers = lane.hash, lane.partitions, _NO_HEADERS
        add_parcel, add_index = sent.parcels.append, sent.indexes.append
        timestamp = time_ns() // 1_000_000
        added = 0
        lane.busy = True
        try:
            box = lane.box
            places = box.open
            for key, value in pairs:
                partition = lane.sticky if key is None else hash_key(key) % partitions
                parcel = places[partition]
                if (
                    parcel is None
                    or parcel.append(parcel.count, timestamp, key, value, headers) is None
                ):
                    record = (timestamp, key, value, headers)
                    parcel = self._open_and_append(lane, box, partition, key is None, record)
                size = (0 if key is None else len(key)) + (0 if value is None else len(value))
                add_parcel(parcel)
                add_index(parcel.count)
                parcel.count += 1
                parcel.weight += size
                added += size
        finally:
            lane.busy = False
            lane.unreported += added

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything handed over so far is settled; `TimeoutError` if it takes longer.

        Failures are not raised here but by the `Sent` they belong to.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while not self._committer.idle:
            left = None if deadline is None else deadline - self._clock.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"not everything was appended within {timeout:g} s")
            self._committer.run(left)

    def deliver(self, parcel: Parcel, timeout: float | None) -> None:
        """See `pxrs.runtime.sent.Driver`. The calling thread becomes the committer."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while not parcel.settled:
            left = None if deadline is None else deadline - self._clock.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"not appended within {timeout:g} s; it is still being tried")
            self._committer.run(left, unless=lambda: parcel.settled)

    def hurry(self) -> None:
        """See `pxrs.runtime.sent.Driver`. The background thread does not wait for company."""
        if not self._due.is_set():
            self._due.set()

    def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`."""
        self._closed = True
        # A round after that, even if there seems to be nothing: it takes away the boxes, waiting
        # for whoever is filling one, and new ones are refused.
        self._committer.run()
        self.flush()
        self._due.set()
        self._wake.set()
        self._thread.join()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Filling

    def _lane(self, topic: str) -> Lane:
        lane = self.lanes.get(topic)
        if lane is None:
            self._refuse_closed()
            lane = self.lanes.use(self.lanes.find(topic))
        return lane

    def _attend(self, lane: Lane) -> Lane:
        """Every few hundred messages: look at the shared buffer, and let the committer run."""
        self._refuse_closed()
        if lane.busy:
            # A signal handler or destructor sends while this very thread is inside `send`.
            return self.lanes.extra(lane.topic)
        self._outbox.report(lane)
        if self._outbox.held >= self._commit_at and not self._due.is_set():
            self._due.set()
        if self._committer.busy:
            time.sleep(_YIELD)
        return lane

    def _open_and_append(
        self, lane: Lane, box: Box, partition: int, loose: bool, record: _Record
    ) -> Parcel:
        """Append where there is no batch, or a full one. Messages without a key move on."""
        self._refuse_closed()
        if lane.stale:
            self.lanes.renew(lane, self.lanes.find(lane.topic.name))
        if loose:
            partition = lane.sticky = (lane.sticky + 1) % lane.partitions
            parcel = box.open[partition]
            if parcel is not None and parcel.append(parcel.count, *record) is not None:
                return parcel
        parcel = self._outbox.open_parcel(lane, box, partition)
        if not self._awake:
            self._awake = True
            self._wake.set()
        parcel.append(0, *record)
        return parcel

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the producer was closed")

    def _encode(self, key: Any, value: Any) -> tuple[bytes | None, bytes | None]:
        if self._key_serde is None or key is None:
            key = _plain(key, "key")
        else:
            key = self._key_serde.encode(key)
        if self._value_serde is None:
            return key, _plain(value, "value")
        return key, self._value_serde.encode(value)

    def _check_size(
        self, key: bytes | None, value: bytes | None, headers: list[Header] | None
    ) -> tuple[int, list[Header]]:
        """The message's size and headers, if it is not too large."""
        size = len(key or b"") + len(value or b"") + _size_of_headers(headers or _NO_HEADERS)
        if size > self._most:
            raise MessageTooLarge(
                f"a message of {size} bytes; the limit is {self._most} "
                "(max_message_bytes of the producer)"
            )
        return size, list(headers) if headers else _NO_HEADERS

    # The background thread

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            looks = 0
            while looks < _LOOKS and not self._closed:
                looks = 0 if self._commit_what_is_due() else looks + 1
                self._retain()
            self._awake = False
            if not self._committer.idle:
                self._wake.set()

    def _commit_what_is_due(self) -> bool:
        urgent = self._due.wait(self._settings.linger or 0.001)
        self._due.clear()
        oldest = self._outbox.oldest
        if oldest is None:
            if self._committer.idle:
                return False
            self._committer.run()
            return True
        if urgent or self._clock.monotonic() - oldest >= self._settings.linger:
            self._committer.run()
        return True

    def _learn(self, parcel: Parcel, error: PxrsError | None) -> None:
        """Before anybody is told, so that who sends again then finds the topic gone or anew."""
        if isinstance(error, TopicNotFound):
            self._outbox.mark_stale(parcel.topic)
        elif parcel.topic.retention_ms is not None or parcel.topic.retention_bytes is not None:
            self._grown.add(parcel.topic)

    def _retain(self) -> None:
        """Now and then, drop what the topics that have grown no longer keep."""
        now = self._clock.monotonic()
        for topic in list(self._grown):
            if now - self._retained.get(topic.id, -_RETENTION_EVERY) >= _RETENTION_EVERY:
                self._retained[topic.id] = now
                self._grown.discard(topic)
                # Retention is housekeeping: what fails now is done the next time.
                with suppress(PxrsError):
                    self._topics.retain(topic)


def _plain(value: object, what: str) -> bytes | None:
    return None if value is None else to_bytes(value, what)


def _chunks(messages: Iterable[tuple[Any, Any]]) -> Iterable[Iterable[tuple[Any, Any]]]:
    """A list in one piece, an iterator in pieces that need not be kept in memory together."""
    if isinstance(messages, list | tuple):
        yield messages
        return
    rest = iter(messages)
    while chunk := list(islice(rest, _ITERATOR_CHUNK)):
        yield chunk


def _size_of_headers(headers: list[Header]) -> int:
    try:
        return sum(len(name.encode()) + len(content or b"") for name, content in headers)
    except (TypeError, ValueError, AttributeError):
        raise InvalidRequest("headers are a list of pairs: a str and bytes (or None)") from None
