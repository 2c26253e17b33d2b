"""A copy into JetStream touches no stream that another store, or another copy, has made."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.config import nats_settings, parse_url
from pxrs.errors import CopyRefused, TopicExists
from pxrs.operations.copy import Count
from pxrs.stores.identity import identity_of
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.types import Bounds
from support.copying import copied
from support.node import LocalNode

pytestmark = pytest.mark.engine("nats")

TOPIC = "orders"


@pytest.fixture
def log_url(nats_url: str) -> str:
    return f"{nats_url}/t-{secrets.token_hex(6)}"


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Sixty messages, of which retention has left five."""
    url = f"sqlite:///{tmp_path}/from.db"
    with pxrs.connect(url) as px:
        px.topics.create(TOPIC, partitions=1)
        _send(px, 60)
    return url


def _send(px: pxrs.Pxrs, number: int) -> None:
    with px.producer() as producer:
        for each in range(number):
            producer.send(TOPIC, b"%d" % each).result()


def _trim(url: str, before: int) -> None:
    with pxrs.connect(url) as px:
        where = px.topics.find(TOPIC).id
        px.stores.log.trim(pxrs.types.LogPartition(where, 0), before)


def bounds(log_url: str, topic_id: str) -> Bounds:
    with closing(JetStreamLog(nats_settings(parse_url(log_url)))) as log:
        return log.bounds(topic_id)[0]


def test_a_prefix_in_use_is_refused(source: str, log_url: str, tmp_path: Path) -> None:
    """The live store was copied from the same source: its streams bear the same names."""
    live = f"sqlite:///{tmp_path}/live.db log={log_url}"
    assert copied(source, live).complete
    _trim(source, 55)
    with pxrs.connect(source) as px:
        topic_id = px.topics.find(TOPIC).id
    with pytest.raises(CopyRefused, match="not empty"):
        copied(source, f"sqlite:///{tmp_path}/fresh.db log={log_url}")
    assert bounds(log_url, topic_id) == Bounds(0, 60)
    with pxrs.connect(live) as px:
        _send(px, 1)
        px.topics.delete(TOPIC)


def test_two_copies_at_once_share_no_stream(source: str, log_url: str, tmp_path: Path) -> None:
    """Who begins second is refused."""
    one, two = (f"sqlite:///{tmp_path}/{name}.db log={log_url}" for name in ("one", "two"))
    began: list[Count] = []

    def begin_the_other(count: Count) -> None:
        if not began:
            began.append(count)
            with pytest.raises(CopyRefused, match="not empty"):
                copied(source, two)

    assert copied(source, one, on_progress=begin_the_other).complete
    assert began
    # Its own goes on: an earlier run of the same copy made the streams.
    assert copied(source, one).only_verified
    with pxrs.connect(one) as px:
        px.topics.delete(TOPIC)


def test_a_topic_bears_the_identity_of_its_store(log_url: str, tmp_path: Path) -> None:
    """Also of one that was made through a node, by a client that sees no engine."""
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db log={log_url}") as px:
        px.topics.create(TOPIC, partitions=1)
    url = f"sqlite:///{tmp_path}/app.db log={log_url}"
    with LocalNode(url) as node:
        with pxrs.connect(f"pxrs://{node.address}") as px:
            px.topics.create("remote", partitions=1)
        identity = identity_of(node.px.stores.coord)
        log = node.px.stores.log
        assert isinstance(log, JetStreamLog)
        assert list(log.held().values()) == [identity, identity]
        for topic in node.px.topics.list():
            node.px.topics.delete(topic.name)


def test_a_stream_has_one_store(log_url: str) -> None:
    """Both copies found the prefix empty: who comes second to a stream is refused."""
    with closing(JetStreamLog(nats_settings(parse_url(log_url)))) as log:
        log.owned_by(lambda: "one")
        for _ in range(2):
            log.create("t-1", 1)
        log.owned_by(lambda: "two")
        with pytest.raises(TopicExists, match="another store"):
            log.create("t-1", 1)
        assert log.held() == {"t-1": "one"}
        log.owned_by(lambda: "one")
        log.drop("t-1")
        assert log.held() == {}
