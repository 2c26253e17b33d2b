"""Bad input: a typed error that says what to do, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import (
    ConfigError,
    InvalidRequest,
    MessageTooLarge,
    OffsetOutOfRange,
    PartitionNotFound,
    Producer,
    Pxrs,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from support.reading import read_all

TOPIC = "orders"

# Values are handed over untyped, as a caller without a type checker would.
Call = Callable[[Any], object]


@pytest.fixture(params=[pytest.param("memory://", marks=pytest.mark.engine("memory"))])
def url(request: pytest.FixtureRequest) -> str:
    """Bad input is refused before a store sees it: one engine shows it."""
    return str(request.param)


@pytest.fixture
def topic(px: Pxrs) -> Pxrs:
    px.topics.create(TOPIC, partitions=3)
    return px


def refused(kind: type[PxrsError], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=match) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert not caught.value.retryable


class TestTopics:
    @pytest.mark.parametrize("name", ["", "x" * 250, "x" * 300])
    def test_names_too_short_or_too_long(self, px: Pxrs, name: str) -> None:
        refused(InvalidRequest, f"1 to 249 characters, got {len(name)}", lambda: create(px, name))
        assert px.topics.list() == []

    @pytest.mark.parametrize("name", [".", "..", "a b", "a/b", "ä", "a\n", "a\0", "a,b", "%"])
    def test_names_with_other_characters(self, px: Pxrs, name: str) -> None:
        refused(InvalidRequest, "letters, digits", lambda: create(px, name))
        assert px.topics.list() == []

    @pytest.mark.parametrize("name", [None, 5, b"orders", ["orders"], {}])
    def test_names_that_are_not_text(self, px: Pxrs, name: Any) -> None:
        px.topics.create("a", partitions=1)
        with px.producer() as producer:
            producer.send("a", "v")
            for call in (
                lambda: create(px, name),
                lambda: producer.send(name, "v"),
                lambda: producer.send_many(name, [("k", "v")]),
                lambda: px.reader(name),
                lambda: px.topics.describe(name),
                lambda: px.topics.delete(name),
                lambda: px.topics.apply_retention(name),
            ):
                refused(InvalidRequest, "topic name", call)

    @pytest.mark.parametrize("count", [0, -1, 100_001, True, 1.0, "3", None])
    def test_partitions(self, px: Pxrs, count: Any) -> None:
        refused(InvalidRequest, "1 to 100000", lambda: px.topics.create(TOPIC, partitions=count))
        assert px.topics.list() == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("retention", value) for value in (0, -1, True, "1", 1e18, float("nan"))),
            *(("retention_bytes", value) for value in (0, -1, True, 1.5, "1", 2**63)),
        ],
    )
    def test_retention(self, px: Pxrs, name: str, value: Any) -> None:
        settings = {name: value}
        refused(InvalidRequest, name, lambda: px.topics.create(TOPIC, partitions=1, **settings))
        assert px.topics.list() == []

    @pytest.mark.parametrize("value", ["", "crc32", None, 5, []])
    def test_partitioner(self, px: Pxrs, value: Any) -> None:
        wanted = {"partitions": 1, "partitioner": value}
        refused(InvalidRequest, "xxhash, murmur2, jump", lambda: px.topics.create(TOPIC, **wanted))
        assert px.topics.list() == []

    def test_that_exist_otherwise(self, topic: Pxrs) -> None:
        before = topic.topics.list()
        refused(
            TopicExists, "partitions = 3, not 4", lambda: topic.topics.create(TOPIC, partitions=4)
        )
        refused(
            TopicExists,
            "retention = None, not 0.005",
            lambda: topic.topics.create(TOPIC, partitions=3, retention=0.005),
        )
        assert topic.topics.list() == before
        assert topic.topics.create(TOPIC, partitions=3) == before[0]

    @pytest.mark.parametrize(
        "call",
        [
            lambda px: px.reader("nope"),
            lambda px: px.topics.describe("nope"),
            lambda px: px.topics.delete("nope"),
            lambda px: px.topics.apply_retention("nope"),
            lambda px: px.producer().send("nope", "v"),
            lambda px: px.producer().send_many("nope", [("k", "v")]),
        ],
    )
    def test_that_do_not_exist(self, px: Pxrs, call: Call) -> None:
        refused(TopicNotFound, r"topics.create\('nope', partitions=", lambda: call(px))
        assert px.topics.list() == []


def create(px: Pxrs, name: Any) -> object:
    return px.topics.create(name, partitions=1)


class TestSending:
    @pytest.mark.parametrize(
        ("kind", "match", "call"),
        [
            (PartitionNotFound, "0 to 2", lambda p: p.send(TOPIC, "v", partition=3)),
            (PartitionNotFound, "0 to 2", lambda p: p.send(TOPIC, "v", partition=-1)),
            (PartitionNotFound, "True", lambda p: p.send(TOPIC, "v", partition=True)),
            (PartitionNotFound, r"1\.0", lambda p: p.send(TOPIC, "v", partition=1.0)),
            (PartitionNotFound, "got '1'", lambda p: p.send(TOPIC, "v", partition="1")),
            (InvalidRequest, "serde", lambda p: p.send(TOPIC, 5)),
            (InvalidRequest, "serde", lambda p: p.send(TOPIC, {"a": 1})),
            (InvalidRequest, "serde", lambda p: p.send(TOPIC, "v", key=5)),
            (InvalidRequest, "serde", lambda p: p.send(TOPIC, "v", key=1.5)),
            (InvalidRequest, "not valid text", lambda p: p.send(TOPIC, "v", key="\ud800")),
            (InvalidRequest, "not valid text", lambda p: p.send(TOPIC, "\ud800")),
            (InvalidRequest, "not valid text", lambda p: p.send_many(TOPIC, [("\ud800", "v")])),
            (InvalidRequest, "milliseconds", lambda p: p.send(TOPIC, "v", timestamp=-1)),
            (InvalidRequest, "milliseconds", lambda p: p.send(TOPIC, "v", timestamp=1.5)),
            (InvalidRequest, "milliseconds", lambda p: p.send(TOPIC, "v", timestamp=True)),
            (InvalidRequest, "milliseconds", lambda p: p.send(TOPIC, "v", timestamp="now")),
            (InvalidRequest, "milliseconds", lambda p: p.send(TOPIC, "v", timestamp=2**63)),
            (InvalidRequest, "list of pairs", lambda p: p.send(TOPIC, "v", headers={"ab": b"x"})),
            (InvalidRequest, "list of pairs", lambda p: p.send(TOPIC, "v", headers="ab")),
            (InvalidRequest, "list of pairs", lambda p: p.send(TOPIC, "v", headers=iter([1]))),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=["ab"])),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=[("a",)])),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=[("a", "text")])),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=[("a", 5)])),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=[(b"a", b"x")])),
            (InvalidRequest, "header", lambda p: p.send(TOPIC, "v", headers=[("\ud800", b"x")])),
            (MessageTooLarge, "max_message_bytes", lambda p: p.send(TOPIC, bytes(1001))),
            (MessageTooLarge, "1001 bytes", lambda p: p.send(TOPIC, bytes(1000), key="k")),
            (MessageTooLarge, "limit is 1000", lambda p: p.send(TOPIC, None, key=bytes(1001))),
            (MessageTooLarge, "1000", lambda p: p.send(TOPIC, "v", headers=[("a" * 1000, None)])),
            (InvalidRequest, "items", lambda p: p.send_many(TOPIC, {"ab": "cd"})),
            (InvalidRequest, "pairs", lambda p: p.send_many(TOPIC, "abcd")),
            (InvalidRequest, "pairs", lambda p: p.send_many(TOPIC, 5)),
            (InvalidRequest, "pairs", lambda p: p.send_many(TOPIC, None)),
        ],
    )
    def test_is_refused_and_sends_nothing(
        self, topic: Pxrs, kind: type[PxrsError], match: str, call: Call
    ) -> None:
        with topic.producer(linger=600, max_message_bytes=1000) as producer:
            refused(kind, match, lambda: call(producer))
            assert_works(topic, producer)

    @pytest.mark.parametrize("headers", [None, [], (), [("a", b"")], (["a", None],)])
    def test_headers_that_are_fine(self, topic: Pxrs, headers: Any) -> None:
        with topic.producer() as producer:
            producer.send(TOPIC, "v", headers=headers)
        assert read_all(topic, TOPIC)[0].headers == tuple(map(tuple, headers or ()))


def assert_works(px: Pxrs, producer: Producer) -> None:
    producer.flush()
    assert read_all(px, TOPIC) == []
    producer.send(TOPIC, "fine").result()
    assert [message.value for message in read_all(px, TOPIC)] == [b"fine"]


class TestReading:
    @pytest.mark.parametrize("partition", [3, -1, True, 1.0, "1", None])
    def test_unknown_partitions(self, topic: Pxrs, partition: Any) -> None:
        reader = topic.reader(TOPIC)
        for call in (
            lambda: reader.read(partition, 0),
            lambda: reader.bounds(partition),
            lambda: reader.offset_at(partition, 0),
            lambda: reader.follow([0, partition]),
        ):
            refused(PartitionNotFound, "0 to 2", call)

    @pytest.mark.parametrize("offset", [-1, 3, 2**63, -(2**70), 10**30])
    def test_offsets_outside(self, topic: Pxrs, offset: int) -> None:
        with topic.producer() as producer:
            for _ in range(2):
                producer.send(TOPIC, "v", partition=0)
        reader = topic.reader(TOPIC)
        side = "before the start" if offset < 0 else "past the end"
        for call in (lambda: reader.read(0, offset), lambda: reader.follow([0], start=offset)):
            with pytest.raises(OffsetOutOfRange, match=side) as caught:
                call()
            error = caught.value
            assert (error.topic, error.partition, error.offset) == (TOPIC, 0, offset)
            assert (error.start, error.end) == (0, 2)
        assert reader.read(0, 2) == []

    @pytest.mark.parametrize("value", [True, 1.0, "1", None])
    def test_numbers_of_another_type(self, topic: Pxrs, value: Any) -> None:
        with topic.producer() as producer:
            producer.send(TOPIC, "v", partition=0)
        reader = topic.reader(TOPIC)
        assert len(reader.read(0, 0)) == 1
        refused(InvalidRequest, "offset", lambda: reader.read(0, value))
        refused(InvalidRequest, "max_records", lambda: reader.read(0, 0, value))
        refused(InvalidRequest, "timestamp", lambda: reader.offset_at(0, value))
        refused(InvalidRequest, "start", lambda: reader.follow([0], start=value))

    @pytest.mark.parametrize("value", [0, -1])
    def test_no_records_at_all(self, topic: Pxrs, value: int) -> None:
        refused(InvalidRequest, "at least 1", lambda: topic.reader(TOPIC).read(0, 0, value))

    @pytest.mark.parametrize("value", [[], 3, {0}, ""])
    def test_partitions_that_are_no_list(self, topic: Pxrs, value: Any) -> None:
        refused(InvalidRequest, "partitions", lambda: topic.reader(TOPIC).follow(value))

    def test_a_start_that_is_no_start(self, topic: Pxrs) -> None:
        start: Any = "newest"
        refused(
            InvalidRequest,
            "'earliest' or 'latest'",
            lambda: topic.reader(TOPIC).follow(start=start),
        )


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("linger", [-1, "1", None, True, float("nan"), float("inf")]),
            ("max_block", [-0.1, "1", None, False, float("nan"), float("inf")]),
            ("delivery_timeout", [-1, "1", None, True, float("inf")]),
            ("batch_bytes", [0, -1, 1e6, True, "1", None, 2**31]),
            ("max_message_bytes", [0, 1.5, True, 2**31]),
            ("buffer_bytes", [0, 1.5, True, None, 2**20 - 1]),
            ("compression", ["", "zip", None, 5, []]),
        ],
    )
    def test_of_a_producer(self, px: Pxrs, name: str, values: list[Any]) -> None:
        for value in values:
            settings = {name: value}
            refused(InvalidRequest, name, lambda s=settings: px.producer(**s))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("", "store URL"),
        ("app.db", "store URL"),
        ("sqlite:app.db", "store URL"),
        (None, "store URL"),
        (5, "store URL"),
        ("sqlite://[x", "names a host"),
        ("sqllite:///app.db", "unknown scheme 'sqllite'"),
        ("redis://localhost", "knows memory://, sqlite://"),
        ("http://127.0.0.1:6080", "nodes of pxrs serve are pxrs://host:port"),
        ("sqlite://app.db", "names a host"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///app.db?durabilty=full", "takes busy_timeout, durability"),
        ("sqlite:///app.db?Durability=full", "does not know the option 'Durability'"),
        ("sqlite:///app.db?durability=maximal", "full or relaxed"),
        ("sqlite:///app.db?durability=", "full or relaxed"),
        ("sqlite:///app.db?durability=full&durability=relaxed", "is given twice"),
        ("sqlite:///app.db?busy_timeout=soon", "must be a number"),
        ("sqlite:///app.db?busy_timeout=", "must be a number"),
        ("sqlite:///app.db?busy_timeout=-1", "busy_timeout"),
        ("sqlite:///app.db?busy_timeout=nan", "busy_timeout"),
        ("sqlite:///app.db?busy_timeout=inf", "busy_timeout"),
        ("sqlite:///app#1.db", "%23"),
        ("sqlite:///app%00.db", "NUL"),
        ("memory://?durability=full", "takes no options"),
        ("memory://name?x=1", "takes no options"),
    ],
)
def test_urls(url: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(ConfigError, match, lambda: pxrs.connect(url))
    assert list(tmp_path.iterdir()) == []
