"""CoordStore on PostgreSQL. `sql/coord.sql` has what a commit does.

A record of an ended session is deleted with it, in one transaction: a record that can be read is
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pxrs.stores.api import Watch, validate_commit, validate_limit
from pxrs.stores.postgres.arrays import Byteas, Int8s, Texts
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.database import Database, Pg, Row
from pxrs.stores.postgres.functions import CHECK, DELETE, PUT
from pxrs.stores.postgres.sessions import Sessions
from pxrs.stores.timed_sessions import AdoptedSession, TimedSession
from pxrs.stores.wakeups import KEY
from pxrs.types import Check, Committed, Conflict, Limits, Put, Versioned, Write

_LIMITS = Limits(operations=10_000, value_bytes=1_100_000)
_COLUMNS = "key, value, version, session"
_LAST = chr(0x10FFFF)
_GET = f"SELECT {_COLUMNS} FROM @.pxrs_coord WHERE key = %b"
_LIST_AFTER = f"""SELECT {_COLUMNS} FROM @.pxrs_coord
    WHERE key > %b AND key <= %b ORDER BY key LIMIT %s"""
_LIST_FROM = _LIST_AFTER.replace("key >", "key >=")
_COMMIT = """SELECT failed, r_key, r_version, r_place, r_value, r_session FROM @.pxrs_commit(
    %b::text[], %b::int8[], %b::int8[], %b::bytea[], %b::text[], %b::text[])"""
_NOW = "SELECT @.pxrs_now_ms()"
_MOST_PLACES = 100_000


class PostgresCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, database: Database, sessions: Sessions, changes: ChangeListener) -> None:
        self._database = database
        self._sessions = sessions
        self._changes = changes
        # Where the rows are (ctid) that this process has written. A hint: see `pxrs_commit`.
        self._places: dict[str, str] = {}

    def get(self, key: str) -> Versioned | None:
        records = self._living(lambda: self._database.read(_GET, (key,)))
        return records[0] if records else None

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        beyond = max(after or "", prefix)
        statement = _LIST_AFTER if after is not None and after >= prefix else _LIST_FROM
        wanted = (beyond, prefix + _LAST, limit)
        return [*self._living(lambda: self._database.read(statement, wanted))]

    def _living(self, read: Callable[[], Sequence[Row]]) -> Sequence[Versioned]:
        """Return the records that are read, after ending dead sessions if no thread does that."""
        rows = read()
        if any(row[3] is not None for row in rows) and self._sessions.observation.look_if_due():
            rows = read()
        records = [Versioned(*row) for row in rows]
        self._changes.read(records)
        return records

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, self.limits)
        if not checks and not writes:
            return Committed({})
        rows = self._database.write(_COMMIT, self._parameters(checks, writes))
        outcome = self._outcome(rows)
        if isinstance(outcome, Committed):
            self._changes.ring(KEY, [write.key for write in writes])
        return outcome

    def apply(
        self, connection: Pg, checks: Sequence[Check], writes: Sequence[Write]
    ) -> Committed | Conflict:
        """`commit` inside a transaction; the caller that commits must ring."""
        if not checks and not writes:
            return Committed({})
        parameters = self._parameters(checks, writes)
        return self._outcome(self._database.run_inside(connection, _COMMIT, parameters))

    def watch(self, *where: str) -> Watch:
        return self._changes.watch(KEY, where)

    def now_ms(self) -> int:
        """See `pxrs.stores.api.TellsTime`."""
        return int(self._database.read(_NOW)[0][0])

    def session(self, ttl: float) -> TimedSession:
        return self._sessions.open(ttl)

    def lend(self, ttl: float) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self._sessions.lend(ttl)

    def adopt(self, session: str) -> AdoptedSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self._sessions.adopt(session)

    def close(self) -> None:
        self._sessions.close()

    def _parameters(
        self, checks: Sequence[Check], writes: Sequence[Write]
    ) -> tuple[Sequence[object], ...]:
        """One list per parameter of `pxrs_commit`, in the order of the keys."""
        expected = {check.key: check.version for check in checks}
        written = {write.key: write for write in writes}
        rows = []
        for key in sorted(expected.keys() | written.keys()):
            write = written.get(key)
            version = expected.get(key, -1)
            if write is None:
                rows.append((key, CHECK, version, b"", "", ""))
            elif isinstance(write, Put):
                place = self._places.get(key, "")
                rows.append((key, PUT, version, bytes(write.value), write.session or "", place))
            else:
                rows.append((key, DELETE, version, b"", "", ""))
        kinds = (Texts, Int8s, Int8s, Byteas, Texts, Texts)
        return tuple(
            kind(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)
        )

    def _outcome(self, rows: Sequence[Row]) -> Committed | Conflict:
        if rows and rows[0][0]:
            current = {
                key: None if version is None else Versioned(key, value, version, session)
                for _, key, version, _, value, session in rows
            }
            self._changes.read([record for record in current.values() if record is not None])
            return Conflict(current)
        if len(self._places) > _MOST_PLACES:
            self._places.clear()
        self._places.update((row[1], row[3]) for row in rows)
        return Committed({row[1]: row[2] for row in rows})
