"""Topics: made once, found by name, gone with all they held."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

import pxrs
from pxrs import (
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionInfo,
    Pxrs,
    StoreBusy,
    Topic,
    TopicExists,
    TopicNotFound,
)
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Conflict, LogPartition, Write
from support.child import Child
from support.faults import FaultyStores
from support.inside import say, wait_for_parent
from support.reading import read_all, values_by_key

TOPIC = "orders"


def test_made_again_just_so_are_the_same(px: Pxrs) -> None:
    first = px.topics.create(TOPIC, partitions=3, retention=1, retention_bytes=2000)
    assert px.topics.create(TOPIC, partitions=3, retention=1, retention_bytes=2000) == first
    assert px.topics.list() == [first]
    assert first.created_ms > 0


def test_are_listed_by_name(px: Pxrs) -> None:
    names = ["b", "A", "a.b", "a-b", "a_b", "10", "9", "x" * 249]
    made = {name: px.topics.create(name, partitions=1) for name in names}
    assert px.topics.list() == [made[name] for name in sorted(names)]


def test_describe_counts_messages_and_bytes(px: Pxrs) -> None:
    topic = px.topics.create(TOPIC, partitions=2)
    empty = px.topics.describe(TOPIC)
    assert empty.topic == topic
    assert empty.partitions == [PartitionInfo(0, 0, 0, 0), PartitionInfo(1, 0, 0, 0)]
    with px.producer() as producer:
        for _ in range(5):
            producer.send(TOPIC, "v" * 100, partition=1)
    info = px.topics.describe(TOPIC)
    assert info.messages == 5
    assert (info.partitions[1].start, info.partitions[1].end) == (0, 5)
    assert info.size == info.partitions[1].size > 500


def test_made_by_many_at_once_are_one(px: Pxrs) -> None:
    made: list[Topic] = []
    barrier = threading.Barrier(8)

    def make() -> None:
        barrier.wait()
        made.append(px.topics.create(TOPIC, partitions=2))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len({topic.id for topic in made}) == 1


def make_differently(url: str, partitions: int) -> None:
    with pxrs.connect(url) as px:
        say("ready")
        wait_for_parent()
        try:
            px.topics.create(TOPIC, partitions=partitions)
            say("made")
        except TopicExists as error:
            say(str(error))


@pytest.mark.engine("sqlite")
@pytest.mark.long
def test_made_differently_by_processes_at_once_one_wins(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with pxrs.connect(url) as px:
        children = [Child(make_differently, url, count) for count in (1, 2, 3)]
        for child in children:
            child.read()
        for child in children:
            child.tell()
        words = [child.read() for child in children]
        for child in children:
            child.join()
        assert words.count("made") == 1
        winner = px.topics.list()[0].partitions
        assert words.index("made") + 1 == winner
        for word in words:
            assert word == "made" or f"partitions = {winner}, not" in word


class FailingCoord:
    """A coordination store whose nth commit from now fails."""

    def __init__(self, inner: CoordStore, nth: int, error: Exception) -> None:
        self._inner = inner
        self._left = nth
        self._error = error

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._inner.commit(checks, writes)


@pytest.fixture
def logs(stores: FaultyStores) -> set[str]:
    """The logs that there are."""
    made: set[str] = set()
    create, drop = stores.log.create, stores.log.drop

    def note_create(topic_id: str, partitions: int) -> None:
        create(topic_id, partitions)
        made.add(topic_id)

    def note_drop(topic_id: str) -> None:
        drop(topic_id)
        made.discard(topic_id)

    stores.log.create, stores.log.drop = note_create, note_drop  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("error", [StoreBusy("held"), OutcomeUnknown("lost")])
def test_that_cant_be_made_leave_nothing_behind(
    stores: FaultyStores, logs: set[str], error: Exception, nth: int
) -> None:
    """Unless nobody can tell: then the log stays, as the topic may point to it."""
    with Pxrs(stores) as px:
        topics = px.topics
        topics._coord = FailingCoord(stores.coord, nth, error)  # type: ignore[assignment]
        with pytest.raises(type(error)):
            topics.create(TOPIC, partitions=2)
        unknown = nth == 2 and isinstance(error, OutcomeUnknown)
        assert len(logs) == len(stores.coord.list("topics/")) == unknown
        assert topics.list() == []
        # Whatever was left: who tries again has the topic.
        made = topics.create(TOPIC, partitions=2)
        assert topics.list() == [made]
        assert logs == {made.id}


def test_whose_log_cant_be_made_leave_no_record(stores: FaultyStores) -> None:
    create = stores.log.create

    def refuse(topic_id: str, partitions: int) -> None:
        raise pxrs.InvalidRequest("too long a name")

    stores.log.create = refuse  # type: ignore[attr-defined]
    with Pxrs(stores) as px:
        with pytest.raises(pxrs.InvalidRequest):
            px.topics.create(TOPIC, partitions=2)
        assert stores.coord.list("topics/") == []
        stores.log.create = create  # type: ignore[attr-defined]
        px.topics.create(TOPIC, partitions=3)


def test_that_were_begun_otherwise_are_made_and_told(stores: FaultyStores, logs: set[str]) -> None:
    """Who died on its way may have been told nothing: its topic is as it was to be."""
    with Pxrs(stores) as px:
        topics = px.topics
        lost = FailingCoord(stores.coord, 2, OutcomeUnknown("lost"))
        topics._coord = lost  # type: ignore[assignment]
        with pytest.raises(OutcomeUnknown):
            topics.create(TOPIC, partitions=2)
        for find in (px.topics.find, px.topics.describe, px.topics.delete):
            with pytest.raises(TopicNotFound):
                find(TOPIC)
        with pytest.raises(TopicExists, match="partitions = 2, not 3"):
            px.topics.create(TOPIC, partitions=3)
        assert {px.topics.find(TOPIC).id} == logs
        px.topics.delete(TOPIC)
        assert logs == set()


class TestDeleted:
    def test_are_gone(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        reader = px.reader(TOPIC)
        with px.producer() as producer:
            producer.send(TOPIC, "v", partition=0)
        px.topics.delete(TOPIC)
        assert px.topics.list() == []
        for call in (
            lambda: px.topics.describe(TOPIC),
            lambda: px.reader(TOPIC),
            lambda: px.topics.delete(TOPIC),
            lambda: reader.read(0, 0),
            lambda: reader.bounds(0),
            lambda: reader.offset_at(0, 0),
            lambda: reader.follow(start="earliest"),
        ):
            with pytest.raises(TopicNotFound, match=f"'{TOPIC}'"):
                call()

    def test_under_a_follower_end_it(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        messages = px.reader(TOPIC).follow()
        px.topics.delete(TOPIC)
        px.topics.create(TOPIC, partitions=2)
        with pytest.raises(TopicNotFound, match=f"'{TOPIC}'"):
            next(messages)

    def test_under_a_producer_refuse(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        with px.producer(linger=600) as producer:
            producer.send(TOPIC, "v", key="k").result()
            px.topics.delete(TOPIC)
            with pytest.raises(TopicNotFound, match=f"'{TOPIC}'"):
                producer.send(TOPIC, "v", key="k").result()
            with pytest.raises(TopicNotFound, match=f"'{TOPIC}'"):
                producer.send(TOPIC, "v", key="k")
            with pytest.raises(TopicNotFound, match=f"'{TOPIC}'"):
                producer.send_many(TOPIC, [("k", "v")])

    def test_and_made_again_start_anew(self, px: Pxrs) -> None:
        """One batch may fail that was on its way to the old one; then all is well."""
        px.topics.create(TOPIC, partitions=2)
        with px.producer(linger=600) as producer:
            for number in range(3):
                producer.send(TOPIC, str(number), key="k").result()
            px.topics.delete(TOPIC)
            px.topics.create(TOPIC, partitions=2)
            with pytest.raises(TopicNotFound):
                producer.send(TOPIC, "3", key="k").result()
            assert producer.send(TOPIC, "4", key="k").result().offset == 0
            assert producer.send_many(TOPIC, [("k", "5")]).result()[0].offset == 1
        assert values_by_key(px, TOPIC) == {b"k": [4, 5]}

    def test_and_made_again_otherwise_say_so_once(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        with px.producer(linger=600) as producer:
            producer.send(TOPIC, "0", partition=0).result()
            for partitions in (5, 1, 3):
                px.topics.delete(TOPIC)
                px.topics.create(TOPIC, partitions=partitions)
                with pytest.raises(TopicNotFound):
                    producer.send(TOPIC, "lost", partition=0).result()
                with pytest.raises(TopicExists, match=f"{partitions} partitions.*send again"):
                    producer.send(TOPIC, "not taken", partition=0)
                last = partitions - 1
                assert producer.send(TOPIC, "1", partition=last).result() == (TOPIC, last, 0)
            producer.flush()
            producer.send(TOPIC, "2", key="k").result()
            assert len(producer._outbox._buffers) == 1
        assert sorted(message.value for message in read_all(px, TOPIC)) == [b"1", b"2"]


class TestRetention:
    def test_by_size_keeps_the_newest(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1, retention_bytes=3000)
        with px.producer(linger=600) as producer:
            for _ in range(10):
                producer.send(TOPIC, bytes(1000)).result()
        px.topics.apply_retention(TOPIC)
        start, end = px.reader(TOPIC).bounds(0)
        assert end == 10
        assert 7 <= start <= 8

    def test_by_age(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1, retention=60)
        with px.producer(linger=600) as producer:
            for timestamp in (5, 6, None, 7, None):
                producer.send(TOPIC, "v", timestamp=timestamp).result()
        px.topics.apply_retention(TOPIC)
        assert px.reader(TOPIC).bounds(0) == (2, 5)

    def test_for_ever_long_drops_nothing(self, px: Pxrs) -> None:
        px.topics.create(
            TOPIC, partitions=1, retention=timedelta(days=365_000), retention_bytes=2**62
        )
        with px.producer() as producer:
            producer.send(TOPIC, "v", timestamp=0).result()
            producer.send(TOPIC, "v", timestamp=0).result()
        px.topics.apply_retention(TOPIC)
        assert px.reader(TOPIC).bounds(0) == (0, 2)

    def test_without_any_drops_nothing(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer() as producer:
            producer.send(TOPIC, "v", timestamp=0).result()
        px.topics.apply_retention(TOPIC)
        assert px.reader(TOPIC).bounds(0) == (0, 1)

    def test_is_applied_by_producers_as_they_go(self, faulty: Pxrs, stores: FaultyStores) -> None:
        done = threading.Event()
        stores.log.expiring = done.set
        faulty.topics.create(TOPIC, partitions=1, retention=0.001)
        with faulty.producer(linger=0.001) as producer:
            producer.send(TOPIC, "v", timestamp=0).result()
            assert done.wait(30)

    def test_under_a_reader_that_walks(self, px: Pxrs) -> None:
        topic = px.topics.create(TOPIC, partitions=1)
        with px.producer(linger=600) as producer:
            for _ in range(3):
                producer.send_many(TOPIC, [(None, "v")] * 10).result()
        reader = px.reader(TOPIC)
        assert reader.read(0, 5, max_records=2)[-1].offset == 6
        px.stores.log.trim(LogPartition(topic.id, 0), 20)
        with pytest.raises(OffsetOutOfRange) as caught:
            px.reader(TOPIC).read(0, 5)
        assert (caught.value.start, caught.value.end) == (20, 30)
        # What it holds of the batch it gives, and says then that the next one is gone.
        assert [m.offset for m in reader.read(0, 7, max_records=100)] == [7, 8, 9]
        with pytest.raises(OffsetOutOfRange):
            reader.read(0, 10)
