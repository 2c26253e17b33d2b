"""Every error pxrs raises on purpose.

```
PxrsError
├── InvalidRequest            bad input; nothing was changed          (also a ValueError)
│   ├── ConfigError             unknown scheme, unknown or mistyped option
│   │   └── MissingExtra          an optional dependency is not installed
│   ├── TopicNotFound
│   ├── TopicExists             … with another number of partitions or other settings
│   ├── PartitionNotFound
│   ├── QueueNotFound
│   ├── QueueExists             … with another order
│   ├── GroupNotFound
│   ├── GroupExists             … for another topic and application
│   ├── GroupNotEmpty           .members: who must leave first, unless the call is forced
│   ├── CopyRefused             one store can't be copied into the other as they are
│   ├── OffsetOutOfRange        .start, .end: what the partition holds
│   └── MessageTooLarge
├── StoreError                the engine could not do it
│   ├── StoreBusy             ↻ another process holds the writer; names the holder
│   ├── StoreUnavailable      ↻ the engine can't be reached
│   │   └── RetryExhausted      ↻ … after several attempts; .attempts, and the last one's error
│   ├── StoreFull               no space left; nothing was written
│   ├── StoreReadOnly           the store can't be written
│   ├── StoreDamaged            the engine says its own data is broken
│   ├── SchemaMismatch          made by another version of pxrs
│   ├── MessagesLost            the engine lost messages that were read already
│   ├── SourceChanged           a table was truncated or made anew under a virtual topic
│   └── OutcomeUnknown          the write may or may not have happened, and reading back can't tell
├── DamagedBatch              a stored batch fails its checksum; .next_offset is where to continue
├── BufferFull                ↻ the producer's buffer stayed full for max_block seconds
├── DeliveryFailed              messages were not appended within delivery_timeout, or never can be
├── ProducerFenced              another producer with this id and a higher epoch has appended
├── SequenceGap                 a batch arrived whose predecessor never did
├── VersionMismatch             the key has another version than `if_match`; .current: which
├── AlreadyExists               the key was to be created and is there; .current: its version
├── NotLeader                 ↻ another node leads the key; .node and .address: which
├── CommitConflict            ↻ a check failed inside atomic(); .current holds what is there now
├── TransactionConflict       ↻ the engine chose this transaction as the victim of a deadlock
├── Fenced                      another owner has this now; .parts names the partitions
│   └── Displaced               another process joined under this static member's name
├── NoCheckpoint                a partition has no checkpoint, and `start="error"` was asked for
├── HandlerFailed               a handler failed for the last time, and the run was to stop then
├── SessionLost                 the session expired; everything written with it is gone
├── PermissionDenied            the token lacks a right; .right: which; nothing was changed
├── NotAtomic                   these stores can't commit together
├── InsideTransaction           this call needs a write transaction of its own
├── IllegalMove                 a bug in pxrs: an event that this state does not know
└── Closed                      the object was closed, or belongs to the parent process of a fork
```

↻ marks errors after which the same call may succeed: `error.retryable` is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pxrs.redaction import hidden

if TYPE_CHECKING:
    from pxrs.types import TopicPartition, Version, Versioned


_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
# How much of a value an error quotes.
_LONGEST_QUOTE = 100


def quoted(value: object) -> str:
    """The value as errors show it: its repr, cut after 100 characters."""
    if isinstance(value, str | bytes | bytearray):
        # Cut first: the repr of a body of 64 MB is four times as long.
        text = repr(value[:_LONGEST_QUOTE])
        return text if len(value) <= _LONGEST_QUOTE else f"{text}…"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - its own `__repr__` fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


class PxrsError(Exception):
    """The root of the tree."""

    retryable: ClassVar[bool] = False

    def __init__(self, *args: object) -> None:
        # Many errors quote a driver, or another program, which may quote a password.
        super().__init__(*(hidden(each) if isinstance(each, str) else each for each in args))

    @property
    def code(self) -> str:
        """The name of its class as words, for programs: `version_mismatch`."""
        return _WORDS.sub("_", type(self).__name__).lower()

    @property
    def message(self) -> str:
        """The text: what happened and what to do."""
        return str(self)

    @property
    def cause(self) -> BaseException | None:
        """The error that led to this one."""
        return self.__cause__

    @property
    def context(self) -> dict[str, Any]:
        """The error's attributes by name: a key, versions, partitions."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross processes: rebuild from text and attributes, not through __init__, which
        # would take the finished text for its first argument.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InvalidRequest(PxrsError, ValueError):
    """The call is wrong: an argument, a name or a setting. Nothing was changed."""


