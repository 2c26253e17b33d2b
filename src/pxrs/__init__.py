"""Safe parallel consumption of ordered messages on the store you already run."""

import typing as _typing

from pxrs._version import __version__
from pxrs.app import Pxrs, connect
from pxrs.config import DeadLetter, Stop
from pxrs.consuming.reader import Reader
from pxrs.core.retry import Backoff
from pxrs.errors import (
    AlreadyExists,
    BufferFull,
    Closed,
    CommitConflict,
    ConfigError,
    CopyRefused,
    DamagedBatch,
    DeliveryFailed,
    Displaced,
    Fenced,
    GroupExists,
    GroupNotEmpty,
    GroupNotFound,
    HandlerFailed,
    IllegalMove,
    InsideTransaction,
    InvalidRequest,
    MessagesLost,
    MessageTooLarge,
    MissingExtra,
    NoCheckpoint,
    NotAtomic,
    NotLeader,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionNotFound,
    PermissionDenied,
    ProducerFenced,
    PxrsError,
    QueueExists,
    QueueNotFound,
    RetryExhausted,
    SchemaMismatch,
    SequenceGap,
    SessionLost,
    SourceChanged,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TopicExists,
    TopicNotFound,
    TransactionConflict,
    VersionMismatch,
)
from pxrs.options import (
    ConsumerOptions,
    ListenOptions,
    MemberOptions,
    ProducerOptions,
    RunOptions,
)
from pxrs.producing.handles import Sent, SentMany
from pxrs.producing.producer import Producer
from pxrs.running.handle import Running
from pxrs.running.topics import DeadMessage, Topics
from pxrs.serde import JSON, Serde
from pxrs.topics import PartitionInfo, TopicInfo
from pxrs.types import (
    ABSENT,
    Bounds,
    Entry,
    Fence,
    ItemState,
    Message,
    Position,
    Queue,
    Topic,
    TopicPartition,
    Version,
)

if _typing.TYPE_CHECKING:
    from pxrs.client.client import Client
    from pxrs.client.stats import ClientStats
    from pxrs.client.topology import NodeAddress, NodesView, TopologyChange
    from pxrs.consuming.consumer import Consumer
    from pxrs.consuming.health import Health
    from pxrs.consuming.transactions import Transaction
    from pxrs.groups.admin import Groups
    from pxrs.groups.info import (
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
    from pxrs.kv.store import KeyValues
    from pxrs.kv.transaction import TransactionKeys
    from pxrs.kv.watch import KeyWatch
    from pxrs.queues.admin import ItemInfo, QueueInfo, QueueRates, Queues
    from pxrs.queues.item import Item, PutItem
    from pxrs.queues.unit_of_work import UnitOfWork
    from pxrs.sources.admin import SourceInfo, Sources

# Loaded at first use: a program that only sends need not load them.
_LATER = {
    "Consumer": "consuming.consumer",
    "Transaction": "consuming.transactions",
    "Health": "consuming.health",
    "Groups": "groups.admin",
    "CheckpointChange": "groups.info",
    "GroupHistory": "groups.info",
    "GroupInfo": "groups.info",
    "GroupPartition": "groups.info",
    "GroupReset": "groups.info",
    "GroupSummary": "groups.info",
    "MemberInfo": "groups.info",
    "PartitionMove": "groups.info",
    "Rebalance": "groups.info",
    "UnitOfWork": "queues.unit_of_work",
    "Item": "queues.item",
    "PutItem": "queues.item",
    "Queues": "queues.admin",
    "QueueInfo": "queues.admin",
    "QueueRates": "queues.admin",
    "ItemInfo": "queues.admin",
    "KeyValues": "kv.store",
    "KeyWatch": "kv.watch",
    "TransactionKeys": "kv.transaction",
    "Sources": "sources.admin",
    "SourceInfo": "sources.admin",
    "Client": "client.client",
    "ClientStats": "client.stats",
    "NodeAddress": "client.topology",
    "NodesView": "client.topology",
    "TopologyChange": "client.topology",
}


def __getattr__(name: str) -> _typing.Any:
    from importlib import import_module

    if name == "aio":
        return import_module("pxrs.aio")
    if name not in _LATER:
        raise AttributeError(f"module 'pxrs' has no attribute {name!r}")
    value = getattr(import_module(f"pxrs.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    # opening
    "connect",
    "Pxrs",
    "__version__",
    # topics and messages
    "Topic",
    "Topics",
    "TopicInfo",
    "DeadMessage",
    "PartitionInfo",
    "TopicPartition",
    "Message",
    "Fence",
    "Position",
    "Bounds",
    # sending and reading
    "Producer",
    "ProducerOptions",
    "Sent",
    "SentMany",
    "Reader",
    "Serde",
    "JSON",
    # consuming
    "Consumer",
    "MemberOptions",
    "ConsumerOptions",
    "RunOptions",
    "Running",
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
    "PutItem",
    "ListenOptions",
    "Queue",
    "Queues",
    "QueueInfo",
    "QueueRates",
    "ItemInfo",
    "ItemState",
    # keys and values
    "KeyValues",
    "KeyWatch",
    "TransactionKeys",
    "Entry",
    "Version",
    "ABSENT",
    # existing streams as topics; see pxrs.sources
    "Sources",
    "SourceInfo",
    # nodes, for pxrs://
    "Client",
    "ClientStats",
    "NodesView",
    "NodeAddress",
    "TopologyChange",
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
    "GroupExists",
    "GroupNotEmpty",
    "OffsetOutOfRange",
    "MessageTooLarge",
    "StoreError",
    "StoreBusy",
    "StoreUnavailable",
    "RetryExhausted",
    "StoreFull",
    "StoreReadOnly",
    "StoreDamaged",
    "MessagesLost",
    "SchemaMismatch",
    "SourceChanged",
    "OutcomeUnknown",
    "DamagedBatch",
    "BufferFull",
    "DeliveryFailed",
    "ProducerFenced",
    "SequenceGap",
    "VersionMismatch",
    "AlreadyExists",
    "NotLeader",
    "CommitConflict",
    "CopyRefused",
    "TransactionConflict",
    "Fenced",
    "Displaced",
    "NoCheckpoint",
    "HandlerFailed",
    "IllegalMove",
    "SessionLost",
    "PermissionDenied",
    "NotAtomic",
    "InsideTransaction",
    "Closed",
]
