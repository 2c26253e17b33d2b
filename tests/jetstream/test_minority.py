"""A server that is cut off from its peers answers for a while, and is not believed."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nats
import pxrs
from engines import Engine
from pxrs.config import OnTrimmed, nats_settings, parse_url
from pxrs.core.records import Claim, claims_prefix, decode, encode
from pxrs.errors import DeliveryFailed, OffsetOutOfRange, StoreUnavailable, TopicNotFound
from pxrs.stores.jetstream.failures import Stale
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.jetstream.topics import Topic
from pxrs.testing.conformance.tools import append, batch
from pxrs.types import Bounds, LogPartition, Put
from support.child import PATIENCE
from support.copying import copied
from support.engine_fixtures import NewEngine
from support.jetstream import fill, little_room
from support.node import LocalNode, looks
from support.partitions import Network

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
LATE = 2**50


class Cluster:
    """Three nodes; the network between one and the others can be cut."""

    def __init__(
        self,
        new_engine: NewEngine,
        network: Network,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._network = network
        # A client of one node knows no other: on a busy machine it would go there by itself.
        self.engine: Engine = new_engine(
            "nats",
            before=network.joins,
            nodes=3,
            advertise=network.advertise,
            tells_clients=False,
            settings=settings,
        )

    def cut_off(self, node: int) -> None:
        self._network.isolate(node)

    def heal(self) -> None:
        self._network.heal(reset=True)

    def url(self, node: int, timeout: float, replicas: int = 3) -> str:
        port = self.engine.ports[3 * node]
        return f"nats://127.0.0.1:{port}?replicas={replicas}&timeout={timeout}"

    def log(self, node: int, timeout: float = 30, replicas: int = 3) -> JetStreamLog:
        return JetStreamLog(nats_settings(parse_url(self.url(node, timeout, replicas))))

    def leader_of_meta(self) -> int:
        """The node that decides which streams there are."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.engine.ports[2]}/jsz") as answer:
            return int(json.load(answer)["meta_cluster"]["leader"].removeprefix("n"))

    def leader_of(self, stream: str) -> int:
        async def ask() -> Any:
            client = await nats.connect(f"127.0.0.1:{self.engine.ports[0]}")
            try:
                return await client.jetstream().stream_info(stream)
            finally:
                await client.close()

        return int(asyncio.run(ask()).cluster.leader.removeprefix("n"))


@pytest.fixture
def cluster(new_engine: NewEngine) -> Iterator[Cluster]:
    with Network() as network:
        yield Cluster(new_engine, network)


def send(px: pxrs.Pxrs, count: int) -> None:
    with px.producer(delivery_timeout=2 * PATIENCE) as producer:
        for _ in range(count):
            producer.send("t", b"x").result()


def read_all(px: pxrs.Pxrs, count: int) -> None:
    """The group has handled so many messages."""
    with px.consumer("t", "g", auto_commit=False) as consumer:
        seen = 0
        while seen < count:
            seen += len(consumer.poll(timeout=PATIENCE))
        consumer.commit()


def poll_as_owner(consumer: pxrs.Consumer[bytes]) -> None:
    """Before it owns the partition it does not read it, and has no trouble to report."""
    owns = False
    while not owns:
        owns = bool(consumer.assignment)
        assert consumer.poll(timeout=0.5) == []


def test_an_end_before_what_was_read_needs_a_majority(cluster: Cluster) -> None:
    with closing(cluster.log(0)) as log:
        log.create(HERE.topic_id, 1)
        append(log, HERE, batch(b"a", b"b"))
    leader = cluster.leader_of("pxrs_t-1")
    with closing(cluster.log(leader, timeout=2)) as log:
        with pytest.raises(OffsetOutOfRange):
            log.fetch(HERE, 5, 1)
        cluster.cut_off(leader)
        assert log.bounds(HERE.topic_id) == {0: Bounds(0, 2)}
        with pytest.raises(StoreUnavailable):
            log.fetch(HERE, 5, 1)
    cluster.heal()
    with closing(cluster.log(leader)) as log:
        with pytest.raises(OffsetOutOfRange) as told:
            log.fetch(HERE, 5, 1)
        assert (told.value.start, told.value.end) == (0, 2)
        assert append(log, HERE, batch(b"c")) == [2]


