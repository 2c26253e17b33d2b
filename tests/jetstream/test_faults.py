"""Servers die and networks break under load: nothing acknowledged is lost, nothing doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import pxrs
from engines import Engine
from pxrs import Pxrs
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.jetstream import leader_of
from support.load import Load
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")

TOPIC = "orders"
# What a leader's election may take.
FAILOVER = 15.0


@pytest.fixture
def cluster(new_engine: NewEngine) -> Engine:
    return new_engine("nats", nodes=3)


@pytest.fixture
def replicated(cluster: Engine) -> Iterator[Pxrs]:
    with pxrs.connect("memory://", log=f"{cluster.url}?replicas=3&timeout=20") as px:
        yield px


def test_the_streams_leader_is_killed_under_load(cluster: Engine, replicated: Pxrs) -> None:
    topic = replicated.topics.create(TOPIC, partitions=4)
    load = Load(replicated, TOPIC)
    load.await_more(2000)
    cluster.kill(leader_of(cluster.url, f"pxrs_{topic.id}"))
    load.await_more(2000, PATIENCE + FAILOVER)
    load.stop()
    load.check(replicated)
    cluster.start()
    load.check(replicated)


@pytest.mark.thorough
def test_every_node_is_restarted_in_turn(cluster: Engine, replicated: Pxrs) -> None:
    replicated.topics.create(TOPIC, partitions=4)
    load = Load(replicated, TOPIC)
    for node in range(3):
        load.await_more(500, PATIENCE + FAILOVER)
        cluster.restart(node)
    load.await_more(500, PATIENCE + FAILOVER)
    load.stop()
    load.check(replicated)


@pytest.mark.parametrize("sync", ["2m", "always"])
def test_the_server_restarts_under_load(new_engine: NewEngine, sync: str) -> None:
    """A server alone keeps what it acknowledged through kill -9; a power cut needs `always`."""
    engine = new_engine("nats", sync=sync)
    with pxrs.connect("memory://", log=engine.url) as px:
        px.topics.create(TOPIC, partitions=4)
        load = Load(px, TOPIC)
        load.await_more(500)
        engine.restart()
        load.await_more(500)
        engine.kill()
        engine.start()
        load.await_more(500)
        load.stop()
        load.check(px)


@pytest.mark.parametrize("break_it", [Proxy.refuse, Proxy.cut], ids=["refused", "silent"])
def test_a_client_is_cut_off_and_comes_back(
    nats_url: str, break_it: Callable[[Proxy], None]
) -> None:
    with (
        Proxy(int(nats_url.rpartition(":")[2])) as proxy,
        closing(pxrs.connect("memory://", log=f"nats://{proxy.address}?timeout=3")) as px,
    ):
        px.topics.create(TOPIC, partitions=4)
        load = Load(px, TOPIC)
        try:
            for _ in range(3):
                load.await_more(500)
                break_it(proxy)
                with pytest.raises(pxrs.StoreUnavailable):
                    px.topics.describe(TOPIC)
                proxy.heal()
            load.await_more(500)
            load.stop()
            load.check(px)
        finally:
            proxy.heal()
            px.topics.delete(TOPIC)


def test_a_follower_goes_on_after_the_connection_broke(nats_url: str) -> None:
    """Hints that came while there was no connection are made up for."""
    with (
        Proxy(int(nats_url.rpartition(":")[2])) as proxy,
        closing(pxrs.connect("memory://shared", log=nats_url)) as sender,
        closing(pxrs.connect("memory://shared", log=f"nats://{proxy.address}")) as receiver,
    ):
        sender.topics.create(TOPIC, partitions=1)
        found: list[bytes] = []
        came = threading.Condition()

        def follow() -> None:
            for message in receiver.reader(TOPIC).follow(start="earliest"):
                with came:
                    found.append(message.value)
                    came.notify_all()
                if message.value == b"last":
                    return

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        with sender.producer() as producer:
            producer.send(TOPIC, b"first").result()
            with came:
                assert came.wait_for(lambda: b"first" in found, PATIENCE)
            proxy.refuse()
            producer.send(TOPIC, b"unheard").result()
            proxy.heal()
            with came:
                assert came.wait_for(lambda: b"unheard" in found, PATIENCE)
            producer.send(TOPIC, b"last").result()
        thread.join(PATIENCE)
        assert found == [b"first", b"unheard", b"last"]
        sender.topics.delete(TOPIC)
