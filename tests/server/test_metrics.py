"""What a node counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

import pxrs
from pxrs import metrics as names
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import GroupNotFound, TopicNotFound
from pxrs.metrics import Metric
from pxrs.server.metrics import Metrics
from pxrs.types import LogPartition
from support.child import PATIENCE
from support.java_member import JavaMember
from support.node import Client, LocalNode, looks


@pytest.fixture
def url() -> str:
    return "memory://"


def test_every_metric_is_shown(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/topics/orders/messages", {"messages": [{"value": "a"}, {"value": "b"}]})
    client.get("/v1/topics/orders/partitions/0/messages?offset=0")
    client.post("/v1/groups/billing/members", {"member": "a", "topics": ["orders"]})
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}]})
    client.post("/v1/queues/mail/take", {})
    for number in range(3):
        client.get(f"/made/up/{number}")
    shown = client.get("/metrics")
    assert shown.headers["content-type"].startswith("text/plain")
    text = shown.body.decode()
    for metric in vars(names).values():
        if isinstance(metric, Metric):
            assert f"# HELP {metric.name}" in text, metric.name
    assert 'pxrs_produced_messages_total{topic="orders"} 2.0' in text
    assert 'pxrs_requests_total{method="",route="none",status="404"} 3.0' in text
    assert 'pxrs_queue_items{queue="mail",state="held"} 1.0' in text
    assert "pxrs_leases 1.0" in text
    assert "pxrs_held_members 1.0" in text
    assert 'pxrs_group_lag_messages{group="billing"}' in text
    assert "made/up" not in text


class Store:
    """The groups and queues of an application, as a scrape asks for them."""

    def __init__(self) -> None:
        self.groups = self.queues = self
        self.names = ["a", "b", "c"]
        self.gone: set[str] = set()
        self.described: Callable[[], None] = lambda: None
        self.looks = 0

    async def list(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(name=name, generation=1, **QUEUE) for name in self.names]

    async def describe(self, group: str) -> Any:
        self.described()
        await asyncio.sleep(0)
        if group in self.gone:
            raise GroupNotFound(group)
        return SimpleNamespace(lag=7, lag_seconds=3.0)


QUEUE = dict.fromkeys(("ready", "delayed", "held", "waiting", "dead"), 1) | {"oldest_age": 2.5}


def test_a_group_that_is_deleted_during_a_look_hides_no_other() -> None:
    store: Any = Store()
    store.gone = {"b"}
    text = asyncio.run(Metrics(SYSTEM_CLOCK).text(store)).decode()
    assert 'pxrs_group_lag_messages{group="a"} 7.0' in text
    assert 'group="b"' not in text
    assert 'pxrs_group_lag_seconds{group="c"} 3.0' in text
    assert 'pxrs_queue_oldest_seconds{queue="c"} 2.5' in text


def test_a_scrape_during_a_look_sees_what_the_look_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()

    async def walk() -> None:
        metrics = Metrics(SYSTEM_CLOCK)
        texts = await asyncio.gather(*[metrics.text(store) for _ in range(3)])
        assert all('pxrs_group_lag_messages{group="c"} 7.0' in text.decode() for text in texts)
        assert store.looks == 2  # groups and queues
        # While it looks, what it has found last is shown by whatever reads the registry.
        monkeypatch.setattr("pxrs.server.metrics._FRESH", 0.0)
        seen: list[bytes] = []
        store.described = lambda: seen.append(generate_latest(metrics._registry))
        await metrics.text(store)
        assert len(seen) == 3
        assert all('pxrs_group_lag_messages{group="c"} 7.0' in text.decode() for text in seen)

    asyncio.run(walk())


def test_a_scrape_does_not_wait_long_for_a_store_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pxrs.server.metrics._PATIENCE", 0.0)
    store: Any = Store()

    async def walk() -> None:
        metrics = Metrics(SYSTEM_CLOCK)
        metrics.set(names.STORE_UP, 0)
        back = asyncio.Event()
        found = store.list

        async def away() -> list[Any]:
            await back.wait()
            return await found()  # type: ignore[no-any-return]

        store.list = away
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                text = (await metrics.text(store)).decode()
                assert "pxrs_store_up 0.0" in text
                assert "pxrs_group_lag_messages{" not in text
            back.set()
            while b"pxrs_group_lag_messages{" not in await metrics.text(store):
                await asyncio.sleep(0)
        assert store.looks == 2  # all of them shared one

    asyncio.run(walk())


def test_what_is_too_much_to_be_shown_is_counted() -> None:
    store: Any = Store()
    store.names = [f"g{number:03}" for number in range(203)]
    text = asyncio.run(Metrics(SYSTEM_CLOCK).text(store)).decode()
    assert 'pxrs_not_shown{kind="groups"} 3.0' in text
    assert 'pxrs_not_shown{kind="queues"} 3.0' in text


def test_rebalances_are_counted_by_reason(
    client: Client, node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.server.metrics._FRESH", 0.0)
    client.get("/metrics")
    node.px.topics.create("orders", partitions=2)

    def generation(least: int) -> None:
        for _ in looks():
            if node.px.groups.describe("billing").generation >= least:
                return

    members = "/v1/groups/billing/members"
    client.post(members, {"member": "a", "topics": ["orders"]})
    generation(1)
    client.post(members, {"member": "b", "topics": ["orders"]})
    generation(2)
    assert client("DELETE", f"{members}/b").status == 204
    generation(3)
    text = client.get("/metrics").body.decode()
    assert 'pxrs_group_rebalances_total{reason="joined"} 2.0' in text
    assert 'pxrs_group_rebalances_total{reason="left"} 1.0' in text
    assert client.get("/metrics").body.decode().count("pxrs_group_rebalances_total{") == 2


def shown(text: str, name: str) -> float:
    """The value of a metric."""
    (line,) = [each for each in text.splitlines() if each.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def test_values(client: Client) -> None:
    """Fenced commits, lag, latencies and ages: not only that they are named."""
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}]})
    path = "/v1/groups/billing/members"
    client.post(path, {"member": "a", "topics": ["orders"]})
    owned = client.get(f"{path}/a?wait=30").json["partitions"]
    old = {"value": "a", "timestamp": 1700000000000}
    client.post("/v1/topics/orders/messages", {"messages": [old] * 5})
    commits = "/v1/groups/billing/commits"
    commit = {"commits": [{"fence": owned[0]["fence"], "offset": 2}]}
    assert client.post(commits, commit).json["commits"][0]["fenced"] is False
    assert client("DELETE", f"{path}/a").status == 204
    assert client.post(commits, commit).json["commits"][0]["fenced"] is True
    value = partial(shown, client.get("/metrics").body.decode())
    assert value("pxrs_fenced_commits_total") == 1
    assert value("pxrs_commit_seconds_count") == 2
    assert value("pxrs_commit_seconds_sum") > 0
    assert value("pxrs_produce_seconds_count") == 1
    assert value("pxrs_produce_seconds_sum") > 0
    assert value('pxrs_group_lag_messages{group="billing"}') == 3
    age = time.time() - 1700000000
    assert age - 3600 < value('pxrs_group_lag_seconds{group="billing"}') <= age
    assert value('pxrs_queue_oldest_seconds{queue="mail"}') > 0


def test_messages_of_raw_batches_are_counted_from_the_offset_on(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/topics/orders/messages", {"messages": [{"value": "a"}] * 5})
    for offset in (2, 5):
        page = client.get(f"/v1/topics/orders/partitions/0/batches?offset={offset}")
        assert page.status == 200
    assert counted(client)['pxrs_fetched_messages_total{topic="orders"}'] == 3


def test_calls_of_remote_clients_are_counted(
    node: LocalNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages by their topic, whose name the node does not hear with them; commits, and errors."""
    monkeypatch.setattr("pxrs.server.metrics._FRESH", 0.0)
    with pxrs.connect(f"pxrs://{node.address}") as px:
        for topic in ("orders", "gone"):
            px.topics.create(topic, partitions=1)
            with px.producer() as producer:
                for _ in range(3):
                    producer.send(topic, b"x").result()
        px.topics.delete("gone")
        where = LogPartition(px.topics.find("orders").id, 0)
        assert px.stores.log.fetch(where, 1, 1000).batches[-1].next == 3
        before = counted(client)
        with px.consumer("orders", group="billing", auto_commit=False) as consumer:
            for message in consumer:
                if message.offset == 2:
                    break
            consumer.commit()
        with px.transaction() as tx:
            tx.send("orders", b"d")
        with pytest.raises(TopicNotFound):
            px.stores.log.fetch(LogPartition("none", 0), 0, 1000)
    after = counted(client)
    assert before['pxrs_produced_messages_total{topic="orders"}'] == 3
    assert before['pxrs_fetched_messages_total{topic="orders"}'] == 2
    assert before["pxrs_produce_seconds_count"] == 6
    assert before["pxrs_commit_seconds_count"] == 0
    assert after['pxrs_produced_messages_total{topic="orders"}'] == 4
    assert after['pxrs_fetched_messages_total{topic="orders"}'] == 5
    assert after["pxrs_produce_seconds_count"] == 7
    assert after["pxrs_commit_seconds_count"] >= 1
    calls = 'pxrs_requests_total{method="pxrs",route="log.'
    assert after[f'{calls}append",status="OK"}}'] == 6
    assert after[f'{calls}fetch",status="topic_not_found"}}'] == 1
    assert after['pxrs_request_seconds_count{route="log.append"}'] == 6
    assert not any("gone" in name for name in after)


