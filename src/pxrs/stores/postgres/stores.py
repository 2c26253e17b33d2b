"""The stores of a `postgresql://` URL."""

from __future__ import annotations

from typing import Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.stores.findings import Finding
from pxrs.stores.postgres.atomic import PostgresAtomic
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.coord import PostgresCoord
from pxrs.stores.postgres.database import Database
from pxrs.stores.postgres.log import PostgresLog
from pxrs.stores.postgres.queues.store import PostgresQueues
from pxrs.stores.postgres.schema import DEFAULT_SCHEMA
from pxrs.stores.postgres.sessions import Sessions


class PostgresStores:
    """See `pxrs.stores.api.Stores`. `channel`: where to send notifications, if not to all."""

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        connections: int = 8,
        busy_timeout: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
        url: str | None = None,
        channel: str | None = None,
    ) -> None:
        self.url = url or conninfo
        self.database = Database(
            conninfo, schema, connections=connections, busy_timeout=busy_timeout
        )
        self._changes = ChangeListener(self.database, clock, channel)
        self._sessions = Sessions(
            self.database, clock, self._changes.observation, self._changes.guard
        )
        self.coord = PostgresCoord(self.database, self._sessions, self._changes)
        self.log = PostgresLog(self.database, self._changes)
        self.queues = PostgresQueues(self.database, self._changes, clock)

    def atomic(self, connection: Any = None) -> PostgresAtomic:
        self.database.check_open()
        return PostgresAtomic(
            self.database,
            self.coord,
            self.log,
            self.queues,
            self._changes,
            self._sessions,
            connection,
        )

    def findings(self) -> list[Finding]:
        """Return the findings about the engine."""
        from pxrs.stores.postgres.doctor import findings

        return findings(self.database)

    def close(self) -> None:
        self.coord.close()
        self._changes.close()
        self.log.close()
        self.database.close()
