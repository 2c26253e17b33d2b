"""Topics come and go under a run: its own, and those that its dead letters go to."""

from __future__ import annotations

import re
import threading

import pytest

import pxrs
from pxrs import Backoff, Message
from support.child import PATIENCE
from support.running import Running, wait_for_checkpoints

ONCE = Backoff(attempts=1)


def refuse(message: Message) -> None:
    raise RuntimeError("can't be handled")


@pytest.mark.parametrize("partitions", [None, 3], ids=["deleted", "made again"])
def test_letters_go_on_when_their_topic_was_emptied(px: pxrs.Pxrs, partitions: int | None) -> None:
    px.topics.create("orders", partitions=1)
    running = Running(px, refuse, topic="orders", retry=ONCE, auto_commit_interval=0.01)
    with px.producer() as producer:
        producer.send("orders", "first").result()
        wait_for_checkpoints(px, 1)
        px.topics.delete("orders.dlq")
        if partitions is not None:
            px.topics.create("orders.dlq", partitions=partitions)
        producer.send("orders", "second").result()
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    assert running.error is None
    letters = px.reader("orders.dlq").follow(start="earliest", timeout=0)
    assert [letter.value for letter in letters] == [b"second"]


def test_a_message_that_fails_while_its_topic_goes_stops_nobody(px: pxrs.Pxrs) -> None:
    px.topics.create("orders.eu", partitions=1)
    px.topics.create("orders.us", partitions=1)
    deleted, handled = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.topic == "orders.us":
            handled.set()
            return
        if not deleted.is_set():
            px.topics.delete("orders.eu")
            deleted.set()
        raise RuntimeError("can't be handled")

    running = Running(px, handle, topic=re.compile(r"orders\.(eu|us)"), retry=ONCE)
    with px.producer() as producer:
        producer.send("orders.eu", "v").result()
        assert deleted.wait(PATIENCE)
        producer.send("orders.us", "v").result()
    assert handled.wait(PATIENCE)
    px.stop()
    running.join()
    assert running.error is None


def test_an_error_that_quotes_its_message_does_not_double_the_letter(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    value = bytes(100_000)

    def handle(message: Message) -> None:
        raise ValueError(f"can't read {message.value!r}")

    running = Running(px, handle, topic="orders", retry=ONCE, auto_commit_interval=0.01)
    with px.producer() as producer:
        producer.send("orders", value)
    wait_for_checkpoints(px, 1)
    px.stop()
    running.join()
    [letter] = px.reader("orders.dlq").read(0, 0)
    assert letter.value == value
    said = [text for _, text in letter.headers if text is not None]
    assert b"ValueError: can't read b'" in b"".join(said)
    assert sum(map(len, said)) < 20_000
