"""Who writes to a table in PostgreSQL, and may have an id whose row can't be seen yet."""

from __future__ import annotations

from collections.abc import Iterable

_PREPARED = "prepared "
# A transaction that was prepared (PREPARE TRANSACTION) belongs to no connection any more, and is
# named by its own number: its virtual one, `-1/<number>` in some versions, changes when the server
# starts anew. `age` puts the transaction before its savepoints. All locks are read at once.
WRITERS = f"""
WITH locks AS (SELECT * FROM pg_locks WHERE granted)
SELECT CASE WHEN l.pid IS NOT NULL THEN l.virtualtransaction || '@' || l.pid
    ELSE '{_PREPARED}' || CASE WHEN l.virtualtransaction ~ '^-1/'
        THEN substr(l.virtualtransaction, 4)
        ELSE coalesce((
            SELECT t.transactionid::text FROM locks t
            WHERE t.virtualtransaction = l.virtualtransaction AND t.locktype = 'transactionid'
                AND t.mode = 'ExclusiveLock'
            ORDER BY age(t.transactionid) DESC LIMIT 1), l.virtualtransaction) END END
FROM locks l
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class SeenWriters:
    """Everyone who is writing, by names that stay while they write.

    PREPARE TRANSACTION takes a transaction's locks from its connection, so the name that it was
    known by vanishes while it may still commit. Its locks are handed over, never let go of, so it
    is among the prepared ones that are seen at the look from which it is missing. Which one it is
    can't be told; the name is kept until all of those have ended. Prepared ones that come later
    can't be it, so rows wait no longer for that than for the transactions of one moment.
    """

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()
        # What those who are missing may have become.
        self._kept: dict[str, frozenset[str]] = {}

    def seen(self, found: Iterable[str]) -> frozenset[str]:
        """`found`: who holds a lock for writing now."""
        now = frozenset(found)
        prepared = frozenset(name for name in now if name.startswith(_PREPARED))
        kept = {name: heirs & prepared for name, heirs in self._kept.items()}
        for name in self._last - now:
            if not name.startswith(_PREPARED):
                kept[name] = prepared
        self._kept = {name: heirs for name, heirs in kept.items() if heirs}
        self._last = now
        return now | self._kept.keys()
