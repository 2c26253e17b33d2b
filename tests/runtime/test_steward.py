"""What the threads beside a consumer do when the store says no; what a failed goodbye leaves."""

from __future__ import annotations

import pytest

import pxrs
from pxrs.types import Put
from support.child import PATIENCE

TOO_NEW = Put("group/g", b'{"schema": 99}')


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.create_topic("orders", partitions=2)
    return px


def told(consumer: pxrs.Consumer) -> BaseException:
    """What polling raises in the end."""
    while True:
        try:
            consumer.poll(timeout=PATIENCE)
        except pxrs.PxrsError as error:
            return error


def test_what_will_never_pass_is_told(topic: pxrs.Pxrs) -> None:
    consumer = topic.consumer("orders", "g")
    topic.stores.coord.commit((), (TOO_NEW,))
    error = told(consumer)
    assert isinstance(error, pxrs.SchemaMismatch)
    assert "99" in str(error)
    health = consumer.health()
    assert not health.ok
    assert "99" in health.detail
    with pytest.raises(pxrs.SchemaMismatch):
        consumer.close()


def test_a_bug_in_a_callers_subscription_is_told(topic: pxrs.Pxrs) -> None:
    """Not only pxrs' own errors: a thread that dies in silence leaves a poll that waits."""

    class SurpriseError(Exception):
        pass

    with topic.consumer("orders", "g") as consumer:

        def look() -> None:
            raise SurpriseError

        consumer._membership.look = look  # type: ignore[method-assign]
        consumer._steward.wake()
        with pytest.raises(SurpriseError):
            while True:
                consumer.poll(timeout=PATIENCE)


def test_a_failed_goodbye_ends_the_session(topic: pxrs.Pxrs) -> None:
    """Others must not wait for the session of one that has gone."""
    consumer = topic.consumer("orders", "g", session_ttl=3600.0)
    assert len(topic.stores.coord.list("members/g/")) == 1
    topic.stores.coord.commit((), (TOO_NEW,))
    with pytest.raises(pxrs.SchemaMismatch):
        consumer.close()
    assert topic.stores.coord.list("members/g/") == []
    consumer.close()


def test_a_failed_join_leaves_no_session(topic: pxrs.Pxrs) -> None:
    topic.stores.coord.commit((), (TOO_NEW,))
    with pytest.raises(pxrs.SchemaMismatch):
        topic.consumer("orders", "g", session_ttl=3600.0)
    assert topic.stores.coord.list("members/g/") == []


def test_one_that_fails_to_close_keeps_nobody_open(url: str) -> None:
    px = pxrs.connect(url)
    px.create_topic("orders", partitions=2)
    bad = px.consumer("orders", "g")
    good = px.consumer("orders", "h")
    producer = px.producer()
    px.stores.coord.commit((), (TOO_NEW,))
    with pytest.raises(pxrs.SchemaMismatch):
        px.close()
    for closed in (bad.poll, good.poll, lambda: producer.send("orders", "x")):
        with pytest.raises(pxrs.PxrsError):
            closed()
    with pytest.raises(pxrs.Closed):
        px.topics()
