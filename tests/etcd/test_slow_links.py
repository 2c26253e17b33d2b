"""Over a slow link all goes on, as slowly as it has to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pxrs.config import etcd_settings, parse_url
from pxrs.stores.etcd import nodes
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.types import Committed, Put
from support.proxy import Proxy

pytestmark = pytest.mark.engine("etcd")

RATE = 200_000


@pytest.fixture
def slow(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdCoord]:
    """A store behind a link on which the first try of anything large takes too long."""
    monkeypatch.setattr(nodes, "_TRY", 0.3)
    known = etcd_settings(parse_url(etcd_url))
    with Proxy(int(known.hosts[0].rpartition(":")[2])) as proxy:
        proxy.slow(RATE)
        coord = EtcdCoord(etcd_settings(parse_url(f"etcd://{proxy.address}/{known.prefix}")))
        yield coord
        coord.close()


def test_a_large_value_passes_a_slow_link(slow: EtcdCoord) -> None:
    value = secrets.token_bytes(300_000)
    assert isinstance(slow.commit([], [Put("k", value)]), Committed)
    record = slow.get("k")
    assert record is not None
    assert record.value == value


def test_a_commit_may_take_longer_than_the_timeout_if_it_carries_much(
    slow: EtcdCoord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes.Nodes, "timeout", 1.0)
    assert isinstance(slow.commit([], [Put("k", secrets.token_bytes(500_000))]), Committed)


def test_many_records_are_read_over_a_slow_link(slow: EtcdCoord) -> None:
    """All of them take longer than the timeout."""
    written = {f"k/{number:02d}": secrets.token_bytes(60_000) for number in range(40)}
    for key, value in written.items():
        assert isinstance(slow.commit([], [Put(key, value)]), Committed)
    assert {record.key: record.value for record in slow.list("k/")} == written
