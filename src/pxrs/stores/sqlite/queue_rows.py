"""The rows of queues and items, inside somebody's transaction.

A lane is what has to stay in order: the items of a key, or all of a fifo queue. At its front is
one item that is ready or delayed, or those that one transaction holds; all others wait. Whatever
changes a front calls `settle`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pxrs.errors import Fenced
from pxrs.stores.sqlite.database import in_chunks
from pxrs.types import Held, Holder, ItemState, Queue

READY, DELAYED, HELD, WAITING, DEAD = range(5)
STATES = (
    ItemState.READY,
    ItemState.DELAYED,
    ItemState.HELD,
    ItemState.WAITING,
    ItemState.DEAD,
)
# 8 million queues of a trillion items each.
NUMBER_BITS = 40
_NUMBERS = 1 << NUMBER_BITS

Lane = tuple[int, str]

_CANDIDATE = "id, deliveries, suspect, rank, key, put_ms, error, body, lane"
_SHOW = f"""UPDATE pxrs_queue_items
    SET state = CASE WHEN visible > ?3 THEN {DELAYED} ELSE {READY} END
    WHERE id = (SELECT min(id) FROM pxrs_queue_items
                WHERE queue = ?1 AND lane = ?2 AND state = {WAITING})
    AND NOT EXISTS (SELECT 1 FROM pxrs_queue_items
                    WHERE queue = ?1 AND lane = ?2 AND lane IS NOT NULL AND state < {WAITING})"""


class QueueRow(NamedTuple):
    """A queue and its number in the file."""

    id: int
    info: Queue


class Candidate(NamedTuple):
    """An item that may be handed out."""

    id: int
    deliveries: int
    suspect: bool
    rank: int
    key: str | None
    put_ms: int
    error: str
    body: bytes | None
    lane: str | None


class HeldRow(NamedTuple):
    """An item in somebody's hands."""

    id: int
    queue: int
    name: str
    session: str
    tx: str
    lane: str | None
    deliveries: int
    most: int | None
    lock_until: float | None


class Hands(NamedTuple):
    """A holder, and every name that its items may be held under."""

    session: str
    names: tuple[str, ...]


class FoundHeld(NamedTuple):
    """An item that is still in the hands of who asks."""

    id: int
    lane: str | None


def item_id(queue: int, number: int) -> int:
    """An item's row: its queue's id and its number in it. No item has the number 0.

    Numbers come from callers: one that can't be must not lead into another queue.
    """
    return queue << NUMBER_BITS | (number if 0 < number < _NUMBERS else 0)


def ids_after(queue: int, number: int) -> int:
    """What the rows of a queue's items with higher numbers are above."""
    return queue << NUMBER_BITS | max(0, min(number, _NUMBERS - 1))