def test_the_end_of_a_full_one_needs_a_majority(new_engine: NewEngine) -> None:
    """It refuses at once what would show that it leads, because it has no room for it."""
    with Network() as network:
        cluster = Cluster(new_engine, network, little_room(1 << 20))
        with closing(cluster.log(0)) as log:
            log.create(HERE.topic_id, 1)
            end = fill(log, HERE)
        leader = cluster.leader_of("pxrs_t-1")
        with closing(cluster.log(leader, timeout=2)) as log:
            cluster.cut_off(leader)
            assert log.bounds(HERE.topic_id) == {0: Bounds(0, end)}
            with pytest.raises(StoreUnavailable):
                log.fetch(HERE, end + 5, 1)
        cluster.heal()
        with closing(cluster.log(leader)) as log, pytest.raises(OffsetOutOfRange) as told:
            log.fetch(HERE, end + 5, 1)
        assert (told.value.start, told.value.end) == (0, end)


def test_that_there_is_no_such_topic_needs_a_majority(cluster: Cluster) -> None:
    leader = cluster.leader_of_meta()
    with closing(cluster.log(leader, timeout=2)) as log:
        with pytest.raises(TopicNotFound):
            log.bounds("none")
        cluster.cut_off(leader)
        with pytest.raises(StoreUnavailable):
            log.bounds("none")
        with pytest.raises(StoreUnavailable):
            log.drop("none")
    cluster.heal()
    with closing(cluster.log(leader)) as log:
        with pytest.raises(TopicNotFound):
            log.bounds("none")
        log.drop("none")
        assert log.held() == {}


def test_that_a_stream_is_gone_needs_a_majority(cluster: Cluster) -> None:
    """A client may come from a server with old knowledge to one that knows better, and back."""
    leader = cluster.leader_of_meta()
    healthy, asked = threading.Event(), 0

    async def stale(topic: Topic) -> str:
        """As long as the servers are cut off, what a server with old knowledge answers."""
        nonlocal asked
        asked += 1
        if asked == 3:
            cluster.heal()
            healthy.set()
        if not healthy.is_set():
            raise Stale(topic.id)
        return topic.id

    with closing(cluster.log(leader)) as log:
        log.create(HERE.topic_id, 1)
        cluster.cut_off(leader)
        assert log._run(log._topics.using(HERE.topic_id, stale)) == HERE.topic_id
        log.drop(HERE.topic_id)


