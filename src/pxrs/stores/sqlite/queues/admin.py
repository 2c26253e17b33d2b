"""Administration of queues: create, list, peek, drop, redrive, purge, restore."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any

from pxrs.clock import Clock
from pxrs.core.queue import (
    LIVE,
    NOT_HELD,
    page_size,
    require_same,
    states_or,
    validate_name,
    validate_restored,
)
from pxrs.errors import QueueNotFound
from pxrs.stores.rows import DEAD, DELAYED, READY, counted, numbers_of, stored
from pxrs.stores.sqlite.change_counters import slot
from pxrs.stores.sqlite.database import Database, Turn, in_chunks
from pxrs.stores.sqlite.queues import rows
from pxrs.stores.sqlite.queues.puts import put_items, restore_items
from pxrs.types import Holder, ItemState, NewItem, Queue, QueueLimits, QueueStats, StoredItem

LIMITS = QueueLimits(items=10_000, body_bytes=64 * 2**20)
_CHUNK = 5000
# One statement, so that nothing can change between an item and its body.
_ITEM = f"""id, CASE WHEN state = {DELAYED} AND visible <= :now_ms THEN {READY} ELSE state END,
    coalesce(body, (SELECT body FROM pxrs_queue_bodies b WHERE b.id = pxrs_queue_items.id)),
    key, rank, deliveries, put_ms, taken_ms, visible, dead_ms, error, session, tx"""
# One statement, too: between two of them an item could move and be counted twice, or not at all.
_COUNT = "(SELECT count(*) FROM pxrs_queue_items WHERE queue = q.id AND state = {state})"
_STATS = f"""SELECT {", ".join(_COUNT.format(state=state) for state in range(5))}, put, discarded,
    (SELECT put_ms FROM pxrs_queue_items WHERE id > q.id << {rows.NUMBER_BITS}
        AND id < q.id + 1 << {rows.NUMBER_BITS} AND state < {DEAD} ORDER BY id LIMIT 1),
    (SELECT count(*) FROM pxrs_queue_items
        WHERE queue = q.id AND state = {DELAYED} AND visible <= :now_ms)
    FROM pxrs_queues q WHERE name = :queue"""


class QueueUpkeep:
    """The part of a `QueueStore` that holds no items and commits no unit of work."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        validate_name(name)

        def work(turn: Turn) -> Queue:
            found = rows.find_queue(turn.connection, name)
            if found is not None:
                return require_same(found.info, fifo)
            return rows.make_queue(turn.connection, name, fifo, self._clock.wall_ms()).info

        return self._database.write(work)

    def find(self, name: str) -> Queue | None:
        with self._database.reading() as connection:
            found = rows.find_queue(connection, name)
        return None if found is None else found.info

    def all(self) -> list[Queue]:
        with self._database.reading() as connection:
            found = connection.execute(
                "SELECT name, fifo, created FROM pxrs_queues ORDER BY name"
            ).fetchall()
        return [Queue(name=row[0], fifo=bool(row[1]), created_ms=row[2]) for row in found]

    def delete(self, name: str) -> None:
        def unname(turn: Turn) -> int | None:
            found = rows.find_queue(turn.connection, name)
            if found is None:
                return None
            # From now on it can't be found; its items are deleted a piece at a time.
            turn.connection.execute("DELETE FROM pxrs_queues WHERE id = ?", (found.id,))
            turn.connection.execute("DELETE FROM pxrs_queue_seen WHERE queue = ?", (found.id,))
            turn.slots.add(slot_of(name))
            return found.id

        queue = self._database.write(unname)
        if queue is not None:
            while self._database.write(lambda turn: _delete_some(turn.connection, queue)):
                pass

    def stats(self, queue: str) -> QueueStats:
        with self._database.reading() as connection:
            named = {"queue": queue, "now_ms": self._clock.wall_ms()}
            row = connection.execute(_STATS, named).fetchone()
        if row is None:
            return QueueStats()
        *counts, put, discarded, oldest, overdue = row
        done = put - discarded - sum(counts)
        return counted(counts, overdue=overdue, oldest=oldest, put=put, done=done)

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        wanted, most = states_or(states, LIVE), page_size(limit)
        now_ms = self._clock.wall_ms()
        with self._database.reading() as connection:
            found = rows.find_queue(connection, queue)
            if found is None:
                return []
            items = connection.execute(
                f"SELECT {_ITEM} FROM pxrs_queue_items WHERE id > :after AND id < :end "
                f"AND ({_among(wanted)}) ORDER BY id LIMIT :most",
                {
                    "now_ms": now_ms,
                    "after": rows.ids_after(found.id, after or 0),
                    "end": rows.item_id(found.id + 1, 0),
                    "most": most,
                },
            ).fetchall()
        return [self._stored(item, now_ms) for item in items]

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        states = (*NOT_HELD, ItemState.DEAD)
        return self._database.write(lambda turn: self._discard(turn, queue, ids, states))

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        wanted = states_or(states, NOT_HELD)
        total = 0
        ids = self._latest(queue, wanted, None)
        while ids:
            total += self._database.write(
                partial(self._discard, name=queue, ids=ids, states=wanted)
            )
            ids = self._latest(queue, wanted, before=ids[-1])
        return total

    def _latest(self, queue: str, states: Sequence[ItemState], before: int | None) -> list[int]:
        """List items from the end: removing a lane from its front would show each of its items."""
        with self._database.reading() as connection:
            found = rows.find_queue(connection, queue)
            if found is None:
                return []
            top = rows.item_id(*((found.id + 1, 0) if before is None else (found.id, before)))
            items = connection.execute(
                f"SELECT id FROM pxrs_queue_items WHERE id > :after AND id < :end "
                f"AND ({_among(states)}) ORDER BY id DESC LIMIT {_CHUNK}",
                {
                    "now_ms": self._clock.wall_ms(),
                    "after": rows.item_id(found.id, 0),
                    "end": top,
                },
            ).fetchall()
        return [rows.number_of(item) for (item,) in items]

    def _discard(
        self, turn: Turn, name: str, ids: Sequence[int], states: Sequence[ItemState]
    ) -> int:
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            return 0
        now_ms = self._clock.wall_ms()
        rows.promote_due(connection, queue.id, now_ms)
        gone: list[tuple[int, str | None]] = []
        for some in in_chunks(list(ids)):
            # Written into the statement: its other parameters are named ones.
            items = ",".join(str(rows.item_id(queue.id, number)) for number in some)
            gone += connection.execute(
                f"DELETE FROM pxrs_queue_items WHERE id IN ({items}) AND ({_among(states)}) "
                "RETURNING id, lane",
                {"now_ms": now_ms},
            ).fetchall()
        rows.remove_bodies(connection, [item for item, _ in gone])
        lanes = {(queue.id, lane) for _, lane in gone if lane is not None}
        rows.settle(connection, lanes, now_ms)
        connection.execute(
            "UPDATE pxrs_queues SET discarded = discarded + ? WHERE id = ?", (len(gone), queue.id)
        )
        turn.slots.add(slot_of(name))
        return len(gone)

    def _stored(self, row: Sequence[Any], now_ms: int) -> StoredItem:
        item, *columns, session, tx = row
        holder = None
        if session is not None:
            holder = Holder(session, tx)
        return stored((rows.number_of(item), *columns), holder, now_ms)

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        return self._database.write(lambda turn: self._redrive(turn, queue, ids))

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        validate_restored(items, LIMITS)

        def work(turn: Turn) -> int:
            found = rows.find_queue(turn.connection, queue)
            if found is None:
                raise QueueNotFound(queue)
            turn.slots.add(slot_of(queue))
            turn.weight += sum(len(item.body) for item in items)
            return restore_items(turn.connection, found, items, self._clock.wall_ms())

        return self._database.write(work)

    def _redrive(self, turn: Turn, name: str, ids: Sequence[int]) -> int:
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            return 0
        total, now_ms = 0, self._clock.wall_ms()
        for number in dict.fromkeys(ids):
            old = rows.item_id(queue.id, number)
            item = connection.execute(
                f"SELECT body, key, rank, error FROM pxrs_queue_items WHERE id = ? "
                f"AND state = {DEAD}",
                (old,),
            ).fetchone()
            if item is None:
                continue
            body = rows.load_body(connection, old, item[0])
            connection.execute("DELETE FROM pxrs_queue_items WHERE id = ?", (old,))
            rows.remove_bodies(connection, [old])
            new = NewItem(queue=name, body=body, key=item[1], priority=-item[2])
            (fresh,) = put_items(connection, name, [new], now_ms)
            assert fresh is not None
            connection.execute(
                "UPDATE pxrs_queue_items SET error = ? WHERE id = ?",
                (item[3], rows.item_id(queue.id, fresh)),
            )
            total += 1
        connection.execute("UPDATE pxrs_queues SET put = put - ? WHERE id = ?", (total, queue.id))
        turn.slots.add(slot_of(name))
        return total


def slot_of(queue: str) -> int:
    """The slot whose change counter is raised when there may be something to take."""
    return slot(f"queue/{queue}")


def _among(states: Sequence[ItemState]) -> str:
    """A condition for rows in these states at `:now_ms`. A delayed item that is due is ready."""
    numbers = ",".join(map(str, numbers_of(states)))
    is_due = f"(state = {DELAYED} AND visible <= :now_ms)"
    if ItemState.READY in states:
        return f"state IN ({numbers}) OR {is_due}"
    return f"state IN ({numbers}) AND NOT {is_due}"


def _delete_some(connection: sqlite3.Connection, queue: int) -> bool:
    """Delete some rows of a deleted queue; returns whether there may be more."""
    found = connection.execute(
        "DELETE FROM pxrs_queue_items WHERE id IN (SELECT id FROM pxrs_queue_items "
        "WHERE id > ? AND id < ? LIMIT ?) RETURNING id",
        (rows.item_id(queue, 0), rows.item_id(queue + 1, 0), _CHUNK),
    ).fetchall()
    rows.remove_bodies(connection, [item for (item,) in found])
    return len(found) == _CHUNK
