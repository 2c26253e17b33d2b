"""Frozen value types that cross the seams."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgspec

if TYPE_CHECKING:
    # Type checkers know defaults on every version, Python itself has them from 3.13 on.
    from typing_extensions import TypeVar

    # The type of values: of messages and items, and of the objects that read and write them.
    Value = TypeVar("Value", default=Any)
    # The same where a serde may be given, and where none is: what is read from topics is bytes …
    Read = TypeVar("Read", default=bytes)
    # … and what is put into queues, and comes back from there, is text or bytes.
    Plain = TypeVar("Plain", default=str | bytes)
else:
    from typing import TypeVar

    Value, Read, Plain = TypeVar("Value"), TypeVar("Read"), TypeVar("Plain")

Header = tuple[str, bytes | None]
# Names of topics, groups and queues that begin with this are reserved for pxrs.
RESERVED = "_pxrs."


class TopicPartition(NamedTuple):
    """One partition of a topic, by the topic's name."""

    topic: str
    partition: int


class LogPartition(NamedTuple):
    """One partition of a log, by the topic's id: a topic made again is another log."""

    topic_id: str
    partition: int


class Fence(NamedTuple):
    """A token that a handler stores with its own effects, to refuse those of a stale owner.

    The epoch of a message that was read without a group is 0.
    """

    topic: str
    partition: int
    epoch: int


class Message(msgspec.Struct, Generic[Value], frozen=True, gc=False):
    """One message. `key` and `value` are bytes unless a serde decoded them.

    `Message[Order]` has an `Order` as its value; None if None was sent, which the type hides.
    `gc=False`: a message refers to values and to its fence, never back to itself.
    """

    fence: Fence
    offset: int
    timestamp: int
    key: Any
    value: Value
    headers: tuple[Header, ...] = ()

    @property
    def topic(self) -> str:
        return self.fence.topic

    @property
    def partition(self) -> int:
        return self.fence.partition


class Position(NamedTuple):
    """The topic, partition and offset of a written message."""

    topic: str
    partition: int
    offset: int


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as its record in the coordination store describes it."""

    name: str
    id: str
    partitions: int
    # The rule for the partition of a key, for all producers: see `core/routing.py`.
    partitioner: str = "xxhash"
    retention_ms: int | None = None
    retention_bytes: int | None = None
    created_ms: int = 0
    # The settings of a virtual topic's source, see `sources/`.
    source: dict[str, Any] | None = None

    @property
    def retention(self) -> float | None:
        """Seconds that messages are kept; None keeps them for ever."""
        return None if self.retention_ms is None else self.retention_ms / 1000


class Bounds(NamedTuple):
    """The offsets of a partition, from `start` up to (not including) `end`."""

    start: int
    end: int


class Counted(NamedTuple):
    """How many messages there are; an estimate if it is not `exact`."""

    messages: int
    exact: bool


class Version(msgspec.Struct, frozen=True, order=True, gc=False):
    """The version of a key's value. `index` rises with every write to the key's shard.

    `term` rises when another node begins to lead the shard. Versions compare as they were given;
    0/0 stands for a key that does not exist.
    """

    term: int
    index: int


# The version of a key that does not exist: `if_match=ABSENT` creates it.
ABSENT = Version(0, 0)


class Entry(msgspec.Struct, frozen=True):
    """A key, its value, and the version that was written with it."""

    key: bytes
    value: bytes
    version: Version


class Versioned(msgspec.Struct, frozen=True):
    """A record of the coordination store. Versions only rise while the record exists."""

    key: str
    value: bytes
    version: int
    session: str | None = None


class Check(NamedTuple):
    """Holds when `key` is at `version`; version 0 means that there is no such record.

    Version 0 may be checked only on a key that the same commit puts, and the version of a
    session-bound record may not be checked at all: engines exist that can't do either.
    """

    key: str
    version: int


class Put(NamedTuple):
    """Writes `value`; with a session id the record vanishes with that session."""

    key: str
    value: bytes
    session: str | None = None


class Delete(NamedTuple):
    """Removes the record; removing one that is not there is fine."""

    key: str


Write = Put | Delete


class Committed(msgspec.Struct, frozen=True):
    """All checks held, all writes are done. `versions` has the new version of every key put."""

    versions: Mapping[str, int]


class Conflict(msgspec.Struct, frozen=True):
    """Nothing was written. `current` has every checked key that was not as expected."""

    current: Mapping[str, Versioned | None]


class Limits(NamedTuple):
    """The limits of one `commit`, and of a record's key."""

    operations: int
    value_bytes: int
    key_chars: int = 2100


