"""Queues as people look after them: make, list, look into, clear out, fill from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Connection, exc

from pxrs.clock import Clock
from pxrs.core.queue import (
    LIVE,
    LOOSE,
    REMEMBERED_FOR,
    is_suspect,
    page_size,
    require_same,
    states_or,
    validate_name,
    validate_restored,
)
from pxrs.errors import QueueNotFound
from pxrs.stores.mysql.change_listener import ChangeListener
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.queues import admin_statements as kept
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.changes import make_queue
from pxrs.stores.mysql.queues.rows import (
    QueueRow,
    find_queues,
    in_chunks,
    lane_text,
    lock_queues,
    settle,
)
from pxrs.stores.rows import (
    DEAD,
    DELAYED,
    READY,
    WAITING,
    counted,
    numbers_of,
    possible,
    stored,
)
from pxrs.types import Holder, ItemState, Queue, QueueLimits, QueueStats, StoredItem

# A body is sent with its zeros and quotes escaped: twice its size has to fit into a packet of
# 16 MB, which is what MariaDB takes unless it is told otherwise.
LIMITS = QueueLimits(items=10_000, body_bytes=7 * 2**20)
_PIECE = 5000
_NUMBERS = 2**63


class QueueUpkeep:
    """The part of a `QueueStore` that holds nothing and commits nothing for anybody."""

    def __init__(self, database: Database, changes: ChangeListener, clock: Clock) -> None:
        self._database = database
        self._changes = changes
        self._clock = clock

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        validate_name(name)

        def work(connection: Connection) -> Queue:
            if name not in find_queues(connection, [name]):
                make_queue(connection, name, fifo=fifo)
            return find_queues(connection, [name])[name].info

        return require_same(self._database.write(work), fifo)

    def find(self, name: str) -> Queue | None:
        found = _queues(self._database.read(kept.FIND, names=[name]))
        return found[0] if found else None

    def all(self) -> list[Queue]:
        return _queues(self._database.read(kept.EVERY))

    def delete(self, name: str) -> None:
        def unname(connection: Connection) -> int | None:
            locked = lock_queues(connection, [name]).get(name)
            if locked is None:
                return None
            # Nobody finds it any more; its items go a piece at a time.
            queue = locked.queue.id
            connection.execute(kept.DROP_QUEUE, {"queue": queue})
            connection.execute(sql.DROP_SEEN, {"queue": queue})
            return queue

        queue = self._database.write(unname)
        if queue is not None:
            self._delete_items(queue)
            self._changes.ring_queues([name])

    def _delete_items(self, queue: int) -> None:
        """Remove the items of a queue that is not there any more."""

        def piece(connection: Connection) -> bool:
            ids = connection.execute(kept.PIECE.limit(_PIECE), {"queue": queue}).scalars().all()
            if ids:
                connection.execute(kept.DISCARD_UPTO, {"queue": queue, "upto": ids[-1]})
            return len(ids) == _PIECE

        while self._database.write(piece):
            pass

    def stats(self, queue: str) -> QueueStats:
        rows = self._database.read(kept.STATS, name=queue)
        if not rows:
            return QueueStats()
        *counts, overdue, oldest, put, done = rows[0]
        return counted(counts, overdue=overdue, oldest=oldest, put=put, done=int(done))

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        statement = kept.peek(numbers_of(states_or(states, LIVE)), page_size(limit))
        found = self._find(queue)
        if found is None:
            return []
        above = max(0, min(after or 0, _NUMBERS - 1))
        return [_stored(row) for row in self._database.read(statement, queue=found, after=above)]

    def _find(self, name: str) -> int | None:
        rows = self._database.read(kept.FIND, names=[name])
        return rows[0][1] if rows else None

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        states = (*LOOSE, ItemState.DEAD)
        gone = self._database.write(lambda connection: _discard(connection, queue, ids, states))
        self._changes.ring_queues([queue])
        return gone

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        wanted = states_or(states, LOOSE)
        total = 0
        ids = self._latest(queue, wanted, _NUMBERS - 1)
        while ids:
            total += self._database.write(partial(_discard, name=queue, ids=ids, states=wanted))
            ids = self._latest(queue, wanted, ids[-1])
        self._changes.ring_queues([queue])
        return total

    def _latest(self, queue: str, states: Sequence[ItemState], before: int) -> list[int]:
        found = self._find(queue)
        if found is None:
            return []
        statement = kept.latest(numbers_of(states), _PIECE)
        return [row[0] for row in self._database.read(statement, queue=found, before=before)]

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        total = self._database.write(lambda connection: _redrive(connection, queue, ids))
        self._changes.ring_queues([queue])
        return total

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        validate_restored(items, LIMITS)
        total = self._database.write(lambda connection: _restore(connection, queue, items))
        self._changes.ring_queues([queue])
        return total

    # What was applied, and what is left over

    def _tidy(self) -> None:
        """Forget what nobody will ask for, and remove what belongs to no queue.

        That a session is over is noted when it is first seen: it counts for programs that come
        later, though none of them may live for as long as somebody might ask.
        """
        for session, seen_ms, now_ms in self._database.read(kept.ORPHANED):
            if seen_ms is None:
                self._database.write(partial(_note_ended, session))
            elif seen_ms + REMEMBERED_FOR * 1000 <= now_ms:
                while self._forget(session, self._database.read(kept.NOTED_IN, session=session)):
                    pass
        for (queue,) in self._database.read(kept.STRAYS):
            self._delete_items(queue)

    def _forget_units(self, session: str, units: Sequence[str]) -> None:
        for some in in_chunks(units):
            self._forget(session, self._database.read(kept.NOTED, session=session, units=some))

    def _forget(self, session: str, noted: Sequence[Any]) -> bool:
        """Forget records of units; what they did is added up. Whether there were any."""
        numbers: dict[int, list[int]] = {}
        done: Counter[int] = Counter()
        for number, queue, count in noted:
            numbers.setdefault(queue, []).append(number)
            done[queue] += count
        for queue, some in numbers.items():
            self._database.write(partial(_fold, session, queue, some, done[queue]))
        return bool(numbers)


def _note_ended(session: str, connection: Connection) -> None:
    # Two at the same moment note the same.
    with suppress(exc.IntegrityError):
        connection.execute(kept.NOTE_ENDED, {"session": session})


def _fold(
    session: str, queue: int, numbers: Sequence[int], done: int, connection: Connection
) -> None:
    """Forget commits, and add up what they did; unless somebody else does. The queue first."""
    connection.execute(kept.COUNT_DONE, {"queue": queue, "more": done})
    gone = 0
    for some in in_chunks(numbers):
        gone += connection.execute(kept.FORGET, {"session": session, "numbers": some}).rowcount
    if gone < len(numbers):
        connection.rollback()


def _queues(rows: Sequence[Any]) -> list[Queue]:
    return [Queue(name=row[0], fifo=bool(row[2]), created_ms=row[3]) for row in rows]


def _discard(
    connection: Connection, name: str, ids: Sequence[int], states: Sequence[ItemState]
) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        return 0
    queue, _, now = locked
    statement = kept.lock_standing(numbers_of(states))
    total, lanes = 0, set()
    for some in in_chunks(possible(ids)):
        rows = connection.execute(statement, {"queue": queue.id, "ids": some}).all()
        if rows:
            gone = [row[0] for row in rows]
            connection.execute(kept.DISCARD, {"queue": queue.id, "ids": gone})
            total += len(gone)
            lanes |= {row[1] for row in rows if row[1] is not None}
    settle(connection, queue.id, lanes, now)
    connection.execute(kept.STIR, {"ids": [queue.id]})
    return total


def _redrive(connection: Connection, name: str, ids: Sequence[int]) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        return 0
    queue, first, now = locked
    lanes: dict[int, str | None] = {}
    for some in in_chunks(possible(ids)):
        rows = connection.execute(kept.lock_standing([DEAD]), {"queue": queue.id, "ids": some})
        lanes |= {row[0]: row[1] for row in rows}
    old = [number for number in possible(ids) if number in lanes]
    moves = [
        {"queue": queue.id, "old": number, "new": first + at, "now": now}
        for at, number in enumerate(old)
    ]
    if moves:
        connection.execute(kept.REVIVE, moves)
    connection.execute(kept.NUMBER, {"queue": queue.id, "numbers": len(old), "fresh": 0})
    settle(connection, queue.id, {lane for lane in lanes.values() if lane is not None}, now)
    return len(old)


def _restore(connection: Connection, name: str, items: Sequence[StoredItem]) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        raise QueueNotFound(name)
    queue, _, now = locked
    there: set[int] = set()
    for some in in_chunks([item.id for item in items]):
        rows = connection.execute(sql.PRESENT, {"queue": queue.id, "ids": some})
        there |= set(rows.scalars())
    fresh = [_restored(queue, item, now) for item in items if item.id not in there]
    if fresh:
        connection.execute(sql.INSERT, fresh)
    above = max((item.id + 1 for item in items), default=0)
    counts = {"queue": queue.id, "above": above, "fresh": len(fresh)}
    connection.execute(kept.NUMBER_ABOVE, counts)
    lanes = {row["lane"] for row in fresh if row["lane"] is not None}
    for some_lanes in in_chunks(sorted(lanes)):
        # What shows in a lane may not be its first item any more.
        connection.execute(sql.HIDE, {"queue": queue.id, "lanes": some_lanes})
    settle(connection, queue.id, lanes, now)
    return len(fresh)


def _restored(queue: QueueRow, item: StoredItem, now: int) -> dict[str, Any]:
    lane = lane_text(queue.info, item.key)
    due = item.visible_ms or item.put_ms
    state = DELAYED if due > now else READY
    if item.state is ItemState.DEAD:
        state = DEAD
    elif lane is not None:
        state = WAITING
    return {
        "queue_id": queue.id,
        "item_id": item.id,
        "state": state,
        "grade": -item.priority,
        "lane": lane,
        "item_key": item.key,
        "due_ms": due,
        "deliveries": item.deliveries,
        "suspect": int(is_suspect(item)),
        "put_ms": item.put_ms,
        "taken_ms": item.taken_ms,
        "dead_ms": item.dead_ms,
        "error_text": item.error or None,
        "body": bytes(item.body),
    }


def _stored(row: Sequence[Any]) -> StoredItem:
    *columns, session, tx, now = row
    return stored(columns, Holder(session, tx) if session is not None else None, now)
