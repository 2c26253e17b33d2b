"""URLs and settings, taken apart and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.config import (
    ProducerSettings,
    check_group_name,
    check_partitions,
    check_topic_name,
    default_url,
    parse_url,
    split_url,
    sqlite_settings,
)
from pxrs.core.queue import validate_name
from pxrs.errors import ConfigError, InvalidRequest
from pxrs.urls import public


@pytest.mark.parametrize(
    ("url", "scheme", "place", "options"),
    [
        ("sqlite:///app.db", "sqlite", "app.db", {}),
        ("sqlite:////var/lib/app.db", "sqlite", "/var/lib/app.db", {}),
        ("SQLite:///App.db", "sqlite", "App.db", {}),
        ("sqlite+pysqlite:///app.db", "sqlite", "app.db", {}),
        ("mysql+pymysql://db/app", "mysql+pymysql", "db/app", {}),
        ("sqlite:///a%20b%23c%3F.db", "sqlite", "a b#c?.db", {}),
        (
            "sqlite:///sub/app.db?durability=relaxed",
            "sqlite",
            "sub/app.db",
            {"durability": "relaxed"},
        ),
        ("memory://", "memory", "", {}),
        ("memory://name", "memory", "name", {}),
    ],
)
def test_urls(url: str, scheme: str, place: str, options: dict[str, str]) -> None:
    found = parse_url(url)
    assert (found.scheme, found.place, found.options) == (scheme, place, options)


@pytest.mark.parametrize("url", ["redis://a", "memory+x://", "etcd+tls://a:2379", "nats+tls://a"])
def test_schemes_that_do_not_exist(url: str) -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        parse_url(url)


@given(st.text())
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    try:
        parse_url(text)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - most texts are refused, some are not


@given(st.text(max_size=30).map("sqlite:///".__add__))
def test_any_path_is_a_url_or_a_config_error(text: str) -> None:
    try:
        assert parse_url(text).place
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - most texts are refused, some are not


def test_sqlite_settings() -> None:
    assert sqlite_settings({}).durability == "full"
    assert sqlite_settings({"busy_timeout": "2.5"}).busy_timeout == 2.5
    assert sqlite_settings({"busy_timeout": "0"}).busy_timeout == 0


def test_the_default_store_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PXRS_URL", raising=False)
    assert default_url() == "sqlite:///pxrs.db"
    monkeypatch.setenv("PXRS_URL", "memory://")
    assert default_url() == "memory://"


@given(st.text(alphabet="abcXYZ019._-", min_size=1, max_size=249))
def test_topic_names(name: str) -> None:
    if name in (".", ".."):
        with pytest.raises(InvalidRequest):
            check_topic_name(name)
    else:
        assert check_topic_name(name) == name


@given(st.text())
def test_other_topic_names_are_refused(name: str) -> None:
    fine = 1 <= len(name) <= 249 and all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if fine and name not in (".", "..") and not name.startswith("_pxrs."):
        assert check_topic_name(name) == name
    else:
        with pytest.raises(InvalidRequest):
            check_topic_name(name)


@pytest.mark.parametrize("check", [check_topic_name, check_group_name, validate_name])
def test_names_of_pxrs_itself_are_refused(check: Callable[[str], str]) -> None:
    with pytest.raises(InvalidRequest, match=r"must not begin with '_pxrs\.'"):
        check("_pxrs.nodes")
    assert check("_pxrsnodes") == "_pxrsnodes"


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text()))
def test_partitions(count: Any) -> None:
    if type(count) is int and 1 <= count <= 100_000:
        assert check_partitions(count) == count
    else:
        with pytest.raises(InvalidRequest, match="1 to 100000"):
            check_partitions(count)


def test_a_buffer_smaller_than_a_message_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_message_bytes \(1000\), got 999"):
        ProducerSettings(buffer_bytes=999, max_message_bytes=1000)
    ProducerSettings(buffer_bytes=1000, max_message_bytes=1000, batch_bytes=1)


def test_compressed_batches_are_no_larger_than_consumers_decode() -> None:
    most: dict[str, Any] = {
        "max_message_bytes": 64 * 2**20,
        "batch_bytes": 4 * 2**20,
        "buffer_bytes": 2**30,
    }
    ProducerSettings(compression="zstd", **most)
    for name in ("max_message_bytes", "batch_bytes"):
        more = most | {name: most[name] + 1}
        ProducerSettings(**more)
        with pytest.raises(ConfigError, match=f"{name} with compression must be .* {most[name]}"):
            ProducerSettings(compression="zstd", **more)


_BYTES = ("batch_bytes", "buffer_bytes", "max_message_bytes")
_SECONDS = ("linger", "max_block", "delivery_timeout")


@given(
    st.sampled_from(_BYTES + _SECONDS),
    st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)),
)
def test_settings_are_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        settings = ProducerSettings(**{name: value})
    except ConfigError as error:
        assert name in str(error)  # noqa: PT017 - most values are refused, some are not
    else:
        assert type(value) is int or (name in _SECONDS and type(value) is float)
        assert getattr(settings, name) == value >= 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///app.db", "sqlite:///app.db"),
        ("postgresql://app@db/app", "postgresql://app@db/app"),
        ("postgresql://app:s3cret@db:5432/app", "postgresql://app@db:5432/app"),
        ("mysql+pymysql://app:s3:c@ret@db/app", "mysql+pymysql://app@db/app"),
        ("etcd://a:2379,b:2379/p%40th", "etcd://a:2379,b:2379/p%40th"),
        # It might be a password that was not encoded.
        ("etcd://a:2379,b:2379/p@th", "etcd://…"),
        ("nats://s3cret@a,b:4222", "nats://a,b:4222"),
        ("nats://joe:s3cret@a", "nats://joe@a"),
        ("postgresql://db/app?password=s3cret&x=1", "postgresql://db/app"),
        ("postgresql://db?sslmode=require&password=x", "postgresql://db?sslmode=require"),
        ("etcd://r:s3cret@a log=nats://s3cret@b?replicas=3", "etcd://r@a log=nats://b?replicas=3"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert public(url) == shown


@pytest.mark.parametrize("url", ["db://joe:s3cret@a", "sqlite://joe:s3cret@a", "nats://:s3cret@[a"])
def test_errors_show_no_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "completed"),
    [
        ("postgresql://db/app", "postgresql://db/app"),
        ("etcd://a", "etcd://a log=sqlite:///x"),
        ("mysql+pymysql://a/b", "mysql+pymysql://a/b log=sqlite:///x"),
        ("nats://a", "nats://a coord=sqlite:///x"),
        ("etcd://a log=nats://a", "etcd://a log=nats://a"),
        ("nats://a coord=etcd://a", "nats://a coord=etcd://a"),
    ],
)
def test_what_an_engine_does_not_keep(url: str, completed: str) -> None:
    assert split_url(url).completed("sqlite:///x").whole == completed
