"""Held items: how they are held, extended, given back, removed and buried."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pxrs.errors import Fenced
from pxrs.stores.rows import DEAD, DELAYED, HELD, READY, WAITING
from pxrs.stores.sqlite.database import in_chunks
from pxrs.stores.sqlite.queues.rows import NUMBERS, item_id, remove_bodies
from pxrs.stores.sqlite.queues.units import GIVEN_UP
from pxrs.types import Held, Holder


class HeldRow(NamedTuple):
    """A held item."""

    id: int
    queue: int
    name: str
    session: str
    tx: str
    lane: str | None
    deliveries: int
    most: int | None
    lock_until: float | None


class FoundHeld(NamedTuple):
    """An item that the caller still holds."""

    id: int
    lane: str | None


def lanes_held(connection: sqlite3.Connection, queue: int, holder: Holder, now: float) -> list[str]:
    """The lanes in which the holder may take more: no lock on an item of them has run out."""
    rows = connection.execute(
        "SELECT lane FROM pxrs_queue_items "
        f"WHERE queue = ? AND session = ? AND tx = ? AND state = {HELD} AND lane IS NOT NULL "
        "GROUP BY lane HAVING min(coalesce(lock_until, 9e999)) > ? ORDER BY lane",
        (queue, *holder, now),
    ).fetchall()
    return [row[0] for row in rows]


def hold(
    connection: sqlite3.Connection,
    items: Sequence[int],
    holder: Holder,
    most: int | None,
    lock_until: float | None,
    now_ms: int,
    unit: str = "",
) -> bool:
    """Hold the items for the holder and count the delivery; false if `unit` was given up."""
    held = 0
    unless = f"AND NOT EXISTS ({GIVEN_UP})" if unit else ""
    for some in in_chunks(items):
        marks = ",".join("?" * len(some))
        held += connection.execute(
            f"UPDATE pxrs_queue_items SET state = {HELD}, deliveries = deliveries + 1, "
            "session = ?, tx = ?, most = ?, lock_until = ?, taken_ms = ? "
            f"WHERE id IN ({marks}) {unless}",
            (*holder, most, lock_until, now_ms, *some, *((holder.session, unit) if unit else ())),
        ).rowcount
    return held == len(items)


def held_rows(connection: sqlite3.Connection, queue: int | None = None) -> list[HeldRow]:
    """Lists held items, in one queue or in all."""
    # The index is named because SQLite would rather walk through all items in order.
    of_queue = "" if queue is None else "AND i.queue = ? "
    rows = connection.execute(
        "SELECT i.id, i.queue, q.name, i.session, i.tx, i.lane, i.deliveries, i.most, i.lock_until "
        "FROM pxrs_queue_items i INDEXED BY pxrs_queue_held JOIN pxrs_queues q ON q.id = i.queue "
        f"WHERE i.state = {HELD} {of_queue}",
        () if queue is None else (queue,),
    ).fetchall()
    return [HeldRow(*row) for row in sorted(rows)]


def remove_held(
    connection: sqlite3.Connection, queue: int, holder: Holder, held: Sequence[Held], now: float
) -> list[str]:
    """Remove the items that the holder has handled; returns their lanes.

    Raises `Fenced` if the holder has lost any. The statement itself is the fence: it compares
    holder, delivery and deadline with the row.
    """
    lanes: set[str] = set()
    apart: list[int] = []
    gone = 0
    for some in in_chunks(held):
        deliveries = _deliveries(queue, some)
        where, values = _in_hands(deliveries, holder, now)
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
        # The caller rolls back, and with it what was removed.
        raise Fenced(
            f"{len(held) - gone} of {len(held)} items of queue {held[0].queue!r} are not held "
            "any more; another worker has them, or will get them"
        )
    if apart:
        remove_bodies(connection, apart)
    return sorted(lanes)


def _deliveries(queue: int, held: Sequence[Held]) -> dict[int, int]:
    """The delivery that each row must be at. Computes `item_id` without a call for each."""
    first = item_id(queue, 0)
    return {
        first + number if 0 < number < NUMBERS else first: delivery for _, number, delivery in held
    }


def _in_hands(items: Collection[int], holder: Holder, now: float) -> tuple[str, list[object]]:
    """A condition, and its values, for the rows that the holder still holds in time.

    The caller compares their deliveries itself: with pairs SQLite takes twice as long.
    """
    marks = ",".join("?" * len(items))
    where = (
        f"id IN ({marks}) AND state = {HELD} AND session = ? AND tx = ? "
        "AND (lock_until IS NULL OR lock_until > ?)"
    )
    return where, [*items, *holder, now]


def give_back(
    connection: sqlite3.Connection,
    item: int,
    *,
    visible: int,
    error: str,
    suspect: bool,
    now_ms: int,
) -> None:
    """Free an item. In a lane it waits until `settle` shows it."""
    connection.execute(
        "UPDATE pxrs_queue_items SET state = CASE WHEN lane IS NOT NULL THEN "
        f"{WAITING} WHEN ? THEN {DELAYED} ELSE {READY} END, visible = ?, "
        "error = coalesce(?, error), suspect = ?, "
        "session = NULL, tx = NULL, lock_until = NULL WHERE id = ?",
        (visible > now_ms, visible, error or None, suspect, item),
    )


def bury(connection: sqlite3.Connection, item: int, error: str, now_ms: int) -> None:
    """Bury an item: it stays, with its error, until it is redriven or dropped."""
    connection.execute(
        f"UPDATE pxrs_queue_items SET state = {DEAD}, dead_ms = ?, error = coalesce(?, error), "
        "session = NULL, tx = NULL, lock_until = NULL WHERE id = ?",
        (now_ms, error or None, item),
    )


def find_held(
    connection: sqlite3.Connection, queue: int, holder: Holder, held: Held, now: float
) -> FoundHeld | None:
    """The item, if this holder holds it at this delivery and in time; else None."""
    where, values = _in_hands([item_id(queue, held.id)], holder, now)
    row = connection.execute(
        f"SELECT id, lane FROM pxrs_queue_items WHERE {where} AND deliveries = ?",
        [*values, held.delivery],
    ).fetchone()
    return FoundHeld(*row) if row else None


def extend(
    connection: sqlite3.Connection,
    queue: int,
    holder: Holder,
    held: Sequence[Held],
    now: float,
    lock_until: float,
) -> bool:
    """Hold the items until `lock_until`; returns whether that is sooner than before for any.

    Raises `Fenced` if one is lost. Waiting processes know a later time, or none: they must be
    woken for an earlier one.
    """
    sooner = False
    for some in in_chunks(held):
        deliveries = _deliveries(queue, some)
        where, values = _in_hands(deliveries, holder, now)
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
