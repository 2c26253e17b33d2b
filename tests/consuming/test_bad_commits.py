"""Commits that must not count, and topics that are deleted under a group."""

from __future__ import annotations

import pytest

import pxrs
from pxrs.core.records import Claim, decode
from pxrs.types import Message
from support.child import PATIENCE


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=1)
    send(px, 5)
    return px


def send(px: pxrs.Pxrs, count: int) -> None:
    with px.producer() as producer:
        for number in range(count):
            producer.send("orders", str(number))


def checkpoint(px: pxrs.Pxrs) -> int | None:
    return px.groups.describe("g").partitions[0].checkpoint


def at(message: Message, offset: int) -> Message:
    return Message(message.fence, offset, 0, None, b"", ())


def test_behind_the_checkpoint_changes_nothing(topic: pxrs.Pxrs) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        messages = consumer.poll(timeout=PATIENCE)
        consumer.commit(messages[3])
        assert checkpoint(topic) == 4
        consumer.commit(messages[1])
        assert checkpoint(topic) == 4


@pytest.mark.parametrize("offset", [5, 1000, 2**62])
def test_past_what_was_handed_out_is_refused(topic: pxrs.Pxrs, offset: int) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        messages = consumer.poll(timeout=PATIENCE)
        with pytest.raises(pxrs.InvalidRequest, match="not handed out"):
            consumer.commit(at(messages[0], offset))
        assert checkpoint(topic) is None
        consumer.commit(messages[-1])
        assert checkpoint(topic) == 5


def test_what_was_in_hand_before_a_seek_can_not_undo_it(topic: pxrs.Pxrs) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        messages = consumer.poll(timeout=PATIENCE)
        consumer.seek("orders", 0, 1)
        with pytest.raises(pxrs.InvalidRequest, match="not handed out"):
            consumer.commit(messages[4])
        assert checkpoint(topic) == 1


def test_partitions_that_are_not_owned_are_refused(topic: pxrs.Pxrs) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        (first, *_) = consumer.poll(timeout=PATIENCE)
        for fence in (
            pxrs.Fence("orders", 7, first.fence.epoch),
            pxrs.Fence("others", 0, first.fence.epoch),
            pxrs.Fence("orders", 0, first.fence.epoch - 1),
            pxrs.Fence("orders", 0, first.fence.epoch + 1),
        ):
            with pytest.raises(pxrs.Fenced):
                consumer.commit(Message(fence, 0, 0, None, b"", ()))
        with pytest.raises(pxrs.PartitionNotFound, match=r"must be 0 to 0 .*, got 7"):
            consumer.seek("orders", 7, 0)
        with pytest.raises(pxrs.Fenced, match="not owned by this consumer"):
            consumer.seek("others", 0, 0)
        assert checkpoint(topic) is None


def test_seeking_where_nothing_is_owned_is_refused(topic: pxrs.Pxrs) -> None:
    """Most often before the first poll: to do nothing would be to start somewhere else."""
    part = pxrs.TopicPartition("orders", 1)
    with topic.consumer("orders", "g") as owner:
        owner.poll(timeout=PATIENCE)
        with topic.consumer("orders", "g") as other:
            with pytest.raises(pxrs.Fenced, match="poll first, or seek in on_assigned"):
                other.seek("orders", 0, 1)
            with pytest.raises(pxrs.Fenced, match=r"owns no partition; .* seek in on_assigned"):
                other.seek_to_time(0)
            with pytest.raises(pxrs.PartitionNotFound, match="got 1"):
                other.seek_to_time(0, {part})


def test_a_topic_made_again_does_not_inherit_the_checkpoint(topic: pxrs.Pxrs) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        before = consumer.poll(timeout=PATIENCE)
        consumer.commit()
        assert checkpoint(topic) == 5
        topic.topics.delete("orders")
        topic.topics.create("orders", partitions=1)
        send(topic, 2)
        with pytest.raises(pxrs.PxrsError):
            # Of the topic that is gone: another one has its name now.
            while True:
                consumer.commit(before[4])
        send(topic, 5)
        found: list[int] = []
        while len(found) < 7:
            found += [message.offset for message in consumer.poll(timeout=PATIENCE)]
        assert found == list(range(7))
        with pytest.raises(pxrs.Fenced):
            consumer.commit(before[4])
        assert checkpoint(topic) is None
        consumer.commit()
        assert checkpoint(topic) == 7
    claims = [decode(record, Claim) for record in topic.stores.coord.list("claims/g/")]
    assert sorted(claim.checkpoint or 0 for claim in claims) == [5, 7]


@pytest.mark.parametrize("reset", [False, True])
def test_the_fence_of_a_topic_made_again_is_above_the_old_one(
    topic: pxrs.Pxrs, *, reset: bool
) -> None:
    """What a handler wrote elsewhere under an old fence must not refuse the new owners."""
    fences: list[pxrs.Fence] = []
    for _ in range(3):
        with topic.consumer("orders", "g") as consumer:
            fences.append(consumer.poll(timeout=PATIENCE)[0].fence)
    for _ in range(2):
        topic.topics.delete("orders")
        topic.topics.create("orders", partitions=1)
        send(topic, 1)
        if reset:
            topic.groups.reset("g", "orders", to=0)
        with topic.consumer("orders", "g") as consumer:
            fences.append(consumer.poll(timeout=PATIENCE)[0].fence)
    assert {(fence.topic, fence.partition) for fence in fences} == {("orders", 0)}
    epochs = [fence.epoch for fence in fences]
    assert epochs == sorted(set(epochs))


def test_a_topic_deleted_under_a_group_is_let_go(topic: pxrs.Pxrs) -> None:
    told: list[set[pxrs.TopicPartition]] = []
    with topic.consumer("orders", "g", on_lost=told.append, on_revoked=told.append) as consumer:
        consumer.poll(timeout=PATIENCE)
        topic.topics.delete("orders")
        while consumer.assignment or not told:
            consumer.poll(timeout=0.05)
        assert told == [{pxrs.TopicPartition("orders", 0)}]
        assert topic.groups.describe("g").partitions == ()
        # And back again, from the beginning.
        topic.topics.create("orders", partitions=1)
        send(topic, 1)
        (message,) = consumer.poll(timeout=PATIENCE)
        assert message.offset == 0


def test_the_last_hundred_resets_are_kept(topic: pxrs.Pxrs) -> None:
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        consumer.poll(timeout=PATIENCE)
        for number in range(103):
            consumer.seek("orders", 0, number % 5)
    topic.groups.reset("g", "orders", to=2)
    resets = topic.groups.explain("g", limit=1000).resets
    assert len(resets) == 100
    assert resets[-1].changes[0].after == 2
    assert len(topic.stores.coord.list("resets/g/")) == 100
