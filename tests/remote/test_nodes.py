"""`pxrs://` against real nodes: everything works, nodes are killed, tokens are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import pxrs
from pxrs import Entry, Pxrs, PxrsError, aio
from pxrs.cli.main import cli
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.tokens import Tokens, all_rights
from support.child import PATIENCE
from support.loops import run
from support.node import LocalNode, NodeProcess

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with LocalNode(f"sqlite:///{tmp_path}/node.db") as node:
        yield node


def test_all_of_it_works(node: LocalNode) -> None:
    """Messages, groups, queues, transactions and keys: the embedded code, through a node."""
    with pxrs.connect(f"pxrs://{node.address}") as px:
        px.topics.create("orders", partitions=4)
        with px.producer() as producer:
            producer.send_many("orders", [(f"k{n % 9}", f"{n}") for n in range(500)])
        got: list[bytes] = []
        with px.consumer("orders", group="g", start="earliest") as consumer:
            while len(got) < 500:
                got += [message.value for message in consumer.poll(timeout=PATIENCE)]
            consumer.commit()
        assert sorted(got, key=int) == [b"%d" % n for n in range(500)]
        assert px.groups.describe("g").lag == 0
        px.put("inbox", "order")
        with px.transaction() as tx:
            item = tx.take("inbox")
            assert item is not None
            tx.put("outbox", item.value)
            tx.send("orders", "placed", "k")
            tx.kv.put("order", "placed")
        assert node.px.queues.describe("outbox").ready == 1
        entry = node.px.kv.get("order")
        assert entry is not None
        assert entry.value == b"placed"
        assert node.px.topics.describe("orders").messages == 501


def test_all_of_it_works_from_asyncio(node: LocalNode) -> None:
    run(use_all_of_it(node))


async def use_all_of_it(node: LocalNode) -> None:
    async with aio.connect(f"pxrs://{node.address}") as px:
        await px.topics.create("orders", partitions=2)
        async with px.producer() as producer:
            await producer.send_many("orders", [(f"k{n}", f"{n}") for n in range(50)])
        got: list[bytes] = []
        async with px.consumer("orders", group="g", start="earliest") as consumer:
            while len(got) < 50:
                got += [message.value for message in await consumer.poll(timeout=PATIENCE)]
            await consumer.commit()
        assert sorted(got, key=int) == [b"%d" % n for n in range(50)]
        assert (await px.groups.describe("g")).lag == 0
        await px.put("inbox", "order")
        async with px.transaction() as tx:
            item = await tx.take("inbox", timeout=PATIENCE)
            assert item is not None
            await tx.put("outbox", item.value)
        assert (await px.queues.describe("outbox")).ready == 1
        version = await px.kv.put("order", "placed")
        assert await px.kv.get("order") == Entry(b"order", b"placed", version)
        assert [it.name for it in (await px.client.view()).nodes] == [node._node.node_id]


def test_the_command_line_works_through_a_node(node: LocalNode) -> None:
    def pxrs_command(*arguments: str, stdin: bytes | None = None) -> str:
        url = f"pxrs://{node.address}"
        result = CliRunner(env={"PXRS_URL": url}).invoke(
            cli, arguments, input=stdin, catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    pxrs_command("topics", "create", "orders", "--partitions", "2")
    assert "orders" in pxrs_command("topics", "list")
    pxrs_command("produce", "orders", stdin=b"one\ntwo\n")
    assert node.px.topics.describe("orders").messages == 2
    consumed = pxrs_command("consume", "orders", "--group", "g", "--max", "2", "--values-only")
    assert {*consumed.split()} == {"one", "two"}
    assert node.px.groups.describe("g").lag == 0
    pxrs_command("queues", "create", "inbox")
    assert "inbox" in pxrs_command("queues", "list")
    assert pxrs_command("kv", "put", "k", "1") == "1.1\n"
    assert pxrs_command("kv", "get", "k") == "1"


def test_a_stream_needs_a_token(node: LocalNode) -> None:
    tokens = Tokens(node.px.stores.coord, SYSTEM_CLOCK)
    admin = tokens.create("admin", all_rights())
    node.guard.asks = True
    with pxrs.connect(f"pxrs://{admin}@{node.address}") as px:
        assert px.topics.list() == []
        tokens.revoke("admin")
        node.guard._known.clear()
        with pytest.raises(PxrsError, match="this token is wrong"):
            px.topics.list()
    for login, problem in (("", "send a token"), ("x@", "wrong")):
        with pytest.raises(PxrsError, match=problem):
            pxrs.connect(f"pxrs://{login}{node.address}?timeout=5")


@pytest.mark.long
def test_the_view_is_followed_when_the_node_that_told_it_is_killed(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/nodes.db"
    nodes = [NodeProcess(store, "--node-id", name, session_ttl=2.0) for name in "ab"]
    url = "pxrs://" + ",".join(str(node.endpoint) for node in nodes)
    led_by_b = threading.Event()
    try:
        with pxrs.connect(url) as px:

            def look(_: object) -> None:
                view = px.client.view()
                if {*view.slots} == {"b"} and [it.name for it in view.nodes] == ["b"]:
                    led_by_b.set()

            px.client.on_change(look)
            assert px.client._link.hello.node == "a"
            nodes[0].kill()
            assert led_by_b.wait(PATIENCE)
            version = px.kv.put("k", "x")
            assert px.kv.get("k") == Entry(b"k", b"x", version)
            assert px.client.stats().router.elsewhere == 0
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.long
def test_a_killed_node_is_not_noticed_by_those_who_write_and_read(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/nodes.db"
    nodes = [NodeProcess(store) for _ in range(2)]
    url = "pxrs://" + ",".join(str(node.endpoint) for node in nodes)
    try:
        with pxrs.connect(url) as px:
            px.topics.create("orders", partitions=2)
            got: list[int] = []
            consuming = threading.Thread(target=consume, args=(url, got))
            consuming.start()
            with px.producer() as producer:
                for number in range(600):
                    producer.send("orders", str(number), key=str(number % 2)).result(PATIENCE)
                    px.kv.put("last", str(number), idempotency_key=str(number))
                    if number == 200:
                        nodes[0].kill()
            consuming.join(2 * PATIENCE)
            assert set(got) == set(range(600))
            for parity in (0, 1):
                firsts = list(dict.fromkeys(n for n in got if n % 2 == parity))
                assert firsts == sorted(firsts)
            entry = px.kv.get("last")
            assert entry is not None
            assert entry.value == b"599"
            # Every message is in the log once: the producer repeats what it is not sure of.
            assert px.topics.describe("orders").messages == 600
    finally:
        for node in nodes:
            node.kill()


def consume(url: str, got: list[int]) -> None:
    with pxrs.connect(url) as px:
        consume_with(px, got)


def consume_with(px: Pxrs, got: list[int]) -> None:
    with px.consumer("orders", group="g", start="earliest") as consumer:
        while len(set(got)) < 600:
            got += [int(message.value) for message in consumer.poll(timeout=PATIENCE)]
