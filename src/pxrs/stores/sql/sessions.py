"""Sessions: rows judged by the database's clock.

Why a verdict can't be taken back: who reads judges by when its statement began, and sees all
that was committed before that. Who renews locks the row first and judges by when the next
statement began, which is later. So a session that anybody has seen expired is not renewed.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import Connection

from pxrs.clock import Clock
from pxrs.errors import InvalidRequest, PxrsError, SessionLost
from pxrs.stores.sql import statements as sql
from pxrs.stores.sql.database import Database


class Sessions:
    """The sessions that this process holds, and the end of those of others."""

    def __init__(self, database: Database, clock: Clock, on_ended: Callable[[], None]) -> None:
        self._database = database
        self._clock = clock
        self._on_ended = on_ended
        self._held: set[SqlSession] = set()
        self._holder = f"{socket.gethostname()}:{os.getpid()}"[:200]

    def open(self, ttl: float) -> SqlSession:
        if not 0.05 <= ttl <= 86_400:
            raise InvalidRequest(f"a session of {ttl} s; 0.05 s to a day can be had")
        name = secrets.token_hex(12)
        sent = self._clock.monotonic()
        values = {"new_id": name, "seconds": ttl, "length": ttl, "new_holder": self._holder}
        self._database.write(lambda connection: connection.execute(sql.OPEN, values))
        session = SqlSession(self, self._clock, name, ttl, sent)
        self._held.add(session)
        return session

    def renew(self, name: str) -> bool:
        """Whether it was renewed; false if it is over."""

        def work(connection: Connection) -> bool:
            connection.execute(sql.LOCK_SESSION, {"one": name}).all()
            return connection.execute(sql.RENEW, {"one": name}).rowcount == 1

        return self._database.write(work)

    def end(self, session: SqlSession) -> None:
        self._held.discard(session)
        self._database.write(lambda connection: _end(connection, [session.id]))
        self._on_ended()

    def reap(self) -> None:
        """End the sessions that are past their time, with everything written with them."""

        def work(connection: Connection) -> bool:
            ids = connection.execute(sql.LOCK_EXPIRED).scalars().all()
            return _end(connection, ids) if ids else False

        if self._database.write(work):
            self._on_ended()

    def close(self) -> None:
        for session in list(self._held):
            with suppress(PxrsError):
                session.close()


def _end(connection: Connection, ids: Sequence[str]) -> bool:
    """Whether there was such a session."""
    connection.execute(sql.LOCK_SESSIONS, {"ids": ids}).all()
    if not connection.execute(sql.END, {"ids": ids}).rowcount:
        return False
    connection.execute(sql.DELETE_BOUND, {"ids": ids})
    connection.execute(sql.RAISE_BOTH)
    return True


class SqlSession:
    """See `pxrs.stores.api.Session`."""

    def __init__(
        self, sessions: Sessions, clock: Clock, name: str, ttl: float, sent: float
    ) -> None:
        self.id = name
        self.ttl = ttl
        self._sessions = sessions
        self._clock = clock
        self._deadline = sent + ttl
        self._over = self._ended = False
        self._renewing = threading.Lock()

    def renew(self) -> None:
        with self._renewing:
            sent = self._clock.monotonic()
            if self.remaining() > 0 and self._sessions.renew(self.id):
                self._deadline = sent + self.ttl
                return
        with suppress(PxrsError):
            self.close()
        raise SessionLost(f"session {self.id} expired or was ended; open a new one")

    def remaining(self) -> float:
        return 0.0 if self._over else max(0.0, self._deadline - self._clock.monotonic())

    def close(self) -> None:
        self._over = True
        if not self._ended:
            self._sessions.end(self)
            self._ended = True
