"""Coordination on a real ZooKeeper passes the suite; messages are kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines.zookeeper import REMOVE_EMPTY

from pxrs.testing.conformance import Rule, coord_checks
from support.coord_lab import CoordLab
from support.engine_fixtures import place_in, started

pytestmark = pytest.mark.engine("zookeeper")


@pytest.fixture(scope="module")
def hasty_url() -> Iterator[str]:
    """A server that removes empty folders in no time: they are made again all the time."""
    with started("zookeeper", java=REMOVE_EMPTY) as engine:
        yield engine.url


@pytest.fixture(params=["", pytest.param("removed folders", marks=pytest.mark.long)])
def lab(request: pytest.FixtureRequest) -> Iterator[CoordLab]:
    url = place_in("zookeeper")
    if request.param:
        url = f"{request.getfixturevalue('hasty_url')}/{url.rpartition('/')[2]}"
    lab = CoordLab(url, ttl=1.5)
    yield lab
    lab.close()


@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: CoordLab) -> None:
    check(lab)
