"""Whoever stops in the middle of what was handed out gets the rest again, and nothing is lost."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.types import TopicPartition

PATIENCE = 30.0


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.engine("memory")),
        pytest.param("sqlite", marks=pytest.mark.engine("sqlite")),
    ]
)
def consumer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pxrs.Consumer]:
    """Two partitions with three messages each."""
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/stops.db"
    with pxrs.connect(url) as px:
        px.topics.create("t", 2)
        with px.producer() as producer:
            for value in range(6):
                producer.send("t", b"%d" % value, partition=value % 2)
        with px.consumer("t", "g", debounce=0.0, auto_commit_interval=PATIENCE) as consumer:
            yield consumer


def rest(consumer: pxrs.Consumer, number: int) -> set[bytes]:
    seen: set[bytes] = set()
    while len(seen) < number:
        found = consumer.poll(timeout=PATIENCE)
        assert found, f"only {seen} came"
        seen |= {message.value for message in found}
    assert consumer.poll(timeout=0.01) == []
    return seen


def break_a_loop(consumer: pxrs.Consumer) -> None:
    for _ in consumer:
        break


def break_batches(consumer: pxrs.Consumer) -> None:
    for _ in consumer.batches():
        break


def fail_in_a_loop(consumer: pxrs.Consumer) -> None:
    with pytest.raises(KeyError):
        for message in consumer:
            raise KeyError(message.value)


@pytest.mark.parametrize("stop", [break_a_loop, break_batches, fail_in_a_loop])
def test_what_was_not_handled_comes_again(
    consumer: pxrs.Consumer, stop: Callable[[pxrs.Consumer], None]
) -> None:
    stop(consumer)
    assert rest(consumer, 6) == {b"0", b"1", b"2", b"3", b"4", b"5"}


def test_polling_inside_a_loop_does_not_skip_what_the_loop_has_not_shown(
    consumer: pxrs.Consumer,
) -> None:
    messages = iter(consumer)
    first = next(messages)
    seen = rest(consumer, 5)
    assert seen == {b"0", b"1", b"2", b"3", b"4", b"5"} - {first.value}


def test_what_was_in_hand_before_a_seek_counts_no_more(consumer: pxrs.Consumer) -> None:
    rest(consumer, 6)
    consumer.seek("t", 0, 0)
    assert [message.value for message in consumer.poll(timeout=PATIENCE)] == [b"0", b"2", b"4"]
    consumer.seek("t", 0, 1)
    assert [message.value for message in consumer.poll(timeout=PATIENCE)] == [b"2", b"4"]
    consumer.seek("t", 0, 2)
    consumer.commit()
    assert [message.value for message in consumer.poll(timeout=PATIENCE)] == [b"4"]


def test_a_loop_goes_on_where_it_was_sent(consumer: pxrs.Consumer) -> None:
    consumer.pause(TopicPartition("t", 1))
    seen: list[bytes] = []
    for message in consumer:
        seen.append(message.value)
        if len(seen) == 2:
            consumer.seek("t", 0, 0)
        if len(seen) == 5:
            break
    assert seen == [b"0", b"2", b"0", b"2", b"4"]


def test_a_poll_that_waits_can_be_woken(consumer: pxrs.Consumer) -> None:
    rest(consumer, 6)
    found: list[list[pxrs.Message]] = []
    polling = threading.Thread(target=lambda: found.append(consumer.poll()))
    polling.start()
    consumer.wake()
    polling.join(PATIENCE)
    assert (found, polling.is_alive()) == ([[]], False)


def test_being_woken_early_ends_the_next_poll(consumer: pxrs.Consumer) -> None:
    rest(consumer, 6)
    consumer.wake()
    assert consumer.poll() == []


@pytest.mark.engine("memory")
def test_closing_tells_on_revoked_which_can_still_commit() -> None:
    told: list[set[TopicPartition]] = []

    def revoked(parts: set[TopicPartition]) -> None:
        told.append(parts)
        leaving.commit()
        raise KeyError("and fails")

    with pxrs.connect("memory://") as px:
        px.topics.create("t", 1)
        with px.producer() as producer:
            producer.send("t", "a").result()
        leaving = px.consumer("t", "g", auto_commit=False, on_revoked=revoked)
        assert len(leaving.poll(timeout=PATIENCE)) == 1
        with pytest.raises(KeyError, match="and fails"):
            leaving.close()
        leaving.close()
        info = px.groups.describe("g")
    assert told == [{TopicPartition("t", 0)}]
    # It has left all the same.
    assert (info.members, info.lag) == ((), 0)


class SeekingSerde:
    """Sends its consumer elsewhere while it decodes, as another thread could."""

    consumer: pxrs.Consumer | None = None

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        consumer, self.consumer = self.consumer, None
        if consumer is not None:
            consumer.seek("orders", 0, 0)
        return data


@pytest.mark.engine("memory")
def test_what_was_fetched_for_another_place_is_void() -> None:
    serde = SeekingSerde()
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", 1)
        with px.producer(batch_bytes=1) as producer:
            producer.send_many("orders", [("k", str(number)) for number in range(3)])
        with px.consumer("orders", "g", serde=serde, prefetch_bytes=1) as consumer:
            assert [message.offset for message in consumer.poll(timeout=PATIENCE)] == [0]
            serde.consumer = consumer
            assert [message.offset for message in consumer.poll(timeout=PATIENCE)] == [0]


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("memory://", marks=pytest.mark.engine("memory")),
        pytest.param("sqlite:///{}/dropped.db", marks=pytest.mark.engine("sqlite")),
    ],
)
def test_a_consumer_that_is_dropped_leaves_its_partitions_to_others(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def first_of(px: pxrs.Pxrs) -> bytes:
        for message in px.consumer("t", "g", debounce=0.0):
            return bytes(message.value)
        raise AssertionError("unreachable: a consumer has no end")

    with pxrs.connect(url.format(tmp_path)) as px:
        px.topics.create("t", 1)
        with px.producer() as producer:
            producer.send_many("t", [("k", "a"), ("k", "b")])
        assert first_of(px) == b"a"
        gc.collect()
        with px.consumer("t", "g", debounce=0.0) as other:
            # What was shown was not handled.
            assert [message.value for message in other.poll(timeout=PATIENCE)] == [b"a", b"b"]
    assert [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
