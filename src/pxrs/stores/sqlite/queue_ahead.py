"""Items set aside for a process that will ask for them: one sync per item instead of two.

An item has to be counted durably before it is handed out, and its removal has to be durable when
`commit` returns. A worker in a loop would pay for two syncs. So the commit that removes one item
also counts the next and sets it aside for its session. Handing it out is then a small transaction
that is not synced: no death of a process can undo it.

- If the session dies, or does not ask for a while, whatever is still marked as set aside was not
  handed out, and gets its count back.
- After a power cut that can't be told: the mark may be back although the item was out. So the
  mark names the machine's start, and another start's marks keep their count: k stays an upper
  bound.

Only items without a lane are set aside, and only for who takes again at once after its commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from pxrs.stores.sqlite.posix import boot_id
from pxrs.stores.sqlite.queue_rows import DELAYED, HELD, READY, Candidate, QueueRow
from pxrs.types import Holder, Queue

# How soon after a commit the next take has to come, and how long it may then let others wait.
_SOON = 0.05
_PATIENCE = 0.2
# A batch is better off with a sync of its own than with rewriting every item once more.
MOST = 16
_PREFIX = "ahead:"
_BOOT = boot_id()
MARK = _PREFIX + _BOOT
# Put together in one statement: a worker in a loop comes here for every item.
_ASIDE = f"""SELECT i.id, i.deliveries - 1, i.suspect, i.rank, i.key, i.put_ms, i.error, i.body,
    i.lane, q.id, q.fifo, q.created,
    (SELECT min(rank) FROM pxrs_queue_items WHERE queue = q.id AND state = {READY}),
    (SELECT min(visible) FROM pxrs_queue_items WHERE queue = q.id AND state = {DELAYED})
    FROM pxrs_queues q JOIN pxrs_queue_items i ON i.queue = q.id
    WHERE q.name = ? AND i.session = ? AND i.tx = ? AND i.state = {HELD}
    ORDER BY i.rank, i.id LIMIT ?"""
# What stands beside the states in a condition: set aside is as good as ready.
IS_AHEAD = f"(state = {HELD} AND tx >= '{_PREFIX}' AND tx < 'ahead;')"


def is_ahead(tx: str) -> bool:
    """Whether it is set aside, not held."""
    return tx.startswith(_PREFIX)


def was_handed_out(tx: str) -> bool:
    """Whether an item that its session left behind may have been in somebody's hands."""
    return tx != MARK


class Habits:
    """Which queues this process takes from in a loop."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and bool(_BOOT)
        self._committed: dict[str, float] = {}
        self._looping: dict[str, int | None] = {}

    def took(self, queue: str, most: int | None, now: float) -> None:
        """It took from the queue, soon after a commit or not."""
        if self._enabled and now - self._committed.get(queue, -1.0) < _SOON:
            self._looping[queue] = most
        else:
            self._looping.pop(queue, None)

    def committed(self, queue: str, now: float) -> None:
        if self._enabled:
            self._committed[queue] = now

    def expects(self, queue: str) -> bool:
        """Whether the next take is likely to come at once."""
        return queue in self._looping

    def most(self, queue: str) -> int | None:
        """What the last taker's policy was."""
        return self._looping.get(queue)


def set_aside(
    connection: sqlite3.Connection,
    queue: int,
    session: str,
    count: int,
    most: int | None,
    now: float,
) -> None:
    """Count the next items and keep them for the session, for a moment."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {HELD}, deliveries = deliveries + 1, "
        "session = ?1, tx = ?2, most = ?3, lock_until = ?4 WHERE id IN ("
        "SELECT id FROM (SELECT id, deliveries, suspect, lane FROM pxrs_queue_items "
        f"WHERE queue = ?5 AND state = {READY} ORDER BY rank, id LIMIT ?6) "
        "WHERE NOT suspect AND lane IS NULL AND (?3 IS NULL OR deliveries < ?3))",
        (session, MARK, most, now + _PATIENCE, queue, count),
    )


class Aside(NamedTuple):
    """What is set aside for a session, not counted for the taker yet, and of which queue."""

    queue: QueueRow
    items: list[Candidate]
    outranked: bool


def find_aside(
    connection: sqlite3.Connection, name: str, session: str, count: int, now_ms: int
) -> Aside | None:
    """What is set aside; `outranked` if something more urgent has come since, or may have."""
    rows = connection.execute(_ASIDE, (name, session, MARK, count)).fetchall()
    if not rows:
        return None
    queue, fifo, created, best, due = rows[0][9:]
    info = Queue(name=name, fifo=bool(fifo), created_ms=created)
    items = [Candidate(*row[:9]) for row in rows]
    outranked = (best is not None and best < items[0].rank) or (due is not None and due <= now_ms)
    return Aside(QueueRow(queue, info), items, outranked)


def is_waiting(connection: sqlite3.Connection, queue: int, session: str) -> bool:
    """Whether anything is set aside for the session."""
    row = connection.execute(
        "SELECT 1 FROM pxrs_queue_items WHERE queue = ? AND session = ? AND tx = ? "
        f"AND state = {HELD} LIMIT 1",
        (queue, session, MARK),
    ).fetchone()
    return row is not None


def hand_out(
    connection: sqlite3.Connection,
    items: Sequence[int],
    holder: Holder,
    most: int | None,
    lock_until: float | None,
    now_ms: int,
) -> None:
    """The taker has them now. They were counted when they were set aside."""
    marks = ",".join("?" * len(items))
    connection.execute(
        "UPDATE pxrs_queue_items SET session = ?, tx = ?, most = ?, lock_until = ?, taken_ms = ? "
        f"WHERE id IN ({marks})",
        (*holder, most, lock_until, now_ms, *items),
    )


def put_back(connection: sqlite3.Connection, items: Sequence[int]) -> None:
    """Nobody had them: they are ready again and get their count back."""
    marks = ",".join("?" * len(items))
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {READY}, deliveries = deliveries - 1, "
        f"session = NULL, tx = NULL, lock_until = NULL WHERE id IN ({marks})",
        list(items),
    )