class ConfigError(InvalidRequest):
    """A URL, setting or option that pxrs does not know or can't use."""


class MissingExtra(ConfigError):
    """A backend needs an optional dependency that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'pxrs[{extra}]'")
        self.extra = extra


class TopicNotFound(InvalidRequest):
    """No topic of this name, or it was deleted."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} does not exist; create it: px.topics.create({topic!r}, partitions=…)"
        )
        self.topic = topic


class TopicExists(InvalidRequest):
    """A topic of this name exists with other settings."""


class PartitionNotFound(InvalidRequest):
    """The topic has no such partition."""

    def __init__(self, topic: str, partition: object, partitions: int) -> None:
        super().__init__(
            f"partition must be 0 to {partitions - 1} for topic {topic!r}, got {quoted(partition)}"
        )
        self.topic = topic
        self.partition = partition


class QueueNotFound(InvalidRequest):
    """No queue of this name."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} does not exist; put an item into it, "
            f"or create it with px.queues.create({queue!r})"
        )
        self.queue = queue


class QueueExists(InvalidRequest):
    """A queue of this name exists with another order."""


class GroupNotFound(InvalidRequest):
    """No consumer ever joined a group of this name, or the group was deleted."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"group {group!r} does not exist; it is created when its first member joins"
        )
        self.group = group


class GroupExists(InvalidRequest):
    """A group of this name exists for another topic and application."""


class GroupNotEmpty(InvalidRequest):
    """The call needs a group without members."""

    def __init__(self, group: str, members: tuple[str, ...]) -> None:
        super().__init__(
            f"group {group!r} has members: {', '.join(members)}; "
            "stop them first, or pass force=True to fence them"
        )
        self.group = group
        self.members = members


class CopyRefused(InvalidRequest):
    """A store can't be copied: it is in use, or the other one holds something else."""


