"""Reads and writes rows of queues and items, inside the caller's transaction.

A lane is a set of items that stay in order: those of a key, or all of a fifo queue. At its front is
one item that is ready or delayed, or those that one transaction holds; all others wait. Each
function that changes a front calls `settle`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from pxrs.stores.rows import DELAYED, READY, WAITING, Candidate, QueueRow
from pxrs.stores.sqlite.database import in_chunks
from pxrs.types import Queue

# 8 million queues of a trillion items each.
NUMBER_BITS = 40
NUMBERS = 1 << NUMBER_BITS

Lane = tuple[int, str]

_CANDIDATE = "id, deliveries, suspect, rank, key, put_ms, error, body, lane"
_SHOW = f"""UPDATE pxrs_queue_items
    SET state = CASE WHEN visible > :now_ms THEN {DELAYED} ELSE {READY} END
    WHERE id = (SELECT min(id) FROM pxrs_queue_items
                WHERE queue = :queue AND lane = :lane AND state = {WAITING})
    AND NOT EXISTS (SELECT 1 FROM pxrs_queue_items
                    WHERE queue = :queue AND lane = :lane AND lane IS NOT NULL
                    AND state < {WAITING})"""


def item_id(queue: int, number: int) -> int:
    """An item's row id, made of its queue's id and its number there. No item has the number 0.

    Numbers come from callers: an impossible one must not lead into another queue.
    """
    return queue << NUMBER_BITS | (number if 0 < number < NUMBERS else 0)


def ids_after(queue: int, number: int) -> int:
    """Returns the bound above which the rows of items with higher numbers are."""
    return queue << NUMBER_BITS | max(0, min(number, NUMBERS - 1))


def number_of(item: int) -> int:
    """Returns the number of an item as users see it."""
    return item & (NUMBERS - 1)


def find_queue(connection: sqlite3.Connection, name: str) -> QueueRow | None:
    row = connection.execute(
        "SELECT id, fifo, created FROM pxrs_queues WHERE name = ?", (name,)
    ).fetchone()
    if row is None:
        return None
    return QueueRow(row[0], Queue(name=name, fifo=bool(row[1]), created_ms=row[2]))


def make_queue(connection: sqlite3.Connection, name: str, fifo: bool, now_ms: int) -> QueueRow:
    cursor = connection.execute(
        "INSERT INTO pxrs_queues (name, fifo, created, next, put, discarded) "
        "VALUES (?, ?, ?, 1, 0, 0)",
        (name, fifo, now_ms),
    )
    assert cursor.lastrowid is not None
    return QueueRow(cursor.lastrowid, Queue(name=name, fifo=fifo, created_ms=now_ms))


def reserve_numbers(
    connection: sqlite3.Connection, name: str, count: int, now_ms: int
) -> tuple[QueueRow, int]:
    """Reserve numbers for new items; returns the queue, made if missing, and the first number."""
    row = connection.execute(
        "UPDATE pxrs_queues SET next = next + ?, put = put + ? WHERE name = ? "
        "RETURNING id, fifo, created, next - ?",
        (count, count, name, count),
    ).fetchone()
    if row is None:
        make_queue(connection, name, False, now_ms)
        return reserve_numbers(connection, name, count, now_ms)
    number, fifo, created, first = row
    return QueueRow(number, Queue(name=name, fifo=bool(fifo), created_ms=created)), first


def id_of(connection: sqlite3.Connection, name: str) -> int | None:
    """The queue's id, None if there is no such queue."""
    row = connection.execute("SELECT id FROM pxrs_queues WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None


def settle(connection: sqlite3.Connection, lanes: Iterable[Lane], now_ms: int) -> None:
    """Show the first item of each lane, unless there is one at its front already."""
    for queue, lane in lanes:
        connection.execute(_SHOW, {"queue": queue, "lane": lane, "now_ms": now_ms})


def hide_front(connection: sqlite3.Connection, queue: int, lane: str) -> None:
    """Hide the item that shows in the lane: it may no longer be the first. Held items stay."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {WAITING} "
        f"WHERE queue = ? AND lane = ? AND state IN ({READY}, {DELAYED})",
        (queue, lane),
    )


def promote_due(connection: sqlite3.Connection, queue: int, now_ms: int) -> None:
    """Show delayed items whose time has come."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {READY} "
        f"WHERE queue = ? AND state = {DELAYED} AND visible <= ?",
        (queue, now_ms),
    )


def load_body(connection: sqlite3.Connection, item: int, body: bytes | None) -> bytes:
    """The body of an item, from its row or from the table of large bodies."""
    if body is not None:
        return body
    row = connection.execute("SELECT body FROM pxrs_queue_bodies WHERE id = ?", (item,)).fetchone()
    return bytes(row[0])


def remove_bodies(connection: sqlite3.Connection, items: Sequence[int]) -> None:
    for some in in_chunks(items):
        marks = ",".join("?" * len(some))
        connection.execute(f"DELETE FROM pxrs_queue_bodies WHERE id IN ({marks})", some)


# Taking


def ready_items(connection: sqlite3.Connection, queue: int, count: int) -> list[Candidate]:
    """Lists ready items by priority and age, including suspects and used-up ones."""
    rows = connection.execute(
        f"SELECT {_CANDIDATE} FROM pxrs_queue_items WHERE queue = ? AND state = {READY} "
        "ORDER BY rank, id LIMIT ?",
        (queue, count),
    ).fetchall()
    return [Candidate(*row) for row in rows]


def following_items(
    connection: sqlite3.Connection,
    queue: int,
    lanes: Sequence[str],
    count: int,
    now_ms: int,
) -> list[Candidate]:
    """Lists items behind those that the holder has, up to the first that is not due."""
    found: list[Candidate] = []
    for lane in lanes:
        rows = connection.execute(
            f"SELECT {_CANDIDATE}, visible FROM pxrs_queue_items "
            f"WHERE queue = ? AND lane = ? AND state = {WAITING} ORDER BY id LIMIT ?",
            (queue, lane, count - len(found)),
        ).fetchall()
        for row in rows:
            if row[-1] > now_ms:
                break
            found.append(Candidate(*row[:-1]))
        if len(found) == count:
            break
    return found


def first_behind_ms(connection: sqlite3.Connection, queue: int, lanes: Iterable[str]) -> int | None:
    """Returns when the next item of a lane of the holder is due."""
    found = [
        connection.execute(
            "SELECT visible FROM pxrs_queue_items "
            f"WHERE queue = ? AND lane = ? AND state = {WAITING} ORDER BY id LIMIT 1",
            (queue, lane),
        ).fetchone()
        for lane in lanes
    ]
    return min((row[0] for row in found if row is not None), default=None)


def first_due_ms(connection: sqlite3.Connection, queue: int) -> int | None:
    """Returns when the next delayed item is due."""
    row = connection.execute(
        f"SELECT min(visible) FROM pxrs_queue_items WHERE queue = ? AND state = {DELAYED}",
        (queue,),
    ).fetchone()
    due: int | None = row[0]
    return due
