"""A node of an ensemble, or the only server, stands still: its clients go elsewhere, or say so."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from engines.process import Process

from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import SessionLost
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.link import Link
from pxrs.testing.conformance.tools import committed
from pxrs.types import Check, Put
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.zookeeper import leads

pytestmark = pytest.mark.engine("zookeeper")


def opened(url: str) -> ZooKeeperCoord:
    return ZooKeeperCoord(zookeeper_settings(parse_url(f"{url}/x?timeout={PATIENCE:g}")))


class Followers:
    """Two nodes of three: those that do not lead, so there is no election when one is frozen."""

    def __init__(self, new_engine: NewEngine) -> None:
        # Ticks of a second: a session may be silent for 20 s.
        engine = new_engine("zookeeper", nodes=3, tick_ms=1000)
        self._nodes = dict(zip(engine.ports[::4], engine.nodes, strict=True))
        following = [port for port in self._nodes if not leads(port)]
        self.url = "zookeeper://" + ",".join(f"127.0.0.1:{port}" for port in following)

    def of(self, link: Link) -> Process:
        """The node that it is connected to."""
        return self._nodes[link.client._connection._socket.getpeername()[1]]


@pytest.fixture
def followers(new_engine: NewEngine) -> Followers:
    return Followers(new_engine)


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_handle_leaves_a_node_that_stands_still(followers: Followers, busy: bool) -> None:
    """Also if there are new requests all the time, which the node will never answer."""
    done = threading.Event()
    with closing(opened(followers.url)) as coord:
        version = committed(coord.commit([], [Put("k", b"1")])).versions["k"]
        client = coord._link.client

        def ask() -> None:
            while busy and not done.wait(0.5):
                client.exists_async("/x")

        asking = threading.Thread(target=ask)
        asking.start()
        node = followers.of(coord._link)
        node.freeze()
        try:
            committed(coord.commit([Check("k", version)], [Put("k", b"2")]))
        finally:
            node.thaw()
            done.set()
            asking.join()


@pytest.mark.long
def test_a_session_outlives_a_node_that_stands_still(followers: Followers) -> None:
    """Its TTL is longer than the servers allow, so there is a request in each quarter of that."""
    with closing(opened(followers.url)) as coord:
        session = coord.session(60.0)
        node = followers.of(session._link)
        node.freeze()
        session.renew()
        node.thaw()


def test_a_session_whose_time_is_up_while_nobody_answers_is_lost(new_engine: NewEngine) -> None:
    engine = new_engine("zookeeper")
    with closing(opened(engine.url)) as coord:
        session = coord.session(2.0)
        engine.nodes[0].freeze()
        with pytest.raises(SessionLost):
            session.renew()
        engine.nodes[0].thaw()
