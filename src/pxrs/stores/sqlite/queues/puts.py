"""Inserts new items, inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import count

from pxrs.core.queue import delay_ms, is_suspect, key_order_of, validate_for
from pxrs.stores.rows import DEAD, DELAYED, READY, WAITING, QueueRow
from pxrs.stores.sqlite.database import in_chunks
from pxrs.stores.sqlite.queues import rows
from pxrs.types import ItemState, NewItem, StoredItem

_INLINE_BYTES = 2048
_INSERT = """INSERT INTO pxrs_queue_items (id, queue, state, rank, lane, key, visible, deliveries,
    suspect, put_ms, error, body) VALUES """
_RESTORE = """INSERT OR IGNORE INTO pxrs_queue_items (id, queue, state, rank, lane, key, visible,
    deliveries, suspect, put_ms, taken_ms, dead_ms, error, body) VALUES """


def put_items(
    connection: sqlite3.Connection, name: str, items: Sequence[NewItem], now_ms: int
) -> list[int | None]:
    """Add items at the end of the queue, which is made if need be.

    Returns their numbers; None for duplicates of items that were put before.
    """
    if all(item.dedupe is None for item in items):
        first = _put_fresh(connection, name, items, now_ms)
        return list(range(first, first + len(items)))
    queue = rows.find_queue(connection, name) or rows.make_queue(connection, name, False, now_ms)
    for item in items:
        validate_for(queue.info, item)
    fresh = [_is_fresh(connection, queue.id, item, now_ms) for item in items]
    wanted = [item for item, is_fresh in zip(items, fresh, strict=True) if is_fresh]
    numbers = count(_put_fresh(connection, name, wanted, now_ms))
    return [next(numbers) if is_fresh else None for is_fresh in fresh]


def _put_fresh(
    connection: sqlite3.Connection, name: str, items: Sequence[NewItem], now_ms: int
) -> int:
    """Insert the items; returns the first one's number."""
    queue, first = rows.reserve_numbers(connection, name, len(items), now_ms)
    for item in items:
        validate_for(queue.info, item)
    values = [_row(queue, first + at, item, now_ms) for at, item in enumerate(items)]
    for some in in_chunks(values, 2000):
        marks = ",".join(["(?,?,?,?,?,?,?,0,0,?,'',?)"] * len(some))
        connection.execute(_INSERT + marks, [value for row in some for value in row])
    for at, item in enumerate(items):
        if len(item.body) > _INLINE_BYTES:
            _store_body(connection, rows.item_id(queue.id, first + at), item.body)
    lanes = {lane for item in items if (lane := key_order_of(queue.info, item.key)) is not None}
    rows.settle(connection, ((queue.id, lane) for lane in lanes), now_ms)
    return first


def restore_items(
    connection: sqlite3.Connection,
    queue: QueueRow,
    items: Sequence[StoredItem],
    now_ms: int,
) -> int:
    """Add items of another store under their own numbers; returns how many were new here."""
    fresh: set[int] = set()
    for some in in_chunks([_restored_row(queue, item, now_ms) for item in items], 1500):
        marks = ",".join(["(?,?,?,?,?,?,?,?,?,?,?,?,?,?)"] * len(some))
        found = connection.execute(
            f"{_RESTORE}{marks} RETURNING id", [value for row in some for value in row]
        ).fetchall()
        fresh |= {row[0] for row in found}
    for item in items:
        number = rows.item_id(queue.id, item.id)
        if number in fresh and len(item.body) > _INLINE_BYTES:
            _store_body(connection, number, item.body)
    connection.execute(
        "UPDATE pxrs_queues SET next = max(next, ?), put = put + ? WHERE id = ?",
        (max((item.id + 1 for item in items), default=0), len(fresh), queue.id),
    )
    lanes = {lane for item in items if (lane := key_order_of(queue.info, item.key)) is not None}
    for lane in sorted(lanes):
        rows.hide_front(connection, queue.id, lane)
    rows.settle(connection, ((queue.id, lane) for lane in sorted(lanes)), now_ms)
    return len(fresh)


def _restored_row(queue: QueueRow, item: StoredItem, now_ms: int) -> tuple[object, ...]:
    lane = key_order_of(queue.info, item.key)
    visible = item.visible_ms or item.put_ms
    state = DELAYED if visible > now_ms else READY
    if item.state is ItemState.DEAD:
        state = DEAD
    elif lane is not None:
        state = WAITING
    return (
        rows.item_id(queue.id, item.id),
        queue.id,
        state,
        -item.priority,
        lane,
        item.key,
        visible,
        item.deliveries,
        is_suspect(item),
        item.put_ms,
        item.taken_ms,
        item.dead_ms,
        item.error,
        item.body if len(item.body) <= _INLINE_BYTES else None,
    )


def _row(queue: QueueRow, number: int, item: NewItem, now_ms: int) -> tuple[object, ...]:
    lane = key_order_of(queue.info, item.key)
    visible = now_ms + delay_ms(item.delay) if item.delay else now_ms
    state = WAITING if lane is not None else DELAYED if item.delay else READY
    body = item.body if len(item.body) <= _INLINE_BYTES else None
    return (
        rows.item_id(queue.id, number),
        queue.id,
        state,
        -item.priority,
        lane,
        item.key,
        visible,
        now_ms,
        body,
    )


def _is_fresh(connection: sqlite3.Connection, queue: int, item: NewItem, now_ms: int) -> bool:
    if item.dedupe is None:
        return True
    connection.execute(
        "DELETE FROM pxrs_queue_seen WHERE queue = ? AND until <= ?", (queue, now_ms)
    )
    until = now_ms + delay_ms(item.dedupe_window)
    cursor = connection.execute(
        "INSERT OR IGNORE INTO pxrs_queue_seen VALUES (?, ?, ?)", (queue, item.dedupe, until)
    )
    return cursor.rowcount == 1


def _store_body(connection: sqlite3.Connection, item: int, body: bytes) -> None:
    connection.execute("INSERT INTO pxrs_queue_bodies VALUES (?, ?)", (item, body))
