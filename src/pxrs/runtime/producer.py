"""The producer: `send` puts a message into a batch, one thread commits what all have put."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ProducerSettings
from pxrs.core.routing import partitioner
from pxrs.errors import (
    Closed,
    InvalidRequest,
    MessageTooLarge,
    PartitionNotFound,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from pxrs.log.batches import compression_code
from pxrs.runtime.committer import Committer
from pxrs.runtime.outbox import REPORT_BYTES, Lane, Outbox
from pxrs.runtime.sent import Parcel, Sent, SentMany
from pxrs.runtime.topics import Topics
from pxrs.serde import Serde, to_bytes
from pxrs.stores.api import LogStore
from pxrs.types import Header, Topic

_Record = tuple[int, bytes | None, bytes | None, Sequence[Header]]
_NO_HEADERS: list[Header] = []
# Long enough for the committing thread to get the interpreter, short enough not to be felt.
_YIELD = 1e-5
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
        self._route = partitioner(settings.partitioner)
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
            on_settled=self._after_round,
        )
        self._local = threading.local()
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
        headers: Sequence[Header] | None = None,
        timestamp: int | None = None,
    ) -> Sent:
        """Hand a message over; `Sent.result()` waits until it is durable.

        Without a partition the key decides; without a key either, messages stick to one
        partition until its batch is full. `timestamp` is in milliseconds, now by default.
        """
        try:
            lane: Lane = self._local.lanes[topic]
        except (AttributeError, KeyError):
            lane = self._open_lane(topic)
        if lane.unreported > REPORT_BYTES or self._closed:
            self._report(lane)
        if type(value) is not bytes or self._value_serde is not None:
            value = self._encode_value(value)
        if key is not None and (type(key) is not bytes or self._key_serde is not None):
            key = self._encode_key(key)
        loose = False
        if partition is not None:
            if not 0 <= partition < lane.partitions:
                raise PartitionNotFound(topic, partition, lane.partitions)
        elif key is not None:
            partition = self._route(key, lane.partitions)
        else:
            partition, loose = lane.sticky, True
        if timestamp is None:
            timestamp = time.time_ns() // 1_000_000
        if headers or value is None or len(value) + (len(key) if key else 0) > self._most:
            self._check_size(key, value, headers or _NO_HEADERS)
        record = (timestamp, key, value, headers or _NO_HEADERS)
        with lane.lock:
            parcel = lane.open[partition]
            kept = None
            if parcel is not None:
                kept = parcel.append(parcel.count, *record)
            if parcel is None or kept is None:
                parcel, kept = self._open_and_append(lane, partition, loose, record)
            index = parcel.count
            parcel.count = index + 1
            lane.unreported += kept.size
        return Sent(parcel, index)

    def send_many(self, topic: str, messages: Iterable[tuple[Any, Any]]) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each."""
        lane = self._lane(topic)
        route, partitions, most = self._route, lane.partitions, self._most
        raw = self._key_serde is None and self._value_serde is None
        places, lock = lane.open, lane.lock
        timestamp = self._clock.wall_ms()
        parcels: list[Parcel] = []
        indexes: list[int] = []
        for key, value in messages:
            if type(value) is not bytes or type(key) is not bytes or not raw:
                value = self._encode_value(value)
                key = None if key is None else self._encode_key(key)
            if value is None or len(value) + (len(key) if key else 0) > most:
                self._check_size(key, value, _NO_HEADERS)
            if lane.unreported > REPORT_BYTES:
                self._report(lane)
                timestamp = self._clock.wall_ms()
            partition = lane.sticky if key is None else route(key, partitions)
            with lock:
                parcel = places[partition]
                kept = None
                if parcel is not None:
                    kept = parcel.append(parcel.count, timestamp, key, value, _NO_HEADERS)
                if parcel is None or kept is None:
                    record = (timestamp, key, value, _NO_HEADERS)
                    parcel, kept = self._open_and_append(lane, partition, key is None, record)
                index = parcel.count
                parcel.count = index + 1
                lane.unreported += kept.size
            parcels.append(parcel)
            indexes.append(index)
        return SentMany(parcels, indexes)

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

    def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`."""
        if self._closed:
            return
        self._closed = True
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
        try:
            lane: Lane = self._local.lanes[topic]
        except (AttributeError, KeyError):
            lane = self._open_lane(topic)
        self._report(lane)
        return lane

    def _open_lane(self, topic: str) -> Lane:
        self._refuse_closed()
        found = self._topics.find(topic)
        lane = Lane(found, sticky=time.monotonic_ns() % found.partitions)
        self._outbox.add_lane(lane)
        if not hasattr(self._local, "lanes"):
            self._local.lanes = {}
        self._local.lanes[topic] = lane
        return lane

    def _open_and_append(
        self, lane: Lane, partition: int, loose: bool, record: _Record
    ) -> tuple[Parcel, Any]:
        """Append where there is no batch, or a full one. Messages without a key move on."""
        if lane.stale:
            self._renew_lane(lane)
        if loose:
            partition = lane.sticky = (lane.sticky + 1) % lane.partitions
            parcel = lane.open[partition]
            kept = None if parcel is None else parcel.append(parcel.count, *record)
            if parcel is not None and kept is not None:
                return parcel, kept
        parcel = self._outbox.open_parcel(lane, partition)
        if not self._awake:
            self._awake = True
            self._wake.set()
        return parcel, parcel.append(0, *record)

    def _renew_lane(self, lane: Lane) -> None:
        """The topic was deleted under us. Made again just so, it goes on; else it is an error."""
        found = self._topics.find(lane.topic.name)
        if found.partitions != lane.partitions:
            del self._local.lanes[lane.topic.name]
            raise TopicExists(
                f"topic {found.name!r} was made again with {found.partitions} partitions instead "
                f"of {lane.partitions}; send again"
            )
        lane.topic = found
        lane.stale = False

    def _report(self, lane: Lane) -> None:
        """Every few hundred messages: look at the shared buffer, and let the committer run."""
        self._refuse_closed()
        self._outbox.report(lane)
        if self._outbox.held >= self._commit_at and not self._due.is_set():
            self._due.set()
        if self._committer.busy:
            time.sleep(_YIELD)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the producer was closed")

    def _encode_value(self, value: Any) -> bytes | None:
        if self._value_serde is not None:
            return self._value_serde.encode(value)
        return None if value is None else to_bytes(value, "value")

    def _encode_key(self, key: Any) -> bytes:
        if self._key_serde is not None:
            return self._key_serde.encode(key)
        return to_bytes(key, "key")

    def _check_size(
        self, key: bytes | None, value: bytes | None, headers: Sequence[Header]
    ) -> None:
        size = len(key or b"") + len(value or b"")
        for name, content in headers:
            if not isinstance(name, str) or not (content is None or isinstance(content, bytes)):
                raise InvalidRequest("headers are pairs of a str and bytes (or None)")
            size += len(name.encode()) + len(content or b"")
        if size > self._most:
            raise MessageTooLarge(
                f"a message of {size} bytes; the limit is {self._most} "
                "(max_message_bytes of the producer)"
            )

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

    def _after_round(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if isinstance(parcel.error, TopicNotFound):
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
