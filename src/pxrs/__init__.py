"""Safe parallel consumption of ordered messages on the store you already run."""

from typing import TYPE_CHECKING, Any

from pxrs._version import __version__
from pxrs.core.delivery import ConsumeOnce, ConsumeTimes, Forever
from pxrs.core.retry import Backoff
from pxrs.errors import (
    BufferFull,
    Closed,
    CommitConflict,
    ConfigError,
    CopyRefused,
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
    QueueExists,
    QueueNotFound,
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
from pxrs.runtime.failure import DeadLetter, Stop
from pxrs.runtime.producer import Producer
from pxrs.runtime.reader import Reader
from pxrs.runtime.sent import Sent, SentMany
from pxrs.runtime.topics import PartitionInfo, TopicInfo
from pxrs.serde import JSON, Serde
from pxrs.types import Bounds, Fence, ItemState, Message, Position, Queue, Topic, TopicPartition

if TYPE_CHECKING:
    from pxrs.runtime.consumer import Consumer
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
    from pxrs.runtime.item import Item
    from pxrs.runtime.listener import Listener
    from pxrs.runtime.listener_processes import ProcessListener
    from pxrs.runtime.queues import ItemInfo, QueueInfo, QueueRates, Queues
    from pxrs.runtime.transaction import Transaction
    from pxrs.runtime.unit_of_work import UnitOfWork

# Loaded at first use: a program that only sends does not pay for them.
_LATER = {
    "Consumer": "consumer",
    "Transaction": "transaction",
    "Health": "health",
    "Groups": "groups",
    "CheckpointChange": "group_info",
    "GroupHistory": "group_info",
    "GroupInfo": "group_info",
    "GroupPartition": "group_info",
    "GroupReset": "group_info",
    "GroupSummary": "group_info",
    "MemberInfo": "group_info",
    "PartitionMove": "group_info",
    "Rebalance": "group_info",
    "UnitOfWork": "unit_of_work",
    "Item": "item",
    "Listener": "listener",
    "ProcessListener": "listener_processes",
    "Queues": "queues",
    "QueueInfo": "queues",
    "QueueRates": "queues",
    "ItemInfo": "queues",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pxrs' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"pxrs.runtime.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


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
    # work queues
    "UnitOfWork",
    "Item",
    "Listener",
    "ProcessListener",
    "ConsumeOnce",
    "ConsumeTimes",
    "Forever",
    "Queue",
    "Queues",
    "QueueInfo",
    "QueueRates",
    "ItemInfo",
    "ItemState",
    # errors
    "PxrsError",
    "InvalidRequest",
    "ConfigError",
    "MissingExtra",
    "TopicNotFound",
    "TopicExists",
    "PartitionNotFound",
    "QueueNotFound",
    "QueueExists",
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
    "CopyRefused",
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
