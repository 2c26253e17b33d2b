"""CoordStore on SQL: a commit locks what it checks and writes, then checks, then writes.

Rows are locked in one order, sessions before records before the revision, each sorted. Who
meets a deadlock all the same, through somebody else's statements, runs again.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.errors import InvalidRequest, SessionLost
from pxrs.stores.api import Watch, refuse_session_check, validate_commit, validate_limit
from pxrs.stores.findings import Finding
from pxrs.stores.mysql import one_trip
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.change_listener import ChangeListener
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.schema import LONGEST_KEY, reading
from pxrs.stores.mysql.sessions import Observation, Sessions, SqlSession
from pxrs.stores.rows import next_step
from pxrs.types import Check, Committed, Conflict, Delete, Limits, Put, Versioned, Write

_LIMITS = Limits(operations=10_000, value_bytes=1_000_000)
_LAST = chr(0x10FFFF)
# Oracle takes a thousand values in a list.
_CHUNK = 500


class SqlCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, url: str, place: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.database = Database(url, place)
        self.changes = ChangeListener(self.database)
        self._sessions = Sessions(self.database, clock, self.changes.ring_all)
        self.changes.observation = Observation(self.database, clock, self._sessions.end_expired)

    def get(self, key: str) -> Versioned | None:
        rows = self.database.read(sql.GET, key=key)
        return Versioned(*rows[0]) if rows else None

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        beyond = after is not None and after >= prefix
        statement = sql.LIST_AFTER if beyond else sql.LIST_FROM
        if limit is not None:
            statement = statement.limit(limit)
        first = max(after or "", prefix)
        rows = self.database.read(statement, first=first, last=prefix + _LAST)
        return [Versioned(*row) for row in rows]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate(checks, writes)
        self.database.check_open()
        if not checks and not writes:
            return Committed({})
        if self.database.sends_at_once and one_trip.fits(checks, writes):
            revision = one_trip.commit(self.database, checks, writes)
            if revision is not None:
                return self._done(writes, revision)
        outcome = self.database.write(lambda connection: Commit(connection, checks, writes).run())
        if isinstance(outcome, Committed):
            self.changes.ring([write.key for write in writes])
        return outcome

    def _done(self, writes: Sequence[Write], revision: int) -> Committed:
        self.changes.ring([write.key for write in writes])
        puts = (write.key for write in writes if isinstance(write, Put))
        return Committed(dict.fromkeys(puts, revision))

    def watch(self, *prefixes: str) -> Watch:
        self.database.check_open()
        return self.changes.watch(prefixes)

    def session(self, ttl: float) -> SqlSession:
        return self._sessions.open(ttl)

    def findings(self) -> builtins.list[Finding]:
        """What an examination of the engine finds."""
        from pxrs.stores.mysql.doctor import findings

        return findings(self.database)

    def close(self) -> None:
        self.changes.close()
        if self.database.usable:
            self._sessions.close()
        self.database.close()


def validate(checks: Sequence[Check], writes: Sequence[Write]) -> None:
    """Refuse a commit that can't be."""
    validate_commit(checks, writes, _LIMITS)
    for write in writes:
        if len(write.key.encode()) > LONGEST_KEY:
            raise InvalidRequest(f"a key of over {LONGEST_KEY} bytes: {write.key[:50]!r}…")


class Commit:
    """One commit inside a transaction. `latest`: it is the caller's, with a snapshot of its own."""

    def __init__(
        self,
        connection: Connection,
        checks: Sequence[Check],
        writes: Sequence[Write],
        *,
        latest: bool = False,
    ) -> None:
        self._connection = connection
        self._checks = checks
        self._writes = writes
        self._found_sessions = reading(sql.FOUND_SESSIONS, latest=latest)

    def run(self) -> Committed | Conflict:
        self._require_sessions()
        keys = {check.key for check in self._checks} | {write.key for write in self._writes}
        rows = {row[0]: row for row in self._rows(sql.LOCK_RECORDS, "keys", sorted(keys))}
        failed = self._failed(rows)
        if failed:
            return Conflict(failed)
        if not self._writes:
            return Committed({})
        return Committed(self._write(set(rows)))

    def _require_sessions(self) -> None:
        names = {write.session for write in self._writes if isinstance(write, Put)} - {None}
        if not names:
            return
        ids = sorted(str(name) for name in names)
        list(self._rows(sql.LOCK_SESSIONS, "ids", ids))
        living = {row[0] for row in self._rows(sql.LIVING_SESSIONS, "ids", ids)}
        for name in ids:
            if name not in living:
                raise SessionLost(f"session {name} is over; open a new one and start again")

    def _failed(self, rows: dict[str, Any]) -> dict[str, Versioned | None]:
        """The checked records that are not as expected. Those of ended sessions are absent."""
        checked = [rows[check.key] for check in self._checks if check.key in rows]
        bound = sorted({row[3] for row in checked if row[3] is not None})
        living = {row[0] for row in self._rows(self._found_sessions, "ids", bound)}
        found = {row[0]: Versioned(*row) for row in checked if row[3] is None or row[3] in living}
        failed: dict[str, Versioned | None] = {}
        for check in self._checks:
            record = found.get(check.key)
            refuse_session_check(record, check)
            if (record.version if record else 0) != check.version:
                failed[check.key] = record
        return failed

    def _write(self, there: set[str]) -> dict[str, int]:
        puts = [write for write in self._writes if isinstance(write, Put)]
        deletes = [write.key for write in self._writes if isinstance(write, Delete)]
        raised = sql.RAISE_BOTH if deletes else sql.RAISE_REVISION
        self._connection.execute(raised, {"step": next_step()})
        revision: int = self._connection.execute(sql.REVISION).scalar_one()
        for some in _chunks(sorted(deletes)):
            self._connection.execute(sql.DELETE, {"keys": some})
        changed = [
            {"key": p.key, "new_body": p.value, "new_version": revision, "new_session": p.session}
            for p in puts
            if p.key in there
        ]
        made = [
            {"name": p.key, "body": p.value, "version": revision, "session_id": p.session}
            for p in puts
            if p.key not in there
        ]
        if changed:
            self._connection.execute(sql.UPDATE, changed)
        if made:
            self._connection.execute(sql.INSERT, made)
        return dict.fromkeys((put.key for put in puts), revision)

    def _rows(self, statement: Any, name: str, values: Sequence[str]) -> Iterator[Any]:
        for some in _chunks(values):
            yield from self._connection.execute(statement, {name: some}).all()


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
