"""`pxrs://` against real nodes: everything works, nodes are killed, tokens are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import Pxrs, PxrsError
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.tokens import Tokens, all_rights
from support.child import PATIENCE
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
