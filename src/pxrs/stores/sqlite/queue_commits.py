"""Which changes were applied, for those who did not hear the answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from pxrs.stores.queue_rules import REMEMBERED
from pxrs.stores.sqlite.database import in_chunks
from pxrs.types import Holder


def remember(connection: sqlite3.Connection, holder: Holder) -> None:
    """Note a change beside what it did. A session's latest ones are kept, a few more at times."""
    number: int = connection.execute(
        "INSERT INTO pxrs_queue_commits SELECT ?1, coalesce(max(slot), 0) + 1, ?2 "
        "FROM pxrs_queue_commits WHERE session = ?1 RETURNING slot",
        (holder.session, holder.transaction),
    ).fetchone()[0]
    if number % REMEMBERED == 0:
        connection.execute(
            "DELETE FROM pxrs_queue_commits WHERE session = ? AND slot <= ?",
            (holder.session, number - REMEMBERED),
        )


def is_remembered(connection: sqlite3.Connection, holder: Holder) -> bool:
    row = connection.execute(
        "SELECT 1 FROM pxrs_queue_commits WHERE session = ? AND tx = ?",
        (holder.session, holder.transaction),
    ).fetchone()
    return row is not None


def sessions(connection: sqlite3.Connection) -> list[str]:
    """Whose changes are remembered."""
    rows = connection.execute("SELECT DISTINCT session FROM pxrs_queue_commits").fetchall()
    return [name for (name,) in rows]


def forget_sessions(connection: sqlite3.Connection, sessions: Sequence[str]) -> None:
    for some in in_chunks(sessions):
        marks = ",".join("?" * len(some))
        connection.execute(f"DELETE FROM pxrs_queue_commits WHERE session IN ({marks})", some)
