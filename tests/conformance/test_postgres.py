"""The PostgreSQL backend passes every suite, with notifications and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pxrs.testing.conformance import (
    Rule,
    atomic_checks,
    coord_checks,
    doubt_checks,
    lent_session_checks,
    log_checks,
    queue_checks,
    restore_checks,
    wake_checks,
)
from support.postgres import EmptiedLab

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture
def lab(
    postgres_of_many: str, broom: psycopg.Connection[Any], request: pytest.FixtureRequest
) -> Iterator[EmptiedLab]:
    lab = EmptiedLab(postgres_of_many, broom, getattr(request, "param", None))
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    coord_checks()
    + lent_session_checks()
    + log_checks()
    + doubt_checks()
    + queue_checks()
    + restore_checks()
    + atomic_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: EmptiedLab) -> None:
    check(lab)


@pytest.mark.parametrize("lab", ["nobody_hears_this"], indirect=True, ids=["deaf"])
@pytest.mark.parametrize("check", wake_checks(), ids=lambda check: check.__name__)
def test_conforms_when_all_notifications_are_lost(check: Rule, lab: EmptiedLab) -> None:
    check(lab)