def number_of(item: int) -> int:
    """What people know an item by."""
    return item & (_NUMBERS - 1)


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
    """The queue, which is made if need be, and the first of so many new items' numbers."""
    row = connection.execute(
        "UPDATE pxrs_queues SET next = next + ?1, put = put + ?1 WHERE name = ?2 "
        "RETURNING id, fifo, created, next - ?1",
        (count, name),
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
        connection.execute(_SHOW, (queue, lane, now_ms))


def hide_front(connection: sqlite3.Connection, queue: int, lane: str) -> None:
    """What shows in the lane may not be its first item any more. What is held stays."""
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
    """The body of an item, from its row or from where the large ones lie."""
    if body is not None:
        return body
    row = connection.execute("SELECT body FROM pxrs_queue_bodies WHERE id = ?", (item,)).fetchone()
    return bytes(row[0])


# Taking


def ready_items(connection: sqlite3.Connection, queue: int, count: int) -> list[Candidate]:
    """What is at hand, by priority and age. Suspects and used-up ones are among them."""
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
    """What follows in the lanes that the holder has the front of, up to what is not due yet."""
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


def lanes_held(connection: sqlite3.Connection, queue: int, holder: Holder, now: float) -> list[str]:
    """The lanes that the holder may go on with: it is not late with any item of them."""
    rows = connection.execute(
        "SELECT lane FROM pxrs_queue_items "
        f"WHERE queue = ? AND session = ? AND tx = ? AND state = {HELD} AND lane IS NOT NULL "
        "GROUP BY lane HAVING min(coalesce(lock_until, 9e999)) > ? ORDER BY lane",
        (queue, *holder, now),
    ).fetchall()
    return [row[0] for row in rows]


def first_behind_ms(connection: sqlite3.Connection, queue: int, lanes: Iterable[str]) -> int | None:
    """When the next item shows in one of the lanes that a holder may go on with."""
    found = [
        connection.execute(
            "SELECT visible FROM pxrs_queue_items "
            f"WHERE queue = ? AND lane = ? AND state = {WAITING} ORDER BY id LIMIT 1",
            (queue, lane),
        ).fetchone()
        for lane in lanes
    ]
    return min((row[0] for row in found if row is not None), default=None)


def hold(
    connection: sqlite3.Connection,
    items: Sequence[int],
    holder: Holder,
    most: int | None,
    lock_until: float | None,
    now_ms: int,
) -> None:
    """Put items into the holder's hands and count the delivery."""
    for some in in_chunks(items):
        marks = ",".join("?" * len(some))
        connection.execute(
            f"UPDATE pxrs_queue_items SET state = {HELD}, deliveries = deliveries + 1, "
            f"session = ?, tx = ?, most = ?, lock_until = ?, taken_ms = ? WHERE id IN ({marks})",
            (*holder, most, lock_until, now_ms, *some),
        )


def first_due_ms(connection: sqlite3.Connection, queue: int) -> int | None:
    """When the next delayed item shows."""
    row = connection.execute(
        f"SELECT min(visible) FROM pxrs_queue_items WHERE queue = ? AND state = {DELAYED}",
        (queue,),
    ).fetchone()
    due: int | None = row[0]
    return due


def held_rows(connection: sqlite3.Connection, queue: int | None = None) -> list[HeldRow]:
    """Everything in somebody's hands, in one queue or in all."""
    # By its index: without being told SQLite would rather walk through all items in order.
    of_queue = "" if queue is None else "AND i.queue = ? "
    rows = connection.execute(
        "SELECT i.id, i.queue, q.name, i.session, i.tx, i.lane, i.deliveries, i.most, i.lock_until "
        "FROM pxrs_queue_items i INDEXED BY pxrs_queue_held JOIN pxrs_queues q ON q.id = i.queue "
        f"WHERE i.state = {HELD} {of_queue}",
        () if queue is None else (queue,),
    ).fetchall()
    return [HeldRow(*row) for row in sorted(rows)]


# Ending


def remove_held(
    connection: sqlite3.Connection, queue: int, hands: Hands, held: Sequence[Held], now: float
) -> list[str]:
    """Remove what the holder has handled; the lanes it was in. Raises `Fenced` if it lost any.

    The fence stands in the statement: holder, delivery and deadline are those of the row.
    """
    lanes: set[str] = set()
    apart: list[int] = []
    gone = 0
    for some in in_chunks(held):
        deliveries = _deliveries(queue, some)
        where, values = _in_hands(deliveries, hands, now)
        rows = connection.execute(
            f"DELETE FROM pxrs_queue_items WHERE {where} "
            "RETURNING id, deliveries, lane, body IS NULL",
            values,
        ).fetchall()
        for number, delivery, lane, is_apart in rows:
            gone += deliveries[number] == delivery
            if lane is not None:
                lanes.add(lane)
            if is_apart:
                apart.append(number)
    if gone < len(held):
        # Whoever is told so rolls back, and with it what was removed.
        raise Fenced(
            f"{len(held) - gone} of {len(held)} items of queue {held[0].queue!r} are not held "
            "any more; somebody else has them, or will"
        )
    if apart:
        remove_bodies(connection, apart)
    return sorted(lanes)


def _deliveries(queue: int, held: Sequence[Held]) -> dict[int, int]:
    """The delivery that each row has to be at. As `item_id` has it, without a call for each."""
    first = item_id(queue, 0)
    return {
        first + number if 0 < number < _NUMBERS else first: delivery for _, number, delivery in held
    }


def _in_hands(items: Collection[int], hands: Hands, now: float) -> tuple[str, list[object]]:
    """A condition for those of the rows that the holder has and is not late with, and its values.

    What it says of their deliveries has to be compared: SQLite takes twice as long for pairs.
    """
    marks, names = ",".join("?" * len(items)), ",".join("?" * len(hands.names))
    where = (
        f"id IN ({marks}) AND state = {HELD} AND session = ? "
        f"AND (lock_until IS NULL OR lock_until > ?) AND tx IN ({names})"
    )
    return where, [*items, hands.session, now, *hands.names]


def remove_bodies(connection: sqlite3.Connection, items: Sequence[int]) -> None:
    for some in in_chunks(items):
        marks = ",".join("?" * len(some))
        connection.execute(f"DELETE FROM pxrs_queue_bodies WHERE id IN ({marks})", some)


def give_back(
    connection: sqlite3.Connection,
    item: int,
    *,
    visible: int,
    error: str,
    suspect: bool,
    now_ms: int,
) -> None:
    """Nobody holds it any more. In a lane it waits, and `settle` shows it."""
    connection.execute(
        "UPDATE pxrs_queue_items SET state = CASE WHEN lane IS NOT NULL THEN "
        f"{WAITING} WHEN ?2 > ?5 THEN {DELAYED} ELSE {READY} END, visible = ?2, "
        "error = CASE WHEN ?3 = '' THEN error ELSE ?3 END, suspect = ?4, "
        "session = NULL, tx = NULL, lock_until = NULL WHERE id = ?1",
        (item, visible, error, suspect, now_ms),
    )


def give_back_uncounted(connection: sqlite3.Connection, item: int) -> None:
    """Nobody has had it: it is ready again, and its delivery did not happen."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {READY}, deliveries = deliveries - 1, "
        "session = NULL, tx = NULL WHERE id = ?",
        (item,),
    )


def bury(connection: sqlite3.Connection, item: int, error: str, now_ms: int) -> None:
    """It is dead: it stays, with what is known of its end, until somebody looks after it."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {DEAD}, dead_ms = ?3, "
        "error = CASE WHEN ?2 = '' THEN error ELSE ?2 END, "
        "session = NULL, tx = NULL, lock_until = NULL WHERE id = ?1",
        (item, error, now_ms),
    )


