"""Administration of queues: create, list, peek, drop, redrive, purge."""

from __future__ import annotations

from collections.abc import Sequence

from pxrs.core.queue import LIVE, NOT_HELD, page_size, require_same, states_or, validate_name
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.database import Database, Row
from pxrs.stores.rows import DEAD, DELAYED, READY, counted, numbers_of, possible, stored
from pxrs.stores.wakeups import QUEUE
from pxrs.types import Holder, ItemState, Queue, QueueStats, StoredItem

_CHUNK = 5000
_CREATE = """INSERT INTO @.pxrs_queues (name, fifo, created) VALUES (%s, %s, @.pxrs_now_ms())
    ON CONFLICT (name) WHERE dropped IS NULL DO NOTHING"""
_FIND = "SELECT name, fifo, created FROM @.pxrs_queues WHERE name = %s AND dropped IS NULL"
_ALL = "SELECT name, fifo, created FROM @.pxrs_queues WHERE dropped IS NULL ORDER BY name"
_UNNAME = """UPDATE @.pxrs_queues SET dropped = clock_timestamp()
    WHERE name = %s AND dropped IS NULL RETURNING id"""
_EMPTY = """DELETE FROM @.pxrs_queue_items WHERE queue = %s AND id IN (
    SELECT id FROM @.pxrs_queue_items WHERE queue = %s LIMIT %s) RETURNING 1"""
# A delayed item that is due is ready, even if it is not marked so yet.
_STATE = f"""CASE WHEN i.state = {DELAYED} AND i.visible <= @.pxrs_now_ms() THEN {READY}
    ELSE i.state END"""
_COUNT = "(SELECT count(*) FROM @.pxrs_queue_items i WHERE i.queue = k.id AND i.state = {state})"
# One statement: between two of them an item could move and be counted twice, or not at all.
_STATS = f"""SELECT {", ".join(_COUNT.format(state=state) for state in range(5))},
    (SELECT count(*) FROM @.pxrs_queue_items i
        WHERE i.queue = k.id AND i.state = {DELAYED} AND i.visible <= @.pxrs_now_ms()),
    (SELECT i.put_ms FROM @.pxrs_queue_items i
        WHERE i.queue = k.id AND i.state < {DEAD} ORDER BY i.id LIMIT 1),
    c.put, c.done
    FROM @.pxrs_queues k, LATERAL (
        SELECT coalesce(sum(put), 0)::int8 AS put, coalesce(sum(done), 0)::int8 AS done FROM (
            SELECT put, done FROM @.pxrs_queue_counts WHERE queue = k.id
            UNION ALL
            SELECT u.put, u.done FROM @.pxrs_queue_commits,
                unnest(queues, puts, dones) AS u(queue, put, done) WHERE u.queue = k.id) n) c
    WHERE k.name = %s AND k.dropped IS NULL"""
_PEEK = f"""SELECT i.id, i.state, i.body, i.key, i.rank, i.deliveries, i.put_ms, i.taken_ms,
    i.visible, i.dead_ms, i.error, i.session, i.tx, @.pxrs_now_ms()
    FROM @.pxrs_queues k JOIN @.pxrs_queue_items i ON i.queue = k.id
    WHERE k.name = %s AND k.dropped IS NULL AND i.id > %s AND {_STATE} = ANY (%s::int8[])
    ORDER BY i.id LIMIT %s"""
_LATEST = f"""SELECT i.id FROM @.pxrs_queues k JOIN @.pxrs_queue_items i ON i.queue = k.id
    WHERE k.name = %s AND k.dropped IS NULL AND i.id < %s AND {_STATE} = ANY (%s::int8[])
    ORDER BY i.id DESC LIMIT %s"""
_BEYOND = 2**63 - 1


class QueueUpkeep:
    """The part of a `QueueStore` that holds no items and commits no unit of work."""

    def __init__(self, database: Database, changes: ChangeListener) -> None:
        self._database = database
        self._changes = changes

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        validate_name(name)
        while True:
            found = self.find(name)
            if found is not None:
                return require_same(found, fifo)
            self._database.write(_CREATE, (name, fifo))

    def find(self, name: str) -> Queue | None:
        rows = self._database.read(_FIND, (name,))
        return _queue(rows[0]) if rows else None

    def all(self) -> list[Queue]:
        return [_queue(row) for row in self._database.read(_ALL)]

    def delete(self, name: str) -> None:
        # From now on it can't be found. Its items are deleted a piece at a time, and what is left
        # of it by `pxrs_queue_tidy`.
        for (queue,) in self._database.write(_UNNAME, (name,)):
            self._changes.ring(QUEUE, [name])
            statement = _EMPTY
            while len(self._database.write(statement, (queue, queue, _CHUNK))) == _CHUNK:
                pass

    def stats(self, queue: str) -> QueueStats:
        rows = self._database.read(_STATS, (queue,))
        if not rows:
            return QueueStats()
        *counts, overdue, oldest, put, done = rows[0]
        return counted(counts, overdue=overdue, oldest=oldest, put=put, done=done)

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        wanted = numbers_of(states_or(states, LIVE))
        rows = self._database.read(
            _PEEK,
            (queue, max(0, min(after or 0, _BEYOND)), wanted, page_size(limit)),
        )
        return [_stored(row) for row in rows]

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        return self._discard(queue, ids, (*NOT_HELD, ItemState.DEAD))

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        wanted = states_or(states, NOT_HELD)
        total, before = 0, _BEYOND
        # From the end: removing a lane from its front would show each of its items.
        while True:
            rows = self._database.read(_LATEST, (queue, before, numbers_of(wanted), _CHUNK))
            if not rows:
                return total
            ids = [number for (number,) in rows]
            total += self._discard(queue, ids, wanted)
            before = ids[-1]

    def _discard(self, queue: str, ids: Sequence[int], states: Sequence[ItemState]) -> int:
        ((gone,),) = self._database.write(
            "SELECT @.pxrs_queue_discard(%s::text, %s::int8[], %s::int8[])",
            (queue, sorted(possible(ids)), numbers_of(states)),
        )
        self._changes.ring(QUEUE, [queue])
        return int(gone)

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        ((again,),) = self._database.write(
            "SELECT @.pxrs_queue_redrive(%s::text, %s::int8[])",
            (queue, possible(ids)),
        )
        self._changes.ring(QUEUE, [queue])
        return int(again)


def _queue(row: Row) -> Queue:
    return Queue(name=row[0], fifo=row[1], created_ms=row[2])


def _stored(row: Row) -> StoredItem:
    *columns, session, tx, now = row
    return stored(columns, None if session is None else Holder(session, tx), now)
