"""The stores of a `sqlite://` URL."""

from __future__ import annotations

from typing import Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.stores.findings import Finding
from pxrs.stores.sqlite.atomic import SqliteAtomic
from pxrs.stores.sqlite.change_listener import ChangeListener
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database
from pxrs.stores.sqlite.log import SqliteLog
from pxrs.stores.sqlite.queues.store import SqliteQueues
from pxrs.stores.sqlite.sessions import SessionFiles


class SqliteStores:
    """See `pxrs.stores.api.Stores`."""

    def __init__(
        self,
        path: str,
        *,
        durability: str = "full",
        busy_timeout: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
        use_inotify: bool = True,
    ) -> None:
        self.database = Database(path, durability, busy_timeout, clock)
        self.url = f"sqlite:///{self.database.path}"
        try:
            sessions = SessionFiles(self.database.folder, self.database.path, clock)
        except BaseException:
            self.database.close()
            raise
        self._changes = ChangeListener(self.database, sessions, clock, use_inotify)
        self.coord = SqliteCoord(self.database, sessions, self._changes, clock)
        self.log = SqliteLog(self.database, self._changes, clock)
        self.queues = SqliteQueues(self.database, self.coord, self._changes, clock)
        self.database.origin.on_fork(self._changes.abandon)

    def atomic(self, connection: Any = None) -> SqliteAtomic:
        return SqliteAtomic(self.database, self.coord, self.log, self.queues, connection)

    def findings(self) -> list[Finding]:
        """Return the findings about the engine."""
        from pxrs.stores.sqlite.doctor import findings

        return findings(self.database, durability=self.database.durability)

    def close(self) -> None:
        self._changes.close()
        self.coord.close()
        self.log.close()
        self.queues.close()
        self.database.close()
