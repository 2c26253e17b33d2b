"""What tests of MariaDB share."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import parse_url, sql_settings
from pxrs.stores.mysql.schema import TABLES
from pxrs.stores.mysql.stores import SqlStores


def open_sql(url: str, clock: Clock = SYSTEM_CLOCK) -> SqlStores:
    """Stores as another process would open them."""
    return SqlStores(sql_settings(parse_url(url)), clock)


class SqlPlace:
    """A database; what is in pxrs' tables goes with it.

    Without TLS: PyMySQL would load all certificates of the system for each connection.
    """

    def __init__(self, url: str) -> None:
        self.url = f"{url}?ssl_disabled=true"
        self.engine = sqlalchemy.create_engine(self.url, poolclass=sqlalchemy.NullPool)
        self._opened: list[SqlStores] = []

    def open(self, url: str | None = None, clock: Clock = SYSTEM_CLOCK) -> SqlStores:
        self._opened.append(open_sql(url or self.url, clock))
        return self._opened[-1]

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """One statement on a connection of its own."""
        with self.engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
        with self.engine.begin() as connection:
            for name in re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", "".join(TABLES)):
                if name not in ("pxrs_meta", "pxrs_identity"):
                    connection.exec_driver_sql(f"DELETE FROM {name}")
