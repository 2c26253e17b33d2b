"""Commits that are too large, and links that carry little or break."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import InvalidRequest, OutcomeUnknown, StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.testing.conformance.tools import committed
from pxrs.types import Put
from support.engine_fixtures import NewEngine
from support.proxy import Proxy

pytestmark = pytest.mark.engine("zookeeper")
# 3.6 Mbit/s.
RATE = 450_000


@contextmanager
def opened(url: str) -> Iterator[ZooKeeperCoord]:
    with closing(ZooKeeperCoord(zookeeper_settings(parse_url(url)))) as coord:
        yield coord


@pytest.fixture
def proxy(zookeeper_url: str) -> Iterator[Proxy]:
    (host,) = zookeeper_settings(parse_url(zookeeper_url)).hosts
    with Proxy(int(host.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: Proxy, zookeeper_url: str) -> str:
    return f"zookeeper://{proxy.address}/{zookeeper_url.rpartition('/')[2]}"


def test_a_commit_that_breaks_the_network_each_time_may_be_tried_again(
    proxy: Proxy, proxied: str
) -> None:
    with opened(f"{proxied}?timeout=1") as coord:
        value = b"the words" + bytes(50_000)
        coord.get("k")
        proxy.reset_at(b"the words")
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            coord.commit([], [Put("k", value)])
        proxy.heal()
        committed(coord.commit([], [Put("k", value)]))


def test_what_a_server_with_another_limit_cuts_off_is_final(new_engine: NewEngine) -> None:
    engine = new_engine("zookeeper", java=["-Djute.maxbuffer=100000"])
    with opened(f"{engine.url}/x") as coord:
        with pytest.raises(InvalidRequest, match=r"jute\.maxbuffer"):
            coord.commit([], [Put("k", b"x" * 200_000)])
        committed(coord.commit([], [Put("k", b"x" * 20_000)]))


def test_so_it_is_over_a_slow_link(new_engine: NewEngine) -> None:
    """The server has closed the connection before the commit has passed."""
    engine = new_engine("zookeeper", java=["-Djute.maxbuffer=100000"])
    with Proxy(engine.ports[0]) as proxy:
        proxy.slow(RATE)
        with opened(f"zookeeper://{proxy.address}/x") as coord:
            with pytest.raises(InvalidRequest, match=r"jute\.maxbuffer"):
                coord.commit([], [Put("k", b"x" * 900_000)])
            committed(coord.commit([], [Put("k", b"x" * 20_000)]))


def test_a_megabyte_passes_a_slow_link(proxy: Proxy, proxied: str) -> None:
    proxy.slow(RATE)
    with opened(proxied) as coord:
        value = secrets.token_bytes(coord.limits.value_bytes)
        committed(coord.commit([], [Put("k", value)]))
        found = coord.get("k")
        assert found is not None
        assert found.value == value


def test_a_commit_may_take_longer_than_the_timeout_if_it_carries_much(
    proxy: Proxy, proxied: str
) -> None:
    proxy.slow(RATE)
    with opened(f"{proxied}?timeout=1") as coord:
        committed(coord.commit([], [Put("k", secrets.token_bytes(900_000))]))


def test_many_records_are_read_over_a_slow_link(
    proxy: Proxy, proxied: str, zookeeper_url: str
) -> None:
    """All of them take longer than the timeout."""
    written = {f"k/{number:02d}": secrets.token_bytes(60_000) for number in range(40)}
    with opened(zookeeper_url) as near:
        for key, value in written.items():
            committed(near.commit([], [Put(key, value)]))
    proxy.slow(RATE)
    with opened(f"{proxied}?timeout=2") as coord:
        assert {record.key: record.value for record in coord.list("k/")} == written
