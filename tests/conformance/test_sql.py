"""Coordination through SQLAlchemy passes the suite on a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.open import open_stores
from pxrs.testing.conformance import Rule, await_end, coord_checks

pytestmark = pytest.mark.engine("mariadb")


class SqlLab:
    """A database of its own; every handle has connections of its own. Logs are not looked at."""

    ttl = 1.0
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
def lab(mariadb_url: str) -> Iterator[SqlLab]:
    lab = SqlLab(mariadb_url)
    yield lab
    lab.close()


@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: SqlLab) -> None:
    check(lab)
