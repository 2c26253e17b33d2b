"""Queues as people look after them: make, list, look into, clear out."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any

from pxrs.clock import Clock
from pxrs.errors import QueueNotFound
from pxrs.stores.queue_rules import LIVE, LOOSE, require_same, states_or, validate_name
from pxrs.stores.sqlite import queue_rows as rows
from pxrs.stores.sqlite.control import slot
from pxrs.stores.sqlite.database import Database, Turn, in_chunks
from pxrs.stores.sqlite.queue_ahead import IS_AHEAD, is_ahead
from pxrs.types import Holder, ItemState, NewItem, Queue, QueueStats, StoredItem

_CHUNK = 5000
_ITEM = """id, state, body, key, rank, deliveries, put_ms, taken_ms, visible, dead_ms, error,
    session, tx"""


class QueueUpkeep:
    """The part of a `QueueStore` that holds nothing and commits nothing for anybody."""

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
            # Nobody finds it any more; its items go a piece at a time.
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
            found = rows.find_queue(connection, queue)
            if found is None:
                return QueueStats()
            counts = [
                connection.execute(
                    f"SELECT count(*) FROM pxrs_queue_items WHERE queue = ? AND state = {state}",
                    (found.id,),
                ).fetchone()[0]
                for state in range(5)
            ]
            put, done = connection.execute(
                "SELECT put, done FROM pxrs_queues WHERE id = ?", (found.id,)
            ).fetchone()
            oldest = connection.execute(
                "SELECT put_ms FROM pxrs_queue_items WHERE id BETWEEN ? AND ? AND state < 4 "
                "ORDER BY id LIMIT 1",
                (rows.item_id(found.id, 0), rows.item_id(found.id + 1, 0)),
            ).fetchone()
            overdue = self._overdue(connection, found.id)
            aside: int = connection.execute(
                f"SELECT count(*) FROM pxrs_queue_items WHERE queue = ? AND {IS_AHEAD}", (found.id,)
            ).fetchone()[0]
        return QueueStats(
            ready=counts[0] + overdue + aside,
            delayed=counts[1] - overdue,
            held=counts[2] - aside,
            waiting=counts[3],
            dead=counts[4],
            oldest_ms=oldest[0] if oldest else None,
            put=put,
            done=done,
        )

    def _overdue(self, connection: sqlite3.Connection, queue: int) -> int:
        """Delayed items whose time has come: they are ready, nobody has noted it yet."""
        overdue: int = connection.execute(
            "SELECT count(*) FROM pxrs_queue_items WHERE queue = ? AND state = 1 AND visible <= ?",
            (queue, self._clock.wall_ms()),
        ).fetchone()[0]
        return overdue

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        wanted = states_or(states, LIVE)
        with self._database.reading() as connection:
            found = rows.find_queue(connection, queue)
            if found is None:
                return []
            items = connection.execute(
                f"SELECT {_ITEM} FROM pxrs_queue_items WHERE id > ? AND id < ? "
                f"AND {_in_states(wanted)} ORDER BY id LIMIT ?",
                (rows.item_id(found.id, after or 0), rows.item_id(found.id + 1, 0), limit),
            ).fetchall()
            return [_stored(connection, item) for item in items]

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        states = (*LOOSE, ItemState.DEAD)
        return self._database.write(lambda turn: self._discard(turn, queue, ids, states))

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        wanted = states_or(states, LOOSE)
        total = 0
        ids = self._latest(queue, wanted, None)
        while ids:
            total += self._database.write(
                partial(self._discard, name=queue, ids=ids, states=wanted)
            )
            ids = self._latest(queue, wanted, before=ids[-1])
        return total

    def _latest(self, queue: str, states: Sequence[ItemState], before: int | None) -> list[int]:
        """Items from the end: removing a lane from its front would show each of its items."""
        with self._database.reading() as connection:
            found = rows.find_queue(connection, queue)
            if found is None:
                return []
            top = rows.item_id(*((found.id + 1, 0) if before is None else (found.id, before)))
            items = connection.execute(
                f"SELECT id FROM pxrs_queue_items WHERE id > ? AND id < ? "
                f"AND {_in_states(states)} ORDER BY id DESC LIMIT ?",
                (rows.item_id(found.id, 0), top, _CHUNK),
            ).fetchall()
        return [rows.number_of(item) for (item,) in items]

    def _discard(
        self, turn: Turn, name: str, ids: Sequence[int], states: Sequence[ItemState]
    ) -> int:
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            return 0
        gone: list[tuple[int, str | None]] = []
        for some in in_chunks(list(ids)):
            marks = ",".join("?" * len(some))
            gone += connection.execute(
                f"DELETE FROM pxrs_queue_items WHERE id IN ({marks}) AND {_in_states(states)} "
                "RETURNING id, lane",
                [rows.item_id(queue.id, number) for number in some],
            ).fetchall()
        rows.remove_bodies(connection, [item for item, _ in gone])
        lanes = {(queue.id, lane) for _, lane in gone if lane is not None}
        rows.settle(connection, lanes, self._clock.wall_ms())
        turn.slots.add(slot_of(name))
        return len(gone)

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        return self._database.write(lambda turn: self._redrive(turn, queue, ids))

    def _redrive(self, turn: Turn, name: str, ids: Sequence[int]) -> int:
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            raise QueueNotFound(name)
        total, now_ms = 0, self._clock.wall_ms()
        for number in dict.fromkeys(ids):
            old = rows.item_id(queue.id, number)
            item = connection.execute(
                f"SELECT body, key, rank, error FROM pxrs_queue_items WHERE id = ? "
                f"AND state = {rows.DEAD}",
                (old,),
            ).fetchone()
            if item is None:
                continue
            body = rows.load_body(connection, old, item[0])
            connection.execute("DELETE FROM pxrs_queue_items WHERE id = ?", (old,))
            rows.remove_bodies(connection, [old])
            new = NewItem(queue=name, body=body, key=item[1], priority=-item[2])
            (fresh,) = rows.put_items(connection, queue, [new], now_ms)
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
    """The slot of the bell that rings when there may be something to take from the queue."""
    return slot(f"queue/{queue}")


def _in_states(states: Sequence[ItemState]) -> str:
    """The condition for items in those states. What is set aside for somebody is ready."""
    numbers = ",".join(str(rows.STATES.index(state)) for state in states)
    if ItemState.READY in states and ItemState.HELD not in states:
        return f"(state IN ({numbers}) OR {IS_AHEAD})"
    if ItemState.HELD in states and ItemState.READY not in states:
        return f"(state IN ({numbers}) AND NOT {IS_AHEAD})"
    return f"state IN ({numbers})"


def _stored(connection: sqlite3.Connection, row: Sequence[Any]) -> StoredItem:
    item, state, body, key, rank, deliveries, put_ms, taken, visible, dead, error, session, tx = row
    if tx is not None and is_ahead(tx):
        state, deliveries, session = rows.READY, deliveries - 1, None
    return StoredItem(
        id=rows.number_of(item),
        state=rows.STATES[state],
        body=rows.load_body(connection, item, body),
        key=key,
        priority=-rank,
        deliveries=deliveries,
        put_ms=put_ms,
        taken_ms=taken,
        visible_ms=visible if state == rows.DELAYED else None,
        dead_ms=dead,
        error=error,
        holder=Holder(session, tx) if session is not None else None,
    )


def _delete_some(connection: sqlite3.Connection, queue: int) -> bool:
    """Remove a piece of a queue that is not there any more; whether there may be more."""
    found = connection.execute(
        "DELETE FROM pxrs_queue_items WHERE id IN (SELECT id FROM pxrs_queue_items "
        "WHERE id > ? AND id < ? LIMIT ?) RETURNING id",
        (rows.item_id(queue, 0), rows.item_id(queue + 1, 0), _CHUNK),
    ).fetchall()
    rows.remove_bodies(connection, [item for (item,) in found])
    return len(found) == _CHUNK
