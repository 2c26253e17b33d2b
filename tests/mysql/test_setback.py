"""The server's clock is set back. What sessions make of it stands in `test_sessions.py`."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from pxrs.stores.mysql.stores import SqlStores
from support.setback import check_items
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")


def test_items_wait_on(place: SqlPlace) -> None:
    behind = 0

    def shift(connection: Any, record: Any, proxy: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET timestamp = UNIX_TIMESTAMP(SYSDATE(6)) - {behind}")

    def set_clock(back: int) -> None:
        nonlocal behind
        behind = back

    def opened() -> SqlStores:
        stores = place.open()
        for engine in stores.coord.database._engines:
            event.listen(engine, "checkout", shift)
        return stores

    check_items(opened, set_clock)
