"""CoordStore on SQLite.

`commit` reads what it checks inside `BEGIN IMMEDIATE`, so nothing can change before it
writes. A record of an ended session is treated as absent from the moment the session is over;
its row is deleted later, by the next write that comes across it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress

from pxrs.clock import Clock
from pxrs.errors import PxrsError, SessionLost, StoreBusy
from pxrs.stores.api import failed_checks, validate_commit, validate_limit
from pxrs.stores.sqlite.change_counters import key_slots, slot
from pxrs.stores.sqlite.change_listener import ChangeListener, SlotWatch
from pxrs.stores.sqlite.database import Database, Turn, in_chunks
from pxrs.stores.sqlite.lent_sessions import LentSessions
from pxrs.stores.sqlite.sessions import FileSession, SessionFiles
from pxrs.stores.timed_sessions import AdoptedSession
from pxrs.types import (
    Check,
    Committed,
    Conflict,
    Delete,
    Limits,
    Put,
    Versioned,
    Write,
)

_LIMITS = Limits(operations=10_000, value_bytes=1_100_000)
_COLUMNS = "key, value, version, session"
_LAST = chr(0x10FFFF)
# Not REPLACE, which would delete the row and its entry in the index, and make both anew.
_PUT = """INSERT INTO pxrs_coord VALUES {rows} ON CONFLICT (key) DO UPDATE
    SET value = excluded.value, version = excluded.version, session = excluded.session"""
_SWEEP_EVERY = 10.0
# How long to wait for the writer before looking whether the commit must give way.
_LOOK_ROUND = 0.1

_Row = tuple[str, bytes, int, str | None]


class SqliteCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(
        self, database: Database, sessions: SessionFiles, changes: ChangeListener, clock: Clock
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._changes = changes
        self._mine: dict[str, FileSession] = {}
        self._lent = LentSessions(sessions, clock, lambda name: self._remove_rows([name]))
        self._clock = clock
        self._next_sweep = 0.0
        database.origin.on_fork(self._forget_sessions)

    def get(self, key: str) -> Versioned | None:
        with self._database.reading() as connection:
            rows = _rows_of(connection, [key])
            return next(iter(self._as_of_now(connection, rows)), None)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        found: list[Versioned] = []
        with self._database.reading() as connection:
            while True:
                rows = _page(connection, prefix, after, limit)
                found.extend(self._as_of_now(connection, rows))
                if limit is None or len(rows) < limit or len(found) >= limit:
                    return found[:limit]
                after = rows[-1][0]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, self.limits)
        return self._database.write(lambda turn: self.apply(turn, checks, writes))

    def commit_unless(
        self, checks: Sequence[Check], writes: Sequence[Write], wanted: Callable[[], bool]
    ) -> Committed | Conflict:
        """See `pxrs.stores.api.GivesWay`."""
        validate_commit(checks, writes, self.limits)
        left = self._database.busy_timeout
        while True:
            patience = min(left, _LOOK_ROUND)
            left -= patience
            try:
                return self._database.write(lambda turn: self.apply(turn, checks, writes), patience)
            except StoreBusy:
                if left <= 0 or wanted():
                    raise

    def apply(
        self, turn: Turn, checks: Sequence[Check], writes: Sequence[Write]
    ) -> Committed | Conflict:
        """`commit` inside the caller's write transaction."""
        conflict = self._failed_checks(turn.connection, checks)
        if conflict:
            return Conflict(conflict)
        self._refuse_dead_sessions(writes)
        for write in writes:
            turn.slots |= key_slots(write.key)
        return Committed(_write_rows(turn.connection, writes))

    def watch(self, *where: str) -> SlotWatch:
        return self._changes.watch(frozenset(map(slot, where)), sessions=True, silent=False)

    def now_ms(self) -> int:
        """See `pxrs.stores.api.TellsTime`: all processes are on one host, and share its clock."""
        return self._clock.wall_ms()

    def session(self, ttl: float) -> FileSession:
        self._database.check_open()
        self._sweep()
        session = self._sessions.open(ttl, self._session_ended)
        self._mine[session.id] = session
        return session

    def lend(self, ttl: float) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        self._database.check_open()
        self._sweep()
        return self._lent.lend(ttl)

    def adopt(self, session: str) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        self._database.check_open()
        return self._lent.adopt(session)

    def is_alive(self, session: str) -> bool:
        """Whether the session lives, for code that holds items in its name.

        This process's own sessions need no look at their file: until their deadline no other
        process has ended them.
        """
        mine = self._mine.get(session)
        if mine is not None and mine.remaining() > 0:
            return True
        return self._sessions.alive(session)

    def close(self) -> None:
        for session in list(self._mine.values()):
            session.close()
        self._sessions.close()

    def _as_of_now(
        self, connection: sqlite3.Connection, rows: Sequence[_Row]
    ) -> Sequence[Versioned]:
        """Filter out the records of ended sessions, after reading the rows of those once more.

        Such a row may have been replaced while its session still lived: then the record was never
        absent.
        """
        while True:
            living = self._living(rows)
            if len(living) == len(rows):
                return living
            ended = {row[0] for row in rows} - {record.key for record in living}
            again = {row[0]: row for row in _rows_of(connection, sorted(ended))}
            latest = [again.get(row[0]) if row[0] in ended else row for row in rows]
            if latest == rows:
                return living
            rows = [row for row in latest if row is not None]

    def _living(self, rows: Sequence[_Row]) -> Sequence[Versioned]:
        alive: dict[str | None, bool] = {None: True}
        for row in rows:
            if row[3] not in alive:
                alive[row[3]] = self._sessions.alive(str(row[3]))
        return [Versioned(*row) for row in rows if alive[row[3]]]

    def _failed_checks(
        self, connection: sqlite3.Connection, checks: Sequence[Check]
    ) -> dict[str, Versioned | None]:
        if not checks:
            return {}
        rows = _rows_of(connection, [check.key for check in checks])
        found = {record.key: record for record in self._living(rows)}
        return failed_checks(checks, found)

    def _refuse_dead_sessions(self, writes: Sequence[Write]) -> None:
        for name in {write.session for write in writes if isinstance(write, Put)} - {None}:
            if not self._sessions.alive(str(name)):
                raise SessionLost(f"session {name} is over; open a new one and start again")

    def _sweep(self) -> None:
        """Remove what dead processes have left. The cost of a look grows with the sessions."""
        now = self._clock.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY
        self._sessions.sweep_unborn()
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT DISTINCT session FROM pxrs_coord WHERE session IS NOT NULL"
            ).fetchall()
        self._remove_rows([name for (name,) in rows if not self._sessions.alive(name)])

    def _session_ended(self, session: FileSession) -> None:
        self._mine.pop(session.id, None)
        self._remove_rows([session.id])

    def _remove_rows(self, sessions: Sequence[str]) -> None:
        """Remove the rows of ended sessions.

        No reader sees them any more: so this neither waits for the writer nor raises an error.
        """
        if sessions:
            with suppress(PxrsError):
                self._database.write(lambda turn: _delete_rows(turn, sessions), patience=0.0)

    def _forget_sessions(self) -> None:
        for session in list(self._mine.values()):
            session.forget()
        self._sessions.forget()


