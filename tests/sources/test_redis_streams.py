"""A stream of Valkey's, consumed by groups."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import pxrs
from pxrs.errors import (
    ConfigError,
    InvalidRequest,
    MissingExtra,
    OffsetOutOfRange,
    SourceChanged,
    StoreUnavailable,
)
from pxrs.sources import RedisStream
from pxrs.sources.redis_stream import OpenRedisStream
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("valkey")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def stream() -> str:
    return f"s-{secrets.token_hex(6)}"


@pytest.fixture
def source(valkey_url: str, stream: str) -> Iterator[OpenRedisStream]:
    source = RedisStream(valkey_url, stream, key="account", value="n").open("")
    yield source
    source.close()


def add(client: redis.Redis, stream: str, *numbers: int, **options: Any) -> None:
    for number in numbers:
        client.xadd(stream, {"account": f"a{number % 3}", "n": number}, **options)


def test_a_group_consumes_it(
    valkey_url: str, stream: str, client: redis.Redis, tmp_path: Path
) -> None:
    add(client, stream, *range(100))
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        px.attach("events", RedisStream(valkey_url, stream, key="account"), partitions=4)
        with px.consumer("events", group="billing", serde=pxrs.JSON()) as consumer:
            found = consumer.poll(max_records=60, timeout=5)
            while len(found) < 100:
                found += consumer.poll(timeout=5)
            timer = threading.Timer(0.05, add, [client, stream, 100])
            timer.start()
            found += consumer.poll(timeout=10)
            timer.join()
        assert sorted(int(message.value["n"]) for message in found) == list(range(101))
        for account in range(3):
            own = [int(m.value["n"]) for m in found if m.value["account"] == f"a{account}"]
            assert own == sorted(own)
        assert found[0].key in (b"a0", b"a1", b"a2")
        assert found[0].timestamp == found[0].offset >> 22
    assert not [each for each in threading.enumerate() if each.name == "pxrs-redis-stream"]


def test_lag_counts_entries(
    valkey_url: str, stream: str, client: redis.Redis, tmp_path: Path
) -> None:
    # More than are asked for at a time.
    add(client, stream, *range(1200))
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        px.attach("events", RedisStream(valkey_url, stream, key="account"), partitions=4)
        px.groups.import_checkpoint("billing", "events", -1)
        shown = px.groups.describe("billing")
        assert (shown.lag, shown.lag_is_exact) == (1200, True)
        with px.consumer("events", group="billing", auto_commit=False) as consumer:
            handled = len(consumer.poll(max_records=300, timeout=5))
            consumer.commit()
        assert px.groups.describe("billing").lag == 1200 - handled


def test_offsets_are_ids(source: OpenRedisStream, client: redis.Redis, stream: str) -> None:
    add(client, stream, 1, id="5-3")
    add(client, stream, 2, id=f"{2**41 - 1}-{2**22 - 1}")
    rows, following = source.read(0, 0, 10)[:2]
    assert [row.offset for row in rows] == [5 << 22 | 3, 2**63 - 1]
    assert following == 2**63


@pytest.mark.parametrize("entry", [f"{2**41}-0", f"5-{2**22}"])
def test_ids_that_do_not_fit_are_refused(
    source: OpenRedisStream, client: redis.Redis, stream: str, entry: str
) -> None:
    add(client, stream, 1, id=entry)
    for call in (lambda: source.read(0, 0, 10), lambda: source.bounds(0), source.check):
        with pytest.raises(ConfigError, match=f"{entry} does not fit"):
            call()


def test_trimmed_entries_are_out_of_range(
    source: OpenRedisStream, client: redis.Redis, stream: str
) -> None:
    add(client, stream, *range(10))
    found = source.read(0, 0, 100).rows
    assert source.bounds(0).start == 0
    client.xtrim(stream, maxlen=4, approximate=False)
    assert source.bounds(0).start == found[6].offset
    with pytest.raises(OffsetOutOfRange):
        source.read(0, found[5].offset, 10)
    assert source.read(0, found[6].offset, 10).rows == found[6:]
    client.xtrim(stream, maxlen=0, approximate=False)
    start, end = source.bounds(0)
    assert start == end == found[-1].offset + 1


def test_a_reader_at_the_end_misses_nothing_of_a_short_stream(
    source: OpenRedisStream, client: redis.Redis, stream: str
) -> None:
    """Each new entry trims the one that was read before it: the reader's place is not gone."""
    place = 0
    for number in range(5):
        add(client, stream, number, maxlen=1, approximate=False)
        [row], place = source.read(0, place, 10)[:2]
        assert row.value == str(number).encode()
    add(client, stream, 5, 6, maxlen=1, approximate=False)
    with pytest.raises(OffsetOutOfRange):
        source.read(0, place, 10)


