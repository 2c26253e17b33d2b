"""Copies the batches of topics as they are, under the same offsets.

A log assigns offsets by itself and begins at 0. Where the source's head was trimmed, the target
first gets a filler that takes up the missing offsets, and is trimmed in turn.

Every batch is appended under a producer id of the copy's own, with its offset as the sequence. So
the log accepts only the very next batch: one whose first try was applied after all, or that
another run has appended meanwhile, is not appended twice. The bytes of the batch are not touched;
they keep the producer they came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from pxrs.codec.batches import filler, read_header
from pxrs.core.sequences import SEQUENCES
from pxrs.errors import (
    CopyRefused,
    OffsetOutOfRange,
    OutcomeUnknown,
    PxrsError,
    SequenceGap,
    StoreUnavailable,
)
from pxrs.stores.api import LogStore
from pxrs.topics import confirmed_bounds
from pxrs.types import Append, Batch, Bounds, LogPartition, StoredBatch, Topic

_FETCH_BYTES = 4 * 2**20
_LONGEST_FILLER = SEQUENCES - 1

OnMessages = Callable[[int], None]


class PartitionSum(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a partition: sizes, and a checksum over its batches and their offsets."""

    topic: str
    partition: int
    start: int
    end: int
    batches: int
    bytes: int
    checksum: str


def missing_messages(source: LogStore, target: LogStore, topic: Topic) -> int:
    """Returns how many messages of the topic the target does not have yet."""
    have = target.bounds(topic.id)
    return sum(
        held.end - max(held.start, min(have[number].end, held.end))
        for number, held in source.bounds(topic.id).items()
    )


def copy_topic(source: LogStore, target: LogStore, topic: Topic, on_messages: OnMessages) -> None:
    """Appends what the target does not have yet, and trims what the source no longer has."""
    for partition in range(topic.partitions):
        where = LogPartition(topic.id, partition)
        _PartitionCopy(source, target, topic, where, on_messages).run()


@dataclass
class _PartitionCopy:
    source: LogStore
    target: LogStore
    topic: Topic
    where: LogPartition
    on_messages: OnMessages

    def run(self) -> None:
        while True:
            wanted, have = self._wanted(), self._have()
            if have.end > wanted.end:
                raise CopyRefused(
                    f"{self._name()} ends at {have.end} in the target and at {wanted.end} in the "
                    "source: a producer has sent to the target, or the source is an older one"
                )
            try:
                if self._step(wanted, have):
                    return
            except (OutcomeUnknown, SequenceGap):
                # Applied or not, or another run was faster: the bounds show it.
                if self._have() == have:
                    raise
            except OffsetOutOfRange:
                # Retention was faster: the next look puts a filler in place of removed messages.
                if self._wanted() == wanted:
                    raise

    def _step(self, wanted: Bounds, have: Bounds) -> bool:
        """Brings the target nearer to the source; true when it has arrived."""
        if have.end < wanted.start:
            self._fill(have.end, wanted.start)
            return False
        if have.start < wanted.start:
            self.target.trim(self.where, wanted.start)
        self._copy(have.end, wanted.end)
        return have.end == wanted.end

    def _wanted(self) -> Bounds:
        """The source's bounds. A server that was cut off from its peers does not know the end."""
        return confirmed_bounds(self.source, self.where)

    def _have(self) -> Bounds:
        return self.target.bounds(self.topic.id)[self.where.partition]

    def _name(self) -> str:
        return f"partition {self.where.partition} of topic {self.topic.name!r}"

    def _fill(self, start: int, end: int) -> None:
        """Takes up offsets for which the source no longer has messages."""
        count = min(end - start, _LONGEST_FILLER)
        self._append([StoredBatch(start, start + count, filler(count))])

    def _copy(self, offset: int, end: int) -> None:
        while offset < end:
            batches = _read(self.source, self.where, offset, end)
            if batches[0].base != offset:
                raise CopyRefused(
                    f"{self._name()}: a batch of the source begins at {batches[0].base}, and the "
                    f"target ends within it at {offset}; they do not hold the same messages"
                )
            self._append(batches)
            self.on_messages(batches[-1].next - offset)
            offset = batches[-1].next

    def _append(self, batches: list[StoredBatch]) -> None:
        appends = [Append(self.where, self._placed(stored)) for stored in batches]
        for stored, result in zip(batches, self.target.append(appends), strict=True):
            if isinstance(result, PxrsError):
                result.add_note(f"offset {stored.base} of {self._name()}")
                raise result
            if result.base != stored.base:
                raise CopyRefused(
                    f"{self._name()}: the target gave offset {result.base} to the batch at "
                    f"{stored.base}; stop the producer that sends to it"
                )

    def _placed(self, stored: StoredBatch) -> Batch:
        producer = f"copy/{self.topic.id}/{self.where.partition}"
        return Batch(
            data=bytearray(stored.data),
            count=stored.next - stored.base,
            max_timestamp=read_header(stored.data).max_timestamp,
            producer_id=xxhash.xxh64_intdigest(producer.encode()) >> 2,
            producer_epoch=0,
            base_sequence=stored.base % SEQUENCES,
        )


def _read(log: LogStore, where: LogPartition, offset: int, end: int) -> list[StoredBatch]:
    """Batches from `offset` on, at least one: the log was confirmed to go on up to `end`."""
    batches = log.fetch(where, offset, _FETCH_BYTES).batches
    if not batches:
        raise StoreUnavailable(
            f"partition {where.partition} of log {where.topic_id!r} was read up to {offset}, and "
            f"it ends at {end}: the server that answers was cut off from the others, or has lost "
            "messages; copy again, and if this stays see docs/jetstream.md"
        )
    return batches


def sum_up(log: LogStore, topic: Topic, partition: int, on_messages: OnMessages) -> PartitionSum:
    """Reads all batches of a partition and computes their checksum.

    Up to its confirmed end: by what this finds, a copy is complete or not.
    """
    where = LogPartition(topic.id, partition)
    start, end = confirmed_bounds(log, where)
    offset, batches, size = start, 0, 0
    digest = xxhash.xxh3_128()
    while offset < end:
        for stored in _read(log, where, offset, end):
            digest.update(b"%d-%d:" % (stored.base, stored.next))
            digest.update(stored.data)
            batches += 1
            size += len(stored.data)
            on_messages(stored.next - stored.base)
            offset = stored.next
    return PartitionSum(
        topic=topic.name,
        partition=partition,
        start=start,
        end=end,
        batches=batches,
        bytes=size,
        checksum=digest.hexdigest(),
    )
