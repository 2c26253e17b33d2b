"""The producer: `send` puts a message into a batch, one thread commits the batches of all.

Also: retention of the topics that it makes grow, and what happens to open producers when the
process forks or ends.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic, sleep, time, time_ns
from typing import Any, Generic, Self

from pxrs.clock import Clock
from pxrs.codec.batches import check_timestamp, compression_code
from pxrs.config import ProducerSettings
from pxrs.errors import (
    Closed,
    StoreError,
)
from pxrs.forks import Origin
from pxrs.producing.buffer import (
    RECORD_BYTES,
    REPORT_BYTES,
    Box,
    Outbox,
    ThreadBuffer,
    ThreadBuffers,
)
from pxrs.producing.committer import Committer, Retention
from pxrs.producing.handles import (
    LOG,
    PendingBatch,
    Sent,
    SentMany,
    Undelivered,
    counted,
    described,
)
from pxrs.producing.records import NO_HEADERS, Checks, check_partition, chunks, plain
from pxrs.serde import Serde
from pxrs.stores.api import LogStore
from pxrs.topics import Topics
from pxrs.types import Header, Topic, Value

_Record = tuple[int, bytes | None, bytes | None, list[Header]]
# Long enough for the committing thread to get the interpreter, short enough not to be felt.
_YIELD = 1e-5
_YIELD_EVERY = 0.0003
# How many messages or bytes `send_many` adds before the committer may take them.
_BUSY_MESSAGES = 128
_BUSY_BYTES = 64 * 2**10
# How many empty looks the background thread takes before it goes to sleep.
_LOOKS = 20


class Producer(Generic[Value]):
    """Sends messages. Thread-safe; use it as a context manager, leaving it flushes."""

    def __init__(
        self,
        topics: Topics,
        log: LogStore,
        clock: Clock,
        settings: ProducerSettings,
        key_serde: Serde | None = None,
        value_serde: Serde[Value] | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._serdes = key_serde is not None or value_serde is not None
        self._most_weight = settings.max_message_bytes + RECORD_BYTES
        self._checks = Checks(settings.max_message_bytes, key_serde, value_serde)
        self._outbox = Outbox(
            clock,
            batch_bytes=settings.batch_bytes,
            buffer_bytes=settings.buffer_bytes,
            compression=compression_code(settings.compression),
            max_block=settings.max_block,
        )
        self._undelivered = Undelivered()
        self._retention = Retention(topics, clock)
        self._origin = Origin("producer")
        self._origin.on_fork(self._abandon)
        self._committer = Committer(
            log,
            self._outbox,
            self._undelivered,
            clock,
            self._retention,
            self._origin,
            delivery_timeout=settings.delivery_timeout,
        )
        self._buffers = ThreadBuffers(topics, self._outbox, clock, settings.delivery_timeout)
        self._local = self._buffers.local
        self._commit_at = min(settings.buffer_bytes // 2, 2 * 2**20)
        self._closed = False
        self._stopped = False
        self._closing = threading.RLock()
        self._awake = False
        self._wake = threading.Event()
        self._yield_at = 0.0
        self._thread = threading.Thread(target=self._run, name="pxrs-producer", daemon=True)
        self._thread.start()
        _open.add(self)

    def send(
        self,
        topic: str,
        value: Value | None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp: int | None = None,
    ) -> Sent:
        """Hand a message over; `Sent.result()` waits until it is durable.

        Without a partition the key decides; without a key either, messages stick to one
        partition until its batch is full. `timestamp` is in milliseconds, now by default. The first
        message to a topic looks it up in the store; if that is unavailable for `delivery_timeout`,
        `send` raises `DeliveryFailed`.
        """
        try:
            buffer: ThreadBuffer = self._local.buffers[topic]
        except (AttributeError, KeyError, TypeError):
            buffer = self._buffer(topic)
        if buffer.unreported > REPORT_BYTES or buffer.busy:
            buffer = self._attend(buffer)
        if type(key) is str and not self._serdes:
            try:
                key = key.encode()
            except UnicodeEncodeError:
                key = plain(key, "key")
        data: Any = value
        if type(data) is not bytes or type(key) is not bytes or self._serdes:
            key, data = self._checks.encode(key, data)
        keyless = False
        if partition is not None:
            check_partition(buffer.topic, partition)
        elif key is not None:
            partition = buffer.hash(key) % buffer.partitions
        else:
            partition, keyless = buffer.sticky, True
        if timestamp is None:
            now = time()
            if not buffer.this_ms <= now < buffer.next_ms:
                buffer.tick(now)
            timestamp = buffer.ms
        else:
            check_timestamp(timestamp)
        if headers or key is None or data is None:
            size, headers = self._checks.size(key, data, headers)
        else:
            size, headers = len(data) + len(key) + RECORD_BYTES, NO_HEADERS
            if size > self._most_weight:
                self._checks.size(key, data, None)
        buffer.busy = True
        box = buffer.box
        try:
            if self._closed:
                self._refuse_closed()
            pending = box.open[partition]
            if (
                pending is None
                or pending.append(pending.count, timestamp, key, data, headers) is None
            ):
                record = (timestamp, key, data, headers)
                pending = self._open_and_append(buffer, box, partition, keyless, record)
            index = pending.count
            pending.count = index + 1
            pending.weight += size
            buffer.unreported += size
        except BaseException:
            box.retire()
            raise
        finally:
            buffer.busy = False
        return Sent(pending, index)

    def send_many(self, topic: str, messages: Iterable[tuple[Any, Value | None]]) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each.

        A list is checked whole before any message is accepted. From an iterator, messages are
        taken a few thousand at a time: on bad input those before it are sent. So are those
        before a `BufferFull` or `Closed` in the middle; a note on the error has their number.
        """
        sent = SentMany([], [])
        with counted(sent):
            for _ in self._sending(topic, messages, sent):
                pass
        return sent

    def _sending(
        self, topic: str, messages: Iterable[tuple[Any, Any]], sent: SentMany
    ) -> Iterator[None]:
        """`send_many` in steps, adding to `sent`: between them others can have their turn."""
        self._refuse_closed()
        self._buffer(topic)
        for chunk in chunks(messages):
            yield from self._adding(topic, self._checks.ready(chunk), sent)

    def _adding(
        self, topic: str, ready: list[tuple[bytes | None, bytes | None]], sent: SentMany
    ) -> Iterator[None]:
        """`_sending` for messages that were checked."""
        before = len(sent)
        while (done := len(sent) - before) < len(ready):
            buffer = self._buffer(topic)
            if buffer.unreported > REPORT_BYTES or buffer.busy:
                buffer = self._attend(buffer)
            self._put_many(buffer, ready[done : done + _BUSY_MESSAGES], sent)
            yield

    def _put_many(
        self, buffer: ThreadBuffer, pairs: list[tuple[bytes | None, bytes | None]], sent: SentMany
    ) -> None:
        """Add the first of the pairs: as many as a busy owner may."""
        hash_key, partitions, headers = buffer.hash, buffer.partitions, NO_HEADERS
        add_batch, add_index = sent._batches.append, sent._indexes.append
        timestamp = time_ns() // 1_000_000
        before, added = len(sent), 0
        buffer.busy = True
        box = buffer.box
        try:
            if self._closed:
                self._refuse_closed()
            places = box.open
            for key, value in pairs:
                partition = buffer.sticky if key is None else hash_key(key) % partitions
                pending = places[partition]
                if (
                    pending is None
                    or pending.append(index := pending.count, timestamp, key, value, headers)
                    is None
                ):
                    record = (timestamp, key, value, headers)
                    pending = self._open_and_append(buffer, box, partition, key is None, record)
                    index = pending.count
                add_batch(pending)
                add_index(index)
                pending.count = index + 1
                added += 0 if value is None else len(value)
                if added >= _BUSY_BYTES:
                    break
        except BaseException:
            box.retire()
            raise
        finally:
            try:
                for pending in set(sent._batches[before:]):
                    # A batch whose first message an interrupt has left uncounted is never sent.
                    size = pending.builder.size() if pending.count else 0
                    # No call between these lines, so no interrupt either.
                    buffer.unreported += size - pending.weight
                    pending.weight = size
            finally:
                buffer.busy = False

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything handed over so far is settled; `TimeoutError` if it takes longer.

        Raises `DeliveryFailed` for messages of all threads that were not delivered, unless a
        `Sent`, a callback or another flush has reported it; `OutcomeUnknown` if some may be there.
        """
        self._committer.drain(timeout)
        if (error := self._undelivered.error()) is not None:
            raise error

    def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`.

        Every call returns when the producer is closed, also a second one. If it can't flush now
        (`InsideTransaction`, Ctrl-C), the next call does. Raises as `flush` does for failures that
        were not reported; the producer is closed then.
        """
        self._end(None)

    def _end(self, reason: BaseException | None) -> None:
        """Close because of an error that is being raised, and note lost messages on it."""
        if self._origin.is_parent:
            return
        self._stop()
        if (error := self._undelivered.error()) is not None:
            if reason is None:
                raise error
            reason.add_note(f"a producer was closed: {error}")

    def _stop(self) -> None:
        self._committer.refuse_nested()
        # A sender checks this once it is busy: either it sees it, or it is waited for below.
        self._closed = True
        with self._closing:
            if self._stopped:
                return
            self._outbox.await_senders()
            self._committer.drain()
            self._stopped = True
            self._committer.due.set()
            self._wake.set()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    # Filling

    def _buffer(self, topic: str) -> ThreadBuffer:
        buffer = self._buffers.get(topic)
        if buffer is None:
            self._refuse_closed()
            buffer = self._buffers.use(self._find(topic))
        return buffer

    def _find(self, topic: str) -> Topic:
        """Look a topic up; waits for a store that is away, as messages under way do."""
        patience = self._buffers.patience(topic)
        while True:
            try:
                return self._buffers.find(topic)
            except StoreError as error:
                sleep(patience.pause(error))
            self._refuse_closed()

    def _attend(self, buffer: ThreadBuffer) -> ThreadBuffer:
        """Every few hundred messages: look at the shared buffer, and let the committer run."""
        self._refuse_closed()
        while buffer.busy:
            # A signal handler or destructor sends while this very thread is inside `send`: its
            # messages are in order among themselves, not with those that it interrupted.
            if buffer.spare is None:
                buffer.spare = self._buffers.extra(buffer.topic)
            buffer = buffer.spare
        self._outbox.report(buffer)
        if self._outbox.held >= self._commit_at:
            self._committer.hurry()
        if self._committer.busy and self._clock.monotonic() >= self._yield_at:
            sleep(_YIELD)
            self._yield_at = self._clock.monotonic() + _YIELD_EVERY
        return buffer

    def _open_and_append(
        self, buffer: ThreadBuffer, box: Box, partition: int, keyless: bool, record: _Record
    ) -> PendingBatch:
        """Append where there is no batch, or a full one. Messages without a key move on."""
        if buffer.stale:
            self._buffers.renew(buffer, self._buffers.find(buffer.topic.name))
        if keyless:
            partition = buffer.sticky = (buffer.sticky + 1) % buffer.partitions
            pending = box.open[partition]
            if pending is not None and pending.append(pending.count, *record) is not None:
                return pending
        pending = self._outbox.open_batch(buffer, box, partition, self._committer)
        if not self._awake:
            self._awake = True
            self._wake.set()
        pending.append(0, *record)
        return pending

    def _refuse_closed(self) -> None:
        """Raise if the producer can't send any more."""
        self._committer.refuse_broken()
        if self._closed:
            raise Closed("the producer was closed")

    def _abandon(self) -> None:
        """In a forked child: the thread is not here, and the messages are the parent's to send."""
        self._closed = True

    def _leftovers(self) -> list[PendingBatch]:
        """At exit: the batches on their way. The background thread commits without lingering."""
        if self._origin.is_parent or self._stopped or self._committer.broken:
            return []
        self._committer.due.set()
        return self._outbox.unsettled()

    # The background thread

    def _run(self) -> None:
        try:
            self._commit_until_stopped()
        except BaseException:
            # No thread would commit any more, so none may send any more.
            self._committer.broken = self._closed = True
            raise

    def _commit_until_stopped(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            looks = 0
            while looks < _LOOKS and not self._stopped:
                busy = self._committer.run_due(self._settings.linger)
                looks = 0 if busy else looks + 1
                self._retention.keep_up()
            # A sender opens a batch before it looks at this: one of the two sees the other.
            self._awake = False
            if self._outbox.unsettled():
                self._wake.set()


# At a normal end the threads of open producers still run: they are made to commit at once, and the
# thread that ends the program waits for them, for a limited time. It commits nothing itself: a
# store that hangs would hold it.


# How many seconds the end of a program may wait for messages that it left behind.
PATIENCE = 10.0


_open: weakref.WeakSet[Producer] = weakref.WeakSet()


def _at_exit() -> None:
    began = monotonic()
    left = [(producer, producer._leftovers()) for producer in list(_open)]
    left = [(producer, batches) for producer, batches in left if batches]
    for producer, batches in left:
        deadline = began + min(PATIENCE, producer._committer.delivery_timeout)
        _await(batches, deadline)
        producer._committer.rest(max(0.0, deadline - monotonic()))
        if lost := [pending for pending in batches if not pending.settled]:
            LOG.error(
                "not delivered: %s: the program ended first; close the producer "
                "to wait longer, and to get the error",
                described(lost),
            )
    # Last: a warning may be turned into an error.
    for producer, batches in left:
        warnings.warn(
            f"a producer was not closed, and {described(batches)} had to be flushed when the "
            "program ended; use it in a `with` block, or call its close()",
            ResourceWarning,
            source=producer,
            stacklevel=2,
        )


def _await(batches: Sequence[PendingBatch], deadline: float) -> None:
    for pending in batches:
        settled = threading.Event()
        pending.when_settled(settled.set)
        if not settled.wait(max(0.0, deadline - monotonic())):
            return


atexit.register(_at_exit)
