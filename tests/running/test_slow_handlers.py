"""Handlers that take too long: others go on, and what comes late does not count."""

from __future__ import annotations

import threading

import pytest

import pxrs
from pxrs.types import TopicPartition
from support.child import PATIENCE


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=2)
    with px.producer() as producer:
        for number in range(6):
            producer.send("orders", str(number), partition=number % 2)
    return px


def checkpoints(px: pxrs.Pxrs) -> list[int | None]:
    return [part.checkpoint for part in px.groups.describe("g").partitions]


def test_one_that_never_returns_ends_the_run_and_others_go_on(topic: pxrs.Pxrs) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def hang(message: pxrs.Message) -> None:
        if message.partition == 0:
            may_end.wait(PATIENCE)
            ended.set()

    with pytest.raises(pxrs.HandlerFailed, match="max_handler_time"):
        topic.run(hang, topic="orders", group="g", workers=2, max_handler_time=0.2).join()
    # What was finished is committed; what hangs is not, and is another member's now.
    assert not checkpoints(topic)[0]
    with topic.consumer("orders", "g", auto_commit=False) as other:
        seen: set[bytes] = set()
        while not {b"0", b"2", b"4"} <= seen:
            seen |= {message.value for message in other.poll(timeout=PATIENCE)}
        may_end.set()
        assert ended.wait(PATIENCE)
        assert not checkpoints(topic)[0]
        other.commit()
        assert checkpoints(topic) == [3, 3]


def test_a_handler_within_its_time_is_left_alone(topic: pxrs.Pxrs) -> None:
    seen: list[bytes] = []

    def handle(message: pxrs.Message) -> None:
        seen.append(message.value)
        if len(seen) == 6:
            topic.stop()

    topic.run(handle, topic="orders", group="g", max_handler_time=PATIENCE).join()
    assert checkpoints(topic) == [3, 3]


def test_what_returns_late_is_refused(topic: pxrs.Pxrs) -> None:
    """It does not let go in time; whoever it is meant for takes it by force."""
    with topic.consumer("orders", "g", auto_commit=False, revoke_timeout=0.2) as slow:
        in_hand = slow.poll(timeout=PATIENCE)
        assert len(in_hand) == 6
        with topic.consumer("orders", "g", auto_commit=False, revoke_timeout=0.2) as quick:
            taken: list[pxrs.Message] = []
            while len(taken) < 3:
                taken += quick.poll(timeout=PATIENCE)
            (part,) = {TopicPartition(each.topic, each.partition) for each in taken}
            quick.commit()
            late = [each for each in in_hand if each.partition == part.partition]
            with pytest.raises(pxrs.Fenced):
                slow.commit(late[0])
            assert checkpoints(topic)[part.partition] == 3
            # Of what it still owns, it goes on committing.
            kept = [each for each in in_hand if each.partition != part.partition]
            slow.commit(kept[-1])
            assert checkpoints(topic) == [3, 3]
