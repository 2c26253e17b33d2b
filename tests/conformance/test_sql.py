"""Coordination and queues pass their suites on a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.testing.conformance import (
    Rule,
    await_end,
    coord_checks,
    lent_session_checks,
    queue_checks,
    restore_checks,
)
from support.engine_fixtures import mariadb_database
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")


class SqlLab:
    """Every handle has connections of its own."""

    ttl = 1.2
    patience = 20.0

    def __init__(self, url: str) -> None:
        self._place = SqlPlace(url)

    def open(self) -> Stores:
        return self._place.open()

    def let_expire(self, session: Session) -> None:
        """Its time may be over before anybody has been in touch for that long: wait for both."""
        stores = self.open()
        watch = stores.coord.watch("lab/")
        await_end(stores, session, self.patience)
        while self._place.query(f"SELECT 1 FROM pxrs_sessions WHERE id = '{session.id}'"):
            watch.wait(0.1)
        watch.close()

    def close(self) -> None:
        self._place.close()


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """One for all checks: to make the tables takes longer than most of them."""
    with mariadb_database() as url:
        yield url


@pytest.fixture
def lab(database: str) -> Iterator[SqlLab]:
    lab = SqlLab(database)
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    coord_checks() + lent_session_checks() + queue_checks() + restore_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: SqlLab) -> None:
    check(lab)