class OffsetOutOfRange(InvalidRequest):
    """The offset is before the partition's first message or past its end."""

    def __init__(self, topic: str, partition: int, offset: int, start: int, end: int) -> None:
        side = "before the start" if offset < start else "past the end"
        super().__init__(
            f"offset {offset} is {side} of {topic!r} partition {partition}, "
            f"which holds {start} up to (not including) {end}"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.start = start
        self.end = end


class MessageTooLarge(InvalidRequest):
    """Key, value and headers together are over the limit."""


class StoreError(PxrsError):
    """The engine underneath could not execute the call."""


class StoreBusy(StoreError):
    """Another process held the store's writer for the whole waiting time."""

    retryable = True


class StoreUnavailable(StoreError):
    """The engine can't be reached or opened."""

    retryable = True


class RetryExhausted(StoreUnavailable):
    """Several attempts through nodes have failed; nothing was done. The last error is chained."""

    def __init__(self, attempts: int, last: PxrsError) -> None:
        times = "once" if attempts == 1 else f"{attempts} times"
        super().__init__(f"tried {times} without success: {last}")
        self.attempts = attempts


class StoreFull(StoreError):
    """No space left; the transaction was rolled back whole."""


class StoreReadOnly(StoreError):
    """The store can be read but not written."""


class StoreDamaged(StoreError):
    """The engine reports its own data as broken."""


class MessagesLost(StoreError):
    """The engine lost messages that were read from it, and gives their offsets to new ones.

    Reading on would skip the new ones in silence, so pxrs goes on only after a seek or a reset.
    `offset` is how far the partition was read or committed; `start` and `end` are its bounds
    now, None if it does not exist at all.
    """

    def __init__(
        self, topic: str, partition: int, offset: int, start: int | None, end: int | None
    ) -> None:
        if end is None:
            found = "does not exist any more, though the topic was not deleted"
            what_to_do = "delete the topic and create it again"
        elif end < offset:
            found = f"ends at {end} now"
            what_to_do = f"seek, or reset the group, to {end} or to an earlier offset"
        else:
            found = "has other messages there now"
            what_to_do = (
                "reset the group to a time before the loss, or seek to "
                f"{offset} to leave out what was sent in place of the lost messages"
            )
        super().__init__(
            f"{topic!r} partition {partition} was read up to offset {offset} and {found}: the "
            "engine lost messages that it had acknowledged (restored from a backup, or crashed "
            f"before it synced); to go on, {what_to_do}"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.start = start
        self.end = end


class SourceChanged(StoreError):
    """A source was changed so that rows would be skipped, or delivered twice."""


class SchemaMismatch(StoreError):
    """The store was made by a version of pxrs that this one can't work with."""


class OutcomeUnknown(StoreError):
    """A write was sent, no answer came, and reading back can't tell whether it happened."""


class DamagedBatch(PxrsError):
    """A stored batch fails its checksum or can't be decoded.

    Reading can continue at `next_offset`. That loses the batch, so pxrs never does it by itself.
    """

    def __init__(self, topic: str, partition: int, offset: int, next_offset: int, why: str) -> None:
        super().__init__(
            f"the batch at offset {offset} of {topic!r} partition {partition} is damaged ({why}); "
            f"to continue without it, read from offset {next_offset}"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.next_offset = next_offset


class BufferFull(PxrsError):
    """The producer's buffer had no room for `max_block` seconds."""

    retryable = True


class DeliveryFailed(PxrsError):
    """Messages were not appended within `delivery_timeout`, or never can be; the cause is chained.

    Raised by the handle that `send` returned, or by `flush` and `close` if the program did not ask
    that handle. `send` itself raises it if the topic could not be looked up in that time.
    """


class ProducerFenced(PxrsError):
    """A producer with the same id and a higher epoch has appended since."""


class SequenceGap(PxrsError):
    """The batch's predecessor was never appended; appending it would hide a loss."""


class VersionMismatch(PxrsError):
    """The key does not have the version that the write named: read it again, then decide."""

    def __init__(self, key: bytes, expected: Version, current: Version | None) -> None:
        has = "does not exist" if current is None else f"has version {_dotted(current)}"
        super().__init__(f"version mismatch: key {quoted(key)} {has}, not {_dotted(expected)}")
        self.key = key
        self.expected = expected
        self.current = current


class AlreadyExists(PxrsError):
    """The key was to be created, and it is there already."""

    def __init__(self, key: bytes, current: Version) -> None:
        super().__init__(f"key {quoted(key)} already exists with version {_dotted(current)}")
        self.key = key
        self.current = current


class NotLeader(PxrsError):
    """Another node leads the key; this one did nothing. Clients go to the leader."""

    retryable = True

    def __init__(self, key: bytes, node: str, address: str) -> None:
        super().__init__(f"node {node!r} at {address} leads the key {quoted(key)}")
        self.key = key
        self.node = node
        self.address = address


def _dotted(version: Version) -> str:
    return f"{version.term}.{version.index}"


class CommitConflict(PxrsError):
    """A check did not hold when `atomic()` was applied; all of it was rolled back."""

    retryable = True

    def __init__(self, current: Mapping[str, Versioned | None]) -> None:
        super().__init__(f"another writer changed: {', '.join(sorted(current))}")
        self.current = current


class TransactionConflict(PxrsError):
    """The engine rolled this transaction back (deadlock, serialisation); run it again."""

    retryable = True


class Fenced(PxrsError):
    """Another owner has this now. Normal control flow: stop working on it.

    `parts` are the partitions that were lost; empty if the error is about something else.
    """

    def __init__(self, message: str = "", parts: Iterable[TopicPartition] = ()) -> None:
        super().__init__(message)
        self.parts = frozenset(parts)


class Displaced(Fenced):
    """Another process joined the group under the same static name; this one must end."""


class NoCheckpoint(PxrsError):
    """The group has no checkpoint in this partition, and the consumer has `start="error"`."""


class HandlerFailed(PxrsError):
    """A handler failed for the last time on a message, and the run stopped. See its cause."""


class SessionLost(PxrsError):
    """The session expired or was ended; it never comes back, open a new one."""


class PermissionDenied(PxrsError):
    """The token may not do this. Nothing was changed.

    `right` is the missing right, as `pxrs token create --allow` takes it; empty if no right would
    suffice.
    """

    def __init__(self, message: str, right: str = "") -> None:
        super().__init__(message)
        self.right = right


class NotAtomic(PxrsError):
    """The stores in use can't apply these changes in one commit."""


class InsideTransaction(PxrsError):
    """The call would wait for this very thread.

    It needs a write transaction of its own while this thread holds one, or it came from a
    signal handler or destructor that has interrupted the producer in this thread.
    """


class IllegalMove(PxrsError):
    """A bug in pxrs: an event that is not in the table of moves. Nothing was changed."""


class Closed(PxrsError):
    """The object was closed, or was made before a fork and used in the child."""
