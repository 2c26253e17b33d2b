"""Coordination on a real ZooKeeper passes the suite; messages are kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.conformance import Rule, coord_checks
from support.coord_lab import CoordLab

pytestmark = pytest.mark.engine("zookeeper")


@pytest.fixture
def lab(zookeeper_url: str) -> Iterator[CoordLab]:
    lab = CoordLab(zookeeper_url, ttl=1.5)
    yield lab
    lab.close()


@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: CoordLab) -> None:
    check(lab)
