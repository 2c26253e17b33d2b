"""What a consumer is told of its partitions, and when; what commits in the background promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import pxrs
from pxrs import TopicPartition
from support.child import PATIENCE

PART = TopicPartition("orders", 0)


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send_many("orders", [("k", str(number)) for number in range(10)])
    return px


class Told:
    """What the callbacks say, in order."""

    def __init__(self) -> None:
        self.words: list[tuple[str, set[TopicPartition]]] = []

    def callbacks(self) -> dict[str, Any]:
        return {
            f"on_{kind}": lambda parts, kind=kind: self.words.append((kind, set(parts)))
            for kind in ("assigned", "revoked", "lost")
        }


def checkpoint(px: pxrs.Pxrs) -> int | None:
    return px.groups.describe("g").partitions[0].checkpoint


def until(px: pxrs.Pxrs, true: Callable[[], bool]) -> None:
    """Look again whenever a claim changes, and now and then."""
    deadline = time.monotonic() + PATIENCE
    with closing(px.stores.coord.watch("claims/g/")) as watch:
        while not true():
            assert time.monotonic() < deadline
            watch.wait(0.05)


def taken_away(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    """Fence the consumer by a reset, and wait until its thread has claimed the partition anew."""
    before = consumer._steps.table.partitions[PART]
    px.groups.reset("g", "orders", to=0, force=True)
    until(px, lambda: consumer._steps.table.partitions.get(PART) not in (before, None))


def test_each_thing_once_and_in_order(topic: pxrs.Pxrs) -> None:
    told = Told()
    with topic.consumer("orders", "g", **told.callbacks()) as consumer:
        consumer.poll(timeout=PATIENCE)
        assert told.words == [("assigned", {PART})]
        taken_away(topic, consumer)
        consumer.poll(timeout=PATIENCE)
        assert told.words[1:] == [("lost", {PART}), ("assigned", {PART})]
    assert told.words[3:] == [("revoked", {PART})]


def test_what_came_and_went_unseen_is_not_told(topic: pxrs.Pxrs) -> None:
    """A callback that hears of a partition may seek in it: then it has to be there."""
    told = Told()
    with topic.consumer("orders", "g", **told.callbacks()) as consumer:
        until(topic, lambda: bool(consumer.assignment))
        taken_away(topic, consumer)
        consumer.poll(timeout=PATIENCE)
        assert told.words == [("assigned", {PART})]


def test_what_is_lost_is_not_revoked_too(topic: pxrs.Pxrs) -> None:
    """It was to be given up, but was taken by force before the caller had heard of it."""
    told = Told()
    older = topic.consumer("orders", "g", revoke_timeout=0.0, strategy="fair", **told.callbacks())
    older.poll(1, timeout=PATIENCE)
    # The topic is given to one that comes with a name before this one's, and takes it at once.
    with topic.consumer("orders", "g", instance="0", revoke_timeout=0.0, strategy="fair") as newer:
        while not newer.assignment:
            newer.poll(1, timeout=0.01)
        with pytest.raises(pxrs.Fenced):
            older.commit()
        older.poll(1, timeout=0)
        assert told.words == [("assigned", {PART}), ("lost", {PART})]
        older.close()


def test_a_callback_that_raises_is_heard_and_the_rest_is_told(topic: pxrs.Pxrs) -> None:
    told = Told()
    callbacks = told.callbacks()

    def on_lost(parts: set[TopicPartition]) -> None:
        raise RuntimeError("could not clean up")

    with topic.consumer("orders", "g", **{**callbacks, "on_lost": on_lost}) as consumer:
        consumer.poll(timeout=PATIENCE)
        taken_away(topic, consumer)
        with pytest.raises(RuntimeError, match="clean up"):
            consumer.poll(timeout=PATIENCE)
        assert told.words == [("assigned", {PART})]
        assert consumer.poll(timeout=PATIENCE)
        assert told.words == [("assigned", {PART})] * 2


def test_a_partition_is_given_away_though_the_callback_raises(topic: pxrs.Pxrs) -> None:
    def on_revoked(parts: set[TopicPartition]) -> None:
        raise RuntimeError("could not flush")

    with topic.consumer(
        "orders", "g", revoke_timeout=None, strategy="fair", on_revoked=on_revoked
    ) as older:
        while not older.assignment:
            older.poll(1, timeout=0.01)
        with topic.consumer("orders", "g", instance="0", strategy="fair") as newer:
            with pytest.raises(RuntimeError, match="flush"):
                while True:
                    older.poll(1, timeout=0.01)
            while not newer.assignment:
                newer.poll(1, timeout=0.01)


def test_leaving_by_a_callback_that_raises(topic: pxrs.Pxrs) -> None:
    def on_revoked(parts: set[TopicPartition]) -> None:
        raise RuntimeError("could not flush")

    consumer = topic.consumer("orders", "g", on_revoked=on_revoked)
    consumer.poll(timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="flush"):
        consumer.close()
    assert topic.stores.coord.list("members/g/") == []
    consumer.close()


@pytest.mark.parametrize("how", ["messages", "batches"])
def test_what_a_loop_failed_on_is_not_committed_when_it_leaves(topic: pxrs.Pxrs, how: str) -> None:
    def on_revoked(parts: set[TopicPartition]) -> None:
        consumer.commit()

    consumer = topic.consumer("orders", "g", auto_commit=False, on_revoked=on_revoked)
    with pytest.raises(RuntimeError, match="at 3"), consumer:
        for found in consumer if how == "messages" else consumer.batches(3):
            message = found if isinstance(found, pxrs.Message) else found[0]
            if message.offset == 3:
                raise RuntimeError("at 3")
    assert checkpoint(topic) == 3


def test_a_displaced_member_is_told_what_it_lost(topic: pxrs.Pxrs) -> None:
    told = Told()
    older = topic.consumer("orders", "g", instance="a", **told.callbacks())
    while not older.assignment or not told.words:
        older.poll(1, timeout=0.01)
    with topic.consumer("orders", "g", instance="a"):
        with pytest.raises(pxrs.Displaced):
            while True:
                older.poll(1, timeout=0.01)
        assert told.words == [("assigned", {PART}), ("lost", {PART})]
        older.close()
        assert len(told.words) == 2


def test_seeking_in_a_callback(topic: pxrs.Pxrs) -> None:
    def on_assigned(parts: dict[TopicPartition, int | None]) -> None:
        for part in parts:
            consumer.seek(part.topic, part.partition, 7)

    consumer = topic.consumer("orders", "g", on_assigned=on_assigned)
    with consumer:
        assert [message.offset for message in consumer.poll(timeout=PATIENCE)] == [7, 8, 9]


class TestCommitAsync:
    def test_before_closing(self, topic: pxrs.Pxrs) -> None:
        for _ in range(5):
            with topic.consumer("orders", "g", auto_commit=False) as consumer:
                consumer.poll(2, timeout=PATIENCE)
                consumer.commit_async()
        assert checkpoint(topic) == 10

    def test_before_a_partition_goes(self, topic: pxrs.Pxrs) -> None:
        def on_revoked(parts: set[TopicPartition]) -> None:
            older.commit_async()

        older = topic.consumer(
            "orders",
            "g",
            auto_commit=False,
            revoke_timeout=None,
            strategy="fair",
            on_revoked=on_revoked,
        )
        messages = older.poll(4, timeout=PATIENCE)
        with topic.consumer("orders", "g", instance="0", strategy="fair") as newer:
            while not newer.assignment:
                messages += older.poll(1, timeout=0.01)
                newer.poll(1, timeout=0.01)
            assert checkpoint(topic) == len(messages)
            older.close()

    def test_while_the_store_is_busy(self, px: pxrs.Pxrs, topic: pxrs.Pxrs) -> None:
        with topic.consumer("orders", "g", auto_commit=False) as consumer:
            consumer.poll(4, timeout=PATIENCE)
            commit = consumer._steps.owned_claims._coord.commit
            failed = threading.Event()

            def busy(*args: Any) -> Any:
                failed.set()
                raise pxrs.StoreBusy("somebody else writes")

            consumer._steps.owned_claims._coord = _Commits(busy)  # type: ignore[assignment]
            consumer.commit_async()
            assert failed.wait(PATIENCE)
            consumer._steps.owned_claims._coord = _Commits(commit)  # type: ignore[assignment]
            until(topic, lambda: checkpoint(topic) == 4)

    def test_a_rollback_does_not_take_it_back(self, topic: pxrs.Pxrs) -> None:
        with topic.consumer("orders", "g", auto_commit=False) as consumer:
            consumer.poll(4, timeout=PATIENCE)
            # The thread beside the caller has not come to it yet.
            with consumer._steps.owned_claims.lock:
                committed = consumer.commit_async()
                assert consumer.poll(4, timeout=PATIENCE)[0].offset == 4
                with pytest.raises(ZeroDivisionError), consumer.transaction():
                    _ = 1 // 0
            committed.result(PATIENCE)
            assert checkpoint(topic) == 4
            assert consumer.poll(1, timeout=PATIENCE)[0].offset == 4


class _Commits:
    def __init__(self, commit: Any) -> None:
        self.commit = commit
        self.limits = pxrs.types.Limits(1000, 1 << 20)


def test_a_commit_of_one_message_is_what_a_rollback_goes_back_to(topic: pxrs.Pxrs) -> None:
    """Though the thread beside the caller has committed what was handled, which is less."""
    with topic.consumer("orders", "g") as consumer:
        messages = consumer.poll(10, timeout=PATIENCE)
        consumer.commit(messages[4])
        consumer._steps.commit_handled()
        assert checkpoint(topic) == 5
        with pytest.raises(RuntimeError), consumer.transaction():
            raise RuntimeError("back")
        assert consumer.poll(timeout=PATIENCE)[0].offset == 5
