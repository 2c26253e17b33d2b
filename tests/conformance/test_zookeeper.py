"""Coordination on a real ZooKeeper passes the suite; messages are kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.open import open_stores
from pxrs.testing.conformance import Rule, await_end, coord_checks

pytestmark = pytest.mark.engine("zookeeper")


class ZooKeeperLab:
    """A folder of its own in the shared ZooKeeper, which ticks every half second."""

    ttl = 1.5
    patience = 20.0

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: list[Stores] = []

    def open(self) -> Stores:
        stores = open_stores("memory://", coord=self._url)
        self._opened.append(stores)
        return stores

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()


@pytest.fixture
def lab(zookeeper_url: str) -> Iterator[ZooKeeperLab]:
    lab = ZooKeeperLab(zookeeper_url)
    yield lab
    lab.close()


@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: ZooKeeperLab) -> None:
    check(lab)