class Batch(msgspec.Struct, frozen=True):
    """An encoded record batch with the header fields a log needs to place it.

    `data` is a RecordBatch v2 whose base offset the log fills in; it lies outside the
    checksum. `producer_id` -1 means that the batch is not deduplicated.
    """

    data: bytearray
    count: int
    max_timestamp: int
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1


class Append(NamedTuple):
    """A batch and the partition it goes to."""

    where: LogPartition
    batch: Batch


class Appended(NamedTuple):
    """The batch is in the log from `base` on; `duplicate` if it already was."""

    base: int
    duplicate: bool = False


class StoredBatch(NamedTuple):
    """A batch as the log keeps it; `next` is the offset after its last message.

    `id` and `after` are for logs whose engine may lose the last batches and give their offsets
    again: its own name, and that of the batch before it. Empty where they are not known.
    """

    base: int
    next: int
    data: bytes
    id: str = ""
    after: str = ""


class Row(NamedTuple):
    """One row of a source, as a message: its fields are in the order of a message's.

    A plain tuple is one, too; those that a database returns end with the value.
    """

    offset: int
    # Milliseconds since 1970.
    timestamp: int
    key: bytes | None
    value: Any
    headers: tuple[Header, ...] = ()


class StoredRows(NamedTuple):
    """Rows of a source that lie in one partition, from `base` up to (not including) `next`.

    There are no others between: offsets of a source rise, but have gaps. `size` is about how many
    bytes they take.
    """

    base: int
    next: int
    rows: list[Row]
    size: int


class Fetched(NamedTuple):
    """Batches in order, the first one holding the wanted offset, and the partition's bounds."""

    batches: list[StoredBatch]
    start: int
    end: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A work queue and how it orders its items."""

    name: str
    fifo: bool = False
    created_ms: int = 0


class Holder(NamedTuple):
    """The holder of items: a transaction of a session. Its items are free when the session ends."""

    session: str
    transaction: str


class NewItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item to be put. Of several with one `dedupe` key within the window only the first is.

    Items of one key are handed out strictly in order; `delay` and the window are in seconds. The
    window counts only where there is a dedupe key.
    """

    queue: str
    body: bytes
    key: str | None = None
    priority: int = 0
    delay: float = 0.0
    dedupe: str | None = None
    dedupe_window: float = 300.0


class Held(NamedTuple):
    """One delivery of an item. A later delivery of the same item has a higher number."""

    queue: str
    id: int
    delivery: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An item as it is handed out, counted already. `error`: how its last delivery ended."""

    held: Held
    body: bytes
    key: str | None
    priority: int
    put_ms: int
    error: str


class Taken(NamedTuple):
    """The items that were taken, and in how many seconds more may be due, if the store knows.

    `suspect`: no items, because a suspect is next and none was asked for.
    """

    items: list[Delivery]
    due: float | None
    suspect: bool = False


class Release(NamedTuple):
    """An item given back: to be handed out again after `delay` seconds, or dead."""

    held: Held
    delay: float = 0.0
    error: str = ""
    dead: bool = False


class QueueChange(msgspec.Struct, frozen=True):
    """A transaction's changes to queues: all of them or none.

    `unit` names this very commit: another attempt at the same has another name. The outcome of one
    without a name can't be asked for, and it leaves no evidence. `forget` are earlier units of the
    session whose outcome the committer knows: their evidence may go.
    """

    holder: Holder
    remove: tuple[Held, ...] = ()
    put: tuple[NewItem, ...] = ()
    unit: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    forget: tuple[str, ...] = ()


class Outcome(enum.StrEnum):
    """The outcome of a commit without an answer. `NEVER` is final, `UNKNOWN` is not."""

    DONE = "done"
    NEVER = "never"
    UNKNOWN = "unknown"


class ItemState(enum.StrEnum):
    """The state of an item. `WAITING`: behind another of its key, or of its fifo queue."""

    READY = "ready"
    DELAYED = "delayed"
    HELD = "held"
    WAITING = "waiting"
    DEAD = "dead"


class StoredItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item in its queue, as `peek` and copies show it.

    `visible_ms`: when it can be taken, if it is delayed.
    """

    id: int
    state: ItemState
    body: bytes
    key: str | None
    priority: int
    deliveries: int
    put_ms: int
    taken_ms: int | None
    visible_ms: int | None
    dead_ms: int | None
    error: str
    holder: Holder | None


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """How many items a queue has in each state, and how many it has had since it was created."""

    ready: int = 0
    delayed: int = 0
    held: int = 0
    waiting: int = 0
    dead: int = 0
    oldest_ms: int | None = None
    put: int = 0
    done: int = 0

    @property
    def depth(self) -> int:
        """The number of items that are not handled yet."""
        return self.ready + self.delayed + self.held + self.waiting


class QueueLimits(NamedTuple):
    """The limits of one transaction."""

    items: int
    body_bytes: int
