"""How long the write-ahead log gets.

A file that still grows is slower to sync (310 against 190 µs per small commit), so the log is
started anew early where no reader stands in the way: at 1 MB, then whenever it has doubled. From
`WAL_LIMIT` on readers are waited for. Large commits fill it with a few of them first.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress

from pxrs.stores.sqlite.change_counters import Control

WAL_LIMIT = 16 * 2**20
_WAL_LEAST = 2**20
_WAL_STEP = 4 * 2**20
_WAL_COMMITS = 8
_READERS_PATIENCE_MS = 50
_COMMIT_WEIGHT = 16 * 2**10


class LogSize:
    """Keeps account of the log's size, with all processes, and starts it anew in time."""

    def __init__(self, control: Control, busy_timeout: float) -> None:
        self._control = control
        self._busy_timeout_ms = int(busy_timeout * 1000)

    def keep_short(self, writer: sqlite3.Connection, weight: int) -> None:
        """After a commit of so many bytes, roughly, and before the next writer's turn."""
        before = self._control.wal_bytes
        size = before + weight + _COMMIT_WEIGHT
        if _is_checkpoint_due(before, size, weight):
            patience = _READERS_PATIENCE_MS if size >= WAL_LIMIT else 0
            size = 0 if self._checkpoint(writer, patience) else size
        self._control.wal_bytes = size

    def _checkpoint(self, writer: sqlite3.Connection, patience_ms: int) -> bool:
        """Move the log's content into the file and start the log anew, if no reader needs it."""
        try:
            writer.execute(f"PRAGMA busy_timeout={patience_ms}")
            busy = writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0]
            return not busy
        except sqlite3.Error:
            # The commit stands; a checkpoint that fails now is tried again later.
            return False
        finally:
            with suppress(sqlite3.Error):
                writer.execute(f"PRAGMA busy_timeout={self._busy_timeout_ms}")


def _is_checkpoint_due(before: int, size: int, weight: int) -> bool:
    """Whether the log's size has passed one of the marks with the last commit."""
    if size >= WAL_LIMIT:
        return before < WAL_LIMIT or size // _WAL_STEP > before // _WAL_STEP
    if size < _WAL_COMMITS * weight:
        return False
    return (size // _WAL_LEAST).bit_length() > (before // _WAL_LEAST).bit_length()
