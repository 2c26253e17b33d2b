"""A change of queues inside a transaction: what is removed, what is put, and that it was done.

Locks in order: the session, the queues that are put to or whose lanes lose a front, items. Who only
removes items without a lane locks no queue, so workers don't wait for each other.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from sqlalchemy import Connection, exc

from pxrs.core.queue import delay_ms, given_up, indexed, validate_for
from pxrs.errors import Fenced
from pxrs.stores.mysql.database import Raced
from pxrs.stores.mysql.queues import admin_statements as kept
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.rows import (
    Locked,
    QueueRow,
    by_queue,
    fence,
    find_queues,
    in_chunks,
    lane_text,
    lanes_of,
    lock_queues,
    require_session,
    session_lost,
    settle,
)
from pxrs.stores.mysql.queues.tables import LANE_BYTES
from pxrs.stores.mysql.schema import reading
from pxrs.stores.rows import DELAYED, READY, WAITING
from pxrs.types import Held, Holder, NewItem, Queue, QueueChange

# A unit's records: how many there are is in their numbers' last bits.
_PLACES = 2**14
# Instead of how many items were removed: the unit was given up.
VOID = -1
# Instead of a session, of units that nobody can ask after: they go as those of ended sessions do.
NOBODY = "-"


class Applied(NamedTuple):
    """What a change did: the new items' ids, and in which queues there may be something new."""

    numbers: list[int | None]
    stirred: frozenset[str]


