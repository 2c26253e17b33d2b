"""Coordination and queues through SQLAlchemy pass their suites on a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.conformance import Rule, coord_checks, queue_checks, restore_checks
from support.coord_lab import CoordLab

pytestmark = pytest.mark.engine("mariadb")


@pytest.fixture
def lab(mariadb_url: str) -> Iterator[CoordLab]:
    lab = CoordLab(mariadb_url, ttl=1.0)
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    coord_checks() + queue_checks() + restore_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: CoordLab) -> None:
    check(lab)
