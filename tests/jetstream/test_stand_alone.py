"""An error of one partition, stream or batch is that one's alone, on a real server."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest

import nats
import pxrs
from pxrs import DeliveryFailed, MessageTooLarge, OutcomeUnknown, Pxrs
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.jetstream import leader_of
from support.reading import read_all

pytestmark = pytest.mark.engine("nats")

GOOD, BAD = "orders", "audit"


@pytest.fixture
def px(nats_url: str) -> Iterator[Pxrs]:
    log = f"{nats_url}/t-{secrets.token_hex(6)}"
    with pxrs.connect("memory://", log=log) as px:
        yield px
        for topic in px.topics.list():
            px.topics.delete(topic.name)


def values(px: Pxrs, topic: str) -> list[bytes]:
    return [message.value for message in read_all(px, topic)]


def allow_no_more(url: str, stream: str) -> None:
    """The stream takes what it holds now, and nothing more."""

    async def update() -> None:
        client = await nats.connect(url.removeprefix("nats://").split("/")[0])
        try:
            answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"")
            info = json.loads(answer.data)
            config = {**info["config"], "max_msgs": info["state"]["messages"]}
            answer = await client.request(
                f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(config).encode()
            )
            assert "error" not in json.loads(answer.data), answer.data
        finally:
            await client.close()

    asyncio.run(update())


def test_a_full_stream_fails_no_other_topics_messages(px: Pxrs, nats_url: str) -> None:
    px.topics.create(GOOD, partitions=2)
    full = px.topics.create(BAD, partitions=1)
    prefix = px.stores.url.rpartition("/")[2]
    allow_no_more(nats_url, f"{prefix}_{full.id}")
    with px.producer(linger=600) as producer:
        for number in range(5):
            kept = producer.send(GOOD, b"%d" % number, key=b"k")
            lost = producer.send(BAD, b"%d" % number)
            assert kept.result(PATIENCE).offset == number
            with pytest.raises(DeliveryFailed, match="no room"):
                lost.result(PATIENCE)
    assert values(px, GOOD) == [b"%d" % number for number in range(5)]
    assert values(px, BAD) == []


def test_a_message_over_the_servers_limit_fails_no_successor(px: Pxrs) -> None:
    px.topics.create(GOOD, partitions=1)
    with px.producer(linger=600, batch_bytes=1, max_message_bytes=2**22) as producer:
        for number in range(5):
            before = producer.send(GOOD, b"before %d" % number)
            huge = producer.send(GOOD, bytes(2**20))
            after = [producer.send(GOOD, b"after %d" % number) for _ in range(2)]
            before.result(PATIENCE)
            for sent in after:
                sent.result(PATIENCE)
            with pytest.raises(MessageTooLarge):
                huge.result(PATIENCE)
    assert values(px, GOOD) == [
        value
        for number in range(5)
        for value in (b"before %d" % number, *[b"after %d" % number] * 2)
    ]


def test_what_the_server_lost_fails_nothing_that_comes_later(new_engine: NewEngine) -> None:
    """Acknowledged batches are gone, as after a power cut: the producer goes on behind them."""
    engine = new_engine("nats")
    data, older = engine.folder / "data0", engine.folder / "older"
    with pxrs.connect("memory://", log=engine.url) as px:
        px.topics.create(GOOD, partitions=1)
        with px.producer(linger=600) as producer:
            producer.send(GOOD, b"0").result(PATIENCE)
            engine.stop()
            shutil.copytree(data, older)
            engine.start()
            for value in (b"lost", b"lost, too"):
                producer.send(GOOD, value).result(PATIENCE)
            engine.stop()
            shutil.rmtree(data)
            older.rename(data)
            engine.start()
            later = [producer.send(GOOD, value) for value in (b"1", b"2")]
            producer.flush(PATIENCE)
            later.append(producer.send(GOOD, b"3"))
            assert [sent.result(PATIENCE).offset for sent in later] == [1, 2, 3]
        assert values(px, GOOD) == [b"0", b"1", b"2", b"3"]


def test_a_node_that_is_down_fails_no_other_nodes_messages(new_engine: NewEngine) -> None:
    cluster = new_engine("nats", nodes=3)
    with pxrs.connect("memory://", log=f"{cluster.url}?timeout=4") as px:
        good = px.topics.create(GOOD, partitions=1)
        here = leader_of(cluster.url, f"pxrs_{good.id}")
        cluster.stop(here)
        bad = px.topics.create(BAD, partitions=1)
        cluster.start()
        with px.producer(linger=600, delivery_timeout=6) as producer:
            for topic in (good, bad):
                producer.send(topic.name, b"0").result(PATIENCE)
            cluster.kill(leader_of(cluster.url, f"pxrs_{bad.id}"))
            lost = [producer.send(bad.name, b"1")]
            kept = [producer.send(good.name, b"1")]
            kept[0].result(PATIENCE)
            lost.append(producer.send(bad.name, b"2"))
            kept.append(producer.send(good.name, b"2"))
            with suppress(DeliveryFailed, OutcomeUnknown):
                producer.flush(PATIENCE)
            assert [sent.result(PATIENCE).offset for sent in kept] == [1, 2]
            for sent in lost:
                with pytest.raises((DeliveryFailed, OutcomeUnknown)):
                    sent.result(PATIENCE)
        assert values(px, good.name) == [b"0", b"1", b"2"]
