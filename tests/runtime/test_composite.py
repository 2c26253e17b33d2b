"""Stores put together from several places."""

from __future__ import annotations

from pathlib import Path

import pytest

import pxrs
from pxrs.config import split_url
from pxrs.errors import ConfigError, NotAtomic
from pxrs.stores.composite import CompositeStores
from pxrs.stores.open import open_stores


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    return f"sqlite:///{tmp_path / 'log.db'}", f"sqlite:///{tmp_path / 'coord.db'}"


def test_groups_live_in_one_place_and_messages_in_the_other(urls: tuple[str, str]) -> None:
    with pxrs.connect(urls[0], coord=urls[1]) as px:
        px.create_topic("t", partitions=2)
        with px.producer() as producer:
            producer.send_many("t", [(b"k%d" % n, b"v%d" % n) for n in range(20)])
        with px.consumer("t", group="g") as consumer:
            seen: list[bytes] = []
            while len(seen) < 20:
                seen += [message.value for message in consumer.poll(timeout=10.0)]
        assert sorted(seen) == sorted(b"v%d" % n for n in range(20))
    with pxrs.connect(urls[0]) as messages, pxrs.connect(urls[1]) as records:
        assert messages.topics() == []
        assert [summary.name for summary in records.groups.list()] == ["g"]


def test_the_url_of_a_composite_opens_it_again(urls: tuple[str, str]) -> None:
    with pxrs.connect(urls[0], coord=urls[1]) as px:
        px.create_topic("t", partitions=3)
        again = px.url
    with pxrs.connect(again) as px:
        assert [topic.partitions for topic in px.topics()] == [3]


def test_parts_do_not_commit_together(urls: tuple[str, str]) -> None:
    stores = open_stores(urls[0], coord=urls[1])
    with pytest.raises(NotAtomic, match="different places"):
        stores.atomic()
    stores.close()


def test_one_text_names_several_places() -> None:
    parts = split_url("sqlite:///a b.db coord=memory://c log=memory://l")
    assert parts.urls() == ["sqlite:///a b.db", "memory://c", "memory://l"]
    assert split_url(str(parts)) == parts
    with pytest.raises(ConfigError, match="twice"):
        split_url("sqlite:///a.db coord=memory://", coord="memory://")


def test_what_was_opened_is_closed_when_another_part_fails(urls: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        open_stores(urls[0], coord="nothing://")


def test_all_parts_are_closed_though_one_fails() -> None:
    closed: list[str] = []

    def fail() -> None:
        closed.append("second")
        raise OSError("no")

    with open_stores_of_memory() as memory:
        parts = memory.stores.coord, memory.stores.log, None
        stores = CompositeStores("x", *parts, [lambda: closed.append("first"), fail])
        with pytest.raises(OSError, match="no"):
            stores.close()
        assert closed == ["second", "first"]


def open_stores_of_memory() -> pxrs.Pxrs:
    return pxrs.connect("memory://")