def counted(client: Client) -> dict[str, float]:
    """The samples of a scrape."""
    lines = client.get("/metrics").body.decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_each_way_to_commit_is_counted_once(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/topics/orders/messages", {"messages": [{"value": "a"}] * 5})

    def counted(name: str) -> float:
        return shown(client.get("/metrics").body.decode(), name)

    java = JavaMember(client, "java")
    for _ in looks():
        if java.beat() == "STABLE":
            break
    assert len(java.poll()) == 5
    java.beat()
    assert counted("pxrs_commit_seconds_count") == 0
    java.beat()
    assert counted("pxrs_commit_seconds_count") == 1
    documented = "/api/v1/consumer-group"
    asked = {"groupId": java.group, "consumerId": "documented"}
    member = client.post(f"{documented}/join", asked).json["memberId"]
    body = {"groupId": java.group, "memberId": member, "offsets": {"0": 5}}
    assert client.post(f"{documented}/commit-offsets", body).status == 409
    assert counted("pxrs_commit_seconds_count") == 2
    assert counted("pxrs_fenced_commits_total") == 1


def test_a_batch_that_was_there_already_is_not_counted_again(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    body = {
        "messages": [{"value": "a"}, {"value": "b"}],
        "producer": {"id": 7, "epoch": 0, "sequence": 0},
    }
    for _ in range(3):
        assert client.post("/v1/topics/orders/partitions/0/messages", body).status == 200
    text = client.get("/metrics").body.decode()
    assert 'pxrs_produced_messages_total{topic="orders"} 2.0' in text
