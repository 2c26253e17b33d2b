"""Coordination and queues through SQLAlchemy pass their suites on a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy

from pxrs.stores.sql.schema import META, metadata
from pxrs.testing.conformance import Rule, coord_checks, queue_checks, restore_checks
from support.coord_lab import CoordLab
from support.engine_fixtures import mariadb_database

pytestmark = pytest.mark.engine("mariadb")


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """One for all checks: to make the tables takes longer than most of them."""
    with mariadb_database() as url:
        yield url


@pytest.fixture
def lab(database: str) -> Iterator[CoordLab]:
    lab = CoordLab(database, ttl=1.2)
    yield lab
    lab.close()
    engine = sqlalchemy.create_engine(database, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            if table is not META:
                connection.execute(sqlalchemy.delete(table))


@pytest.mark.parametrize(
    "check",
    coord_checks() + queue_checks() + restore_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: CoordLab) -> None:
    check(lab)
