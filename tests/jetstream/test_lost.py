"""A server lost what it had acknowledged: its consumers are told, and skip nothing in silence."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import pxrs
from engines import Engine
from pxrs import Consumer, MessagesLost, Pxrs, TopicPartition
from pxrs.config import OnTrimmed
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import LogPartition
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.jetstream import opened

pytestmark = pytest.mark.engine("nats")

TOPIC = "orders"
GROUP = "billing"
HERE = TopicPartition(TOPIC, 0)
# How much is in the older copy of the store, and how much there was before the loss.
KEPT, READ = 40, 100


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine("nats")


@pytest.fixture
def px(engine: Engine) -> Iterator[Pxrs]:
    with pxrs.connect("memory://", log=engine.url) as px:
        px.topics.create(TOPIC, partitions=1)
        yield px


def send(px: Pxrs, start: int, end: int, *, at_once: int = 10) -> None:
    """Send numbers, so many in a batch."""
    with px.producer() as producer:
        for first in range(start, end, at_once):
            values = [(None, str(n)) for n in range(first, min(first + at_once, end))]
            producer.send_many(TOPIC, values)
            producer.flush()


@contextmanager
def set_back(engine: Engine, px: Pxrs) -> Iterator[None]:
    """What is stored inside the block is lost when it ends."""
    send(px, 0, KEPT)
    with falls_back(engine):
        yield


@contextmanager
def falls_back(engine: Engine) -> Iterator[None]:
    data, copy = engine.folder / "data0", engine.folder / "copy"
    engine.stop()
    shutil.copytree(data, copy)
    engine.start()
    yield
    engine.kill()
    shutil.rmtree(data)
    shutil.move(copy, data)
    engine.start()


def read(consumer: Consumer, up_to: int) -> list[int]:
    """The numbers that come until this one has."""
    found: list[int] = []
    while not found or found[-1] < up_to:
        messages = consumer.poll(timeout=PATIENCE)
        assert messages, f"nothing comes after {found}"
        found += [int(message.value) for message in messages]
    return found


def checkpoint(px: Pxrs) -> int | None:
    (part,) = px.groups.describe(GROUP).partitions
    return part.checkpoint


def read_and_lose(engine: Engine, px: Pxrs, consumer: Consumer) -> None:
    """The group has handled and committed what is lost then."""
    with set_back(engine, px):
        send(px, KEPT, READ)
        assert read(consumer, READ - 1) == list(range(READ))
        consumer.commit()


def test_a_running_group_is_told_and_goes_on_where_it_is_told_to(
    engine: Engine, px: Pxrs, caplog: pytest.LogCaptureFixture
) -> None:
    with px.consumer(TOPIC, GROUP, auto_commit=False, on_trimmed="earliest") as consumer:
        read_and_lose(engine, px, consumer)
        for _ in range(2):
            with pytest.raises(MessagesLost, match="reset") as told:
                consumer.poll(timeout=PATIENCE)
        error = told.value
        # Once, however often it is raised.
        lines = [each for each in caplog.records if each.name == "pxrs.groups"]
        assert [each.getMessage() for each in lines] == [f"group {GROUP}: {error}"]
        assert lines[0].levelno == logging.ERROR
        assert (error.topic, error.partition) == HERE
        assert (error.offset, error.start, error.end) == (READ, 0, KEPT)
        health = consumer.health()
        assert not health.ok
        assert health.detail == str(error)
        assert checkpoint(px) == READ
        send(px, 1000, 1010)
        with pytest.raises(MessagesLost):
            consumer.poll(timeout=PATIENCE)
        consumer.seek(TOPIC, 0, KEPT)
        assert read(consumer, 1009) == list(range(1000, 1010))
        consumer.commit()
        assert checkpoint(px) == KEPT + 10
        assert consumer.health().ok


@pytest.mark.parametrize("at_once", [10, 7])
def test_what_stands_in_place_of_lost_messages_is_not_passed_over(
    engine: Engine, px: Pxrs, at_once: int
) -> None:
    """Nobody has looked before the log was longer again than what was read of it."""
    with px.consumer(TOPIC, GROUP, auto_commit=False) as consumer:
        read_and_lose(engine, px, consumer)
        send(px, 1000, 1160, at_once=at_once)
        with pytest.raises(MessagesLost) as told:
            consumer.poll(timeout=PATIENCE)
        assert (told.value.offset, told.value.end) == (READ, KEPT + 160)
        consumer.seek(TOPIC, 0, READ)
        assert read(consumer, 1159) == list(range(1060, 1160))
        consumer.seek(TOPIC, 0, KEPT)
        assert read(consumer, 1159) == list(range(1000, 1160))


def test_a_checkpoint_beyond_the_end_is_no_reason_to_go_back(engine: Engine, px: Pxrs) -> None:
    with px.consumer(TOPIC, GROUP, auto_commit=False) as consumer:
        read_and_lose(engine, px, consumer)
    policies: list[OnTrimmed] = ["error", "earliest", "latest"]
    for policy in policies:
        with (
            px.consumer(TOPIC, GROUP, auto_commit=False, on_trimmed=policy) as consumer,
            pytest.raises(MessagesLost),
        ):
            consumer.poll(timeout=PATIENCE)
        assert checkpoint(px) == READ
    px.groups.reset(GROUP, TOPIC, to="earliest")
    with px.consumer(TOPIC, GROUP, auto_commit=False) as consumer:
        assert read(consumer, KEPT - 1) == list(range(KEPT))


@pytest.mark.parametrize("is_seen_by", ["an append", "a fetch and an append elsewhere"])
def test_an_append_behind_an_end_that_is_another_one(engine: Engine, is_seen_by: str) -> None:
    """The server has lost the end that a producer knows; by now others stand where it was."""
    here, other = LogPartition("t-1", 0), LogPartition("t-1", 1)
    with closing(opened(engine.url)) as idle:
        idle.create("t-1", 2)
        append(idle, here, batch(b"a"))
        append(idle, other, batch(b"a"))
        with falls_back(engine):
            assert append(idle, here, batch(b"lost"), batch(b"lost")) == [1, 2]
            known = idle._run(idle._topics.find("t-1")).parts[0].tail
        with closing(opened(engine.url)) as busy:
            assert append(busy, here, batch(b"b", b"c"), batch(b"d", b"e")) == [1, 3]
            now = busy._run(busy._topics.find("t-1")).parts[0].tail
            assert known is not None
            assert now is not None
            assert known.seq == now.seq
            if is_seen_by != "an append":
                append(busy, other, batch(b"b"))
                assert [each.base for each in idle.fetch(other, 1, 1).batches] == [1]
        assert append(idle, here, batch(b"f")) == [5]
        assert [*values_in(idle, here).values()] == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_a_follower_is_told(engine: Engine, px: Pxrs) -> None:
    with set_back(engine, px):
        send(px, KEPT, READ)
        following = px.reader(TOPIC).follow(start="earliest", timeout=PATIENCE)
        assert [int(next(following).value) for _ in range(READ)] == list(range(READ))
    with pytest.raises(MessagesLost, match="offset 100"):
        next(following)


def test_a_follower_passes_over_nothing_that_stands_in_place_of_lost_messages(
    engine: Engine, px: Pxrs
) -> None:
    with set_back(engine, px):
        send(px, KEPT, READ)
        following = px.reader(TOPIC).follow(start="earliest", timeout=PATIENCE)
        assert [int(next(following).value) for _ in range(READ)] == list(range(READ))
    send(px, 1000, 1160)
    with pytest.raises(MessagesLost) as told:
        next(following)
    assert (told.value.offset, told.value.end) == (READ, KEPT + 160)


def test_an_engine_that_came_back_empty_is_told_of(engine: Engine, px: Pxrs) -> None:
    with px.consumer(TOPIC, GROUP, auto_commit=False) as consumer:
        send(px, 0, KEPT)
        read(consumer, KEPT - 1)
        consumer.commit()
        engine.kill()
        shutil.rmtree(engine.folder / "data0")
        engine.start()
        with pytest.raises(MessagesLost, match="delete"):
            consumer.poll(timeout=PATIENCE)
        assert not consumer.health().ok
        with pytest.raises(pxrs.TopicNotFound), px.producer() as producer:
            producer.send(TOPIC, b"nowhere").result()
        px.topics.delete(TOPIC)
        px.topics.create(TOPIC, partitions=1)
        send(px, 1000, 1010)
        assert read(consumer, 1009) == list(range(1000, 1010))
        assert consumer.health().ok
