"""A commit in one round trip, on MariaDB and MySQL: all its statements are sent at once.

A decision that a client would make between two statements, the server makes by a variable: if a
check does not hold, the writes find nothing to do. Where that happens, or two transactions create a
record at the same time, the commit is repeated statement by statement, which finds out what exists.
A batch that fails in the middle never gets to its COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pxrs.errors import InvalidRequest, OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.connection import MYSQL
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.failures import Raced
from pxrs.stores.rows import next_step
from pxrs.types import Check, Committed, Delete, Put, Write

# In a larger commit, round trips are not what takes the time.
_MOST_OPERATIONS = 200
_MOST_BYTES = 2**20
_ROW = "SELECT %s AS name, %s AS body, @pxrs_revision AS version, %s AS session_id"
_INSERT = """INSERT INTO pxrs_coord (name, body, version, session_id)
    SELECT * FROM ({rows}) AS new WHERE @pxrs_ok"""
_OR_CHANGE = """ ON DUPLICATE KEY UPDATE body = VALUES(body), version = VALUES(version),
    session_id = VALUES(session_id)"""

# A statement as the driver takes it, and its values.
Statement = tuple[str, Sequence[Any]]


def fits(checks: Sequence[Check], writes: Sequence[Write]) -> bool:
    """Whether the commit is small enough to be sent at once."""
    size = sum(len(write.value) for write in writes if isinstance(write, Put))
    return bool(writes) and len(checks) + len(writes) <= _MOST_OPERATIONS and size <= _MOST_BYTES


def commit(
    database: Database, checks: Sequence[Check], writes: Sequence[Write]
) -> Committed | None:
    """Commit; returns None if a check does not hold or a statement fails: nothing is committed."""
    batch = list(_batch(checks, writes))
    text = ";\n".join(text for text, _ in batch)
    values = [value for _, values in batch for value in values]
    try:
        good, revision = _sent(database, text, values)
    except InvalidRequest:
        # Too large to be sent at once: nothing was done.
        return None
    if not good:
        return None
    return Committed({write.key: revision for write in writes if isinstance(write, Put)})


def _sent(database: Database, text: str, values: Sequence[Any]) -> tuple[bool, int]:
    """Whether the commit was done, and its revision."""
    with database.at_once() as connection:
        try:
            good, revision = connection.last_row(text, values)
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"no answer to a commit: {error}") from error
        except InvalidRequest:
            raise
        except (Raced, PxrsError):
            connection.rollback()
            return False, 0
    return bool(good), int(revision or 0)


def _batch(checks: Sequence[Check], writes: Sequence[Write]) -> Iterator[Statement]:
    """The statements. They lock rows in the same order as a commit statement by statement."""
    puts = sorted((write for write in writes if isinstance(write, Put)), key=lambda put: put.key)
    deletes = sorted(write.key for write in writes if isinstance(write, Delete))
    absent = {check.key for check in checks if check.version == 0}
    keys = sorted({check.key for check in checks} | {write.key for write in writes})
    yield "START TRANSACTION", ()
    yield from _living(sorted({put.session for put in puts if put.session is not None}))
    yield MYSQL.one(f"{sql.NAMED} ORDER BY name FOR UPDATE", {"keys": keys})
    yield _checked([check for check in checks if check.version], sorted(absent))
    raised = sql.RAISE_BOTH if deletes else sql.RAISE_REVISION
    yield MYSQL.one(f"{raised} WHERE @pxrs_ok", {"step": next_step()})
    yield "SELECT revision INTO @pxrs_revision FROM pxrs_meta", ()
    if deletes:
        yield MYSQL.one(f"{sql.DELETE} AND @pxrs_ok", {"keys": deletes})
    # If two transactions create the same record, one must fail: the second must not change it.
    yield from _put([put for put in puts if put.key in absent], "")
    yield from _put([put for put in puts if put.key not in absent], _OR_CHANGE)
    yield "COMMIT", ()
    yield "SELECT @pxrs_ok, @pxrs_revision", ()


def _living(sessions: list[str]) -> Iterator[Statement]:
    if not sessions:
        yield "SET @pxrs_lost = 0", ()
        return
    yield MYSQL.one(sql.LOCK_SESSIONS, {"ids": sessions})
    living = f"""SELECT %(wanted)s - COUNT(*) INTO @pxrs_lost FROM pxrs_sessions
        WHERE id IN %(ids)s AND {sql.ALIVE}"""
    yield MYSQL.one(living, {"wanted": len(sessions), "ids": sessions})


def _checked(present: list[Check], absent: list[str]) -> Statement:
    """Sets `@pxrs_ok`: false for a session-bound record. The slow commit raises the reason."""
    known = " OR ".join(["name = %s AND version = %s"] * len(present)) or "FALSE"
    text = f"""SELECT @pxrs_lost = 0 AND %s = (SELECT COUNT(*) FROM pxrs_coord
        WHERE ({known}) AND session_id IS NULL)"""
    values = [value for check in present for value in (check.key.encode(), check.version)]
    if absent:
        there, names = MYSQL.one(sql.NAMED, {"keys": absent})
        text += f" AND NOT EXISTS ({there})"
        values += names
    return f"{text} INTO @pxrs_ok", (len(present), *values)


def _put(puts: list[Put], otherwise: str) -> Iterator[Statement]:
    if puts:
        rows = " UNION ALL ".join([_ROW] * len(puts))
        values = [(put.key.encode(), bytes(put.value), put.session) for put in puts]
        text = _INSERT.format(rows=rows) + otherwise
        yield text, [value for row in values for value in row]