class Change:
    """One change. `latest`: the transaction is the caller's, and may read from an old snapshot."""

    def __init__(
        self, connection: Connection, change: QueueChange, *, latest: bool = False
    ) -> None:
        self._connection = connection
        self._change = change
        self._latest = latest
        self._removed = by_queue(change.remove)
        self._puts: dict[str, list[int]] = {}
        for at, item in enumerate(change.put):
            self._puts.setdefault(item.queue, []).append(at)
        self._queues: dict[str, QueueRow] = {}
        self._locked: dict[int, Locked] = {}
        self._lanes: dict[str, set[str]] = {}
        self._now = 0

    def require(self) -> None:
        """Keep the holder's session alive until the commit; before any other lock.

        Where items of one queue are removed, and that is all, the same look finds the queue.
        """
        if not self._change.remove:
            return
        session = self._change.holder.session
        if self._puts or self._latest or len(self._removed) > 1 or len(self._change.remove) > 1000:
            self._now = require_session(self._connection, session)
            return
        ((name, held),) = self._removed.items()
        values = {"session": session, "name": name, "ids": [each.id for each in held]}
        row = self._connection.execute(sql.LOOK_TO_REMOVE, values).one_or_none()
        if row is None:
            raise session_lost(session)
        self._now, queue, in_lanes = row
        if queue is None:
            raise _deleted(name)
        if not in_lanes:
            self._queues[name] = QueueRow(queue, Queue(name=name))

    def run(self) -> Applied:
        """Do it. Raises `Fenced` if something is not held any more: then roll back."""
        self._find_and_lock()
        for item in self._change.put:
            validate_for(self._queues[item.queue].info, item)
        for name, held in sorted(self._removed.items()):
            self._remove(name, held)
        numbers = self._put_all()
        for name, lanes in sorted(self._lanes.items()):
            settle(self._connection, self._queues[name].id, lanes, self._now, latest=self._latest)
        self._stir()
        self._remember()
        return Applied(numbers, frozenset(self._puts) | frozenset(self._lanes))

    def _find_and_lock(self) -> None:
        """Lock the queues that are put to, and those that something in a lane is removed from.

        Where reads are of an old snapshot all of them: only a locking read sees what is there.
        """
        names = set(self._puts) | (set(self._removed) if self._latest else set())
        unlocked = set(self._removed) - names - set(self._queues)
        if unlocked:
            self._queues |= find_queues(self._connection, unlocked)
            names |= {name for name in unlocked if self._find_lanes(name)}
        if names:
            self._lock(names)
        for name in (names & set(self._removed)) - set(self._lanes):
            self._find_lanes(name)

    def _find_lanes(self, name: str) -> bool:
        """Whether any of what is removed is in a lane. An item stays in its lane."""
        if name not in self._queues:
            raise _deleted(name)
        ids = [each.id for each in self._removed[name]]
        lanes = lanes_of(self._connection, self._queues[name].id, ids, latest=self._latest)
        if lanes:
            self._lanes[name] = lanes
        return bool(lanes)

    def _lock(self, names: set[str]) -> None:
        found = lock_queues(self._connection, names)
        missing = sorted(names - set(found))
        for name in missing:
            if name in self._removed:
                raise _deleted(name)
            make_queue(self._connection, name, fifo=False)
        if missing:
            found |= lock_queues(self._connection, missing)
        for name in names:
            if name not in found:
                raise Raced(f"queue {name!r} was deleted just now")
            self._queues[name] = found[name].queue
            self._locked[found[name].queue.id] = found[name]
            self._now = max(self._now, found[name].now)

    def _remove(self, name: str, held: Sequence[Held]) -> None:
        holder = self._change.holder
        gone = 0
        for some in in_chunks(held):
            values = {"queue": self._queues[name].id, **holding(holder), **fence(some)}
            gone += self._connection.execute(sql.REMOVE, values).rowcount
        if gone < len(held):
            raise Fenced(
                f"{len(held) - gone} of {len(held)} items of queue {name!r} are not held any more; "
                "somebody else has them, or will"
            )

    def _put_all(self) -> list[int | None]:
        numbers: list[int | None] = [None] * len(self._change.put)
        for name, places in sorted(self._puts.items()):
            queue = self._queues[name]
            fresh = self._fresh(queue.id, places)
            first = self._locked[queue.id].next_item
            rows: list[dict[str, Any]] = []
            for at in fresh:
                numbers[at] = first + len(rows)
                rows.append(self._row(queue, first + len(rows), self._change.put[at]))
            counts = {"queue": queue.id, "numbers": len(rows), "fresh": len(rows)}
            self._connection.execute(kept.NUMBER, counts)
            if rows:
                self._connection.execute(sql.INSERT, rows)
            lanes = {row["lane"] for row in rows if row["lane"] is not None}
            if lanes:
                self._lanes.setdefault(name, set()).update(lanes)
        return numbers

    def _row(self, queue: QueueRow, number: int, item: NewItem) -> dict[str, Any]:
        lane = lane_text(queue.info, item.key)
        delay = delay_ms(item.delay)
        state = WAITING if lane is not None else DELAYED if delay else READY
        return new_row(queue.id, number, item, lane, state, self._now + delay, self._now)

    def _fresh(self, queue: int, places: Sequence[int]) -> list[int]:
        """Without those that were put before. Nobody else puts here: the queue is locked."""
        keys = {
            at: indexed(item.dedupe, LANE_BYTES)
            for at in places
            if (item := self._change.put[at]).dedupe is not None
        }
        if not keys:
            return list(places)
        self._connection.execute(sql.FORGET_SEEN, {"queue": queue})
        known: set[str] = set()
        for some in in_chunks(sorted(set(keys.values()))):
            rows = self._connection.execute(
                reading(sql.SEEN_BEFORE, latest=self._latest), {"queue": queue, "keys": some}
            )
            known |= set(rows.scalars())
        fresh, seen = [], []
        for at in places:
            key = keys.get(at)
            if key is not None and key in known:
                continue
            fresh.append(at)
            if key is not None:
                known.add(key)
                until = self._now + delay_ms(self._change.put[at].dedupe_window)
                seen.append({"queue_id": queue, "seen_key": key, "until_ms": until})
        if seen:
            self._connection.execute(sql.SEE, seen)
        return fresh

    def _stir(self) -> None:
        """Whoever waits has to look: what was put to is told with the numbers already."""
        moved = [self._queues[name].id for name in self._lanes if name not in self._puts]
        if moved:
            self._connection.execute(kept.STIR, {"ids": sorted(moved)})

    def _remember(self) -> None:
        """That it was done, and how much: beside it, so that either both are there or none."""
        done = Counter({self._queues[name].id: len(held) for name, held in self._removed.items()})
        session, unit = self._change.holder.session, self._change.unit
        if not unit:
            if not done:
                return
            session, unit = NOBODY, secrets.token_hex(16)
        rows = [
            unit_row(session, unit, queue, count, at)
            for at, (queue, count) in enumerate(sorted(done.items()) or [(0, 0)])
        ]
        try:
            self._connection.execute(kept.REMEMBER, rows)
        except exc.IntegrityError:
            raise given_up(unit) from None


def unit_row(session: str, unit: str, queue: int, done: int, at: int = 0) -> dict[str, Any]:
    """One record of a unit. Its number comes of the unit's name: nobody else writes it."""
    digest = int.from_bytes(sha256(unit.encode()).digest()[:8]) >> 1
    return {
        "session_id": session,
        "n": digest // _PLACES * _PLACES + at,
        "tx": unit,
        "queue_id": queue,
        "done": done,
    }


def _deleted(name: str) -> Fenced:
    return Fenced(f"queue {name!r} was deleted, and its items with it")


def holding(holder: Holder) -> dict[str, str]:
    return {"session": holder.session, "transaction": holder.transaction}


def make_queue(connection: Connection, name: str, *, fifo: bool) -> None:
    """Make a queue, unless somebody has."""
    values = {"new_id": secrets.randbits(62), "new_name": name, "strict": int(fifo)}
    connection.execute(kept.MAKE, values)


def new_row(
    queue: int, number: int, item: NewItem, lane: str | None, state: int, due: int, now: int
) -> dict[str, Any]:
    """A new item as a row."""
    return {
        "queue_id": queue,
        "item_id": number,
        "state": state,
        "grade": -item.priority,
        "lane": lane,
        "item_key": item.key,
        "due_ms": due,
        "deliveries": 0,
        "suspect": 0,
        "put_ms": now,
        "error_text": None,
        "body": bytes(item.body),
    }
