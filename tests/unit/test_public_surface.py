"""Every public name of every public class, written down: an addition is a decision."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, is_typeddict

import pytest

import pxrs
from pxrs import aio

BLOCKING = {
    "Pxrs": (
        "attach begin client close consumer groups health kv listen producer put put_many queues "
        "reader relay run send sources stop stores topics transaction url"
    ),
    "Sources": "describe detach list prepare",
    "SourceInfo": "end final settings topic",
    "Topic": (
        "created_ms id name partitioner partitions retention retention_bytes retention_ms source"
    ),
    "Topics": "apply_retention bounds create dead delete describe find list redrive",
    "TopicInfo": "messages partitions size topic",
    "DeadMessage": (
        "dead_ms deliveries error group headers id key offset partition timestamp topic "
        "traceback value"
    ),
    "PartitionInfo": "end partition size start",
    "TopicPartition": "partition topic",
    "Message": "fence headers key offset partition timestamp topic value",
    "Fence": "epoch partition topic",
    "Position": "offset partition topic",
    "Bounds": "end start",
    "Producer": "close flush send send_many",
    "Sent": "done result when_done",
    "SentMany": "done result",
    "Reader": "bounds follow offset_at read topic",
    "Serde": "decode encode",
    "JSON": "decode encode",
    "Consumer": (
        "assignment batches close commit commit_async health member pause poll resume "
        "run_transaction seek seek_to_time transaction wake"
    ),
    "Running": "failed handled health join stop",
    "Health": "detail ok state",
    "Transaction": (
        "commit connection execute extend finish in_hand is_open kv put put_many rollback send "
        "take take_many"
    ),
    "Backoff": "attempts delay factor first growth jitter longest",
    "DeadLetter": "name_for topic",
    "Stop": "",
    "Groups": "delete describe explain import_checkpoint list reset",
    "GroupSummary": "generation members name state",
    "GroupInfo": (
        "at_ms awaited coordinator generation lag lag_is_exact lag_seconds members name partitions "
        "reason state"
    ),
    "MemberInfo": "client joined_ms name owned static topics",
    "GroupPartition": (
        "checkpoint end epoch lag lag_is_exact lag_seconds metadata owner partition start topic"
    ),
    "GroupHistory": "name rebalances resets",
    "Rebalance": "at_ms coordinator generation members moves reason",
    "PartitionMove": "after before partition topic",
    "GroupReset": "at_ms by changes why",
    "CheckpointChange": "after before partition topic",
    "UnitOfWork": (
        "commit connection execute extend finish in_hand is_open kv put put_many rollback send "
        "take take_many"
    ),
    "Item": "deliveries error headers id key priority put_ms queue value",
    "PutItem": "id",
    "Queue": "created_ms fifo name",
    "Queues": "create dead delete describe drop list peek purge rates redrive",
    "QueueInfo": "created_ms dead delayed depth done fifo held name oldest_age put ready waiting",
    "QueueRates": "done put",
    "ItemInfo": (
        "dead_ms deliveries error headers id key priority put_ms queue state taken_ms value "
        "visible_ms"
    ),
    "ItemState": "DEAD DELAYED HELD READY WAITING",
    "KeyValues": "delete get get_many put scan watch",
    "KeyWatch": "close wait",
    "Client": "collect on_change stats view",
    "ClientStats": "latencies pool retries router topology",
    "NodesView": "epoch nodes slots",
    "NodeAddress": "address name",
    "TopologyChange": "added epoch leaders removed",
    "TransactionKeys": "delete get put",
    "Entry": "key value version",
    "Version": "index term",
}

ASYNC = {
    "Opening": "",
    "Pxrs": (
        "attach begin client close consumer groups health kv listen producer put put_many queues "
        "reader relay run send sources stop topics transaction url"
    ),
    "Sources": "describe detach list prepare",
    "Topics": "apply_retention bounds create dead delete describe find list redrive",
    "Producer": "close flush send send_many",
    "Sent": "done result",
    "SentMany": "done result",
    "Reader": "bounds follow offset_at read topic",
    "Follow": "aclose",
    "Consumer": (
        "assignment batches close commit commit_async health member pause poll resume "
        "run_transaction seek seek_to_time transaction"
    ),
    "Arriving": "",
    "Transaction": (
        "commit connection execute extend finish in_hand is_open kv put put_many rollback send "
        "take take_many"
    ),
    "Groups": "delete describe explain import_checkpoint list reset",
    "UnitOfWork": (
        "commit connection execute extend finish in_hand is_open kv put put_many rollback send "
        "take take_many"
    ),
    "Running": "failed handled health join stop",
    "Queues": "create dead delete describe drop list peek purge rates redrive",
    "KeyValues": "delete get get_many put scan watch",
    "KeyWatch": "close",
    "Client": "collect on_change stats view",
    "TransactionKeys": "delete get put",
}

SOURCES = {
    "FiltersPartitions": "read_partition",
    "JsonLines": "index key on_bad open partitioner path settings settle timestamp value values",
    "KafkaTopic": "config open partitioner settings streams",
    "RedisStream": "key open partitioner settings value values",
    "Row": "headers key offset timestamp value",
    "Source": "bounds close final offset_at read streams watch",
    "SourceRead": "next rows size",
    "Subscription": "end open partitioner quiet settings start",
    "Table": (
        "columns engine key name offset open partition partitioner settings settle timestamp url "
        "value values"
    ),
}


def _blocking() -> list[object]:
    """One of each that has attributes which its class does not show."""
    with ExitStack() as stack:
        px = stack.enter_context(pxrs.connect("memory://"))
        px.topics.create("t", partitions=1)
        producer = stack.enter_context(px.producer())
        consumer = stack.enter_context(px.consumer("t", group="g"))
        sent = producer.send("t", b"value")
        sent.result()
        unit = stack.enter_context(px.transaction())
        listener = stack.enter_context(px.listen("q", lambda item, tx: None))
        px.put("other", b"value")
        item = unit.take("other")
        assert item is not None
        made = [px, px.topics, px.queues, px.groups, px.reader("t"), producer, consumer, sent]
        return [
            *made,
            px.kv,
            px.sources,
            stack.enter_context(px.kv.watch("k")),
            item,
            unit.kv,
            unit.put("other", b"value"),
            producer.send_many("t", []),
            consumer.transaction(),
            unit,
            listener,
            pxrs.JSON(),
        ]


def _sources() -> list[object]:
    return [pxrs.sources.Table("t", value="v"), pxrs.sources.JsonLines("/f.jsonl")]


def _awaited() -> list[object]:
    async def make() -> list[object]:
        async with aio.connect("memory://") as px:
            await px.topics.create("t", partitions=1)
            async with px.producer() as producer, px.consumer("t", group="g") as consumer:
                sent = await producer.send("t", b"value")
                await sent
                unit, transaction = px.transaction(), consumer.transaction()
                made = [px, px.topics, px.queues, px.groups, await px.reader("t"), producer]
                many = await producer.send_many("t", [])
                return [*made, consumer, sent, many, unit, transaction]

    return asyncio.run(make())


def _public(thing: object, kind: type) -> set[str]:
    """What it has beside the names of Python's own classes."""
    foreign = (base for base in kind.__mro__ if not base.__module__.startswith("pxrs"))
    inherited = {name for base in foreign for name in dir(base)}
    return {name for name in dir(thing) if not name.startswith("_")} - inherited


def surface(module: ModuleType, live: list[object]) -> dict[str, str]:
    """The public names of each class, but for errors and options."""
    found = {}
    for name in module.__all__:
        kind = getattr(module, name)
        if inspect.isclass(kind) and not issubclass(kind, BaseException) and not is_typeddict(kind):
            names = _public(kind, kind)
            for thing in live:
                if type(thing) is kind:
                    names |= _public(thing, kind)
            found[name] = " ".join(sorted(names))
    return found


@pytest.mark.parametrize(
    ("module", "make", "expected"),
    [
        (pxrs, _blocking, BLOCKING),
        (aio, _awaited, ASYNC),
        (pxrs.sources, _sources, SOURCES),
    ],
    ids=["pxrs", "pxrs.aio", "pxrs.sources"],
)
def test_nothing_is_public_that_was_not_decided_to_be(
    module: Any, make: Callable[[], list[object]], expected: dict[str, str]
) -> None:
    assert surface(module, make()) == expected


def test_modules_show_their_public_names() -> None:
    for module in (pxrs, aio):
        shown = {name for name in vars(module) if not name.startswith("_")}
        classes = {name for name in shown if not inspect.ismodule(getattr(module, name))}
        assert classes <= set(module.__all__)