def find_held(
    connection: sqlite3.Connection, queue: int, hands: Hands, held: Held, now: float
) -> FoundHeld | None:
    """The item, if it is held just so; None if it is not, or not any more."""
    where, values = _in_hands([item_id(queue, held.id)], hands, now)
    row = connection.execute(
        f"SELECT id, lane FROM pxrs_queue_items WHERE {where} AND deliveries = ?",
        [*values, held.delivery],
    ).fetchone()
    return FoundHeld(*row) if row else None


def extend(
    connection: sqlite3.Connection,
    queue: int,
    hands: Hands,
    held: Sequence[Held],
    now: float,
    lock_until: float,
) -> bool:
    """Hold on until then; whether that is sooner than it was for any of them.

    Raises `Fenced` if one is lost. Who waits was told of a later time, or of none: it has to
    hear of an earlier one.
    """
    sooner = False
    for some in in_chunks(held):
        deliveries = _deliveries(queue, some)
        where, values = _in_hands(deliveries, hands, now)
        rows = connection.execute(
            f"SELECT id, deliveries, lock_until FROM pxrs_queue_items WHERE {where}", values
        ).fetchall()
        if sum(deliveries[number] == delivery for number, delivery, _ in rows) < len(some):
            raise Fenced(f"an item of queue {some[0].queue!r} is not held any more")
        sooner = sooner or any(until is None or until > lock_until for _, _, until in rows)
        connection.execute(
            f"UPDATE pxrs_queue_items SET lock_until = ? WHERE {where}", [lock_until, *values]
        )
    return sooner
