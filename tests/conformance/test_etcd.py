"""Coordination on a real etcd passes the suite; messages are kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.conformance import Rule, coord_checks, lent_session_checks
from support.coord_lab import CoordLab

pytestmark = pytest.mark.engine("etcd")


@pytest.fixture
def lab(etcd_url: str) -> Iterator[CoordLab]:
    lab = CoordLab(etcd_url, ttl=2.0)
    yield lab
    lab.close()


CHECKS = coord_checks() + lent_session_checks()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: CoordLab) -> None:
    check(lab)
