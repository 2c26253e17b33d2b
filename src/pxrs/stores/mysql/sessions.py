"""Sessions: rows judged by the database's clock.

A session is alive while its row exists. Ending it deletes the row and everything written with
it, in one transaction. Why a verdict can't be taken back: renewing locks the row, and counts
only if its time is not over then; ending by time locks it too, and looks again. One of the two is
first.

Which process may end the session of another one, and when, is decided in `pxrs.stores.observer`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pxrs.clock import Clock
from pxrs.errors import PxrsError, SessionLost
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.schema import IDENTITY
from pxrs.stores.observer import Observer, Suspect
from pxrs.stores.rows import next_step
from pxrs.stores.timed_sessions import (
    AdoptedSession,
    TimedSession,
    lent_name,
    require_lent,
    require_ttl,
    this_process,
)


class Sessions:
    """Holds the sessions of this process, and ends those of others that `observer` finds over.

    `on_ended` is called after any of them has ended.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self.clock = clock
        self.observer = Observer(clock)
        self.on_ended: Callable[[], None] = lambda: None
        self._held: dict[str, TimedSession] = {}
        self._holder = this_process()[:200]

    def open(self, ttl: float) -> TimedSession:
        require_ttl(ttl)
        name = secrets.token_hex(12)
        sent = self.clock.monotonic()
        self._write_row(name, ttl)
        session = TimedSession(
            name,
            ttl,
            sent,
            self.clock,
            renew=partial(self._renew, name),
            end=partial(self._end, name),
            holds=lambda: not self._database.same.is_lost,
        )
        self._held[name] = session
        return session

    def lend(self, ttl: float) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        require_ttl(ttl)
        name, sent = lent_name(), self.clock.monotonic()
        self._write_row(name, ttl)
        return self._adopted(name, sent)

    def _write_row(self, name: str, ttl: float) -> None:
        """Open the session in the store that this handle knows, and in no other.

        All sessions end with a database that is dropped, but not the connections to it: they lead
        to the next one of its name.
        """

        def work(connection: Connection) -> None:
            self._database.same.compare(connection.value(IDENTITY) or "")
            connection.run(sql.OPEN, id=name, ttl=ttl, holder=self._holder)

        self._database.write(work)

    def adopt(self, name: str) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        require_lent(name)
        return self._adopted(name, self.clock.monotonic())

    def _adopted(self, name: str, sent: float) -> AdoptedSession:
        row = LentRow(self._database, name)
        if not row.adopt():
            raise SessionLost(f"session {name} is over; open a new one")
        return AdoptedSession(
            name,
            row.ttl,
            sent,
            self.clock,
            renew=row.renew,
            end=partial(self._end, name),
            end_unless_adopted=lambda: self.on_ended() if row.end_unless_adopted() else None,
        )

    def _renew(self, name: str) -> bool:
        def work(connection: Connection) -> bool:
            connection.rows(sql.LOCK_SESSION, id=name)
            return connection.run(sql.RENEW, id=name) == 1

        return self._database.write(work)

    def _end(self, name: str) -> None:
        self._held.pop(name, None)
        if self._database.same.is_lost:
            return
        self._database.write(lambda connection: _end(connection, [name]))
        self.on_ended()

    def look_if_due(self) -> bool:
        """Look, unless another thread just did; returns whether any session ended."""
        return self.observer.is_due and self.look()

    def look(self) -> bool:
        """End the sessions that are over; returns whether there were any."""
        sent = self.clock.monotonic()
        try:
            found = self._database.read(sql.SUSPECTS)
        except PxrsError:
            self.observer.out_of_touch()
            raise
        over = list(self.observer.judge((Suspect(*row) for row in found), sent))
        ended = bool(over) and self._database.write(lambda connection: _end_late(connection, over))
        if ended:
            self.on_ended()
        return ended

    def close(self) -> None:
        for session in list(self._held.values()):
            with suppress(PxrsError):
                session.close()


class LentRow:
    """The row of a lent session, and the name of this handle."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name
        self._mine = {"id": name, "holder": secrets.token_hex(12)}
        self.ttl = 0.0

    def adopt(self) -> bool:
        """Write this handle's name into it and renew it; false if it is over."""
        return self._database.write(lambda connection: self._renewed(connection, sql.ADOPT))

    def renew(self) -> bool:
        """Extend it by one TTL; false if it is over, or another handle has adopted it."""
        return self._database.write(lambda connection: self._renewed(connection, sql.RENEW_LENT))

    def _renewed(self, connection: Connection, statement: str) -> bool:
        connection.rows(sql.LOCK_SESSION, id=self._name)
        if connection.run(statement, **self._mine) != 1:
            return False
        self.ttl = float(connection.value(sql.TTL, id=self._name))
        return True

    def end_unless_adopted(self) -> bool:
        """End it if this handle has adopted it last; returns whether it did."""

        def work(connection: Connection) -> bool:
            found = connection.rows(sql.LOCK_HELD, **self._mine)
            return bool(found) and _end(connection, [self._name])

        return self._database.write(work)


def _end_late(connection: Connection, ids: list[str]) -> bool:
    """End those of the sessions that are still suspects; returns whether there were any."""
    over = connection.rows_in(sql.LOCK_SUSPECTS, ids=ids)
    return bool(over) and _end(connection, [row[0] for row in over])


def _end(connection: Connection, ids: list[str]) -> bool:
    """End the sessions, and delete what is bound to them; returns whether there were any."""
    connection.rows_in(sql.LOCK_SESSIONS, ids=ids)
    if not connection.run_in(sql.END, ids=ids):
        return False
    connection.run_in(sql.DELETE_BOUND, ids=ids)
    connection.run(sql.RAISE_BOTH, step=next_step())
    return True
