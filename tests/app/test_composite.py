"""Stores put together from several places."""

from __future__ import annotations

import subprocess
import sys
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
        px.topics.create("t", partitions=2)
        with px.producer() as producer:
            producer.send_many("t", [(b"k%d" % n, b"v%d" % n) for n in range(20)])
        with px.consumer("t", group="g") as consumer:
            seen: list[bytes] = []
            while len(seen) < 20:
                seen += [message.value for message in consumer.poll(timeout=10.0)]
        assert sorted(seen) == sorted(b"v%d" % n for n in range(20))
    with pxrs.connect(urls[0]) as messages, pxrs.connect(urls[1]) as records:
        assert messages.topics.list() == []
        assert [summary.name for summary in records.groups.list()] == ["g"]


def test_the_url_of_a_composite_opens_it_again(urls: tuple[str, str]) -> None:
    with pxrs.connect(urls[0], coord=urls[1]) as px:
        px.topics.create("t", partitions=3)
        again = px.url
    with pxrs.connect(again) as px:
        assert [topic.partitions for topic in px.topics.list()] == [3]


def test_parts_do_not_commit_together(urls: tuple[str, str]) -> None:
    stores = open_stores(urls[0], coord=urls[1])
    with pytest.raises(NotAtomic, match="different places"):
        stores.atomic()
    stores.close()


def test_queues_are_where_coordination_is(urls: tuple[str, str], etcd_url: str) -> None:
    with pxrs.connect(urls[0], coord=urls[1]) as px, pxrs.connect(urls[1]) as records:
        px.stores.queues.create("q")
        assert [queue.name for queue in records.stores.queues.all()] == ["q"]
    with pxrs.connect(urls[0], coord=etcd_url) as px, pxrs.connect(etcd_url) as records:
        px.stores.queues.create("q")
        assert [queue.name for queue in records.stores.queues.all()] == ["q"]


def test_one_text_names_several_places() -> None:
    parts = split_url("sqlite:///a b.db coord=memory://c log=memory://l")
    assert parts.urls() == ["sqlite:///a b.db", "memory://c", "memory://l"]
    assert split_url(parts.whole) == parts
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
        stores = CompositeStores(
            "x",
            memory.stores.coord,
            memory.stores.log,
            None,
            [lambda: closed.append("first"), fail],
        )
        with pytest.raises(OSError, match="no"):
            stores.close()
        assert closed == ["second", "first"]


def open_stores_of_memory() -> pxrs.Pxrs:
    return pxrs.connect("memory://")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("etcd://h", "aetcd", "etcd"), ("zookeeper://h", "kazoo", "zookeeper")],
)
def test_a_client_that_is_not_installed_is_named(url: str, module: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{module!r}] = None
import pxrs
try:
    pxrs.connect("memory://", coord={url!r})
except pxrs.MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'pxrs[{extra}]'" in done.stdout, done.stderr


def test_a_place_that_keeps_no_messages_is_enough_for_queues_alone(etcd_url: str) -> None:
    with pxrs.connect(etcd_url) as px:
        px.put("q", "work")
        with pytest.raises(ConfigError, match="keeps no messages"):
            px.topics.create("t", partitions=1)
    with pytest.raises(ConfigError, match="keeps no messages"):
        open_stores("memory://", log=etcd_url)
