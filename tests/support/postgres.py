"""What tests of PostgreSQL share."""

from __future__ import annotations

from typing import Any

import psycopg

from pxrs.stores.api import Session
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance import await_end


class PostgresLab:
    """An empty database; every handle is opened as another process would.

    `channel`: notifications go there and nobody hears them.
    """

    # On a busy machine half of it can pass between two statements, if it is much shorter.
    ttl = 0.8
    patience = 10.0

    def __init__(self, url: str, channel: str | None = None) -> None:
        self._url = url
        self._channel = channel
        self._opened: list[PostgresStores] = []

    def open(self) -> PostgresStores:
        stores = PostgresStores(self._url, channel=self._channel)
        self._opened.append(stores)
        return stores

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Rows of one statement on a connection of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description is not None else []
