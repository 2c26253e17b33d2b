"""Sessions: rows judged by the server's clock, with an advisory lock that shows a death at once.

A session is alive while its row exists; ending it deletes the row and everything written
with it, in one transaction. Why a verdict can't be taken back:

- Renewing is one statement on the row, conditional on its time not being over. Ending by time is
  one statement too, which looks at the row again once it has locked it. One of the two is first.
- The lock is taken on a connection of this process before the row is inserted, so a free lock means
  that the connection is closed. This does not hold after a restart of the server, which frees every
  lock, nor behind a pooler, whose connections belong to the pooler. Then only the clock counts. The
  same goes for sessions that are lent, which outlive the process: they have no lock.
- Which process may end the session of another one by its time, and when, is decided in
  `pxrs.stores.observer`.

The process itself notices its closed connection, too, from its own socket, and counts the session
as over.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psycopg

from pxrs.clock import Clock
from pxrs.errors import PxrsError, SessionLost, StoreUnavailable
from pxrs.stores.observer import Observer, Suspect
from pxrs.stores.postgres.database import Database, Pg, Row, hang_up, is_fit, run
from pxrs.stores.postgres.failures import DRIVER_ERRORS, translate
from pxrs.stores.postgres.functions import SUSPECTS
from pxrs.stores.timed_sessions import (
    OF_PROCESS,
    AdoptedSession,
    TimedSession,
    lent_name,
    require_lent,
    require_ttl,
    this_process,
)

_OPEN = """INSERT INTO @.pxrs_sessions
    SELECT %b::text, %b::float8, clock_timestamp() + %b::float8 * interval '1 second', lock,
        pg_postmaster_start_time(), %b::text
    FROM (SELECT %b::int8 AS lock) l WHERE (lock IS NULL OR pg_try_advisory_lock(lock))
        AND coalesce((SELECT value FROM @.pxrs_meta WHERE name = 'id'), '') = %b
    RETURNING 1"""
_RENEW = """UPDATE @.pxrs_sessions SET deadline = clock_timestamp() + ttl * interval '1 second'
    WHERE id = %b AND deadline > clock_timestamp() RETURNING 1"""
# The owner of a lent session also names the handle that has adopted it last.
_ADOPT = """UPDATE @.pxrs_sessions
    SET deadline = clock_timestamp() + ttl * interval '1 second', owner = %b
    WHERE id = %b AND deadline > clock_timestamp() RETURNING ttl"""
_RENEW_LENT = f"{_RENEW.removesuffix('RETURNING 1')} AND owner = %b RETURNING 1"
_END_UNLESS_ADOPTED = """SELECT @.pxrs_end(ARRAY(
    SELECT id FROM @.pxrs_sessions WHERE id = %b AND owner = %b FOR UPDATE))"""
_REAP = "SELECT @.pxrs_reap(%s::text[], %s::text[])"
_UNLOCK = "SELECT pg_advisory_unlock(%b::int8)"
_END = "SELECT @.pxrs_end(%s::text[])"

Statement = Callable[[str, tuple[object, ...]], list[Row]]


class Observation:
    """Looks at the sessions of others, and ends those whose process died or whose time is over."""

    def __init__(
        self, database: Database, clock: Clock, on_ended: Callable[[list[str]], None]
    ) -> None:
        self._database = database
        self._clock = clock
        self.on_ended = on_ended
        self.observer = Observer(clock)

    def look_if_due(self) -> bool:
        """Look, unless another thread just did; returns whether any session ended."""
        if not self.observer.is_due:
            return False
        return self.look(self._database.read, self._database.write)

    def look(self, read: Statement, write: Statement) -> bool:
        """Find the sessions that are over and end them; returns whether there were any."""
        sent = self._clock.monotonic()
        try:
            (answer,) = read(f"SELECT {SUSPECTS}", ())
        except BaseException:
            self.observer.out_of_touch()
            raise
        return self.judge(answer, sent, write)

    def judge(self, answer: Row, sent: float, write: Statement) -> bool:
        """End the sessions that are over by this answer to a query that was sent at `sent`."""
        server, found = answer
        suspects, unlocked = _read(found)
        judged = self.observer.judge(suspects, sent, server)
        if not unlocked and not judged:
            return False
        self.on_ended([row[0] for row in write(_REAP, (unlocked, judged))])
        return True


def _read(found: str | None) -> tuple[list[Suspect], list[str]]:
    """Splits sessions into those to judge by time, and those whose connection is closed."""
    rows = json.loads(found) if found else []
    suspects = [Suspect(*row[:4]) for row in rows if not row[4]]
    return suspects, [row[0] for row in rows if row[4]]


class Anchor:
    """The connection that holds the locks of this process's sessions: they end with it."""

    def __init__(self, connection: Pg) -> None:
        self.connection = connection
        self.lost = False

    @property
    def holds(self) -> bool:
        self.lost = self.lost or not is_fit(self.connection)
        return not self.lost

    def drop(self, database: Database) -> None:
        """Close the connection, but not while a thread waits for an answer on it.

        That thread waits for a socket by its number, which the next connection may get: then it
        would wait for ever.
        """
        self.lost = True
        if not self.connection.lock.acquire(blocking=False):
            with suppress(OSError, psycopg.Error):
                hang_up(self.connection)
            self.connection.lock.acquire()
        try:
            database.drop(self.connection)
        finally:
            self.connection.lock.release()


