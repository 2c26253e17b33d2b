"""A commit in one round trip, on MariaDB and MySQL: all its statements are sent at once.

What a client would decide between two statements the server decides by a variable: if a check does
not hold, the writes find nothing to do. Where that happens, or a record is made twice at once, the
commit is done again, statement by statement, which finds out what is there. A batch that fails in
the middle never gets to its COMMIT.

Only PyMySQL can send several statements at once; with another driver commits go the long way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pxrs.errors import OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.stores.mysql.database import Database
from pxrs.stores.rows import next_step
from pxrs.types import Check, Delete, Put, Write

# Beyond that a commit is not held up by its round trips.
_MOST_OPERATIONS = 200
_MOST_BYTES = 2**20
_ROW = "SELECT %s AS name, %s AS body, @pxrs_revision AS version, %s AS session_id"
_INSERT = "INSERT INTO pxrs_coord (name, body, version, session_id) SELECT * FROM ({rows}) AS new "
_ON_CONDITION = "WHERE @pxrs_ok"
_OR_CHANGE = (
    " ON DUPLICATE KEY UPDATE body = VALUES(body), version = VALUES(version), "
    "session_id = VALUES(session_id)"
)


class Statement(NamedTuple):
    """Text as the driver takes it, and its values."""

    text: str
    values: tuple[Any, ...] = ()


def fits(checks: Sequence[Check], writes: Sequence[Write]) -> bool:
    """Whether it is small enough to be sent at once."""
    size = sum(len(write.value) for write in writes if isinstance(write, Put))
    return bool(writes) and len(checks) + len(writes) <= _MOST_OPERATIONS and size <= _MOST_BYTES


def commit(database: Database, checks: Sequence[Check], writes: Sequence[Write]) -> int | None:
    """The revision of what was written; None if a check does not hold, or nobody can say yet."""
    batch = list(_batch(checks, writes))
    text = ";\n".join(statement.text for statement in batch)
    values = [value for statement in batch for value in statement.values]
    with database.at_once() as driver:
        try:
            good, revision = _last_row(driver, text, values)
        except Exception as error:
            found = _meaning(database, error)
            if found is not None:
                raise found from error
            _roll_back(database, driver)
            return None
    return int(revision) if good else None


def _roll_back(database: Database, driver: Any) -> None:
    try:
        driver.rollback()
    except Exception as error:
        raise database.translated(error) from error


def _meaning(database: Database, error: Exception) -> PxrsError | None:
    """What a failed batch means; None where it was not committed and is worth another try."""
    code = error.args[0] if error.args else None
    translated = database.translated(error)
    if isinstance(translated, StoreUnavailable):
        return OutcomeUnknown(f"no answer to a commit: {translated}")
    return None if isinstance(code, int) else translated


def _last_row(driver: Any, text: str, values: list[Any]) -> tuple[Any, ...]:
    """The row of the last statement. Each of those before may fail, and ends all of it."""
    with driver.cursor() as cursor:
        cursor.execute(text, values)
        row = cursor.fetchone()
        while cursor.nextset():
            row = cursor.fetchone()
        return tuple(row)


def _batch(checks: Sequence[Check], writes: Sequence[Write]) -> Iterator[Statement]:
    """Rows are locked in the same order as by a commit that goes the long way."""
    puts = sorted((write for write in writes if isinstance(write, Put)), key=lambda put: put.key)
    deletes = sorted(write.key for write in writes if isinstance(write, Delete))
    absent = {check.key for check in checks if check.version == 0}
    yield Statement("START TRANSACTION")
    yield from _living(sorted({put.session for put in puts if put.session is not None}))
    keys = sorted({check.key for check in checks} | {write.key for write in writes})
    names = ", ".join(["%s"] * len(keys))
    lock = f"SELECT name FROM pxrs_coord WHERE name IN ({names}) ORDER BY name FOR UPDATE"
    yield Statement(lock, tuple(key.encode() for key in keys))
    yield from _checked([check for check in checks if check.version], sorted(absent))
    more = ", removals = removals + 1" if deletes else ""
    raised = f"UPDATE pxrs_meta SET revision = revision + %s{more} WHERE @pxrs_ok"
    yield Statement(raised, (next_step(),))
    yield Statement("SELECT revision INTO @pxrs_revision FROM pxrs_meta")
    if deletes:
        names = ", ".join(["%s"] * len(deletes))
        gone = f"DELETE FROM pxrs_coord WHERE @pxrs_ok AND name IN ({names})"
        yield Statement(gone, tuple(key.encode() for key in deletes))
    # Of two who make the same record one has to fail: no second one may change it.
    yield from _put([put for put in puts if put.key in absent], "")
    yield from _put([put for put in puts if put.key not in absent], _OR_CHANGE)
    yield Statement("COMMIT")
    yield Statement("SELECT @pxrs_ok, @pxrs_revision")


def _living(sessions: list[str]) -> Iterator[Statement]:
    if not sessions:
        yield Statement("SET @pxrs_lost = 0")
        return
    ids = ", ".join(["%s"] * len(sessions))
    where = f"FROM pxrs_sessions WHERE id IN ({ids})"
    yield Statement(f"SELECT id {where} ORDER BY id FOR UPDATE", tuple(sessions))
    living = f"SELECT %s - COUNT(*) INTO @pxrs_lost {where} AND deadline > UTC_TIMESTAMP(6)"
    yield Statement(living, (len(sessions), *sessions))


def _checked(present: list[Check], absent: list[str]) -> Iterator[Statement]:
    """A record that is bound to a session can't be checked: that is told the long way."""
    known = " OR ".join(["name = %s AND version = %s"] * len(present)) or "FALSE"
    names = ", ".join(["%s"] * len(absent)) or "NULL"
    yield Statement(
        "SELECT @pxrs_lost = 0 AND %s = (SELECT COUNT(*) FROM pxrs_coord "
        f"WHERE ({known}) AND session_id IS NULL) AND NOT EXISTS "
        f"(SELECT 1 FROM pxrs_coord WHERE name IN ({names})) INTO @pxrs_ok",
        (
            len(present),
            *(value for check in present for value in (check.key.encode(), check.version)),
            *(key.encode() for key in absent),
        ),
    )


def _put(puts: list[Put], otherwise: str) -> Iterator[Statement]:
    if puts:
        rows = " UNION ALL ".join([_ROW] * len(puts))
        values = [(put.key.encode(), bytes(put.value), put.session) for put in puts]
        text = _INSERT.format(rows=rows) + _ON_CONDITION + otherwise
        yield Statement(text, tuple(value for row in values for value in row))
