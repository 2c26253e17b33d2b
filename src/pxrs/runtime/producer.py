"""The producer: `send` puts a message into a batch, one thread commits what all have put."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from time import time_ns
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ProducerSettings
from pxrs.core.routing import hasher, partitioner
from pxrs.errors import (
    Closed,
    InvalidRequest,
    MessageTooLarge,
    PartitionNotFound,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from pxrs.log.batches import MAX_TIMESTAMP, compression_code
from pxrs.runtime.checks import checked_headers, chunks, encoded, plain
from pxrs.runtime.committer import Committer
from pxrs.runtime.outbox import RECORD_BYTES, REPORT_BYTES, Box, Lane, Outbox
from pxrs.runtime.sent import Parcel, Sent, SentMany
from pxrs.runtime.topics import Topics
from pxrs.serde import Serde
from pxrs.stores.api import LogStore
from pxrs.types import Header, Topic

_Record = tuple[int, bytes | None, bytes | None, list[Header]]
_NO_HEADERS: list[Header] = []
# Long enough for the committing thread to get the interpreter, short enough not to be felt.
_YIELD = 1e-5
# How many messages `send_many` adds before the committer may take what is there.
_BUSY_MESSAGES = 128
_RETENTION_EVERY = 10.0
# How many empty looks the background thread takes before it goes to sleep.
_LOOKS = 20
_SHORTEST_WAIT = 0.001

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


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
        partitioner(settings.partitioner)
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
            on_settled=self._after_round,
        )
        self._local = threading.local()
        self._commit_at = min(settings.buffer_bytes // 2, 2 * 2**20)
        self._closed = False
        self._stopped = False
        self._forked = False
        self._broken = False
        self._closing = threading.RLock()
        self._awake = False
        self._wake = threading.Event()
        self._due = threading.Event()
        self._grown: set[Topic] = set()
        self._retained: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="pxrs-producer", daemon=True)
        self._thread.start()
        _producers.add(self)

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
        except (AttributeError, KeyError, TypeError):
            lane = self._open_lane(topic)
        if lane.unreported > REPORT_BYTES or lane.busy:
            lane = self._attend(lane)
        if self._serdes:
            key, value = self._encode(key, value)
        else:
            if type(value) is not bytes:
                value = plain(value, "value")
            if type(key) is str and key.isascii():
                key = key.encode()
            elif type(key) is not bytes:
                key = plain(key, "key")
        loose = False
        if partition is not None:
            if type(partition) is not int or not 0 <= partition < lane.partitions:
                raise PartitionNotFound(topic, partition, lane.partitions)
        elif key is not None:
            partition = lane.hash(key) % lane.partitions
        else:
            partition, loose = lane.sticky, True
        if timestamp is None:
            timestamp = time_ns() // 1_000_000
        elif type(timestamp) is not int or not 0 <= timestamp <= MAX_TIMESTAMP:
            raise InvalidRequest(f"timestamp = {timestamp!r}; milliseconds since 1970 are needed")
        if headers or key is None or value is None or len(value) + len(key) > self._most:
            size, headers = self._check_size(key, value, headers)
        else:
            size, headers = len(value) + len(key) + RECORD_BYTES, _NO_HEADERS
        lane.busy = True
        box = lane.box
        try:
            if self._closed:
                self._refuse_closed()
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
            lane.unreported += size
        except BaseException:
            box.retire()
            raise
        finally:
            lane.busy = False
        return Sent(parcel, index)

    def send_many(self, topic: str, messages: Iterable[tuple[Any, Any]]) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each.

        A list is checked whole before anything is taken over. From an iterator, messages are
        taken a few thousand at a time: on bad input those before it are sent. So are those
        before a `BufferFull` or `Closed` in the middle; a note on the error says how many.
        """
        sent = SentMany([], [])
        try:
            for chunk in chunks(messages):
                self._send_chunk(self._attend(self._lane(topic)), self._ready(chunk), sent)
        except PxrsError as error:
            if sent:
                error.add_note(f"the first {len(sent)} messages of this send_many are sent")
            raise
        return sent

    def _ready(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[bytes | None, bytes | None]]:
        """The pairs as bytes, checked."""
        ready = []
        most, serdes = self._most, self._serdes
        for pair in pairs:
            try:
                key, value = pair
            except (TypeError, ValueError):
                raise InvalidRequest(
                    f"send_many takes pairs (key, value), not {type(pair).__name__}"
                ) from None
            if type(key) is str and not serdes:
                key = plain(key, "key")
            if type(value) is not bytes or type(key) is not bytes or serdes:
                key, value = self._encode(key, value)
                self._check_size(key, value, None)
            elif len(value) + len(key) > most:
                self._check_size(key, value, None)
            ready.append((key, value))
        return ready

    def _send_chunk(
        self, lane: Lane, pairs: list[tuple[bytes | None, bytes | None]], sent: SentMany
    ) -> None:
        hash_key, partitions, headers = lane.hash, lane.partitions, _NO_HEADERS
        add_parcel, add_index = sent.parcels.append, sent.indexes.append
        for start in range(0, len(pairs), _BUSY_MESSAGES):
            if lane.unreported > REPORT_BYTES:
                lane = self._attend(lane)
            timestamp = time_ns() // 1_000_000
            added = 0
            lane.busy = True
            box = lane.box
            try:
                if self._closed:
                    self._refuse_closed()
                places = box.open
                for key, value in pairs[start : start + _BUSY_MESSAGES]:
                    partition = lane.sticky if key is None else hash_key(key) % partitions
                    parcel = places[partition]
                    if (
                        parcel is None
                        or parcel.append(parcel.count, timestamp, key, value, headers) is None
                    ):
                        record = (timestamp, key, value, headers)
                        parcel = self._open_and_append(lane, box, partition, key is None, record)
                    size = (0 if key is None else len(key)) + (0 if value is None else len(value))
                    size += RECORD_BYTES
                    add_parcel(parcel)
                    add_index(parcel.count)
                    parcel.count += 1
                    parcel.weight += size
                    added += size
            except BaseException:
                box.retire()
                raise
            finally:
                lane.unreported += added
                lane.busy = False

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything handed over so far is settled; `TimeoutError` if it takes longer.

        Failures are not raised here but by the `Sent` they belong to.
        """
        self._refuse_after_fork()
        now = self._clock.monotonic()
        if not self._committer.drive(lambda: not self._outbox.holds(now), timeout):
            raise TimeoutError(f"not everything was appended within {timeout:g} s")

    def deliver(self, parcel: Parcel, timeout: float | None) -> None:
        """See `pxrs.runtime.sent.Driver`. The calling thread becomes the committer."""
        self._refuse_after_fork()
        if not self._committer.drive(lambda: parcel.settled, timeout):
            raise TimeoutError(f"not appended within {timeout:g} s; it is still being tried")

    def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`.

        Whoever calls it returns when the producer is closed, the second one too. What can't be
        flushed now (`InsideTransaction`, Ctrl-C) is flushed when it is called again.
        """
        if self._forked:
            return
        self._committer.refuse_nested()
        # A sender looks at this once it is busy: either it sees it, or it is waited for below.
        self._closed = True
        with self._closing:
            if self._stopped:
                return
            self._outbox.await_senders()
            self.flush()
            self._stopped = True
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
        except (AttributeError, KeyError, TypeError):
            lane = self._open_lane(topic)
        return lane

    def _open_lane(self, topic: str) -> Lane:
        self._refuse_closed()
        found = self._topics.find(topic)
        lane = self._new_lane(found)
        if not hasattr(self._local, "lanes"):
            self._local.lanes = {}
        self._local.lanes[topic] = lane
        return lane

    def _new_lane(self, topic: Topic) -> Lane:
        hash_key = hasher(self._settings.partitioner, topic.partitions)
        lane = Lane(topic, hash_key, sticky=time.monotonic_ns() % topic.partitions)
        self._outbox.add_lane(lane)
        return lane

    def _attend(self, lane: Lane) -> Lane:
        """Every few hundred messages: look at the shared buffer, and let the committer run."""
        self._refuse_closed()
        while lane.busy:
            # A signal handler or destructor sends while this very thread is inside `send`: what
            # it sends is in order by itself, not with what it interrupted.
            if lane.spare is None:
                lane.spare = self._new_lane(lane.topic)
            lane = lane.spare
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
        if lane.stale:
            self._renew_lane(lane)
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

    def _renew_lane(self, lane: Lane) -> None:
        """The topic was deleted under us. Made again just so, it goes on; else it is an error."""
        found = self._topics.find(lane.topic.name)
        if found.partitions != lane.partitions:
            self._local.lanes.pop(lane.topic.name, None)
            lane.left_behind = True
            raise TopicExists(
                f"topic {found.name!r} was made again with {found.partitions} partitions instead "
                f"of {lane.partitions}; send again"
            )
        lane.topic = found
        lane.stale = False

    def _refuse_closed(self) -> None:
        self._refuse_after_fork()
        if self._broken:
            raise Closed("the producer's thread was ended by an error; flush it and make another")
        if self._closed:
            raise Closed("the producer was closed")

    def _refuse_after_fork(self) -> None:
        if self._forked:
            raise Closed("this producer was made before a fork; make another in the child")

    def abandon(self) -> None:
        """In a forked child: its thread is not here, and what it holds is the parent's to send."""
        self._forked = self._closed = True

    def _encode(self, key: Any, value: Any) -> tuple[bytes | None, bytes | None]:
        if self._key_serde is None or key is None:
            key = plain(key, "key")
        else:
            key = encoded(self._key_serde, key, "key")
        if self._value_serde is None:
            return key, plain(value, "value")
        return key, encoded(self._value_serde, value, "value")

    def _check_size(
        self, key: bytes | None, value: bytes | None, headers: list[Header] | None
    ) -> tuple[int, list[Header]]:
        """What the message takes in the buffer, and its headers, if it is not too large."""
        checked = checked_headers(headers) if headers else _NO_HEADERS
        size = len(key or b"") + len(value or b"")
        size += sum(len(name.encode()) + len(content or b"") for name, content in checked)
        if size > self._most:
            raise MessageTooLarge(
                f"a message of {size} bytes; the limit is {self._most} "
                "(max_message_bytes of the producer)"
            )
        return size + RECORD_BYTES, checked

    # The background thread

    def _run(self) -> None:
        try:
            self._commit_until_stopped()
        except BaseException:
            # Nobody would commit any more, so nobody may send any more.
            self._broken = self._closed = True
            raise

    def _commit_until_stopped(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            looks = 0
            while looks < _LOOKS and not self._stopped:
                looks = 0 if self._commit_what_is_due() else looks + 1
                self._retain()
            # Whoever opens a batch does so before it looks at this: one of us sees the other.
            self._awake = False
            if self._outbox.holds(math.inf):
                self._wake.set()

    def _commit_what_is_due(self) -> bool:
        """Commit what has waited long enough; false if there is nothing at all."""
        linger = self._settings.linger
        # What has failed or did not fit into a commit has waited already.
        wait = 0.0 if self._outbox.waiting else linger or _SHORTEST_WAIT
        urgent = self._due.wait(wait)
        self._due.clear()
        oldest = self._outbox.oldest
        if urgent or self._outbox.waiting:
            self._committer.run()
        elif oldest is None:
            return self._outbox.holds(math.inf)
        elif self._clock.monotonic() - oldest >= linger:
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
                # Retention is housekeeping: what fails now, however, is done the next time.
                with suppress(Exception):
                    self._topics.retain(topic)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
