"""Which units were committed, for callers that lost the answer, and which were given up."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from pxrs.core.queue import given_up
from pxrs.stores.sqlite.database import in_chunks
from pxrs.types import Outcome, QueueChange

_DONE, _NEVER = 0, 1
_FOUND = "FROM pxrs_queue_units WHERE session = ? AND unit = ?"
# Whether there is a unit of this name: a take never has it, unless it was given up.
GIVEN_UP = f"SELECT 1 {_FOUND}"


def note(connection: sqlite3.Connection, change: QueueChange) -> None:
    """Note a unit in its own commit, and forget the units whose outcome its committer knows."""
    session = change.holder.session
    for some in in_chunks(change.forget):
        marks = ",".join("?" * len(some))
        connection.execute(
            f"DELETE FROM pxrs_queue_units WHERE session = ? AND unit IN ({marks})",
            (session, *some),
        )
    if not change.unit:
        return
    try:
        connection.execute(
            "INSERT INTO pxrs_queue_units VALUES (?, ?, ?)", (session, change.unit, _DONE)
        )
    except sqlite3.IntegrityError:
        raise given_up(change.unit) from None


def find(connection: sqlite3.Connection, session: str, unit: str) -> Outcome | None:
    row = connection.execute(f"SELECT state {_FOUND}", (session, unit)).fetchone()
    if row is None:
        return None
    return Outcome.DONE if row[0] == _DONE else Outcome.NEVER


def give_up(connection: sqlite3.Connection, session: str, unit: str) -> None:
    """Refuse the unit from now on."""
    connection.execute("INSERT INTO pxrs_queue_units VALUES (?, ?, ?)", (session, unit, _NEVER))


def sessions(connection: sqlite3.Connection) -> list[str]:
    """Returns the sessions whose units are remembered."""
    rows = connection.execute("SELECT DISTINCT session FROM pxrs_queue_units").fetchall()
    return [name for (name,) in rows]


def seen_to_end(connection: sqlite3.Connection) -> dict[str, int]:
    """Returns sessions that were seen to be over, and the age of the file then, in ms."""
    return dict(connection.execute("SELECT session, age FROM pxrs_queue_ended").fetchall())


def note_ended(connection: sqlite3.Connection, sessions: Sequence[str], age: int) -> None:
    """Note that these sessions are over; an earlier note of another process stays."""
    connection.executemany(
        "INSERT OR IGNORE INTO pxrs_queue_ended VALUES (?, ?)",
        [(session, age) for session in sessions],
    )


def forget_sessions(connection: sqlite3.Connection, sessions: Sequence[str]) -> None:
    for some in in_chunks(sessions):
        marks = ",".join("?" * len(some))
        connection.execute(f"DELETE FROM pxrs_queue_units WHERE session IN ({marks})", some)
    connection.execute(
        "DELETE FROM pxrs_queue_ended WHERE session NOT IN (SELECT session FROM pxrs_queue_units)"
    )
