"""The nodes behind a `pxrs://` URL, awaited: their view, its changes, statistics, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest

from pxrs import Closed, ConfigError, aio
from pxrs.client.topology import TopologyChange
from support.child import PATIENCE
from support.loops import run
from support.node import LocalNode
from support.reading import read_all

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/node.db"


@pytest.fixture
def node(url: str) -> Iterator[LocalNode]:
    with LocalNode(url, node_id="a") as node:
        node.wait_until(lambda: set(node._node.cluster.view.slots) == {"a"})
        yield node


class Changes:
    """Hears of changes, in a thread of the client's, and hands them to the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Queue[TopologyChange] = asyncio.Queue()

    def __call__(self, change: TopologyChange) -> None:
        self._loop.call_soon_threadsafe(self._found.put_nowait, change)

    async def until(self, *, added: str = "", removed: str = "") -> None:
        while True:
            change = await self._found.get()
            if added in {it.name for it in change.added} or removed in {
                it.name for it in change.removed
            }:
                return

    @property
    def count(self) -> int:
        return self._found.qsize()


def test_nodes_that_come_and_go_are_noticed(node: LocalNode, url: str) -> None:
    async def play() -> None:
        async with aio.connect(f"pxrs://{node.address}") as px:
            view = await px.client.view()
            assert [it.name for it in view.nodes] == ["a"]
            first, second = Changes(), Changes()
            end = await px.client.on_change(first)
            await px.client.on_change(second)
            other = LocalNode(url, node_id="b")
            await asyncio.to_thread(other.__enter__)
            try:
                await first.until(added="b")
                await second.until(added="b")
                end()
                heard = first.count
            finally:
                other.stop()
                await asyncio.to_thread(other.join)
            await second.until(removed="b")
            assert first.count == heard
            assert (await px.client.view()).epoch > view.epoch

    run(play())


def test_statistics(node: LocalNode) -> None:
    async def play() -> None:
        async with aio.connect(f"pxrs://{node.address}") as px:
            for number in range(3):
                await px.kv.put(f"k{number}", "x")
            stats = px.client.stats()
            assert (stats.router.nodes, stats.pool.open) == (1, 1)
            assert stats.latencies["kv.write"].calls == 3
            registry = prometheus_client.CollectorRegistry()
            registry.register(px.client)
            assert registry.get_sample_value("pxrs_client_nodes") == 1
            calls = {"method": "kv.write"}
            assert registry.get_sample_value("pxrs_client_calls_total", calls) == 3

    run(play())


def test_streams_end_after_all_that_needs_them(node: LocalNode) -> None:
    """What was sent is in the log, the member has left, and the item is free at once."""
    node.px.topics.create("orders", 1)
    with node.px.transaction() as tx:
        tx.put("mail", "letter")

    async def play() -> None:
        px = await aio.connect(f"pxrs://{node.address}")
        client = px.client
        changes = Changes()
        await client.on_change(changes)
        # All of these stay open.
        consumer, producer = await px.consumer("orders", group="billing"), px.producer(linger=60)
        work = await px.begin()
        assert await work.take("mail") is not None
        await producer.send("orders", b"late")
        assert client.stats().pool.open == 1
        await px.close()
        assert client.stats().pool.open == 0
        for verb in (consumer.poll(), producer.send("orders", b"x"), client.view()):
            with pytest.raises(Closed):
                await verb

    run(play())
    assert [message.value for message in read_all(node.px, "orders")] == [b"late"]
    assert node.px.groups.describe("billing").members == ()
    with node.px.transaction() as tx:
        assert tx.take("mail") is not None
    node.wait_until(lambda: not node.remote._streams)
    for thread in threading.enumerate():
        if thread.name in ("pxrs-topology", "pxrs-remote"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_a_store_without_nodes_has_no_client(tmp_path: Path) -> None:
    async def play() -> None:
        async with aio.connect("memory://") as px:
            with pytest.raises(ConfigError, match="used directly"):
                await px.client.view()

    run(play())
