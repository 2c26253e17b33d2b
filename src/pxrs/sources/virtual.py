"""A virtual topic's log: partitions laid over a source by hashing its keys.

All partitions that this process reads share one scan. What is read lies in chunks, split by
partition, and each partition goes on where its chunk ends, so they stay together by themselves. A
chunk is dropped once every partition that is being read has had its rows: to free them while they
are in the processor's cache costs half. A slow partition falls out of the chunks that are kept, and
what it needs is read again for it: it does not stall the others, and memory stays bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, cast

from pxrs.core.lag import count_rows, share
from pxrs.core.records import Ranges
from pxrs.core.routing import hasher
from pxrs.errors import ConfigError, OffsetOutOfRange, PartitionNotFound, PxrsError
from pxrs.sources.api import (
    FiltersPartitions,
    LastKeys,
    NoticesAnotherStream,
    Source,
    SourceRead,
    TellsLastKeys,
)
from pxrs.sources.rows import size_of
from pxrs.stores.api import Watch
from pxrs.topics import PREPARED
from pxrs.types import Bounds, Counted, Fetched, LogPartition, Row, StoredBatch, StoredRows, Topic

# How many rows are read at a time, and how many bytes of chunks are kept for slower partitions.
_ROWS = 10_000
_KEPT_BYTES = 16 * 2**20
_MOST_CHUNKS = 64
# Of how many keys the partitions are remembered.
_MOST_KEYS = 2**16
# For how long rows below an end are read without asking the source for another one.
_ASK_EVERY = 0.1
# How many rows are read for a lag, and how many of a partition at least.
_COUNTED = 10_000
_COUNTED_AT_LEAST = 500


class _Chunk(NamedTuple):
    """All rows of a stream from `start` up to `next`, by partition."""

    start: int
    next: int
    rows: dict[int, list[Row]]
    size: int
    # The partitions that have not had their rows.
    waiting: set[int]
    # How many chunks had been read before it.
    number: int

    @property
    def mean(self) -> int:
        """About how many bytes a row takes."""
        return self.size // max(1, sum(map(len, self.rows.values())))


class VirtualLog:
    """The read half of `LogStore` for one virtual topic. Thread-safe."""

    def __init__(self, topic: Topic, source: Source) -> None:
        self.source = source
        self.topic = topic
        # What the source can do: to ask each time costs as much as to decode some hundred rows.
        self._filters = source if isinstance(source, FiltersPartitions) else None
        self._notices = source if isinstance(source, NoticesAnotherStream) else None
        check_streams(topic.partitions, source)
        self._per_stream = topic.partitions // source.streams
        self._hash = hasher(topic.partitioner, self._per_stream)
        self._partition_of_key: dict[bytes | None, int] = {}
        self._lock = threading.Lock()
        # By stream and start; the newest one is last.
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        # The incarnation of the source that they were read from, by stream.
        self._incarnations: dict[int, int] = {}
        self._kept = 0
        # By stream: the end that the source had, and when it was asked.
        self._ends: dict[int, tuple[int, float]] = {}
        # How many chunks were read; by partition, how many it had been when it last asked.
        self._chunks_read = 0
        self._asked: dict[int, int] = {}

    @property
    def is_prepared(self) -> bool:
        """Whether the source is read with the column that `prepare` has added."""
        return PREPARED in (self.topic.source or {})

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        """See `LogStore.fetch`; `max_bytes` is for the rows of this partition."""
        partition = self._check(where)
        stream = partition // self._per_stream
        before = self._incarnation(stream)
        bounds = self._bounds(stream, where, offset)
        batch = self._filtered(stream, partition, offset, max_bytes)
        if batch is None:
            batch = self._scanned(stream, partition, offset, max_bytes)
        self._incarnation(stream, before)
        # The seam's type has encoded batches; the code that decodes them takes rows, too.
        batches = cast(list[StoredBatch], [batch] if batch.next > offset else [])
        return Fetched(batches, bounds.start, max(bounds.end, batch.next))

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        """See `FetchesMany`. The one that is furthest behind is read first: others follow it."""
        found: dict[LogPartition, Fetched | PxrsError] = {}
        for where, offset in sorted(places, key=lambda place: place[1]):
            try:
                found[where] = self.fetch(where, offset, max_bytes)
            except PxrsError as error:
                found[where] = error
        yield from (found[where] for where, _ in places)

    def bounds(self) -> dict[int, Bounds]:
        """See `LogStore.bounds`."""
        streams = [self._asked_bounds(stream) for stream in range(self.source.streams)]
        return {
            partition: streams[partition // self._per_stream]
            for partition in range(self.topic.partitions)
        }

    def count(self, ranges: Mapping[int, Ranges]) -> dict[int, Counted]:
        """See `CountsMessages`. For a source without `last_keys` it is an even share of offsets."""
        waiting = {number: each for number, each in ranges.items() if each}
        found = {number: Counted(0, exact=True) for number in ranges}
        for stream in {number // self._per_stream for number in waiting}:
            own = {n: each for n, each in waiting.items() if n // self._per_stream == stream}
            found |= self._count(stream, own)
        return found

    def _count(self, stream: int, ranges: Mapping[int, Ranges]) -> dict[int, Counted]:
        """Counts rows of some partitions of one stream; none of the ranges are empty."""
        source = self.source
        if not isinstance(source, TellsLastKeys):
            return {number: share(each, self._per_stream) for number, each in ranges.items()}
        most = max(_COUNTED // len(ranges), _COUNTED_AT_LEAST)
        found: dict[int, Counted] = {}
        for number, each in ranges.items():
            start, end = each[0][0], each[-1][1]
            last = source.last_keys(stream, start, end, most, number)
            if last is None:
                return self._count_by_hash(stream, source, ranges)
            found[number] = count_rows(each, [row[0] for row in last.rows], last.low, end)
        return found

    def _count_by_hash(
        self, stream: int, source: TellsLastKeys, ranges: Mapping[int, Ranges]
    ) -> dict[int, Counted]:
        """Counts from one look at the newest rows, for all partitions."""
        start = min(each[0][0] for each in ranges.values())
        end = max(each[-1][1] for each in ranges.values())
        rows, low = source.last_keys(stream, start, end, _COUNTED) or LastKeys([], end)
        seen: list[list[int]] = [[] for _ in range(self._per_stream)]
        with self._lock:
            known = self._partition_of_key
            for offset, key in rows:
                seen[known[key] if key in known else self._learn(key)].append(offset)
        return {
            number: count_rows(each, seen[number % self._per_stream], low, end)
            for number, each in ranges.items()
        }

    def final(self, where: LogPartition) -> int | None:
        """The offset below which all rows are final; None if that is not known yet."""
        return self.source.final(self._check(where) // self._per_stream)

    def offset_at(self, where: LogPartition, timestamp: int) -> int | None:
        """Offset of the source's first row of that time or later, in whichever partition."""
        return self.source.offset_at(self._check(where) // self._per_stream, timestamp)

    def incarnation(self, where: LogPartition, since: int | None = None) -> int:
        """See `NoticesAnother`."""
        return self._incarnation(self._check(where) // self._per_stream, since)

    def _incarnation(self, stream: int, since: int | None = None) -> int:
        """The source's; forgets the rows of an earlier one."""
        if self._notices is None:
            return 0
        now = self._notices.incarnation(stream)
        with self._lock:
            if self._incarnations.setdefault(stream, now) != now:
                self._incarnations[stream] = now
                self._ends.pop(stream, None)
                for place in [place for place in self._chunks if place[0] == stream]:
                    self._drop(place)
        return self._notices.incarnation(stream, since)

    def watch(self) -> Watch:
        """Wakes when there may be more to read."""
        return self.source.watch()

    def close(self) -> None:
        self.source.close()

    def _check(self, where: LogPartition) -> int:
        if not 0 <= where.partition < self.topic.partitions:
            raise PartitionNotFound(self.topic.name, where.partition, self.topic.partitions)
        return where.partition

    def _bounds(self, stream: int, where: LogPartition, offset: int) -> Bounds:
        end, asked_at = self._ends.get(stream, (0, 0.0))
        if offset < end and monotonic() < asked_at + _ASK_EVERY:
            # What was removed from the source since is refused by the read itself.
            return Bounds(offset, end)
        with self._lock:
            chunk = self._kept_chunk(stream, offset)
        if chunk is not None:
            return Bounds(min(chunk.start, offset), chunk.next)
        bounds = self._asked_bounds(stream)
        if not bounds.start <= offset <= bounds.end:
            raise OffsetOutOfRange(where.topic_id, where.partition, offset, *bounds)
        return bounds

    def _asked_bounds(self, stream: int) -> Bounds:
        bounds, asked_at = self.source.bounds(stream), monotonic()
        self._ends[stream] = bounds.end, asked_at
        return bounds

    def _filtered(
        self, stream: int, partition: int, offset: int, max_bytes: int
    ) -> StoredRows | None:
        if self._filters is None:
            return None
        read = self._filters.read_partition(stream, partition, offset, _ROWS)
        if read is None:
            return None
        return _within(StoredRows(offset, read.next, read.rows, _size(read)), max_bytes)

    def _scanned(self, stream: int, partition: int, offset: int, max_bytes: int) -> StoredRows:
        with self._lock:
            self._asked[partition] = self._chunks_read
            chunk = self._chunk(stream, offset)
        batch = _within(_cut(chunk, partition, offset), max_bytes)
        if batch.next == chunk.next:
            with self._lock:
                self._had(stream, chunk, partition)
        return batch

    def _kept_chunk(self, stream: int, offset: int) -> _Chunk | None:
        for (of, start), chunk in reversed(self._chunks.items()):
            if of == stream and start <= offset < chunk.next:
                return chunk
        return None

    def _chunk(self, stream: int, offset: int) -> _Chunk:
        """The chunk with this offset: one that is kept, or else read, up to the next kept one."""
        kept = self._kept_chunk(stream, offset)
        if kept is not None:
            return kept
        later = [start for of, start in self._chunks if of == stream and start > offset]
        read = self.source.read(stream, offset, _ROWS, min(later, default=None))
        chunk = self._split(stream, offset, read)
        if chunk.next > offset:
            self._keep(stream, chunk)
        return chunk

    def _split(self, stream: int, offset: int, read: SourceRead) -> _Chunk:
        split: list[list[Row]] = [[] for _ in range(self._per_stream)]
        known = self._partition_of_key
        for row in read.rows:
            try:
                split[known[row[2]]].append(row)
            except KeyError:
                split[self._learn(row[2])].append(row)
        first = stream * self._per_stream
        by_partition = {first + place: found for place, found in enumerate(split)}
        return _Chunk(
            offset, read.next, by_partition, _size(read), set(by_partition), self._chunks_read
        )

    def _learn(self, key: bytes | None) -> int:
        if len(self._partition_of_key) >= _MOST_KEYS:
            self._partition_of_key.clear()
        # Rows without a key are in the first partition.
        place = 0 if key is None else self._hash(key) % self._per_stream
        self._partition_of_key[key] = place
        return place

    def _had(self, stream: int, chunk: _Chunk, partition: int) -> None:
        """Drop the chunk if no other partition that is being read waits for it.

        One that has not asked for as long as chunks are kept is not waited for.
        """
        chunk.waiting.discard(partition)
        recent = self._chunks_read - _MOST_CHUNKS
        place = stream, chunk.start
        if self._chunks.get(place) is chunk and not any(
            self._asked.get(other, 0) >= recent for other in chunk.waiting
        ):
            self._drop(place)

    def _keep(self, stream: int, chunk: _Chunk) -> None:
        self._chunks_read += 1
        self._chunks[(stream, chunk.start)] = chunk
        self._kept += chunk.size
        while len(self._chunks) > 1:
            place, oldest = next(iter(self._chunks.items()))
            if self._kept <= _KEPT_BYTES and oldest.number > chunk.number - _MOST_CHUNKS:
                break
            self._drop(place)

    def _drop(self, place: tuple[int, int]) -> None:
        if (dropped := self._chunks.pop(place, None)) is not None:
            self._kept -= dropped.size


def check_streams(partitions: int, source: Source) -> None:
    """Refuse a number of partitions that can't be laid over the source's streams."""
    if partitions % source.streams:
        raise ConfigError(
            f"partitions must be a multiple of the source's {source.streams} streams, "
            f"got {partitions}"
        )


def _size(read: SourceRead) -> int:
    return size_of(read.rows) if read.size is None else read.size


def _cut(chunk: _Chunk, partition: int, offset: int) -> StoredRows:
    rows = chunk.rows.get(partition, [])
    if rows and rows[0][0] < offset:
        rows = [row for row in rows if row[0] >= offset]
    return StoredRows(offset, chunk.next, rows, len(rows) * chunk.mean)


def _within(batch: StoredRows, max_bytes: int) -> StoredRows:
    """The first of the rows that fit, at least one."""
    if batch.size <= max_bytes or len(batch.rows) < 2:
        return batch
    size, count = 0, 0
    for row in batch.rows:
        size += size_of((row,))
        if count and size > max_bytes:
            break
        count += 1
    rows = batch.rows[:count]
    return StoredRows(batch.base, rows[-1][0] + 1, rows, size_of(rows))
