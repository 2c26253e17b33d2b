"""A message that can't be decoded: what precedes it first, then the error, then a way past it."""

from __future__ import annotations

import pytest
from msgspec import DecodeError

import pxrs
from pxrs import Backoff
from pxrs.serde import JSON
from support.child import PATIENCE

BAD = b"{not json"
ONCE = Backoff(attempts=1)


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=2)
    return px


def send(px: pxrs.Pxrs, partition: int, *values: bytes) -> None:
    """In one batch."""
    with px.producer() as producer:
        for value in values:
            producer.send("orders", value, partition=partition)


def checkpoint(px: pxrs.Pxrs, partition: int) -> int | None:
    return px.groups.describe("g").partitions[partition].checkpoint


def poll(consumer: pxrs.Consumer) -> list[tuple[int, object]]:
    return [(each.partition, each.value) for each in consumer.poll(timeout=PATIENCE)]


def test_what_precedes_comes_first_and_a_seek_leads_past_it(topic: pxrs.Pxrs) -> None:
    send(topic, 0, b"1", b"2", BAD, b"4")
    with topic.consumer("orders", "g", serde=JSON(), auto_commit=False) as consumer:
        assert poll(consumer) == [(0, 1), (0, 2)]
        for _ in range(2):
            with pytest.raises(DecodeError) as caught:
                consumer.poll(timeout=PATIENCE)
            assert "offset 2 of 'orders' partition 0" in caught.value.__notes__[0]
        # The error moves nothing: what came before it was handled by the poll that raised.
        consumer.commit()
        assert checkpoint(topic, 0) == 2
        consumer.seek("orders", 0, 3)
        assert poll(consumer) == [(0, 4)]
        consumer.commit()
        assert checkpoint(topic, 0) == 4


def test_it_does_not_keep_other_partitions_waiting(topic: pxrs.Pxrs) -> None:
    send(topic, 0, BAD)
    send(topic, 1, b"1")
    with topic.consumer("orders", "g", serde=JSON()) as consumer:
        came: list[tuple[int, object]] = []
        errors = 0
        for number in range(2, 6):
            # Each round has something new of the sound partition, and nothing hides the error.
            while len(came) < number - 1:
                try:
                    came += poll(consumer)
                except DecodeError:
                    errors += 1
            send(topic, 1, b"%d" % number)
        assert came == [(1, number) for number in range(1, 5)]
        assert errors >= 3


def test_in_a_loop(topic: pxrs.Pxrs) -> None:
    send(topic, 0, b"1", BAD, b"3")
    seen: list[object] = []
    with topic.consumer("orders", "g", serde=JSON()) as consumer:
        with pytest.raises(DecodeError):
            seen.extend(message.value for message in consumer)
        consumer.seek("orders", 0, 2)
        for message in consumer:
            seen.append(message.value)
            break
    assert seen == [1, 3]


def test_a_run_buries_its_bytes(topic: pxrs.Pxrs) -> None:
    send(topic, 0, b"1", BAD, b"3")
    seen: list[object] = []

    def handle(message: pxrs.Message) -> None:
        seen.append(message.value)
        if message.value == 3:
            topic.stop()

    topic.run(handle, topic="orders", group="g", serde=JSON(), retry=ONCE).join()
    assert seen == [1, 3]
    assert checkpoint(topic, 0) == 3
    letters = topic.reader("orders.dlq")
    (letter,) = [each for number in (0, 1) for each in letters.read(number, 0)]
    assert letter.value == BAD
    headers = dict(letter.headers)
    assert headers["pxrs-dlq-offset"] == b"1"
    assert b"offset 1 of 'orders' partition 0" in (headers["pxrs-dlq-traceback"] or b"")


def test_a_run_stops_there(topic: pxrs.Pxrs) -> None:
    send(topic, 0, b"1", BAD, b"3")
    with pytest.raises(pxrs.HandlerFailed, match="offset 1"):
        topic.run(
            lambda message: None,
            topic="orders",
            group="g",
            serde=JSON(),
            retry=ONCE,
            on_failure=pxrs.Stop(),
        ).join()
    assert checkpoint(topic, 0) == 1
