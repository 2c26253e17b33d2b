"""A topic of Kafka's, consumed by groups: on librdkafka's mock cluster.

That is a protocol mock, not Kafka. It gives markers of transactions their offsets, but does not
hide what was aborted or is open; it finds no times, and forgets what is older than five megabytes.
"""

from __future__ import annotations

import random
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import (
    ConfigError,
    InvalidRequest,
    MissingExtra,
    SourceChanged,
    StoreUnavailable,
    TopicExists,
)
from pxrs.sources import KafkaTopic
from pxrs.testing.conformance import NewRow
from support.source_lab import KafkaWriter, MockKafka, make_topic


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with closing(MockKafka()) as kafka:
        yield kafka


@pytest.fixture
def topic(kafka: MockKafka) -> str:
    name = f"t-{secrets.token_hex(6)}"
    make_topic(kafka, name)
    return name


def fill(kafka: MockKafka, topic: str, count: int) -> None:
    with closing(kafka.writer(topic)) as writer:
        for stream in range(4):
            rows = [NewRow(f"k{number % 5}-{stream}", str(number)) for number in range(count)]
            writer.append(rows, stream)


def test_more_members_than_partitions(kafka: MockKafka, topic: str, tmp_path: Path) -> None:
    """Four partitions are sixteen here, and those of one key stay in order."""
    fill(kafka, topic, 50)
    url = f"sqlite:///{tmp_path}/store.db"
    with pxrs.connect(url) as px, pxrs.connect(url) as other:
        px.attach("events", KafkaTopic(kafka.bootstrap, topic), partitions=16)
        found: list[pxrs.Message] = []
        with (
            px.consumer("events", group="billing") as one,
            other.consumer("events", group="billing") as two,
        ):
            while len({(message.key, message.value) for message in found}) < 200:
                found += one.poll(timeout=0.5) + two.poll(timeout=0.5)
        places = {(message.partition // 4, message.offset) for message in found}
        assert places == {(stream, offset) for stream in range(4) for offset in range(50)}
        for key in {message.key for message in found}:
            own = [m for m in found if m.key == key]
            assert len({message.partition for message in own}) == 1
            first = [int(value) for value in dict.fromkeys(m.value for m in own)]
            assert first == sorted(first)
        assert px.sources.describe("events").settings == {
            "kind": "kafka_topic",
            "bootstrap": kafka.bootstrap,
            "topic": topic,
            "streams": 4,
        }
    assert not [each for each in threading.enumerate() if each.name == "pxrs-kafka-topic"]


def test_keys_headers_and_tombstones(kafka: MockKafka, topic: str) -> None:
    with closing(kafka.writer(topic)) as writer:
        headers: list[tuple[str, str | bytes | None]] = [("a", b"\xff"), ("b", None)]
        writer.client.produce(
            topic, key=b"k", value=None, partition=2, timestamp=1_700_000_000_123, headers=headers
        )
        writer.client.produce(topic, key=None, value=b"v", partition=2)
        writer.client.flush(10)
    with closing(KafkaTopic(kafka.bootstrap, topic).open("")) as source:
        first, second = source.read(2, 0, 10).rows
        assert first == (0, 1_700_000_000_123, b"k", None, tuple(headers))
        assert (second.key, second.value, second.headers) == (None, b"v", ())


def test_markers_of_transactions_are_gaps(kafka: MockKafka, topic: str) -> None:
    writer = KafkaWriter(kafka.bootstrap, topic, **{"transactional.id": topic})
    writer.client.init_transactions(10)
    for number in range(3):
        writer.client.begin_transaction()
        writer.append([NewRow("k", str(number))])
        writer.client.commit_transaction(10)
    writer.close()
    with closing(KafkaTopic(kafka.bootstrap, topic).open("")) as source:
        found, place = [], 0
        while place < source.bounds(0).end:
            rows, place = source.read(0, place, 10)[:2]
            found += [(row.offset, row.value) for row in rows]
        assert found == [(0, b"0"), (2, b"1"), (4, b"2")]
        # The last marker is passed, too: nobody waits for it.
        assert place == 6


def test_reading_here_and_there_skips_nothing(kafka: MockKafka, topic: str) -> None:
    """What was fetched before a stream was moved must not be taken for what comes next."""
    fill(kafka, topic, 300)
    chance = random.Random(4711)
    with closing(KafkaTopic(kafka.bootstrap, topic).open("")) as source:
        for _ in range(40):
            stream, offset = chance.randrange(4), chance.randrange(300)
            while offset < 300 and chance.random() < 0.8:
                rows, following = source.read(stream, offset, chance.choice([1, 10, 1000]))[:2]
                assert [row.offset for row in rows] == list(range(offset, following))
                assert following > offset
                offset = following


def test_a_topic_that_is_split_otherwise(kafka: MockKafka, topic: str, tmp_path: Path) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        with pytest.raises(ConfigError, match="multiple"):
            px.attach("events", KafkaTopic(kafka.bootstrap, topic), partitions=6)
        assert px.sources.list() == []
        with pytest.raises(SourceChanged, match="had 3 partitions"):
            px.attach("events", KafkaTopic(kafka.bootstrap, topic, streams=3), partitions=12)
        px.attach("events", KafkaTopic(kafka.bootstrap, topic), partitions=8)
        px.attach("events", KafkaTopic(kafka.bootstrap, topic), partitions=8)
        with pytest.raises(ConfigError, match="there is no topic 'another'"):
            px.attach("events", KafkaTopic(kafka.bootstrap, "another"), partitions=8)
        make_topic(kafka, "another")
        with pytest.raises(TopicExists):
            px.attach("events", KafkaTopic(kafka.bootstrap, "another"), partitions=8)


class MadeAnew:
    """Answers as brokers do once the topic was deleted and made again, with fewer messages.

    The mock cluster can't delete topics.
    """

    def __init__(self, asking: Any, end: int) -> None:
        self._asking = asking
        self._end = end

    def get_watermark_offsets(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0, self._end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asking, name)


def test_a_topic_that_was_made_anew_is_told(kafka: MockKafka, topic: str) -> None:
    fill(kafka, topic, 20)
    with pxrs.connect("memory://") as px:
        attached = px.attach("events", KafkaTopic(kafka.bootstrap, topic), partitions=4)
        with px.consumer("events", group="g") as consumer:
            found = 0
            while found < 80:
                found += len(consumer.poll(100, timeout=30))
            source: Any = px._stores.log.virtual(attached.id).source
            source._asking = MadeAnew(source._asking, 5)
            # As the client does, which is told that its place is out of range.
            source._wakeups.ring([None])
            with pytest.raises(SourceChanged, match="read up to offset 20, and ends at 5 now"):
                consumer.poll(1, timeout=30)


def test_what_is_refused(kafka: MockKafka) -> None:
    for arguments in (
        {"bootstrap": ""},
        {"topic": 5},
        {"config": {"group.id": "mine"}},
        {"config": {"isolation.level": "read_uncommitted"}},
    ):
        with pytest.raises(InvalidRequest):
            KafkaTopic(**{"bootstrap": "host:1", "topic": "t", **arguments})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config"):
        KafkaTopic(kafka.bootstrap, "t", config={"no.such.setting": 1}).open("")


def test_no_password_is_kept() -> None:
    source = KafkaTopic("host:9092", "t", config={"sasl.password": "secret"})
    assert "secret" not in str(source.settings())


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra, match=r"pxrs\[kafka\]"):
        KafkaTopic("host:9092", "t").open("")


def test_brokers_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.sources.kafka_topic._ANSWER", 0.3)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        KafkaTopic("127.0.0.1:1", "t").open("")
