"""A copy into a log that another store, or another copy, uses touches none of its topics."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import CopyRefused
from pxrs.operations.copy.copier import CopyState, _Copier, _write_state
from pxrs.stores.api import KeepsOwners
from pxrs.stores.open import open_stores
from pxrs.types import Bounds, LogPartition
from support.copying import copied

TOPIC = "orders"


@pytest.fixture(
    params=[
        pytest.param("sqlite"),
        pytest.param("postgres", marks=pytest.mark.engine("postgres")),
        pytest.param("nats", marks=pytest.mark.engine("nats")),
    ]
)
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/log.db"
    elif request.param == "nats":
        yield f"{request.getfixturevalue('nats_url')}/t-{secrets.token_hex(6)}"
    else:
        yield request.getfixturevalue("postgres_url")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Sixty messages."""
    url = f"sqlite:///{tmp_path}/from.db"
    with pxrs.connect(url) as px:
        px.topics.create(TOPIC, partitions=1)
        with px.producer() as producer:
            for each in range(60):
                producer.send(TOPIC, b"%d" % each).result()
    return url


def topic_id(url: str) -> str:
    with pxrs.connect(url) as px:
        return px.topics.find(TOPIC).id


def bounds(log_url: str, topic_id: str) -> Bounds:
    with closing(open_stores("memory://", log=log_url)) as stores:
        return stores.log.bounds(topic_id)[0]


def test_a_log_in_use_is_refused(source: str, log_url: str, tmp_path: Path) -> None:
    """The live store was copied from the same source: its topics have the same ids."""
    live, fresh = (f"sqlite:///{tmp_path}/{name}.db log={log_url}" for name in ("live", "fresh"))
    assert copied(source, live).complete
    with pxrs.connect(source) as px:
        found = px.topics.find(TOPIC).id
        px.stores.log.trim(LogPartition(found, 0), 55)
    with pytest.raises(CopyRefused, match="not empty"):
        copied(source, fresh)
    assert bounds(log_url, found) == Bounds(0, 60)
    with pxrs.connect(live) as px:
        px.topics.delete(TOPIC)


def test_two_copies_at_once_share_no_log(source: str, log_url: str, tmp_path: Path) -> None:
    """Both have found the log empty when both begin: one is refused when it comes to the topic."""
    one, two = (f"sqlite:///{tmp_path}/{name}.db log={log_url}" for name in ("one", "two"))
    with closing(open_stores(source)) as origin, closing(open_stores(two)) as place:
        second = _Copier(origin, place, lambda _: None, SYSTEM_CLOCK)
        state, _ = second.begin(force=False)
        assert copied(source, one).complete
        with pytest.raises(CopyRefused, match="another store"):
            second.copy(state)
    with pxrs.connect(one) as px:
        px.topics.delete(TOPIC)


def test_a_copy_drops_no_topic_of_another(source: str, log_url: str, tmp_path: Path) -> None:
    """It had noted the topic and was killed. Another copy made the topic; the source deleted it."""
    one, two = (f"sqlite:///{tmp_path}/{name}.db log={log_url}" for name in ("one", "two"))
    found = topic_id(source)
    with closing(open_stores(source)) as origin, closing(open_stores(one)) as place:
        first = _Copier(origin, place, lambda _: None, SYSTEM_CLOCK)
        state, _ = first.begin(force=False)
        noted: CopyState = msgspec.structs.replace(state, topics=(found,))
        _write_state(place.coord, state, noted)
    assert copied(source, two).complete
    with pxrs.connect(source) as px:
        px.topics.delete(TOPIC)
    assert copied(source, one).complete
    assert bounds(log_url, found) == Bounds(0, 60)
    with pxrs.connect(two) as px:
        assert px.topics.find(TOPIC).id == found
        px.topics.delete(TOPIC)


def test_only_the_store_that_made_a_topic_drops_it(log_url: str) -> None:
    with closing(open_stores("memory://", log=log_url)) as one:
        one.log.create("t-1", 2)
        with closing(open_stores("memory://", log=log_url)) as two:
            two.log.drop("t-1")
            assert isinstance(one.log, KeepsOwners)
            assert isinstance(two.log, KeepsOwners)
            assert list(two.log.held()) == ["t-1"]
            with pytest.raises(pxrs.TopicExists, match="another store"):
                two.log.create("t-1", 2)
            one.log.create("t-1", 2)
            one.log.drop("t-1")
            assert two.log.held() == {}
            two.log.create("t-1", 1)
            two.log.drop("t-1")
