"""The stores of a `mysql://` or `oracle://` URL: coordination and queues, but no messages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import SqlSettings
from pxrs.stores.api import LogStore
from pxrs.stores.composite import NoLog
from pxrs.stores.findings import Finding
from pxrs.stores.mysql.coord import SqlCoord
from pxrs.stores.mysql.queues.store import SqlQueues

if TYPE_CHECKING:
    from pxrs.stores.mysql.atomic import Alchemy, SqlAtomic


class SqlStores:
    """See `pxrs.stores.api.Stores`. Messages are kept elsewhere."""

    def __init__(self, settings: SqlSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.url = settings.url
        self.coord = SqlCoord(settings, clock)
        self.log = cast(LogStore, NoLog(settings.shown))
        self.queues = SqlQueues(self.coord)
        self._alchemy: Alchemy | None = None
        self._lock = threading.Lock()

    def atomic(self, connection: Any = None) -> SqlAtomic:
        # Only callers' blocks need SQLAlchemy, which takes long to import.
        from pxrs.stores.mysql.atomic import Alchemy, SqlAtomic

        self.coord.database.check_open()
        with self._lock:
            if self._alchemy is None:
                self._alchemy = Alchemy(self.coord.database)
        return SqlAtomic(self.coord, self.queues, self._alchemy, connection)

    def findings(self) -> list[Finding]:
        """Examine the server."""
        from pxrs.stores.mysql.doctor import findings

        return findings(self.coord.database)

    def close(self) -> None:
        self.queues.close()
        self.coord.close()
