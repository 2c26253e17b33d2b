"""CoordStore on SQL: a commit locks what it checks and writes, then checks, then writes.

Rows are locked in one order, sessions before records before the revision, each sorted. A commit
that meets a deadlock all the same, because of other programs' statements, runs again.

On MariaDB and MySQL most commits take one round trip: see `one_trip.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import SqlSettings
from pxrs.errors import InvalidRequest, SessionLost, quoted
from pxrs.stores.api import Watch, failed_checks, validate_commit, validate_limit
from pxrs.stores.mysql import one_trip
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.change_listener import ChangeListener
from pxrs.stores.mysql.connection import Connection, Row
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.schema import LONGEST_KEY
from pxrs.stores.mysql.sessions import Sessions
from pxrs.stores.rows import next_step
from pxrs.stores.timed_sessions import AdoptedSession, TimedSession
from pxrs.stores.wakeups import KEY
from pxrs.types import Check, Committed, Conflict, Delete, Limits, Put, Versioned, Write

_LIMITS = Limits(operations=10_000, value_bytes=1_100_000, key_chars=LONGEST_KEY)
_LAST = chr(0x10FFFF)
_NO_LIMIT = 2**31 - 1


class SqlCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, settings: SqlSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.database = Database(settings)
        self.sessions = Sessions(self.database, clock)
        self.changes = ChangeListener(self.database, self.sessions)
        self.sessions.on_ended = self.changes.ring_all

    def get(self, key: str) -> Versioned | None:
        rows = self.database.read(sql.GET, key=key)
        return _record(rows[0]) if rows else None

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        beyond = after is not None and after >= prefix
        rows = self.database.read(
            sql.LIST_AFTER if beyond else sql.LIST_FROM,
            first=max(after or "", prefix),
            last=prefix + _LAST,
            limit=_NO_LIMIT if limit is None else limit,
        )
        return [_record(row) for row in rows]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate(checks, writes)
        self.database.check_open()
        if not checks and not writes:
            return Committed({})
        outcome: Committed | Conflict | None = None
        if not self.database.is_oracle and one_trip.fits(checks, writes):
            outcome = one_trip.commit(self.database, checks, writes)
        if outcome is None:
            outcome = self.database.write(lambda connection: commit(connection, checks, writes))
        if isinstance(outcome, Committed):
            self.changes.ring(KEY, [write.key for write in writes])
        return outcome

    def watch(self, *where: str) -> Watch:
        self.database.check_open()
        return self.changes.watch(KEY, where)

    def now_ms(self) -> int:
        """See `pxrs.stores.api.TellsTime`."""
        return int(self.database.read(sql.NOW)[0][0])

    def session(self, ttl: float) -> TimedSession:
        return self.sessions.open(ttl)

    def lend(self, ttl: float) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self.sessions.lend(ttl)

    def adopt(self, session: str) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self.sessions.adopt(session)

    def close(self) -> None:
        self.changes.close()
        if self.database.usable:
            self.sessions.close()
        self.database.close()


def validate(checks: Sequence[Check], writes: Sequence[Write]) -> None:
    """Reject a commit that is too large, or has a key that is too long."""
    validate_commit(checks, writes, _LIMITS)
    for write in writes:
        if len(write.key.encode()) > LONGEST_KEY:
            raise InvalidRequest(
                f"key is {len(write.key.encode())} bytes long; the limit is {LONGEST_KEY}: "
                f"{quoted(write.key)}"
            )


def commit(
    connection: Connection,
    checks: Sequence[Check],
    writes: Sequence[Write],
    *,
    latest: bool = False,
) -> Committed | Conflict:
    """One commit inside a transaction. `latest`: the caller's, which may have an old snapshot."""
    _require_sessions(connection, writes)
    keys = sorted({check.key for check in checks} | {write.key for write in writes})
    rows = {row[0]: row for row in connection.rows_in(sql.LOCK_RECORDS, keys=keys)}
    failed = _failed(connection, checks, rows, latest=latest)
    if failed:
        return Conflict(failed)
    return Committed(_write(connection, writes, set(rows)) if writes else {})


def _require_sessions(connection: Connection, writes: Sequence[Write]) -> None:
    puts = [write for write in writes if isinstance(write, Put)]
    ids = sorted({put.session for put in puts if put.session is not None})
    connection.rows_in(sql.LOCK_SESSIONS, ids=ids)
    living = {row[0] for row in connection.rows_in(sql.LIVING_SESSIONS, ids=ids)}
    for name in ids:
        if name not in living:
            raise SessionLost(f"session {name} is over; open a new one and start again")


def _failed(
    connection: Connection, checks: Sequence[Check], rows: dict[str, Row], *, latest: bool
) -> dict[str, Versioned | None]:
    """The checked records that are not as expected. Those of ended sessions are absent."""
    checked = [_record(rows[check.key]) for check in checks if check.key in rows]
    bound = sorted({record.session for record in checked if record.session is not None})
    statement = sql.latest(sql.FOUND_SESSIONS, locking=latest)
    living = {None, *(row[0] for row in connection.rows_in(statement, ids=bound))}
    found = {record.key: record for record in checked if record.session in living}
    return failed_checks(checks, found)


def _write(connection: Connection, writes: Sequence[Write], there: set[str]) -> dict[str, int]:
    puts = [write for write in writes if isinstance(write, Put)]
    deletes = sorted(write.key for write in writes if isinstance(write, Delete))
    connection.run(sql.RAISE_BOTH if deletes else sql.RAISE_REVISION, step=next_step())
    revision: int = connection.value(sql.REVISION)
    connection.run_in(sql.DELETE, keys=deletes)
    rows = [
        {"name": p.key, "body": bytes(p.value), "version": revision, "session_id": p.session}
        for p in puts
    ]
    connection.run_many(sql.UPDATE, [row for row in rows if row["name"] in there])
    connection.run_many(sql.INSERT, [row for row in rows if row["name"] not in there])
    return dict.fromkeys((put.key for put in puts), revision)


def _record(row: Row) -> Versioned:
    """A row as a record. Oracle returns an empty value as NULL."""
    name, body, version, session = row
    return Versioned(name, body or b"", version, session)
