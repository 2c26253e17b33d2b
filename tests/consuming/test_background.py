"""What the threads beside a consumer do when the store says no; what a failed goodbye leaves."""

from __future__ import annotations

import threading

import pytest

import pxrs
from pxrs.consuming.member_steps import MemberSteps
from pxrs.stores.api import Watch
from pxrs.types import Put
from support.child import PATIENCE

TOO_NEW = Put("group/g", b'{"schema": 99}')


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=2)
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

        consumer._steps.membership.look = look  # type: ignore[method-assign]
        consumer._member.background.wake()
        with pytest.raises(SurpriseError):
            while True:
                consumer.poll(timeout=PATIENCE)


def test_a_store_that_is_away_is_left_alone_between_two_tries(topic: pxrs.Pxrs) -> None:
    said: list[str] = []
    works_again = threading.Event()
    with topic.consumer("orders", "g") as consumer:
        look, wait = consumer._steps.membership.look, consumer._member.background._stop.wait

        def fail_thrice() -> float | None:
            said.append("look")
            if said.count("look") <= 3:
                raise pxrs.StoreUnavailable("away")
            works_again.set()
            return look()

        def pause(timeout: float | None = None) -> bool:
            if threading.current_thread().name == "pxrs-background":
                said.append("pause" if timeout else "no pause")
            return wait(timeout)

        consumer._member.background._stop.wait = pause  # type: ignore[method-assign]
        consumer._steps.membership.look = fail_thrice  # type: ignore[method-assign]
        consumer._member.background.wake()
        assert works_again.wait(PATIENCE)
    assert said[:7] == ["look", "pause"] * 3 + ["look"]


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
    px.topics.create("orders", partitions=2)
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
        px.topics.list()


def test_a_watch_that_could_not_be_armed_is_armed_later(
    topic: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait on nothing, or not at all, for as long as it lives."""
    coord, armed = topic.stores.coord, threading.Event()
    watch, failures = coord.watch, [pxrs.StoreUnavailable("away"), pxrs.StoreUnavailable("away")]

    def flaky(*prefixes: str) -> Watch:
        if prefixes[0] == "group/g" and failures:
            raise failures.pop()
        armed.set()
        return watch(*prefixes)

    monkeypatch.setattr(coord, "watch", flaky)
    with topic.consumer("orders", "g"):
        assert armed.wait(PATIENCE)


def test_a_surprise_does_not_end_the_renewals(
    topic: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.consumer("orders", "g", session_ttl=1.0) as consumer:
        session, again = consumer._steps.membership.session, threading.Event()
        assert session is not None
        surprises = [OSError("no such luck")]
        renew = session.renew

        def surprised() -> None:
            if surprises:
                raise surprises.pop()
            renew()
            again.set()

        monkeypatch.setattr(session, "renew", surprised)
        assert again.wait(PATIENCE)
        assert consumer._steps.membership.session is session


def test_who_can_not_go_on_does_not_keep_its_partitions(
    topic: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody has closed it: it would never hear that it has to give them up."""
    dead = topic.consumer("orders", "g", session_ttl=0.5)
    while len(dead.assignment) < 2:
        dead.poll(1, timeout=0.01)

    def look() -> None:
        raise pxrs.SchemaMismatch("too new")

    monkeypatch.setattr(dead._steps.membership, "look", look)
    with pytest.raises(pxrs.SchemaMismatch):
        while True:
            dead.poll(1, timeout=PATIENCE)
    with topic.consumer("orders", "g", revoke_timeout=None) as other:
        while len(other.assignment) < 2:
            other.poll(1, timeout=0.05)
    dead.close()


def test_nothing_is_promised_once_the_lease_is_over(
    topic: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the buffers is not handed out then, so there is nothing to come back for."""
    with topic.producer() as producer:
        producer.send_many("orders", [("k", "a"), ("k", "b")])
    with topic.consumer("orders", "g") as consumer:
        assert len(consumer.poll(1, timeout=PATIENCE)) == 1
        assert consumer._steps.table.has_messages
        with monkeypatch.context() as over:
            over.setattr(MemberSteps, "alive", False)
            assert consumer._member.wait(0) is False
            assert consumer.poll(timeout=0) == []
        assert len(consumer.poll(timeout=PATIENCE)) == 1
