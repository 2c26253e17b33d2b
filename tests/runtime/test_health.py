"""How a consumer says that it is doing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.runtime.health import Facts, judge

GOOD = Facts(
    generation=1,
    owned=4,
    meant=4,
    waiting=0,
    in_hand_since=None,
    store_lost_since=None,
    fatal=None,
)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "idle"),
        ({"waiting": 5}, "assigned"),
        ({"waiting": 5_000}, "lagging"),
        ({"waiting": 5_000, "in_hand_since": 10.0}, "stuck"),
        ({"owned": 3}, "joining"),
        ({"generation": 0, "owned": 0, "meant": 0}, "joining"),
        ({"store_lost_since": 50.0, "owned": 3}, "lost the store"),
        ({"fatal": "displaced", "store_lost_since": 50.0}, "fenced"),
        ({"closed": True, "owned": 0, "meant": 4}, "closed"),
    ],
)
def test_the_worst_is_said(change: dict[str, object], state: str) -> None:
    facts = {name: getattr(GOOD, name) for name in Facts.__struct_fields__} | change
    health = judge(Facts(**facts), now=100.0, stuck_after=60.0, lag_limit=1000)
    assert health.state == state
    assert health.ok == (state in ("idle", "assigned", "lagging"))
    assert health.detail


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.create_topic("orders", partitions=4)
        yield px


@pytest.mark.engine("memory")
def test_a_consumer_at_work(px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send_many("orders", [(f"k{n}", "v") for n in range(100)])
    with px.consumer("orders", "g") as consumer:
        while len(consumer.assignment) < 4:
            consumer.poll(1, timeout=0.05)
        while consumer.poll(10, timeout=0.5):
            assert consumer.health(stuck_after=1e-9).state in ("stuck", "joining")
            assert consumer.health().ok
        assert consumer.health().state == "idle"
    assert consumer.health().state == "closed"


@pytest.mark.engine("memory")
def test_a_displaced_static_member_says_so(px: pxrs.Pxrs) -> None:
    older = px.consumer("orders", "g", instance="billing-1")
    while len(older.assignment) < 4:
        older.poll(1, timeout=0.05)
    with px.consumer("orders", "g", instance="billing-1") as newer:
        while len(newer.assignment) < 4:
            newer.poll(1, timeout=0.05)
        with pytest.raises(pxrs.Displaced):
            older.poll(timeout=10)
        assert older.health().state == "fenced"
        older.close()
        assert len(newer.assignment) == 4
