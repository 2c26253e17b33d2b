"""What tests of PostgreSQL share."""

from __future__ import annotations

from typing import Any

import psycopg

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.stores.api import LogStore, Session
from pxrs.stores.postgres.schema import DEFAULT_SCHEMA
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance import FailingAppend, await_end
from support.failing_appends import CutAppends, Fate
from support.proxy import Proxy


class PostgresLab:
    """An empty schema; every handle is opened as another process would.

    `channel`: notifications go there and nobody hears them.
    """

    # On a busy machine half of it can pass between two statements, if it is much shorter.
    ttl = 0.8
    patience = 10.0

    def __init__(self, url: str, schema: str = DEFAULT_SCHEMA, channel: str | None = None) -> None:
        self._url = url
        self._schema = schema
        self._channel = channel
        self._opened: list[PostgresStores] = []
        self._proxy: Proxy | None = None

    def open(self, clock: Clock = SYSTEM_CLOCK) -> PostgresStores:
        stores = PostgresStores(self._url, schema=self._schema, channel=self._channel, clock=clock)
        self._opened.append(stores)
        return stores

    @property
    def failing_appends(self) -> list[FailingAppend]:
        way, _, database = self._url.rpartition("/")
        self._proxy = proxy = Proxy(int(way.rpartition(":")[2]))
        url = f"postgresql://postgres@{proxy.address}/{database}"

        def opened() -> LogStore:
            self._opened.append(PostgresStores(url, schema=self._schema))
            return self._opened[-1].log

        return CutAppends(proxy, opened).ways(
            (Fate.ARRIVES, 0), (Fate.LOST, 0), (Fate.ARRIVES, 1), (Fate.LOST, 1)
        )

    def let_expire(self, session: Session) -> None:
        """Its time may be over before anybody has been in touch for that long: wait for both."""
        stores = self.open()
        watch = stores.coord.watch("lab/")
        await_end(stores, session, self.patience)
        row = f"SELECT FROM {self._schema}.pxrs_sessions WHERE id = %s"
        while query(self._url, row, session.id):
            watch.wait(0.1)
        watch.close()

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
        if self._proxy is not None:
            self._proxy.close()


class EmptiedLab(PostgresLab):
    """A schema that many labs use, one after the other: to make it takes longer than a check.

    `broom` empties it, for all of them: one connection that knows the tables by then.
    """

    def __init__(
        self, url: str, broom: psycopg.Connection[Any], channel: str | None = None
    ) -> None:
        super().__init__(url, channel=channel)
        self._broom = broom

    def close(self) -> None:
        super().close()
        tables = self._broom.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename <> 'pxrs_meta'",
            (self._schema,),
        ).fetchall()
        emptied = "; ".join(f"DELETE FROM {self._schema}.{name}" for (name,) in tables)
        self._broom.execute(emptied.encode())


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Rows of one statement on a connection of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description is not None else []
