"""Messages for remote clients: produce, fetch, wait for more; as records or as raw batches."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from pxrs import metrics as names
from pxrs.aio.app import Pxrs
from pxrs.codec.batches import (
    CHECKSUM,
    check_timestamp,
    decode_sized,
    encode,
    read_batch,
)
from pxrs.codec.messages import cut, in_memory, messages_of
from pxrs.errors import DamagedBatch, InvalidRequest, OffsetOutOfRange, TopicNotFound
from pxrs.producing.records import Checks, check_partition
from pxrs.server.appends import Appends
from pxrs.server.arrivals import Arrivals
from pxrs.server.metrics import Metrics
from pxrs.server.sends import Pair, Placed, Record, Sends
from pxrs.server.settings import ServeSettings
from pxrs.topics import named, offset_at
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Fence,
    LogPartition,
    Message,
    StoredBatch,
    StoredRows,
    Topic,
)

T = TypeVar("T")

_LOG = logging.getLogger("pxrs.serve")
# Bytes that one call asks the log for. Decoding a megabyte at once would hold up other requests.
_PIECE = 64 * 2**10
_CACHED_BYTES = 32 * 2**20
# A page ends after the message with which it exceeds this size, decompressed.
_PAGE_BYTES = 8 * 2**20
_LAST_OFFSET = 2**63 - 1
# How often a page may ask the log: twice as often as a full page of such pieces has to.
_MOST_PIECES = 2 * _PAGE_BYTES // _PIECE


class ProducerState(NamedTuple):
    """Makes a produce request idempotent: the log recognises a repeat."""

    id: int
    epoch: int
    sequence: int


class Page(NamedTuple):
    """Messages from an offset on, the offset to go on with, and what the partition holds."""

    messages: list[Message]
    next: int
    start: int
    end: int


class RawPage(NamedTuple):
    """Record batches as they are stored; the first one may begin before the wanted offset."""

    data: bytes
    next: int
    start: int
    end: int


class Messages:
    """Produces and fetches for all connections of a node. Used by one event loop."""

    def __init__(self, px: Pxrs, settings: ServeSettings, metrics: Metrics) -> None:
        self._px = px
        self._metrics = metrics
        # This log also reads the rows of virtual topics.
        self._log = px._blocking._stores.log
        self._call = px._threads.call
        self._settings = settings
        self._sends = self._new_sends()
        self._replaced: set[asyncio.Task[None]] = set()
        self._appends = Appends(self._log, px._threads, settings.max_inflight)
        self._arrivals = Arrivals(self._log)
        self._checks = Checks(settings.max_body)
        self._max_body = settings.max_body
        self._topics: dict[str, Topic] = {}
        self._decoded = _DecodedBatches(_CACHED_BYTES)

    # Producing

    def _new_sends(self) -> Sends:
        settings = self._settings
        return Sends(
            self._px.producer(
                # Requests ask for their results at once, which commits: no thread need look for it.
                linger=0.01,
                buffer_bytes=settings.max_inflight,
                max_message_bytes=settings.max_body,
                max_block=settings.request_timeout,
                delivery_timeout=settings.request_timeout,
            )
        )

    def replace_broken(self) -> None:
        """Go on with another producer if the thread of this one was ended by an error."""
        if not self._sends.is_broken:
            return
        _LOG.error("the thread that appends messages was ended by an error; another one goes on")
        broken, self._sends = self._sends, self._new_sends()
        task = asyncio.create_task(broken.end())
        self._replaced.add(task)
        task.add_done_callback(self._replaced.discard)

    async def produce(self, topic: str, records: Sequence[Record]) -> list[Placed]:
        """Append the records durably; all of them are checked before the first one is sent."""

        async def send(found: Topic) -> list[Placed]:
            for record in records:
                self._check(found, record)
            return await self._sends.records(topic, records)

        return await self._produced(topic, send)

    async def produce_pairs(self, topic: str, pairs: list[Pair]) -> list[Placed]:
        """`produce` for records that have a key and a value and nothing else: much cheaper.

        All of them together must be smaller than a message may be: their sizes are not checked.
        """
        return await self._produced(topic, lambda _: self._sends.pairs(topic, pairs))

    async def _produced(
        self, topic: str, send: Callable[[Topic], Awaitable[list[Placed]]]
    ) -> list[Placed]:
        self.replace_broken()
        with self._metrics.timed(names.PRODUCE_SECONDS):
            places = await self._in_topic(topic, send)
        self._metrics.count(names.PRODUCED, topic, by=len(places))
        return places

    async def produce_once(
        self, topic: str, partition: int, records: Sequence[Record], producer: ProducerState
    ) -> Appended:
        """Append the records to one partition as one batch, unless the log has it already."""
        found = await self._topic(topic)
        check_partition(found, partition)
        now = self._px._blocking._clock.wall_ms()
        for record in records:
            self._check(found, record)
        batch = encode(
            (
                (it.key, it.value, list(it.headers), now if it.timestamp is None else it.timestamp)
                for it in records
            ),
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=producer.sequence,
        )
        return await self._append(topic, partition, batch)

    async def append(self, topic: str, partition: int, data: bytes) -> Appended:
        """Append one record batch that the client encoded, after checking that it is intact."""
        check_partition(await self._topic(topic), partition)
        batch = await self._call(partial(read_batch, data, self._max_body))
        return await self._append(topic, partition, batch)

    async def _append(self, topic: str, partition: int, batch: Batch) -> Appended:
        with self._metrics.timed(names.PRODUCE_SECONDS):
            done = await self._in_topic(
                topic,
                lambda it: self._appends.append(Append(LogPartition(it.id, partition), batch)),
            )
        if not done.duplicate:
            self._metrics.count(names.PRODUCED, topic, by=batch.count)
        return done

    def _check(self, topic: Topic, record: Record) -> None:
        if record.partition is not None:
            check_partition(topic, record.partition)
        if record.timestamp is not None:
            check_timestamp(record.timestamp)
        self._checks.size(record.key, record.value, record.headers or None)

    # Fetching

    async def fetch(
        self, topic: str, partition: int, offset: int, most: int, wait: float = 0.0
    ) -> Page:
        """At most `most` messages from `offset` on; waits for the first one if there is none."""

        def look(found: Topic) -> Page:
            return self._read(found, partition, offset, most)

        page = await self._polled(topic, partition, offset, wait, look, lambda it: it.next > offset)
        self._metrics.count(names.FETCHED, topic, by=len(page.messages))
        return page

    async def fetch_raw(
        self, topic: str, partition: int, offset: int, most_bytes: int, wait: float = 0.0
    ) -> RawPage:
        """About `most_bytes` of batches, from the one that has `offset`; waits as `fetch` does."""

        def look(found: Topic) -> RawPage:
            if found.source is not None:
                raise InvalidRequest(
                    f"topic {topic!r} lies over a source and has rows, no record batches; fetch "
                    "its messages as JSON"
                )
            fetched = self._log.fetch(LogPartition(found.id, partition), offset, most_bytes)
            after = fetched.batches[-1].next if fetched.batches else offset
            data = b"".join(batch.data for batch in fetched.batches)
            return RawPage(data, after, fetched.start, fetched.end)

        page = await self._polled(topic, partition, offset, wait, look, lambda page: page.data)
        self._metrics.count(names.FETCHED, topic, by=page.next - offset)
        return page

    async def offsets_at(self, topic: str, timestamp: int) -> dict[int, int | None]:
        """Per partition, the offset of the first message of that time (ms) or later."""

        def look(found: Topic) -> dict[int, int | None]:
            return {
                number: offset_at(
                    self._log,
                    LogPartition(found.id, number),
                    Fence(found.name, number, 0),
                    timestamp,
                )
                for number in range(found.partitions)
            }

        return await self._in_topic(topic, lambda found: self._call(partial(look, found)))

    async def _polled(
        self,
        topic: str,
        partition: int,
        offset: int,
        wait: float,
        look: Callable[[Topic], T],
        found_any: Callable[[T], object],
    ) -> T:
        """Looks at once, and once more when messages have come or the time is over."""
        if not 0 <= offset <= _LAST_OFFSET:
            raise InvalidRequest(f"offset must be 0 or more, got {offset}")

        async def poll(found: Topic) -> T:
            check_partition(found, partition)
            page = await self._call(partial(look, found))
            if found_any(page) or wait <= 0:
                return page
            async with self._arrivals.expect(found, partition, offset, wait) as arrival:
                page = await self._call(partial(look, found))
                if found_any(page):
                    return page
                await arrival.wait()
            return await self._call(partial(look, found))

        return await self._in_topic(topic, poll)

    def _read(self, topic: Topic, partition: int, offset: int, most: int) -> Page:
        """Decodes no more batches than the answer needs. Runs in a thread."""
        where, fence = LogPartition(topic.id, partition), Fence(topic.name, partition, 0)
        found: list[Message] = []
        size, position = 0, offset
        # Offsets of a source have gaps, and long stretches without rows of this partition.
        for _ in range(_MOST_PIECES):
            fetched = self._log.fetch(where, position, _PIECE)
            for batch in fetched.batches:
                try:
                    messages, unpacked = self._decoded.get(where, batch, fence)
                except DamagedBatch:
                    if not found:
                        raise
                    return Page(found, position, fetched.start, fetched.end)
                wanted = cut(messages, position)
                room = most - len(found)
                found += wanted[:room]
                size += unpacked
                position = batch.next if len(wanted) <= room else found[-1].offset + 1
                if len(found) >= most or size >= _PAGE_BYTES:
                    return Page(found, position, fetched.start, fetched.end)
            if not fetched.batches:
                break
        return Page(found, position, fetched.start, fetched.end)

    # Topics

    async def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = await self._px.topics.find(name)
        return topic

    async def _in_topic(self, name: str, do: Callable[[Topic], Awaitable[T]]) -> T:
        """Calls `do` with the topic, once more if it was deleted: it may have been made again."""
        try:
            return await do(await self._topic(name))
        except TopicNotFound:
            self._topics.pop(name, None)
            with named(name):
                return await do(await self._topic(name))
        except OffsetOutOfRange as error:
            raise OffsetOutOfRange(
                name, error.partition, error.offset, error.start, error.end
            ) from None

    # Ending

    @property
    def waiting(self) -> int:
        """How many fetches wait for messages."""
        return self._arrivals.waiting

    def end_waits(self) -> None:
        """Answer every fetch that waits."""
        self._arrivals.close()

    async def close(self) -> None:
        self.end_waits()
        await asyncio.gather(*self._replaced)
        await self._sends.close()


class _DecodedBatches:
    """The batches decoded last: small fetches walk through a large one. Used by any thread.

    Two threads that decode the same batch do no harm: it never changes. Its checksum is part of
    its name, since a log that lost data may hold another batch at the same place.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._batches: OrderedDict[tuple[LogPartition, int, bytes], tuple[list[Message], int]]
        self._batches = OrderedDict()

    def get(
        self, where: LogPartition, batch: StoredBatch | StoredRows, fence: Fence
    ) -> tuple[list[Message], int]:
        """The messages of a batch, and how many bytes they are decompressed."""
        if isinstance(batch, StoredRows):
            # The source keeps what it has read, and rows are not decoded.
            return messages_of(batch, fence), batch.size
        key = where, batch.base, bytes(batch.data[CHECKSUM])
        with self._lock:
            if (known := self._batches.get(key)) is not None:
                self._batches.move_to_end(key)
                return known
        messages, size = decode_sized(batch, fence)
        with self._lock:
            if key not in self._batches:
                self._batches[key] = messages, size
                self._bytes += in_memory(messages, size)
            while self._bytes > self._most:
                _, oldest = self._batches.popitem(last=False)
                self._bytes -= in_memory(*oldest)
        return messages, size
