"""How a consumer says that it is doing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

import pxrs
from pxrs.consuming.health import Facts, judge
from pxrs.testing.clock import VirtualClock
from pxrs.types import Put
from support.child import PATIENCE
from support.running import Running

GOOD = Facts(
    generation=1,
    owned=4,
    meant=4,
    waiting=0,
    in_hand_since=None,
    asked_at=99.0,
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
        ({"unreadable": "a batch is damaged"}, "stuck"),
        ({"owned": 3}, "joining"),
        ({"generation": 0, "owned": 0, "meant": 0}, "joining"),
        ({"store_lost_since": 50.0, "owned": 3}, "lost the store"),
        ({"asked_at": 20.0}, "stuck"),
        ({"asked_at": 20.0, "in_hand_since": 80.0}, "idle"),
        ({"asked_at": 20.0, "owned": 0, "meant": 0}, "idle"),
        ({"lease": 3.0}, "idle"),
        ({"lease": -0.5, "waiting": 5}, "lost the store"),
        ({"fatal": "Displaced", "fenced": True, "store_lost_since": 50.0}, "fenced"),
        ({"fatal": "SchemaMismatch", "closed": True}, "failed"),
        ({"closed": True, "owned": 0}, "closed"),
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
        px.topics.create("orders", partitions=4)
        yield px


@pytest.mark.engine("memory")
def test_a_consumer_at_work(px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send_many("orders", [(f"k{n}", "v") for n in range(100)])
    with px.consumer("orders", "g") as consumer:
        left = 100
        while len(consumer.assignment) < 4:
            left -= len(consumer.poll(1, timeout=0.05))
        while left:
            left -= len(consumer.poll(10, timeout=30))
            assert consumer.health(stuck_after=1e-9).state in ("stuck", "joining")
            assert consumer.health().ok
        consumer.poll(10, timeout=0)
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


@pytest.mark.engine("memory")
def test_what_will_never_pass_is_named(px: pxrs.Pxrs) -> None:
    consumer = px.consumer("orders", "g")
    px.stores.coord.commit((), [Put("group/g", b'{"schema": 99}')])
    with pytest.raises(pxrs.SchemaMismatch):
        while True:
            consumer.poll(timeout=PATIENCE)
    health = consumer.health()
    assert (health.state, health.ok) == ("failed", False)
    assert health.detail.startswith("SchemaMismatch: ")
    with pytest.raises(pxrs.SchemaMismatch):
        consumer.close()


@pytest.mark.engine("memory")
def test_a_deleted_topic_is_named_and_a_closed_consumer_says_so(
    px: pxrs.Pxrs, caplog: pytest.LogCaptureFixture
) -> None:
    with px.consumer("orders", "g") as consumer:
        while len(consumer.assignment) < 4:
            consumer.poll(1, timeout=0.05)
        px.topics.delete("orders")
        while consumer.assignment or consumer.health().state != "idle":
            consumer.poll(1, timeout=0.05)
        assert consumer.health().detail.endswith("deleted: orders")
        (told,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert "no topic any more: orders" in told
    assert consumer.health().state == "closed"


@pytest.mark.engine("memory")
def test_a_loop_that_goes_on_is_not_stuck(px: pxrs.Pxrs) -> None:
    """Its messages were handed out together long ago, but it comes from one to the next."""
    clock = VirtualClock()
    with pxrs.Pxrs(px.stores, clock) as moving:
        with moving.producer(linger=0) as producer:
            for _ in range(5):
                producer.send("orders", "v", partition=0).result()
        with moving.consumer("orders", "g", session_ttl=3600.0, debounce=0) as consumer:
            count = 0
            for _ in consumer:
                assert consumer.health(stuck_after=60).state == "assigned"
                clock.advance(50)
                assert consumer.health(stuck_after=60).state == "assigned"
                if (count := count + 1) == 5:
                    break
                clock.advance(5)
            clock.advance(20)


class Heard(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.lines: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.lines.append(record.getMessage())
            self.event.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard("the handler has been at it")
    logging.getLogger("pxrs.groups").addHandler(handler)
    yield handler
    logging.getLogger("pxrs.groups").removeHandler(handler)


@pytest.mark.engine("memory")
def test_a_run_that_hangs_is_told_without_being_asked(px: pxrs.Pxrs, heard: Heard) -> None:
    with px.producer() as producer:
        producer.send("orders", "v").result()
    go_on = threading.Event()
    running = Running(px, lambda message: go_on.wait(), topic="orders", stuck_after=0.01)
    assert heard.event.wait(PATIENCE)
    (health,) = px.health().values()
    assert (health.state, health.ok) == ("stuck", False)
    go_on.set()
    px.stop()
    running.join()
    assert (running.error, px.health()) == (None, {})
    assert len(heard.lines) == 1


@pytest.mark.engine("memory")
def test_a_loop_that_hangs_is_told_without_being_asked(px: pxrs.Pxrs, heard: Heard) -> None:
    with px.producer() as producer:
        producer.send("orders", "v").result()
    with px.consumer("orders", "g", stuck_after=0.01) as consumer:
        assert len(consumer.poll(timeout=PATIENCE)) == 1
        assert heard.event.wait(PATIENCE)
        assert px.health()[consumer.member].state == "stuck"
        assert consumer.poll(timeout=0) == []
        assert px.health()[consumer.member].state == "idle"


@pytest.mark.engine("memory")
def test_a_consumer_that_nobody_asks_is_stuck(px: pxrs.Pxrs) -> None:
    """Its thread may have died: its partitions are kept, and nothing of them is handled."""
    clock = VirtualClock()
    moving = pxrs.Pxrs(px.stores, clock)
    with moving, moving.consumer("orders", "g", session_ttl=3600.0, debounce=0) as consumer:
        while len(consumer.assignment) < 4:
            consumer.poll(timeout=0)
        clock.advance(50)
        assert consumer.health(stuck_after=60).state == "idle"
        clock.advance(50)
        health = consumer.health(stuck_after=60)
        assert (health.state, health.ok) == ("stuck", False)
        assert "asked" in health.detail
        consumer.poll(timeout=0)
        assert consumer.health(stuck_after=60).state == "idle"
