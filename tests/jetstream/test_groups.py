"""A consumer group of real processes: coordination in SQLite, messages in JetStream."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Pxrs
from support.child import PATIENCE, Child
from support.inside import say
from support.load import KEYS, Load

pytestmark = pytest.mark.engine("nats")

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 6


def consume(url: str) -> None:
    """Tell the parent of every message and when it came, by the machine's clock; then commit."""
    px = pxrs.connect(url)
    consumer = px.consumer(TOPIC, GROUP, auto_commit=False, session_ttl=1.0)
    say([])
    while True:
        messages = consumer.poll(max_records=100, timeout=0.2)
        now = time.monotonic_ns()
        say([(now, m.partition, m.offset, m.key.decode(), m.value.decode()) for m in messages])
        try:
            consumer.commit()
        except pxrs.Fenced:
            continue


class World:
    """The store, its load, its members and all they have said."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.px: Pxrs = pxrs.connect(url)
        self.px.topics.create(TOPIC, partitions=PARTITIONS)
        self.members = [Child(consume, url) for _ in range(2)]
        self.heard: list[list[Any]] = []
        self.load = Load(self.px, TOPIC)

    def listen(self, until: Callable[[], bool]) -> None:
        """Hear what the members say until the condition holds."""
        while not until():
            for member in self.members:
                self.heard += member.read()

    def kill(self, member: Child) -> None:
        """Kill a member, and hear what it had to say."""
        self.members.remove(member)
        member.kill()
        for words in member.rest():
            self.heard += words

    def checkpoints(self) -> list[int]:
        parts = self.px.groups.describe(GROUP).partitions
        return sorted(part.checkpoint or 0 for part in parts)

    def ends(self) -> list[int]:
        return sorted(part.end for part in self.px.topics.describe(TOPIC).partitions)

    def busy(self) -> set[int]:
        """The partitions of which something was heard."""
        return {partition for _, partition, *_ in self.heard}


@pytest.fixture
def world(nats_url: str, tmp_path: Path) -> Iterator[World]:
    prefix = f"t-{secrets.token_hex(6)}"
    world = World(f"sqlite:///{tmp_path}/app.db log={nats_url}/{prefix}")
    yield world
    for member in world.members:
        member.kill()
    world.px.topics.delete(TOPIC)
    world.px.close()


def test_a_killed_consumers_partitions_go_on(world: World) -> None:
    world.listen(lambda: len(world.busy()) == PARTITIONS)
    world.load.await_more(500)
    world.kill(world.members[0])
    world.members.append(Child(consume, world.url))
    world.load.await_more(500)
    world.load.stop()
    world.listen(lambda: world.checkpoints() == world.ends())
    for member in list(world.members):
        world.kill(member)
    world.load.check(world.px)
    _assert_heard_in_order(world)


def _assert_heard_in_order(world: World) -> None:
    """Everything was handled; repeated by the next owner perhaps, never passed over."""
    firsts: defaultdict[str, list[int]] = defaultdict(list)
    seen: set[bytes] = set()
    for _, _, _, key, value in sorted(world.heard):
        if value.encode() not in seen:
            seen.add(value.encode())
            firsts[key].append(int(value.rpartition("/")[2]))
    assert seen == set(world.load.acked)
    assert len(firsts) == KEYS
    assert all(numbers == sorted(numbers) for numbers in firsts.values())


def test_a_topics_life_through_the_verbs(nats_url: str, tmp_path: Path) -> None:
    """Create, send, describe, expire, read by time, delete: all of it over two stores."""
    with pxrs.connect(
        f"sqlite:///{tmp_path}/app.db", log=f"{nats_url}/t-{secrets.token_hex(6)}"
    ) as px:
        # Producers, too, drop what a topic need not keep.
        px.topics.create("kept", partitions=2)
        px.topics.create(TOPIC, partitions=2, retention_bytes=1)
        with px.producer() as producer:
            for number in range(5):
                for topic in ("kept", TOPIC):
                    producer.send(topic, str(number), partition=0, timestamp=1000 + number).result()
        kept, reader = px.reader("kept"), px.reader(TOPIC)
        assert kept.offset_at(0, 1003) == 3
        assert [m.value for m in kept.read(0, 2)] == [b"2", b"3", b"4"]
        px.topics.apply_retention(TOPIC)
        info = px.topics.describe(TOPIC)
        assert [(part.start, part.end) for part in info.partitions] == [(4, 5), (0, 0)]
        with pytest.raises(pxrs.OffsetOutOfRange):
            reader.read(0, 3)
        with px.consumer(TOPIC, GROUP) as consumer:
            assert [m.value for m in consumer.poll(timeout=PATIENCE)] == [b"4"]
        px.topics.delete(TOPIC)
        with pytest.raises(pxrs.TopicNotFound):
            reader.read(0, 5)
