"""Copies from SQLite to the engines that come after it, on real servers."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.operations.copy import Phase
from pxrs.stores.api import ItemRestorer, Stores
from pxrs.stores.open import open_stores
from support.child import Child
from support.copying import copied, copy_and_die
from support.filled import BATCHES, GROUP, PARTITIONS, consume, fill

# What is left of the messages when the heads of two partitions are trimmed.
ALL = PARTITIONS * BATCHES - 7
ENGINES = {
    "postgres": ("postgres_url",),
    "etcd+nats": ("etcd_url", "nats_url"),
    "zookeeper+nats": ("zookeeper_url", "nats_url"),
    "mariadb+nats": ("mariadb_url", "nats_url"),
}


def marked() -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.engine(part) for part in name.split("+")], id=name)
        for name in ENGINES
    ]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/from.db"


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    first, *rest = [request.getfixturevalue(name) for name in ENGINES[request.param]]
    url = " log=".join([first, *(f"{log}/t-{secrets.token_hex(6)}" for log in rest)])
    yield url
    with pxrs.connect(url) as px:
        for topic in px.topics.list():
            px.topics.delete(topic.name)


def takes_items(stores: Stores) -> bool:
    try:
        return isinstance(stores.queues, ItemRestorer)
    except pxrs.PxrsError:
        return False


@pytest.mark.parametrize("target", marked(), indirect=True)
def test_all_arrives_and_the_group_goes_on(source: str, target: str) -> None:
    with closing(open_stores(target)) as stores:
        queues = takes_items(stores)
    fill(source, queues=queues)
    report = copied(source, target)
    assert (report.complete, report.differences, report.copied["messages"]) == (True, (), ALL)
    with pxrs.connect(target) as px:
        parts = px.groups.describe(GROUP).partitions
    expected = [(p.partition, at) for p in parts for at in range(p.checkpoint or 0, p.end)]
    assert sorted(consume(target, len(expected))) == sorted(expected)
    with pxrs.connect(target) as px:
        assert all(
            new.epoch > old.epoch
            for new, old in zip(px.groups.describe(GROUP).partitions, parts, strict=True)
        )


@pytest.mark.parametrize("phase", [Phase.MESSAGES, Phase.RECORDS])
@pytest.mark.parametrize("target", marked()[:2], indirect=True)
def test_a_killed_copy_goes_on(source: str, target: str, phase: Phase) -> None:
    fill(source, queues=False)
    assert Child(copy_and_die, source, target, phase, 1).join() == -signal.SIGKILL
    report = copied(source, target)
    assert (report.complete, report.resumed, report.differences) == (True, True, ())


@pytest.mark.parametrize("target", marked(), indirect=True)
def test_and_back_again(source: str, target: str, tmp_path: Path) -> None:
    with closing(open_stores(target)) as stores:
        # ZooKeeper hands out records one by one: with hundreds of items this takes long.
        fill(source, queues=takes_items(stores) and not target.startswith("zookeeper"))
    copied(source, target)
    back = f"sqlite:///{tmp_path}/back.db"
    assert copied(target, back).complete
    with pxrs.connect(source) as px, pxrs.connect(back) as other:
        for topic in px.topics.list():
            assert px.topics.describe(topic.name) == other.topics.describe(topic.name)
