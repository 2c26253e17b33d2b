"""Administration of queues: create, list, peek, purge, redrive, restore; and tidying up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pxrs.core.queue import (
    LIVE,
    NOT_HELD,
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
from pxrs.stores.mysql.connection import Connection, Row
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.failures import Raced
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.changes import (
    find_queues,
    item_row,
    lock_queues,
    make_queue,
    queue_row,
    settle,
)
from pxrs.stores.rows import DEAD, QueueRow, counted, numbers_of, possible, stored
from pxrs.stores.wakeups import QUEUE
from pxrs.types import Holder, ItemState, Queue, QueueLimits, QueueStats, StoredItem

# A body is sent with its zeros and quotes escaped: twice its size has to fit into a packet of
# 16 MB, which is MariaDB's default limit.
LIMITS = QueueLimits(items=10_000, body_bytes=7 * 2**20)
_PIECE = 5000
_BEYOND = 2**63 - 1


class QueueUpkeep:
    """The verbs of a `QueueStore` that neither hold items nor commit a unit of work."""

    def __init__(self, database: Database, changes: ChangeListener) -> None:
        self._database = database
        self._changes = changes

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        validate_name(name)

        def work(connection: Connection) -> Queue:
            if name not in find_queues(connection, [name]):
                make_queue(connection, name, fifo=fifo)
            return find_queues(connection, [name])[name].info

        return require_same(self._database.write(work), fifo)

    def find(self, name: str) -> Queue | None:
        rows = self._database.read(sql.FIND, names=[name])
        return queue_row(*rows[0]).info if rows else None

    def all(self) -> list[Queue]:
        return [queue_row(*row).info for row in self._database.read(sql.EVERY)]

    def delete(self, name: str) -> None:
        def unname(connection: Connection) -> int | None:
            locked = lock_queues(connection, [name]).get(name)
            if locked is None:
                return None
            # From now on it can't be found; its items are deleted a piece at a time.
            queue = locked.queue.id
            connection.run(sql.DROP_QUEUE, queue=queue)
            connection.run(sql.DROP_SEEN, queue=queue)
            return queue

        queue = self._database.write(unname)
        if queue is not None:
            self._delete_items(queue)
            self._changes.ring(QUEUE, [name])

    def _delete_items(self, queue: int) -> None:
        """Remove the items of a queue that was deleted."""

        def piece(connection: Connection) -> bool:
            rows = connection.rows(sql.PIECE, queue=queue, limit=_PIECE)
            if rows:
                connection.run(sql.DISCARD_UPTO, queue=queue, upto=rows[-1][0])
            return len(rows) == _PIECE

        while self._database.write(piece):
            pass

    def stats(self, queue: str) -> QueueStats:
        rows = self._database.read(sql.STATS, name=queue)
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
        wanted, size = numbers_of(states_or(states, LIVE)), page_size(limit)
        values = {"name": queue, "after": max(0, min(after or 0, _BEYOND)), "limit": size}
        rows = self._database.read(sql.standing(sql.PEEK, wanted), states=wanted, **values)
        return [_stored(row) for row in rows]

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        states = (*NOT_HELD, ItemState.DEAD)
        gone = self._database.write(lambda connection: _discard(connection, queue, ids, states))
        self._changes.ring(QUEUE, [queue])
        return gone

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        wanted = states_or(states, NOT_HELD)
        total = 0
        ids = self._last(queue, wanted, _BEYOND)
        while ids:
            total += self._database.write(partial(_discard, name=queue, ids=ids, states=wanted))
            ids = self._last(queue, wanted, ids[-1])
        self._changes.ring(QUEUE, [queue])
        return total

    def _last(self, queue: str, states: Sequence[ItemState], before: int) -> list[int]:
        numbers = numbers_of(states)
        values = {"name": queue, "before": before, "states": numbers, "limit": _PIECE}
        rows = self._database.read(sql.standing(sql.LAST, numbers), **values)
        return [row[0] for row in rows]

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        total = self._database.write(lambda connection: _redrive(connection, queue, ids))
        self._changes.ring(QUEUE, [queue])
        return total

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        validate_restored(items, LIMITS)
        total = self._database.write(lambda connection: _restore(connection, queue, items))
        self._changes.ring(QUEUE, [queue])
        return total

    # What was applied, and what is left over

    def _tidy(self) -> None:
        """Forget units that are too old for `outcome`, and remove items of deleted queues.

        The end of a session is noted when it is first seen. So it counts for later programs, even
        if none of them runs for as long as a caller might ask for a unit.
        """
        for session, seen_ms, now_ms in self._database.read(sql.ORPHANED):
            if seen_ms is None:
                self._database.write(partial(_note_ended, session))
            elif seen_ms + REMEMBERED_FOR * 1000 <= now_ms:
                while self._forget(session, self._database.read(sql.NOTED_IN, session=session)):
                    pass
        for (queue,) in self._database.read(sql.STRAYS):
            self._delete_items(queue)

    def _forget_units(self, session: str, units: Sequence[str]) -> None:
        if units:
            self._forget(session, self._database.read(sql.NOTED, session=session, units=units))

    def _forget(self, session: str, noted: Sequence[Row]) -> bool:
        """Forget records of units and add up what they did; returns whether there were any."""
        numbers: dict[int, list[int]] = {}
        done: Counter[int] = Counter()
        for number, queue, count in noted:
            numbers.setdefault(queue, []).append(number)
            done[queue] += count
        for queue, some in numbers.items():
            self._database.write(partial(_fold, session, queue, some, done[queue]))
        return bool(numbers)


def _note_ended(session: str, connection: Connection) -> None:
    # If two processes do it at the same time, both note the same.
    with suppress(Raced):
        connection.run(sql.NOTE_ENDED, session=session)


def _fold(session: str, queue: int, numbers: list[int], done: int, connection: Connection) -> None:
    """Forget commits and add up what they did, unless another process does. Queue locked first."""
    connection.run(sql.COUNT_DONE, queue=queue, more=done)
    if connection.run_in(sql.FORGET, session=session, numbers=numbers) < len(numbers):
        connection.rollback()


def _lock_standing(
    connection: Connection, queue: int, ids: Sequence[int], states: Sequence[ItemState]
) -> dict[int, str | None]:
    """Lock those of the items that are in the states; returns their lanes."""
    numbers = numbers_of(states)
    statement = sql.standing(sql.LOCK_STANDING, numbers)
    rows = connection.rows_in(statement, queue=queue, ids=possible(ids), states=tuple(numbers))
    return dict(rows)


def _known(lanes: Iterable[str | None]) -> set[str]:
    return {lane for lane in lanes if lane is not None}


def _discard(
    connection: Connection, name: str, ids: Sequence[int], states: Sequence[ItemState]
) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        return 0
    queue = locked.queue.id
    lanes = _lock_standing(connection, queue, ids, states)
    connection.run_in(sql.DISCARD, queue=queue, ids=list(lanes))
    settle(connection, queue, _known(lanes.values()), locked.now)
    connection.run(sql.STIR, ids=[queue])
    return len(lanes)


def _redrive(connection: Connection, name: str, ids: Sequence[int]) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        return 0
    queue, first, now = locked
    lanes = _lock_standing(connection, queue.id, ids, [ItemState.DEAD])
    old = [number for number in possible(ids) if number in lanes]
    moves = [
        {"queue": queue.id, "old": number, "new": first + at, "now": now}
        for at, number in enumerate(old)
    ]
    connection.run_many(sql.REVIVE, moves)
    connection.run(sql.NUMBER, queue=queue.id, numbers=len(old), fresh=0)
    settle(connection, queue.id, _known(lanes.values()), now)
    return len(old)


def _restore(connection: Connection, name: str, items: Sequence[StoredItem]) -> int:
    locked = lock_queues(connection, [name]).get(name)
    if locked is None:
        raise QueueNotFound(name)
    queue, _, now = locked
    ids = [item.id for item in items]
    there = {row[0] for row in connection.rows_in(sql.PRESENT, queue=queue.id, ids=ids)}
    fresh = [_restored(queue, item, now) for item in items if item.id not in there]
    connection.run_many(sql.RESTORE, fresh)
    above = max((number + 1 for number in ids), default=0)
    connection.run(sql.NUMBER_ABOVE, queue=queue.id, above=above, fresh=len(fresh))
    lanes = sorted(_known(row["lane"] for row in fresh))
    # The item that shows in a lane may no longer be its first.
    connection.run_in(sql.HIDE, queue=queue.id, lanes=lanes)
    settle(connection, queue.id, lanes, now)
    return len(fresh)


def _restored(queue: QueueRow, item: StoredItem, now: int) -> dict[str, Any]:
    columns = {
        "grade": -item.priority,
        "deliveries": item.deliveries,
        "suspect": int(is_suspect(item)),
        "put_ms": item.put_ms,
        "taken_ms": item.taken_ms,
        "dead_ms": item.dead_ms,
        "error": item.error or None,
        "body": bytes(item.body),
    }
    if item.state is ItemState.DEAD:
        columns["state"] = DEAD
    return item_row(queue, item.id, item.key, item.visible_ms or item.put_ms, now, **columns)


def _stored(row: Row) -> StoredItem:
    number, state, body, *columns, session, tx, now = row
    holder = Holder(session, tx) if session is not None else None
    return stored((number, state, body or b"", *columns), holder, now)
