"""The server's clock is set back. What sessions make of it stands in `test_sessions.py`."""

from __future__ import annotations

from typing import Any

import pytest

from pxrs.stores.mysql.database import _Pool
from pxrs.stores.mysql.stores import SqlStores
from support.setback import check_items
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")


def test_items_wait_on(place: SqlPlace) -> None:
    behind = 0

    class Shifted(_Pool):
        """On each of its connections the clock is so far behind."""

        def _take(self) -> Any:
            driver = super()._take()
            with driver.cursor() as cursor:
                cursor.execute(f"SET timestamp = UNIX_TIMESTAMP(SYSDATE(6)) - {behind}")
            return driver

    def set_clock(back: int) -> None:
        nonlocal behind
        behind = back

    def opened() -> SqlStores:
        stores = place.open()
        database = stores.coord.database
        for pool in (database._writers, database._readers):
            pool.__class__ = Shifted
        return stores

    check_items(opened, set_clock)
