"""The rules of a relay: which partition a message is copied to, and what a relay records.

Where the checkpoint and the messages are in different stores, no commit holds both. A relay then
records what it is about to copy before it copies it: the offsets of the source, and under which
producer and sequences the batches go. Whoever finds such a record finishes it under the very same
numbers, and the log recognises what it has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter

import msgspec

from pxrs.core.records import SCHEMA
from pxrs.core.sequences import SEQUENCES
from pxrs.types import Header, Message

Record = tuple[bytes | None, bytes | None, list[Header], int]
Spread = dict[int, list[Record]]

_NO_HEADERS: list[Header] = []
# Partitions of so many keys are remembered.
_MOST_KEYS = 2**16
# What a message costs in a batch beyond its key and value, about.
_RECORD_BYTES = 36


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The topic that a group copies a source to: there is one."""

    topic: str
    schema: int = SCHEMA


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that was begun: all messages of the source from `start` up to (not including) `until`.

    `ends`: the partitions that they go to, and where each ended before.
    """

    start: int
    until: int
    ends: dict[int, int]


class RelayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a relay knows of one partition of its source, beside the checkpoint.

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
        """The record once so many messages were appended to these partitions."""
        following = {
            partition: (self.sequences.get(partition, 0) + count) % SEQUENCES
            for partition, count in counts.items()
        }
        return msgspec.structs.replace(
            self, sequences={**self.sequences, **following}, pending=None
        )

    def is_unfinished(self, checkpoint: int | None) -> bool:
        """Whether there is a copy to finish. A reset to elsewhere has made it void."""
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


class Spreader:
    """Spreads messages over the partitions of a topic, as records in the order that they came.

    A key decides by its hash, as for all who send. Messages without a key stay together, in the
    partition with the number of their own: they keep their order, too. Those without a time get
    `now`. `hash_of`: see `core.routing.hasher`.
    """

    def __init__(self, partitions: int, hash_of: Callable[[bytes], int]) -> None:
        self._partitions = partitions
        self._hash = hash_of
        self._known: dict[bytes, int] = {}

    def spread(self, messages: Iterable[Message], now: int) -> Spread:
        """The records of each partition that gets some. Times begin with 1970."""
        known = self._known
        lists: list[list[Record]] = [[] for _ in range(self._partitions)]
        for message in messages:
            key = message.key
            partition = known.get(key)
            if partition is None:
                partition = self._partition(key, message)
            headers = list(message.headers) if message.headers else _NO_HEADERS
            time = message.timestamp
            lists[partition].append((key, message.value, headers, time if time > 0 else now))
        return {partition: records for partition, records in enumerate(lists) if records}

    def _partition(self, key: bytes | None, message: Message) -> int:
        if key is None:
            return message.partition % self._partitions
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        partition = self._known[key] = self._hash(key) % self._partitions
        return partition


def size_of(key: bytes | None, value: bytes | None, headers: Iterable[Header]) -> int:
    """About how many bytes a message takes in a batch, rather more than less."""
    size = _RECORD_BYTES + len(key or b"") + len(value or b"")
    return size + sum(len(name.encode()) + len(it or b"") + 8 for name, it in headers)


def first_of(messages: list[Message], most_bytes: int) -> list[Message]:
    """The first messages, which take so many bytes at most together, or one."""
    size = 0
    for count, each in enumerate(messages):
        size += size_of(each.key, each.value, each.headers)
        if size > most_bytes and count:
            return messages[:count]
    return messages


def _at_most(records: list[Record]) -> int:
    """The sizes of all, as `size_of` says; most have no headers, and then it is much faster."""
    if any(map(itemgetter(2), records)):
        return sum(size_of(key, value, headers) for key, value, headers, _ in records)
    sizes = [len(key or b"") + len(value or b"") for key, value, _, _ in records]
    return sum(sizes) + _RECORD_BYTES * len(records)


def batches_of(records: list[Record], most_bytes: int) -> list[list[Record]]:
    """The records in order, in lists that take so many bytes at most each, or have one."""
    if _at_most(records) <= most_bytes:
        return [records]
    batches: list[list[Record]] = []
    begin = size = 0
    for number, (key, value, headers, _) in enumerate(records):
        own = size_of(key, value, headers)
        if size + own > most_bytes and number > begin:
            batches.append(records[begin:number])
            begin, size = number, 0
        size += own
    return [*batches, records[begin:]]
