"""The log in one process's memory: as strict as the other engines, gone with the process."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pxrs.codec.batches import set_base_offset
from pxrs.core.sequences import Duplicate, Fresh, ProducerState, judge
from pxrs.errors import (
    Closed,
    OffsetOutOfRange,
    PartitionNotFound,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from pxrs.stores.api import Watch, validate_batch, validate_partitions
from pxrs.stores.wakeups import Wakeups
from pxrs.types import Append, Appended, Batch, Bounds, Fetched, LogPartition, StoredBatch


class MemoryLog:
    """A `LogStore`. Every call holds the one lock that is handed in."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._topics: dict[str, list[MemoryPartition]] = {}
        self._wakeups: Wakeups[LogPartition] = Wakeups(lock)
        self._closed = False

    def create(self, topic_id: str, partitions: int) -> None:
        validate_partitions(partitions)
        with self._lock:
            self._refuse_when_closed()
            held = self._topics.setdefault(topic_id, [MemoryPartition() for _ in range(partitions)])
            if len(held) != partitions:
                raise TopicExists(f"topic {topic_id!r} has {len(held)} partitions")

    def drop(self, topic_id: str) -> None:
        with self._lock:
            self._refuse_when_closed()
            self._topics.pop(topic_id, None)

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        with self._lock:
            self._refuse_when_closed()
            return [self._place_or_refuse(where, batch) for where, batch in appends]

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        with self._lock:
            partition = self.find(where)
            start, end = partition.bounds()
            if not start <= offset <= end:
                raise OffsetOutOfRange(*where, offset, start, end)
            return Fetched(partition.read(offset, max_bytes), start, end)

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        with self._lock:
            held = self._find_topic(topic_id)
            return {number: partition.bounds() for number, partition in enumerate(held)}

    def size(self, where: LogPartition) -> int:
        with self._lock:
            return self.find(where).size

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        with self._lock:
            return self.find(where).batch_at(timestamp)

    def trim(self, where: LogPartition, before: int) -> int:
        with self._lock:
            partition = self.find(where)
            partition.trim(before)
            return partition.bounds().start

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        with self._lock:
            partition = self.find(where)
            partition.expire(before_timestamp, max_bytes)
            return partition.bounds().start

    def watch(self, *where: LogPartition) -> Watch:
        with self._lock:
            self._refuse_when_closed()
            return self._wakeups.watch(frozenset(where).__contains__)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wakeups.close()

    def find(self, where: LogPartition) -> MemoryPartition:
        """The partition; raises `TopicNotFound` or `PartitionNotFound`. Under the lock."""
        held = self._find_topic(where.topic_id)
        if not 0 <= where.partition < len(held):
            raise PartitionNotFound(*where, len(held))
        return held[where.partition]

    def place(self, where: LogPartition, batch: Batch) -> Appended:
        """Append one batch or raise, and wake the partition's watches. Under the lock."""
        validate_batch(batch)
        appended = self.find(where).append(batch)
        self._wakeups.ring((where,))
        return appended

    def _place_or_refuse(self, where: LogPartition, batch: Batch) -> Appended | PxrsError:
        try:
            return self.place(where, batch)
        except PxrsError as error:
            return error

    def _find_topic(self, topic_id: str) -> list[MemoryPartition]:
        self._refuse_when_closed()
        try:
            return self._topics[topic_id]
        except KeyError:
            raise TopicNotFound(topic_id) from None

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Closed("the log was closed")


class Kept(NamedTuple):
    """A batch, and the values that retention needs."""

    stored: StoredBatch
    max_timestamp: int


class MemoryPartition:
    """Batches in order. `end` only rises, so no offset is used twice."""

    def __init__(self) -> None:
        self.batches: list[Kept] = []
        self.end = 0
        self.size = 0
        self._producers: dict[int, ProducerState] = {}

    def bounds(self) -> Bounds:
        start = self.batches[0].stored.base if self.batches else self.end
        return Bounds(start, self.end)

    def append(self, batch: Batch) -> Appended:
        """Add the batch at the end, unless its producer's state forbids it."""
        if batch.producer_id >= 0:
            verdict = judge(self._producers.get(batch.producer_id), batch, self.end)
            if isinstance(verdict, Duplicate):
                return Appended(verdict.base, duplicate=True)
            if not isinstance(verdict, Fresh):
                raise verdict
            self._producers[batch.producer_id] = verdict.state
        base = self.end
        set_base_offset(batch.data, base)
        self.end = base + batch.count
        self.size += len(batch.data)
        stored = StoredBatch(base, self.end, bytes(batch.data))
        self.batches.append(Kept(stored, batch.max_timestamp))
        return Appended(base)

    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        """Batches from the one that holds `offset`, at least one if there is one."""
        found: list[StoredBatch] = []
        room = max_bytes
        index = bisect_right(self.batches, offset, key=lambda kept: kept.stored.next)
        while index < len(self.batches):
            stored = self.batches[index].stored
            room -= len(stored.data)
            if found and room < 0:
                break
            found.append(stored)
            index += 1
        return found

    def batch_at(self, timestamp: int) -> int | None:
        return next(
            (kept.stored.base for kept in self.batches if kept.max_timestamp >= timestamp), None
        )

    def trim(self, before: int) -> None:
        self._drop(bisect_right(self.batches, before, key=lambda kept: kept.stored.next))

    def expire(self, before_timestamp: int | None, max_bytes: int | None) -> None:
        size, gone = self.size, 0
        for stored, max_timestamp in self.batches[:-1]:
            old = before_timestamp is not None and max_timestamp < before_timestamp
            if not old and (max_bytes is None or size <= max_bytes):
                break
            size -= len(stored.data)
            gone += 1
        self._drop(gone)

    def _drop(self, oldest: int) -> None:
        self.size -= sum(len(kept.stored.data) for kept in self.batches[:oldest])
        del self.batches[:oldest]
