"""The rules of a relay: what it records of its copies, and how many messages one copy has.

Where the checkpoint and the messages are in different stores, no commit holds both. A relay then
records what it is about to copy before it copies it: which offsets of the source go to which
partition, and under which producer and sequences the batches go. A member that finds such a record
finishes it under the very same numbers, and the log recognises batches that it has already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pxrs.core.packing import numbers_in, ranges_of
from pxrs.core.records import SCHEMA
from pxrs.core.sequences import SEQUENCES
from pxrs.types import Header, Message

# About how many bytes a message costs in a batch beyond its key and value.
_RECORD_BYTES = 36


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The topic that a group copies a source to: there is one."""

    topic: str
    schema: int = SCHEMA


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that was begun: messages of the source from `start` up to (not including) `until`.

    `ends`: the partitions that they go to, and where each ended before. `offsets`: for each of
    these the messages that go there, by how far behind `start` they are (`0-2,7`). Rows of a table
    may change before the copy is finished; where they go does not.
    """

    start: int
    until: int
    ends: dict[int, int]
    offsets: dict[int, str]

    @property
    def targets(self) -> dict[int, int]:
        """The partition of each message, by its offset."""
        return {
            self.start + place: partition
            for partition, places in self.offsets.items()
            for place in numbers_in(places)
        }


def pending(start: int, until: int, ends: dict[int, int], targets: Mapping[int, int]) -> Pending:
    """The record of a copy of these messages: their offsets, and the partition of each."""
    places: dict[int, list[int]] = {}
    for offset, partition in targets.items():
        places.setdefault(partition, []).append(offset - start)
    offsets = {partition: ranges_of(each) for partition, each in places.items()}
    return Pending(start=start, until=until, ends=ends, offsets=offsets)


class RelayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A relay's record of one partition of its source, beside the checkpoint.

    `sequences`: the next one of the producer, for each partition of the topic that it has
    appended to. `pending` is there from before the first batch is appended until the commit of
    the checkpoint behind it.
    """

    producer: int
    sequences: dict[int, int] = {}
    pending: Pending | None = None
    schema: int = SCHEMA

    def begun(self, pending: Pending) -> RelayRecord:
        """The record of a copy that is about to be made."""
        return msgspec.structs.replace(self, pending=pending)

    def done(self, counts: dict[int, int]) -> RelayRecord:
        """The record once these numbers of messages were appended, by partition."""
        following = {
            partition: (self.sequences.get(partition, 0) + count) % SEQUENCES
            for partition, count in counts.items()
        }
        return msgspec.structs.replace(
            self, sequences={**self.sequences, **following}, pending=None
        )

    def is_unfinished(self, checkpoint: int | None) -> bool:
        """Whether there is a copy to finish. A reset to another offset has made it void."""
        pending = self.pending
        if pending is None or checkpoint is None:
            return False
        return pending.start <= checkpoint < pending.until


def relays_prefix(group: str) -> str:
    return f"relays/{group}/"


def target_key(group: str, source_id: str) -> str:
    """The key of the `Target` of a source in a group."""
    return f"{relays_prefix(group)}{source_id}"


def relay_key(group: str, source_id: str, topic_id: str, partition: int) -> str:
    """The key of the `RelayRecord` of one partition of the source."""
    return f"{relays_prefix(group)}{source_id}/{topic_id}/{partition}"


def size_of(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> int:
    """About how many bytes a message takes in a batch, rather more than less."""
    size = _RECORD_BYTES + len(key or b"") + len(value or b"")
    return size + sum(len(name.encode()) + len(it or b"") + 8 for name, it in headers)


def first_of(messages: list[Message], most_bytes: int) -> list[Message]:
    """The first messages that together take at most `most_bytes`, at least one."""
    size = 0
    for count, each in enumerate(messages):
        size += size_of(each.key, each.value, each.headers)
        if size > most_bytes and count:
            return messages[:count]
    return messages