def test_deleted_entries_are_gaps(
    source: OpenRedisStream, client: redis.Redis, stream: str
) -> None:
    add(client, stream, *range(6))
    found = source.read(0, 0, 100).rows
    for row in (found[2], found[5]):
        client.xdel(stream, f"{row.offset >> 22}-{row.offset & (2**22 - 1)}")
    rows, following = source.read(0, found[0].offset, 100)[:2]
    assert rows == [found[0], found[1], found[3], found[4]]
    assert following == found[5].offset + 1
    assert source.read(0, found[5].offset, 100)[:2] == ([], following)
    assert source.read(0, found[2].offset, 100, found[3].offset)[:2] == ([], found[3].offset)


@pytest.mark.parametrize("again", [False, True])
def test_a_stream_that_is_made_anew_is_refused(
    source: OpenRedisStream, client: redis.Redis, stream: str, again: bool
) -> None:
    add(client, stream, 1, 2)
    source.read(0, 0, 10)
    client.delete(stream)
    if again:
        add(client, stream, 3)
    with pytest.raises(SourceChanged, match="made anew"):
        source.read(0, 0, 10)


def test_values(valkey_url: str, stream: str, client: redis.Redis) -> None:
    client.xadd(stream, {"a": b"\xff1", "b": "é", "c": "3"})
    for value, expected in [
        ("a", b"\xff1"),
        ("none", None),
        (["b", "none"], '{"b":"é","none":null}'.encode()),
        (None, '{"a":"\\\\xff1","b":"é","c":"3"}'.encode()),
    ]:
        source = RedisStream(valkey_url, stream, value=value).open("")
        [row] = source.read(0, 0, 10).rows
        assert (row.key, row.value) == (None, expected)
        source.close()


def test_what_is_refused(valkey_url: str, stream: str, client: redis.Redis, tmp_path: Path) -> None:
    for arguments in ({"url": "http://x"}, {"url": 5}, {"stream": ""}, {"key": 5}, {"value": [""]}):
        with pytest.raises(InvalidRequest):
            RedisStream(**{"url": valkey_url, "stream": "s", **arguments})  # type: ignore[arg-type]
    client.set(stream, "text")
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        with pytest.raises(ConfigError, match="is a string, not a stream"):
            px.attach("events", RedisStream(valkey_url, stream), partitions=2)
        assert px.sources.list() == []


def test_no_password_is_kept() -> None:
    for url in ("redis://me:secret@host:1/0", "redis://:secret@host", "redis://h?password=secret"):
        assert "secret" not in str(RedisStream(url, "s").settings())


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"pxrs\[redis\]"):
        RedisStream("redis://127.0.0.1:1", "s").open("")


def test_a_server_that_restarts(new_engine: NewEngine, stream: str) -> None:
    engine = new_engine("valkey", fsync="always")
    source = RedisStream(engine.url, stream, value="n").open("")
    client = redis.Redis.from_url(engine.url)
    add(client, stream, 1)
    watch = source.watch()
    [first], place = source.read(0, 0, 10)[:2]
    engine.stop()
    assert watch.wait(10)
    with pytest.raises(StoreUnavailable):
        source.read(0, place, 10)
    engine.start()
    add(client, stream, 2)
    assert [row.value for row in source.read(0, place, 10).rows] == [b"2"]
    assert first.value == b"1"
    watch.close()
    client.close()
    source.close()


def test_a_password_that_is_missing(new_engine: NewEngine, stream: str) -> None:
    engine = new_engine("valkey")
    with redis.Redis.from_url(engine.url) as client:
        client.config_set("requirepass", "secret")
    source = RedisStream(engine.url, stream).open("")
    with pytest.raises(ConfigError, match="they are not kept"):
        source.bounds(0)
    source.close()
    trusted = RedisStream(engine.url.replace("//", "//:secret@"), stream).open("")
    assert trusted.bounds(0).end == 0
    trusted.close()
