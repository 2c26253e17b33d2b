"""Through a real PgBouncer in transaction mode: no notification comes, and no lock is ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import engines
from pxrs.testing.conformance import Rule, atomic_checks, wake_checks
from support.engine_fixtures import server_url, unavailable
from support.postgres import EmptiedLab, PostgresLab

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture(scope="module")
def pgbouncer() -> Iterator[engines.Engine]:
    try:
        engine = engines.build("pgbouncer", server=server_url("postgres"))
    except engines.Missing as why:
        unavailable(why)
        raise
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def lab(
    postgres_of_many: str, broom: psycopg.Connection[Any], pgbouncer: engines.Engine
) -> Iterator[EmptiedLab]:
    lab = EmptiedLab(f"{pgbouncer.url}/{postgres_of_many.rpartition('/')[2]}", broom)
    yield lab
    lab.close()


@pytest.mark.parametrize("check", wake_checks() + atomic_checks(), ids=lambda check: check.__name__)
def test_conforms_behind_pgbouncer(check: Rule, lab: EmptiedLab) -> None:
    check(lab)


def test_a_pooler_is_recognised(lab: EmptiedLab, postgres_of_many: str) -> None:
    assert lab.open().database.pooled
    direct = PostgresLab(postgres_of_many)
    assert not direct.open().database.pooled
    direct.close()
