"""What a `mysql://` or `oracle://` URL opens: coordination and queues, but no messages."""

from __future__ import annotations

from typing import Any, cast

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.stores.api import LogStore
from pxrs.stores.composite import NoLog
from pxrs.stores.findings import Finding
from pxrs.stores.mysql.atomic import SqlAtomic
from pxrs.stores.mysql.coord import SqlCoord
from pxrs.stores.mysql.queues.store import SqlQueues


class SqlStores:
    """See `pxrs.stores.api.Stores`. Messages are kept elsewhere."""

    def __init__(self, url: str, place: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.url = url
        self.coord = SqlCoord(url, place, clock)
        self.log = cast(LogStore, NoLog(place))
        self.queues = SqlQueues(self.coord.database, self.coord.changes, clock)

    def atomic(self, connection: Any = None) -> SqlAtomic:
        self.coord.database.check_open()
        return SqlAtomic(self.coord, self.queues, connection)

    def findings(self) -> list[Finding]:
        """What an examination of the engine finds."""
        return self.coord.findings()

    def close(self) -> None:
        self.queues.close()
        self.coord.close()
