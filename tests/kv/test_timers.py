"""Values that expire where the store has no clock: the leading node looks after them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import InvalidRequest
from pxrs.core import kv
from pxrs.kv.store import KeyValues
from pxrs.kv.timers import Timers
from pxrs.stores.api import CoordStore, TellsTime
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing import VirtualClock
from pxrs.types import Version
from support.child import PATIENCE
from support.node import LocalNode, looks


class Timeless:
    """A store without a clock."""

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self.limits = coord.limits

    def get(self, key: str) -> Any:
        return self._coord.get(key)

    def list(self, *given: Any) -> Any:
        return self._coord.list(*given)

    def commit(self, checks: Sequence[Any], writes: Sequence[Any]) -> Any:
        return self._coord.commit(checks, writes)


class Site:
    """A node over a store without a clock, and one that does not lead."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.coord: Any = Timeless(MemoryStores(clock=self.clock).coord)
        self.leads = True
        self.node, self.timers = self.start(lambda _: self.leads)
        self.other, _ = self.start(lambda _: False)

    def start(self, leads: Callable[[int], bool]) -> tuple[KeyValues, Timers]:
        keys = KeyValues(self.coord, self.clock)
        return keys, keys._keep_time(leads)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.timers.step()

    @property
    def left(self) -> list[str]:
        return [record.key for record in self.coord.list(kv.TIMERS)]


@pytest.fixture
def site() -> Site:
    site = Site()
    assert not isinstance(site.coord, TellsTime)
    return site


def test_it_is_deleted_when_its_time_is_over(site: Site) -> None:
    version = site.node.put("k", "x", ttl=5)
    site.advance(4.9)
    assert site.node.get("k") is not None
    site.advance(0.1)
    assert site.node.get("k") is None
    assert site.left == []
    assert site.node.put("k", "y").index > version.index + 1


def test_what_was_written_again_lives_as_long_as_that_says(site: Site) -> None:
    site.node.put("stays", "x", ttl=5)
    site.node.put("stays", "y")
    site.node.put("longer", "x", ttl=5)
    site.advance(3)
    site.node.put("longer", "y", ttl=5)
    site.advance(3)
    assert site.node.get("longer") is not None
    site.advance(2)
    assert [entry.key for entry in site.node.scan()] == [b"stays"]
    assert site.left == []


def test_a_new_leader_counts_afresh(site: Site) -> None:
    site.node.put("k", "x", ttl=5)
    site.advance(4)
    site.node, site.timers = site.start(lambda _: True)
    site.timers.step()
    site.advance(4)
    assert site.node.get("k") is not None
    site.advance(1)
    assert site.node.get("k") is None


def test_the_leader_finds_what_another_has_written(site: Site) -> None:
    site.timers.step()
    site.other.put("k", "x", ttl=1)
    site.advance(10)
    assert site.node.get("k") is not None
    site.advance(1)
    assert site.node.get("k") is None


def test_one_that_leads_no_more_deletes_nothing(site: Site) -> None:
    site.node.put("k", "x", ttl=1)
    site.leads = False
    site.advance(5)
    assert site.node.get("k") is not None
    site.leads = True
    site.timers.look_again()
    site.timers.step()
    site.advance(1)
    assert site.node.get("k") is None


def test_after_a_bug_values_still_expire(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.node.put("k", "x", ttl=1)
    with monkeypatch.context() as patch:
        patch.setattr(site.coord, "commit", fail)
        with pytest.raises(RuntimeError):
            site.advance(1)
    site.advance(1)
    assert site.node.get("k") is None


def test_a_bug_does_not_end_the_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.kv.timers._RETRY", 0.01)
    site.node.put("k", "x", ttl=1)
    failed = threading.Event()

    def note(*_: object) -> None:
        failed.set()
        fail()

    with monkeypatch.context() as patch:
        patch.setattr(site.coord, "list", note)
        site.timers.start()
        assert failed.wait(PATIENCE)
    try:
        site.clock.advance(1)
        for _ in looks():
            site.timers.look_again()
            if site.node.get("k") is None:
                break
    finally:
        site.timers.close()


def fail(*_: object) -> None:
    raise RuntimeError("a bug")


def test_one_beside_the_nodes_refuses(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="a node that looks after it"):
        KeyValues(site.coord, site.clock).put("k", "x", ttl=1)


@pytest.mark.engine("etcd")
def test_on_etcd(etcd_url: str, tmp_path: Path) -> None:
    """Through a node values expire; beside it they can't have a ttl."""
    check(f"sqlite:///{tmp_path}/log.db coord={etcd_url}")


@pytest.mark.engine("zookeeper")
def test_on_zookeeper(zookeeper_url: str, tmp_path: Path) -> None:
    check(f"sqlite:///{tmp_path}/log.db coord={zookeeper_url}")


def check(url: str) -> None:
    with (
        LocalNode(url) as node,
        pxrs.connect(f"pxrs://{node.address}") as px,
    ):
        with pytest.raises(InvalidRequest, match="a node that looks after it"):
            KeyValues(node.px.stores.coord, VirtualClock()).put("k", "x", ttl=1)
        gone = threading.Event()
        with px.kv.watch("k") as changes:
            px.kv.put("keep", "x")
            version: Version = px.kv.put("k", "x", ttl=0.2)

            def wait() -> None:
                while px.kv.get("k") is not None:
                    changes.wait(1.0)
                gone.set()

            threading.Thread(target=wait, daemon=True).start()
            assert gone.wait(PATIENCE)
        assert px.kv.get("keep") is not None
        assert px.kv.put("k", "y").index > version.index