def _rows_of(connection: sqlite3.Connection, keys: Sequence[str]) -> list[_Row]:
    rows: list[_Row] = []
    for some in in_chunks(keys):
        marks = ",".join("?" * len(some))
        rows += connection.execute(
            f"SELECT {_COLUMNS} FROM pxrs_coord WHERE key IN ({marks})", some
        ).fetchall()
    return rows


def _page(
    connection: sqlite3.Connection, prefix: str, after: str | None, limit: int | None
) -> list[_Row]:
    beyond = max(after or "", prefix)
    compare = ">" if after is not None and after >= prefix else ">="
    return connection.execute(
        f"SELECT {_COLUMNS} FROM pxrs_coord WHERE key {compare} ? AND key <= ? "
        "ORDER BY key LIMIT ?",
        (beyond, prefix + _LAST, -1 if limit is None else limit),
    ).fetchall()


def _write_rows(connection: sqlite3.Connection, writes: Sequence[Write]) -> dict[str, int]:
    puts = [write for write in writes if isinstance(write, Put)]
    deletes = [write.key for write in writes if isinstance(write, Delete)]
    for some in in_chunks(deletes):
        marks = ",".join("?" * len(some))
        connection.execute(f"DELETE FROM pxrs_coord WHERE key IN ({marks})", some)
    if not puts:
        return {}
    revision: int = connection.execute(
        "UPDATE pxrs_meta SET value = value + 1 WHERE name = 'revision' RETURNING value"
    ).fetchone()[0]
    for some_puts in in_chunks(puts):
        values: list[object] = []
        for put in some_puts:
            values += (put.key, put.value, revision, put.session)
        rows = ",".join(["(?,?,?,?)"] * len(some_puts))
        connection.execute(_PUT.format(rows=rows), values)
    return dict.fromkeys((put.key for put in puts), revision)


def _delete_rows(turn: Turn, sessions: Sequence[str]) -> None:
    for some in in_chunks(sessions):
        marks = ",".join("?" * len(some))
        turn.connection.execute(f"DELETE FROM pxrs_coord WHERE session IN ({marks})", some)
