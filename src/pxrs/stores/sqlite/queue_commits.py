"""Which changes were applied, for those who did not hear the answer."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence

from pxrs.stores.queue_rules import REMEMBERED
from pxrs.stores.sqlite.database import in_chunks
from pxrs.types import Holder


class Memory:
    """Notes changes for this process: a session's latest ones are kept, in a ring of its own.

    Its own, as another handle on the store may note changes of the same session.
    """

    def __init__(self) -> None:
        self._first = secrets.randbits(31) * REMEMBERED
        self._noted: dict[str, int] = {}

    def note(self, connection: sqlite3.Connection, holder: Holder) -> None:
        """Note a change beside what it did."""
        number = self._noted.get(holder.session, 0)
        self._noted[holder.session] = (number + 1) % REMEMBERED
        connection.execute(
            "INSERT OR REPLACE INTO pxrs_queue_commits VALUES (?, ?, ?)",
            (holder.session, self._first + number, holder.transaction),
        )

    def forget(self, session: str) -> None:
        """Nobody will ask for it any more."""
        self._noted.pop(session, None)


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
