"""CoordStore on SQLite.

`commit` reads what it checks inside `BEGIN IMMEDIATE`, so nothing can change before it
writes. A record of an ended session is treated as absent from the moment the session is over;
its row goes later, with the next write that comes across it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from weakref import WeakSet

from pxrs.errors import InvalidRequest, SessionLost, StoreError
from pxrs.stores.api import refuse_session_check, validate_commit
from pxrs.stores.sqlite.control import key_slots, prefix_slot
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.ears import Ears, SlotWatch
from pxrs.stores.sqlite.sessions import FileSession, SessionFiles
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

_LIMITS = Limits(operations=10_000, value_bytes=1_000_000)
_COLUMNS = "key, value, version, session"
_LAST = chr(0x10FFFF)
# Not REPLACE, which would delete the row and its entry in the index, and make both anew.
_PUT = """INSERT INTO pxrs_coord VALUES {rows} ON CONFLICT (key) DO UPDATE
    SET value = excluded.value, version = excluded.version, session = excluded.session"""


class SqliteCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, database: Database, sessions: SessionFiles, ears: Ears) -> None:
        self._database = database
        self._sessions = sessions
        self._ears = ears
        self._held: WeakSet[FileSession] = WeakSet()
        database.on_fork(self._forget_sessions)

    def get(self, key: str) -> Versioned | None:
        with self._database.reading() as connection:
            return self._find(connection, [key]).get(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        if limit is not None and limit < 1:
            raise InvalidRequest(f"a limit of {limit} records; at least 1 is needed")
        found: list[Versioned] = []
        with self._database.reading() as connection:
            while True:
                rows = _page(connection, prefix, after, limit)
                found.extend(self._living(rows))
                if limit is None or len(rows) < limit or len(found) >= limit:
                    return found[:limit]
                after = rows[-1][0]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, self.limits)
        return self._database.write(lambda turn: self.apply(turn, checks, writes))

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

    def watch(self, *prefixes: str) -> SlotWatch:
        slots = frozenset(prefix_slot(prefix) for prefix in prefixes)
        return self._ears.watch(slots, sessions=True)

    def session(self, ttl: float) -> FileSession:
        self._database.check_open()
        self._sessions.sweep_unborn()
        self._sweep_rows()
        session = self._sessions.open(ttl, self._sweep_session)
        self._held.add(session)
        return session

    def close(self) -> None:
        for session in list(self._held):
            session.close()

    def _find(self, connection: sqlite3.Connection, keys: Sequence[str]) -> dict[str, Versioned]:
        marks = ",".join("?" * len(keys))
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM pxrs_coord WHERE key IN ({marks})", keys
        ).fetchall()
        return {record.key: record for record in self._living(rows)}

    def _living(self, rows: Sequence[tuple[str, bytes, int, str | None]]) -> Sequence[Versioned]:
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
        found = self._find(connection, [check.key for check in checks])
        failed: dict[str, Versioned | None] = {}
        for check in checks:
            record = found.get(check.key)
            refuse_session_check(record, check)
            if (record.version if record else 0) != check.version:
                failed[check.key] = record
        return failed

    def _refuse_dead_sessions(self, writes: Sequence[Write]) -> None:
        for name in {write.session for write in writes if isinstance(write, Put)} - {None}:
            if not self._sessions.alive(str(name)):
                raise SessionLost(f"session {name} is over; open a new one and start again")

    def _sweep_rows(self) -> None:
        """Remove the rows of sessions that are over."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT DISTINCT session FROM pxrs_coord WHERE session IS NOT NULL"
            ).fetchall()
        for (name,) in rows:
            if not self._sessions.alive(name):
                self._sweep_session(name)

    def _sweep_session(self, name: str) -> None:
        """Remove the rows of one ended session. Nobody sees them any more, so it may fail."""
        try:
            self._database.write(lambda turn: _delete_session(turn.connection, name))
        except StoreError:
            return

    def _forget_sessions(self) -> None:
        for session in list(self._held):
            session.forget()


def _page(
    connection: sqlite3.Connection, prefix: str, after: str | None, limit: int | None
) -> list[tuple[str, bytes, int, str | None]]:
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
    if deletes:
        marks = ",".join("?" * len(deletes))
        connection.execute(f"DELETE FROM pxrs_coord WHERE key IN ({marks})", deletes)
    if not puts:
        return {}
    revision: int = connection.execute(
        "UPDATE pxrs_meta SET value = value + 1 WHERE name = 'revision' RETURNING value"
    ).fetchone()[0]
    values: list[object] = []
    for put in puts:
        values += (put.key, put.value, revision, put.session)
    rows = ",".join(["(?,?,?,?)"] * len(puts))
    connection.execute(_PUT.format(rows=rows), values)
    return dict.fromkeys((put.key for put in puts), revision)


def _delete_session(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM pxrs_coord WHERE session = ?", (name,))
