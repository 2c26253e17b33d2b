"""Safe parallel consumption of ordered messages on the store you already run."""

from pxrs._version import __version__
from pxrs.core.retry import Backoff
from pxrs.errors import (
    BufferFull,
    Closed,
    CommitConflict,
    ConfigError,
    DamagedBatch,
    DeliveryFailed,
    Displaced,
    Fenced,
    GroupNotEmpty,
    GroupNotFound,
    HandlerFailed,
    IllegalMove,
    InsideTransaction,
    InvalidRequest,
    MessageTooLarge,
    MissingExtra,
    NoCheckpoint,
    NotAtomic,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionNotFound,
    ProducerFenced,
    PxrsError,
    SchemaMismatch,
    SequenceGap,
    SessionLost,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TopicExists,
    TopicNotFound,
    TransactionConflict,
)
from pxrs.runtime.app import Pxrs, connect
from pxrs.runtime.consumer import Consumer
from pxrs.runtime.failure import DeadLetter, Stop
from pxrs.runtime.group_info import (
    CheckpointChange,
    GroupHistory,
    GroupInfo,
    GroupPartition,
    GroupReset,
    GroupSummary,
    MemberInfo,
    PartitionMove,
    Rebalance,
)
from pxrs.runtime.groups import Groups
from pxrs.runtime.health import Health
from pxrs.runtime.producer import Producer
from pxrs.runtime.reader import Reader
from pxrs.runtime.sent import Sent, SentMany
from pxrs.runtime.topics import PartitionInfo, TopicInfo
from pxrs.runtime.transaction import Transaction
from pxrs.serde import JSON, Serde
from pxrs.types import Bounds, Fence, Message, Position, Topic, TopicPartition

__all__ = [
    # opening
    "connect",
    "Pxrs",
    "__version__",
    # topics and messages
    "Topic",
    "TopicInfo",
    "PartitionInfo",
    "TopicPartition",
    "Message",
    "Fence",
    "Position",
    "Bounds",
    # sending and reading
    "Producer",
    "Sent",
    "SentMany",
    "Reader",
    "Serde",
    "JSON",
    # consuming
    "Consumer",
    "Health",
    "Transaction",
    "Backoff",
    "DeadLetter",
    "Stop",
    "Groups",
    "GroupSummary",
    "GroupInfo",
    "MemberInfo",
    "GroupPartition",
    "GroupHistory",
    "Rebalance",
    "PartitionMove",
    "GroupReset",
    "CheckpointChange",
    # errors
    "PxrsError",
    "InvalidRequest",
    "ConfigError",
    "MissingExtra",
    "TopicNotFound",
    "TopicExists",
    "PartitionNotFound",
    "GroupNotFound",
    "GroupNotEmpty",
    "OffsetOutOfRange",
    "MessageTooLarge",
    "StoreError",
    "StoreBusy",
    "StoreUnavailable",
    "StoreFull",
    "StoreReadOnly",
    "StoreDamaged",
    "SchemaMismatch",
    "OutcomeUnknown",
    "DamagedBatch",
    "BufferFull",
    "DeliveryFailed",
    "ProducerFenced",
    "SequenceGap",
    "CommitConflict",
    "TransactionConflict",
    "Fenced",
    "Displaced",
    "NoCheckpoint",
    "HandlerFailed",
    "IllegalMove",
    "SessionLost",
    "NotAtomic",
    "InsideTransaction",
    "Closed",
]