def test_what_the_majority_made_meanwhile_is_not_removed(cluster: Cluster) -> None:
    """The server that led them all says that there is no such stream, and learns better."""
    leader = cluster.leader_of_meta()
    doubts = threading.Event()
    with (
        closing(cluster.log(leader, timeout=2 * PATIENCE)) as cut_off,
        # Two servers can't place a stream on three.
        closing(cluster.log((leader + 1) % 3, replicas=1, timeout=2 * PATIENCE)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        cut_off.owned_by(lambda: "one store")
        other.owned_by(lambda: "another store")
        streams = cut_off._topics._streams
        require_majority = streams.require_majority

        async def require() -> None:
            doubts.set()
            await require_majority()

        streams.require_majority = require  # type: ignore[method-assign]
        cluster.cut_off(leader)
        dropped = pool.submit(cut_off.drop, HERE.topic_id)
        assert doubts.wait(PATIENCE)
        other.create(HERE.topic_id, 1)
        cluster.heal()
        dropped.result(2 * PATIENCE)
        assert other.held() == {HERE.topic_id: "another store"}
        assert append(other, HERE, batch(b"a")) == [0]


@pytest.mark.thorough
def test_a_topic_made_by_the_majority_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """A producer at the server that led them all, and does not know of it, is not told "no"."""
    store = f"sqlite:///{tmp_path}/app.db"
    leader = cluster.leader_of_meta()
    with (
        pxrs.connect(store, log=cluster.url(leader, 1)) as cut_off,
        # Two servers can't place a stream on three.
        pxrs.connect(store, log=cluster.url((leader + 1) % 3, 60, replicas=1)) as px,
    ):
        cluster.cut_off(leader)
        px.topics.create("t", partitions=1)
        with cut_off.producer(delivery_timeout=3.0) as producer:
            with pytest.raises(DeliveryFailed) as failed:
                producer.send("t", b"too soon").result()
            assert isinstance(failed.value.__cause__, StoreUnavailable)
        with cut_off.producer(delivery_timeout=2 * PATIENCE) as producer:
            sent = producer.send("t", b"waits")
            cluster.heal()
            assert sent.result().offset == 0
        assert [message.value for message in px.reader("t").read(0, 0)] == [b"waits"]


@pytest.mark.thorough
def test_what_an_end_decides_needs_a_majority(cluster: Cluster, tmp_path: Path) -> None:
    """A reset, a seek and a start ask more than the leader that is cut off."""
    store = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(store, log=cluster.url(0, 30)) as px:
        topic = px.topics.create("t", partitions=1)
        send(px, 5)
        read_all(px, 5)
    leader = cluster.leader_of(f"pxrs_{topic.id}")
    with (
        pxrs.connect(store, log=cluster.url(leader, 1)) as px,
        px.consumer("t", "sought", auto_commit=False) as consumer,
    ):
        reader = px.reader("t")
        assert reader.bounds(0).end == 5
        assert consumer.poll(timeout=PATIENCE)
        cluster.cut_off(leader)
        assert reader.bounds(0).end == 5
        decisions: list[Callable[[], object]] = [
            lambda: px.groups.reset("g", "t", to="latest"),
            lambda: px.groups.reset("g", "t", to=10),
            lambda: px.groups.reset("g", "t", timestamp_ms=LATE),
            lambda: consumer.seek("t", 0, 10),
            lambda: reader.follow(start=10),
            lambda: reader.offset_at(0, LATE),
        ]
        # All at once: it answers for some seconds only.
        with ThreadPoolExecutor(len(decisions)) as pool:
            decided = [pool.submit(decide) for decide in decisions]
        for each in decided:
            with pytest.raises(StoreUnavailable):
                each.result()
    cluster.heal()
    with pxrs.connect(store, log=cluster.url(leader, 30)) as px:
        assert px.groups.describe("g").partitions[0].checkpoint == 5
        send(px, 5)
        px.groups.reset("g", "t", timestamp_ms=LATE)
        assert px.groups.describe("g").partitions[0].checkpoint == 10
        reader = px.reader("t")
        with pytest.raises(OffsetOutOfRange):
            reader.follow(start=11)


def test_that_a_copy_is_complete_needs_a_majority(cluster: Cluster, tmp_path: Path) -> None:
    """Else what a majority took after its leader was cut off would not be in it."""
    store, early, late = (f"sqlite:///{tmp_path}/{name}.db" for name in ("from", "early", "late"))
    with pxrs.connect(store, log=cluster.url(0, 30)) as px:
        topic = px.topics.create("t", partitions=1)
        send(px, 5)
    leader = cluster.leader_of(f"pxrs_{topic.id}")
    cluster.cut_off(leader)
    with pytest.raises(StoreUnavailable):
        copied(f"{store} log={cluster.url(leader, 1)}", early)
    with pxrs.connect(store, log=cluster.url((leader + 1) % 3, 30)) as px:
        send(px, 5)
    cluster.heal()
    report = copied(f"{store} log={cluster.url(leader, 30)}", late)
    assert (report.complete, report.messages) == (True, 10)


@pytest.mark.parametrize("policy", ["earliest", pytest.param("latest", marks=pytest.mark.thorough)])
def test_a_checkpoint_beyond_what_a_minority_knows_stays(
    cluster: Cluster, tmp_path: Path, policy: OnTrimmed
) -> None:
    """As a member writes it that has read on from the majority: here before there is one."""
    store = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(store, log=cluster.url(0, 30)) as px:
        topic = px.topics.create("t", partitions=1)
        send(px, 5)
        read_all(px, 5)
        leader = cluster.leader_of(f"pxrs_{topic.id}")
        with pxrs.connect(store, log=cluster.url(leader, 1)) as cut_off:
            cluster.cut_off(leader)
            (record,) = px.stores.coord.list(claims_prefix("g"))
            claim = msgspec.structs.replace(decode(record, Claim), checkpoint=10)
            px.stores.coord.commit([], [Put(record.key, encode(claim))])
            assert cut_off.reader("t").bounds(0).end == 5
            with (
                cut_off.consumer("t", "g", auto_commit=False, on_trimmed=policy) as consumer,
                pytest.raises(StoreUnavailable),
            ):
                poll_as_owner(consumer)
            cluster.heal()
        send(px, 6)
        assert px.groups.describe("g").partitions[0].checkpoint == 10
        with px.consumer("t", "g", auto_commit=False, on_trimmed=policy) as consumer:
            assert [message.offset for message in consumer.poll(timeout=PATIENCE)] == [10]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_checkpoint_stays_while_the_leader_is_cut_off(
    cluster: Cluster, tmp_path: Path, policy: OnTrimmed
) -> None:
    """Its group has handled what a majority took after the leader was cut off."""
    store = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(store, log=cluster.url(0, 30)) as px:
        topic = px.topics.create("t", partitions=1)
        send(px, 5)
    leader = cluster.leader_of(f"pxrs_{topic.id}")
    with pxrs.connect(store, log=cluster.url((leader + 1) % 3, 30)) as px:
        cluster.cut_off(leader)
        send(px, 5)
        read_all(px, 10)
        with pxrs.connect(store, log=cluster.url(leader, 2)) as cut_off:
            with (
                cut_off.consumer("t", "g", auto_commit=False, on_trimmed=policy) as consumer,
                pytest.raises(StoreUnavailable),
            ):
                poll_as_owner(consumer)
            cluster.heal()
            assert px.groups.describe("g").partitions[0].checkpoint == 10
            with cut_off.consumer("t", "g", auto_commit=False) as consumer:
                send(px, 1)
                messages = consumer.poll(timeout=PATIENCE)
                assert [message.offset for message in messages] == [10]


@pytest.mark.thorough
def test_a_commit_of_what_a_majority_took_is_not_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Not by a node whose server of NATS does not know of those messages."""
    store = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(store, log=cluster.url(0, 30)) as px:
        topic = px.topics.create("t", partitions=1)
        send(px, 5)
    leader = cluster.leader_of(f"pxrs_{topic.id}")
    with (
        pxrs.connect(store, log=cluster.url((leader + 1) % 3, 30)) as px,
        LocalNode(f"{store} log={cluster.url(leader, 1)}") as node,
        closing(node.client()) as client,
    ):
        # It says nothing while the others elect a leader.
        patient = {"member": "a", "topics": ["t"], "session_timeout": 300}
        assert client.post("/v1/groups/g/members", patient).status == 201
        for _ in looks():
            if owned := client.get("/v1/groups/g/members/a").json["partitions"]:
                break
        commits = {"commits": [{"fence": owned[0]["fence"], "offset": 10}]}
        assert client.post("/v1/groups/g/commits", commits).status == 416
        cluster.cut_off(leader)
        assert client.post("/v1/groups/g/commits", commits).status == 503
        send(px, 5)
        cluster.heal()
        for _ in looks():
            if (done := client.post("/v1/groups/g/commits", commits)).status != 503:
                break
        assert (done.status, done.json["commits"][0]["checkpoint"]) == (200, 10)
