"""The server's clock is set back. What sessions make of it stands in `test_sessions.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pxrs.stores.postgres.stores import PostgresStores
from support.postgres import query
from support.setback import check_items

pytestmark = pytest.mark.engine("postgres")


def test_items_wait_on(open_stores: Callable[[], PostgresStores], postgres_url: str) -> None:
    def set_clock(back: int) -> None:
        query(
            postgres_url,
            "CREATE OR REPLACE FUNCTION pxrs.pxrs_now_ms() RETURNS int8 LANGUAGE sql VOLATILE AS"
            " $$ SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8"
            f" - {1000 * back} $$",
        )

    check_items(open_stores, set_clock)