class Sessions:
    """The sessions that this process holds."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        observation: Observation,
        on_open: Callable[[Anchor | None], None],
    ) -> None:
        self._database = database
        self._clock = clock
        self.observation = observation
        self._on_open = on_open
        self._lock = threading.Lock()
        self._anchor: Anchor | None = None
        self._held: dict[str, TimedSession] = {}
        self._owner = this_process()
        database.origin.on_fork(self._abandon)

    @property
    def shortest_ttl(self) -> float | None:
        """The shortest TTL of these sessions."""
        return min((session.ttl for session in list(self._held.values())), default=None)

    def open(self, ttl: float) -> TimedSession:
        """Start a session of this process."""
        require_ttl(ttl)
        self._database.check_open()
        name = secrets.token_hex(12)
        anchor = self._anchored()
        lock = None if anchor is None else secrets.randbits(62)
        sent = self._clock.monotonic()
        store = self._database.store_id
        if not self._write(anchor, _OPEN, (name, ttl, ttl, self._owner, lock, store)):
            self._refuse_another()
            raise StoreUnavailable("an advisory lock could not be taken; try again")
        session = self._held[name] = TimedSession(
            name,
            ttl,
            sent,
            self._clock,
            renew=partial(self._renew, name, anchor),
            end=partial(self._end, name, anchor, lock),
            holds=lambda: not self._database.same.is_lost and (anchor is None or anchor.holds),
        )
        self._on_open(anchor)
        return session

    def lend(self, ttl: float) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        require_ttl(ttl)
        self._database.check_open()
        name = lent_name()
        sent = self._clock.monotonic()
        store = self._database.store_id
        if not self._database.write(_OPEN, (name, ttl, ttl, self._owner, None, store)):
            self._refuse_another()
        return self._adopted(name, sent)

    def _refuse_another(self) -> None:
        """A schema that was dropped ends no connection: only a new session finds another store."""
        connection = self._database.take()
        try:
            self._database.same.compare(self._database.read_store_id(connection))
        except DRIVER_ERRORS as error:
            raise translate(error, self._database.place) from error
        finally:
            self._database.give_back(connection)

    def adopt(self, name: str) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        require_lent(name)
        self._database.check_open()
        return self._adopted(name, self._clock.monotonic())

    def _adopted(self, name: str, sent: float) -> AdoptedSession:
        mine = f"{self._owner}{OF_PROCESS}{secrets.token_hex(8)}"
        found = self._database.write(_ADOPT, (mine, name))
        if not found:
            raise SessionLost(f"session {name} is over; open a new one")
        return AdoptedSession(
            name,
            found[0][0],
            sent,
            self._clock,
            renew=lambda: bool(self._database.write(_RENEW_LENT, (name, mine))),
            end=lambda: self._ended(self._database.write(_END, ([name],))),
            end_unless_adopted=lambda: self._ended(
                self._database.write(_END_UNLESS_ADOPTED, (name, mine))
            ),
        )

    def _ended(self, words: list[Row]) -> None:
        self.observation.on_ended([row[0] for row in words])

    def _renew(self, name: str, anchor: Anchor | None) -> bool:
        return bool(self._write(anchor, _RENEW, (name,)))

    def _end(self, name: str, anchor: Anchor | None, lock: int | None) -> None:
        self._held.pop(name, None)
        if self._database.same.is_lost:
            return
        self._ended(self._database.write(_END, ([name],)))
        if anchor is not None and anchor.holds:
            with suppress(psycopg.Error):
                run(anchor.connection, _UNLOCK, (lock,))

    def close(self) -> None:
        """End all of them, if the server can be reached."""
        for session in list(self._held.values()):
            with suppress(PxrsError):
                session.close()
        with self._lock:
            anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.drop(self._database)

    def _anchored(self) -> Anchor | None:
        if self._database.pooled:
            return None
        with self._lock:
            if self._anchor is None or not self._anchor.holds:
                if self._anchor is not None:
                    self._anchor.drop(self._database)
                self._anchor = Anchor(self._database.connect())
            return self._anchor

    def _write(
        self, anchor: Anchor | None, statement: str, parameters: tuple[object, ...]
    ) -> list[Row]:
        if anchor is None:
            return self._database.write(statement, parameters)
        try:
            return self._database.run(anchor.connection, statement, parameters)
        except DRIVER_ERRORS as error:
            raise translate(error, self._database.place) from error

    def _abandon(self) -> None:
        self._lock = threading.Lock()
        self.observation.observer.abandon()
        for session in self._held.values():
            session.forget()
        self._held = {}
