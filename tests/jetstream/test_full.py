"""A JetStream without room: what frees it needs none."""

from __future__ import annotations

from contextlib import closing

import pytest

import pxrs
from pxrs.config import nats_settings, parse_url
from pxrs.errors import OffsetOutOfRange, StoreFull
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import Append, Appended, Bounds, LogPartition
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
A_LOT = 1 << 30
_ROOM = 1 << 20


def full_one(new_engine: NewEngine, nodes: int = 1) -> str:
    """The URL of servers that keep little."""
    account = {
        "jetstream": {"max_file": _ROOM, "max_mem": 0},
        "users": [{"user": "a", "password": "a"}],
    }
    engine = new_engine("nats", nodes=nodes, settings={"accounts": {"A": account}})
    return engine.url.replace("nats://", "nats://a:a@")


def fill(log: JetStreamLog) -> int:
    """Append until there is no room for the smallest message; the end."""
    end = 0
    for size in (60_000, 1_000, 100, 1):
        while True:
            (outcome,) = log.append([Append(HERE, batch(b"x" * size))])
            if not isinstance(outcome, Appended):
                assert isinstance(outcome, StoreFull)
                break
            end = outcome.base + 1
    return end


@pytest.mark.parametrize("way", ["trim", "expire"])
def test_a_full_one_is_freed(new_engine: NewEngine, way: str) -> None:
    with closing(JetStreamLog(nats_settings(parse_url(full_one(new_engine))))) as log:
        log.create("t-1", 1)
        end = fill(log)
        if way == "trim":
            assert log.trim(HERE, 10) == 10
        else:
            assert log.expire(HERE, None, 300_000) > 0
        start = log.bounds("t-1")[0].start
        assert append(log, HERE, batch(b"again")) == [end]
        assert sorted(values_in(log, HERE)) == list(range(start, end + 1))
        fill(log)
        end = log.bounds("t-1")[0].end
        assert log.trim(HERE, A_LOT) == end
        assert log.bounds("t-1") == {0: Bounds(end, end)}
        assert append(log, HERE, batch(b"again")) == [end]


def test_retention_frees_a_full_one_for_a_producer(new_engine: NewEngine) -> None:
    with pxrs.connect("memory://", log=full_one(new_engine)) as px:
        px.topics.create("orders", partitions=1, retention_bytes=200_000)
        end = _send_until_full(px)
        px.topics.apply_retention("orders")
        with px.producer(compression="none") as producer:
            assert producer.send("orders", b"x" * 60_000).result().offset == end
        assert px.topics.describe("orders").partitions[0].start > 0


def _send_until_full(px: pxrs.Pxrs) -> int:
    sent = 0
    with px.producer(compression="none") as producer, pytest.raises(pxrs.DeliveryFailed) as caught:
        while sent < 100:
            producer.send("orders", b"x" * 60_000).result()
            sent += 1
    assert isinstance(caught.value.__cause__, StoreFull)
    return sent


def test_a_full_cluster_tells_where_a_partition_ends(new_engine: NewEngine) -> None:
    url = f"{full_one(new_engine, nodes=3)}?replicas=3"
    with closing(JetStreamLog(nats_settings(parse_url(url)))) as log:
        log.create("t-1", 1)
        end = fill(log)
        with pytest.raises(OffsetOutOfRange) as told:
            log.fetch(HERE, end + 5, 1)
        assert (told.value.start, told.value.end) == (0, end)
        assert len(values_in(log, HERE)) == end
