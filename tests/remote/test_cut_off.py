"""A node that lives and does not reach its store: its clients go on through another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from pxrs.config import parse_url, remote_settings
from pxrs.errors import StoreUnavailable
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Committed, Put
from support.child import PATIENCE
from support.node import LocalNode
from support.proxy import Proxy

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.long]


class Cut:
    """Nodes a and b of one store, each with a way there that can be cut."""

    def __init__(self, postgres_url: str, stack: ExitStack) -> None:
        where, _, database = postgres_url.rpartition("/")
        self.ways = [Proxy(int(where.rpartition(":")[2])) for _ in "ab"]
        for way in self.ways:
            stack.enter_context(way)
        self.nodes = [
            stack.enter_context(
                LocalNode(f"postgresql://postgres@{way.address}/{database}", node_id=name)
            )
            for way, name in zip(self.ways, "ab", strict=True)
        ]
        # Nodes end in peace.
        for way in self.ways:
            stack.callback(way.heal)
        for node in self.nodes:
            view = node.remote.view
            node.wait_until(lambda view=view: {it.name for it in view().nodes} == {"a", "b"})  # type: ignore[misc]

    def client(self, *nodes: LocalNode) -> RemoteStores:
        hosts = ",".join(node.address for node in nodes or self.nodes)
        return RemoteStores(remote_settings(parse_url(f"pxrs://{hosts}?timeout={PATIENCE:g}")))


@pytest.fixture
def cut(postgres_url: str) -> Iterator[Cut]:
    with ExitStack() as stack:
        yield Cut(postgres_url, stack)


@pytest.fixture
def client(cut: Cut) -> Iterator[RemoteStores]:
    with closing(cut.client()) as client:
        assert client._link.hello.node == "a"
        yield client


def test_a_node_whose_store_is_silent_is_left(cut: Cut, client: RemoteStores) -> None:
    """The node takes calls and never answers, but shows that it lives."""
    client.coord.commit((), (Put("k", b"1"),))
    session = client.coord.session(120)
    cut.ways[0].cut()
    found = client.coord.get("k")
    assert found is not None
    assert found.value == b"1"
    assert client._link.hello.node == "b"
    assert isinstance(client.coord.commit((), (Put("k", b"2"),)), Committed)
    session.renew()
    # It sends away who comes, and serves again once it reaches its store.
    node = cut.nodes[0]
    node.wait_until(lambda: bool(node.remote.trouble))
    with pytest.raises(StoreUnavailable, match="try another node"):
        RemoteStores(remote_settings(parse_url(f"pxrs://{node.address}?timeout=2")))
    cut.ways[0].heal()
    node.wait_until(lambda: not node.remote.trouble)
    with closing(cut.client(node)) as again:
        assert again.coord.get("k") is not None
    session.renew()


def test_a_session_is_renewed_through_another_node(cut: Cut, client: RemoteStores) -> None:
    """Before the node itself notices that its store is gone."""
    session = client.coord.session(120)
    cut.nodes[0].remote.note_store = lambda trouble: None  # type: ignore[method-assign]
    cut.ways[0].cut()
    session.renew()
    assert client._link.hello.node == "b"


def test_a_node_that_says_that_its_store_is_away_is_left(cut: Cut, client: RemoteStores) -> None:
    cut.nodes[0].remote.note_store = lambda trouble: None  # type: ignore[method-assign]
    cut.ways[0].refuse()
    assert client.coord.get("k") is None
    assert client._link.hello.node == "b"


def test_where_no_node_reaches_the_store_clients_are_told(cut: Cut, client: RemoteStores) -> None:
    """They do not go from one node to the next without end."""
    watch = client.coord.watch("k")
    for node, way in zip(cut.nodes, cut.ways, strict=True):
        node.remote.note_store = lambda trouble: None  # type: ignore[method-assign]
        way.refuse()
    for _ in range(50):
        with pytest.raises(StoreUnavailable):
            client.coord.get("k")
    assert client._link.pool.stats.opened <= 2 * len(cut.nodes)
    for way in cut.ways:
        way.heal()
    while True:
        try:
            client.coord.commit((), (Put("k", b"1"),))
            break
        except StoreUnavailable:
            threading.Event().wait(0.05)
    while client.coord.get("k") is None:
        assert watch.wait(PATIENCE)
