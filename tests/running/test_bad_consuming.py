"""Bad input to consumers and to `px.run`: told at once, not when the first message fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

import pxrs
from pxrs import Backoff, ConfigError, DeadLetter, InvalidRequest, Message, Pxrs, Stop
from pxrs.testing import GroupLab
from support.child import PATIENCE


@pytest.fixture(params=[pytest.param("memory://", marks=pytest.mark.engine("memory"))])
def url(request: pytest.FixtureRequest) -> str:
    """Bad input is refused before a store sees it: one engine shows it."""
    return str(request.param)


@pytest.fixture
def orders(px: Pxrs) -> Pxrs:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send_many("orders", [("k", "a"), ("k", "b")]).result()
    return px


def handle(message: Message) -> None:
    """Fine."""


# Values are handed over untyped, as a caller without a type checker would.
Call = Callable[[Any], object]


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("max_records", lambda c: c.poll(0)),
        ("max_records", lambda c: c.poll("10")),
        ("max_records", lambda c: c.batches(0)),
        ("seconds", lambda c: c.poll(1, "5")),
        ("seconds", lambda c: c.poll(1, float("nan"))),
        ("message must be", lambda c: c.commit(5)),
        ("offset must be an integer, got '1'", lambda c: c.seek("orders", 0, "1")),
        (r"timestamp\(\) \* 1000", lambda c: c.seek_to_time(datetime(2026, 1, 31))),
        ("partitions must be", lambda c: c.seek_to_time(0, "orders")),
        ("partitions must be", lambda c: c.pause("orders")),
        ("partitions must be", lambda c: c.pause(["orders", "payments"])),
        ("partitions must be", lambda c: c.resume(("orders", "0"))),
    ],
)
def test_a_consumer_refuses_it_and_goes_on(orders: Pxrs, match: str, call: Call) -> None:
    with orders.consumer("orders", "g", auto_commit=False) as consumer:
        (first,) = consumer.poll(1, PATIENCE)
        with pytest.raises(InvalidRequest, match=match):
            call(consumer)
        (second,) = consumer.poll(1, PATIENCE)
        assert (first.value, second.value) == (b"a", b"b")


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("re.compile", {"topics": 5}),
        ("re.compile", {"topics": b"orders"}),
        ("at least one topic", {"topics": []}),
        ("auto_commit", {"auto_commit": "no"}),
        ("on_assigned", {"on_assigned": "print"}),
        ("on_revoked", {"on_revoked": 5}),
        (r"pxrs\.JSON\(\)", {"serde": "json"}),
        (r"pxrs\.JSON\(\)", {"serde": pxrs.JSON}),
        ("key_serde", {"key_serde": "json"}),
    ],
)
def test_a_consumer_that_can_not_be_is_no_member(
    orders: Pxrs, match: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        orders.consumer(**{"topics": "orders", "group": "g", **settings})
    assert orders.groups.list() == []


@pytest.mark.parametrize(
    ("kind", "match", "settings"),
    [
        (InvalidRequest, "got str", {"handler": "handle"}),
        (InvalidRequest, r"handler\(message\): too many", {"handler": lambda: None}),
        (InvalidRequest, "missing a required", {"handler": lambda message, tx: None}),
        (ConfigError, "retry must be .*, got 5", {"retry": 5}),
        (ConfigError, r"pxrs\.Backoff", {"retry": None}),
        (ConfigError, r"pxrs\.Stop\(\)", {"on_failure": "stop"}),
        (ConfigError, r"pxrs\.Stop\(\)", {"on_failure": Stop}),
        (ConfigError, "on_failure", {"on_failure": DeadLetter}),
        (ConfigError, "processes must be .*; got -1", {"processes": -1}),
        (ConfigError, "processes must be .*; got True", {"processes": True}),
        (InvalidRequest, r"pxrs\.JSON\(\)", {"serde": "json"}),
    ],
)
def test_a_run_that_can_not_be_handles_nothing(
    orders: Pxrs, kind: type[InvalidRequest], match: str, settings: dict[str, Any]
) -> None:
    wanted = {"handler": handle, "topic": "orders", "group": "g", **settings}
    with pytest.raises(kind, match=match):
        orders.run(**wanted).join()
    assert (orders.groups.list(), len(orders.topics.list())) == ([], 1)


@pytest.mark.parametrize("name", ["", "a b", 5])
def test_a_dead_letter_topic_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="topic name"):
        DeadLetter(name)


def test_no_checkpoint_says_what_to_do(orders: Pxrs) -> None:
    advice = r"groups\.reset\('g', 'orders', to=…\)"
    with (
        orders.consumer("orders", "g", start="error") as consumer,
        pytest.raises(pxrs.NoCheckpoint, match=advice),
    ):
        consumer.poll(timeout=PATIENCE)
    orders.groups.reset("g", "orders", to="earliest")
    with orders.consumer("orders", "g", start="error") as consumer:
        assert len(consumer.poll(timeout=PATIENCE)) == 2


def test_failures_are_logged(orders: Pxrs, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message) -> None:
        if message.value == b"b":
            orders.stop()
            return
        raise ValueError("no such account")

    orders.run(fail, topic="orders", group="g", retry=Backoff(first=0.001, attempts=2)).join()
    again, buried = [record for record in caplog.records if record.name == "pxrs.run"]
    assert (again.levelname, buried.levelname) == ("WARNING", "ERROR")
    assert "failed once on 'orders' partition 0 offset 0: ValueError" in again.getMessage()
    assert "'orders.dlq'" in buried.getMessage()
    assert buried.exc_info is not None
    assert buried.exc_info[0] is ValueError


@pytest.mark.engine("memory")
def test_statements_where_there_is_no_sql() -> None:
    with pxrs.connect("memory://") as px, px.transaction() as tx:
        with pytest.raises(pxrs.NotAtomic, match="no SQL"):
            tx.execute("SELECT 1")
        tx.put("mail", "it goes on")


@pytest.mark.engine("memory")
def test_a_listener_and_a_lab_refuse_such_handlers_too() -> None:
    one_too_few: Any = lambda item: None  # noqa: E731
    with pxrs.connect("memory://") as px:
        with pytest.raises(InvalidRequest, match=r"handler\(item, tx\)"):
            px.listen("mail", one_too_few)
        assert px.queues.list() == []
    with GroupLab() as lab:
        with pytest.raises(InvalidRequest, match=r"handler\(message, tx\)"):
            lab.start("a", one_too_few, transaction=True)
        lab.start("a", one_too_few)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("limit must be an integer, got '5'", lambda groups: groups.explain("g", limit="5")),
        ("list of numbers", lambda groups: groups.reset("g", "orders", to=0, partitions=0)),
        ("must be an integer", lambda groups: groups.reset("g", "orders", to=0, partitions=["0"])),
        (r"\* 1000", lambda groups: groups.reset("g", "orders", timestamp_ms=datetime.min)),
    ],
)
def test_a_group_is_left_as_it_is(orders: Pxrs, match: str, call: Call) -> None:
    with orders.consumer("orders", "g") as consumer:
        consumer.poll(timeout=PATIENCE)
        consumer.commit()
    with pytest.raises(InvalidRequest, match=match):
        call(orders.groups)
    history = orders.groups.explain("g")
    assert (history.resets, orders.groups.describe("g").lag) == ((), 0)
