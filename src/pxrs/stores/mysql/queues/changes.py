"""A change of queues inside a transaction: it removes, puts, and records that it was done.

Locks in order: the session, the queues that items are put to or whose lanes lose a front, items. A
change that only removes items without a lane locks no queue, so workers don't wait for each other.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from pxrs.core.queue import delay_ms, given_up, indexed, key_order_of, validate_for
from pxrs.errors import Fenced, SessionLost
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.failures import Raced
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.schema import LONGEST_LANE
from pxrs.stores.mysql.statements import latest as reading
from pxrs.stores.rows import DELAYED, READY, WAITING, QueueRow, by_queue
from pxrs.types import Held, Holder, Queue, QueueChange

# The number of a unit's record is a hash of its name, with the record's index in the last bits.
_PLACES = 2**14
# Stored instead of the number of removed items if the unit was given up.
VOID = -1
# Stored instead of a session for units without a name: they are forgotten like those of ended
# sessions.
NOBODY = "-"
# Stored instead of the key as the lane of items of a fifo queue.
_FIFO = "f"


class Locked(NamedTuple):
    """A queue whose row is locked: the next item's number, and the time."""

    queue: QueueRow
    next_item: int
    now: int


class Applied(NamedTuple):
    """The outcome of a change: new items' ids, and the queues that may have something to take."""

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
        """Keep the holder's session alive until the commit. Call it before any other lock is taken.

        If the change only removes items of one queue, the same query finds the queue.
        """
        if not self._change.remove:
            return
        session = self._change.holder.session
        if self._puts or self._latest or len(self._removed) > 1 or len(self._change.remove) > 1000:
            self._now = require_session(self._connection, session)
            return
        ((name, held),) = self._removed.items()
        ids = [each.id for each in held]
        rows = self._connection.rows(sql.LOOK_TO_REMOVE, session=session, name=name, ids=ids)
        if not rows:
            raise session_lost(session)
        self._now, queue, in_lanes = rows[0]
        if queue is None:
            raise deleted(name)
        if not in_lanes:
            self._queues[name] = QueueRow(queue, Queue(name=name))

    def run(self) -> Applied:
        """Apply the change. Raises `Fenced` if an item is no longer held: then roll back."""
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
        """Lock the queues that items are put to, and those from which lanes lose items.

        If the transaction reads from an old snapshot, lock all queues: only a locking read sees the
        present state.
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
        """Whether any of the removed items is in a lane. An item stays in its lane."""
        if name not in self._queues:
            raise deleted(name)
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
                raise deleted(name)
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
        these = fence(self._queues[name].id, self._change.holder, held)
        gone = self._connection.run_in(sql.REMOVE, **these)
        if gone < len(held):
            raise Fenced(
                f"{len(held) - gone} of {len(held)} items of queue {name!r} are not held any more; "
                "they are handed out again"
            )

    def _put_all(self) -> list[int | None]:
        numbers: list[int | None] = [None] * len(self._change.put)
        for name, places in sorted(self._puts.items()):
            queue = self._queues[name]
            fresh = self._fresh(queue.id, places)
            first = self._locked[queue.id].next_item
            rows: list[dict[str, Any]] = []
            for number, at in enumerate(fresh, first):
                item, numbers[at] = self._change.put[at], number
                content = {"grade": -item.priority, "body": bytes(item.body)}
                due = self._now + delay_ms(item.delay)
                rows.append(item_row(queue, number, item.key, due, self._now, **content))
            self._connection.run(sql.NUMBER, queue=queue.id, numbers=len(rows), fresh=len(rows))
            self._connection.run_many(sql.INSERT, rows)
            lanes = {row["lane"] for row in rows if row["lane"] is not None}
            if lanes:
                self._lanes.setdefault(name, set()).update(lanes)
        return numbers

    def _fresh(self, queue: int, places: Sequence[int]) -> list[int]:
        """The indexes of items that are no duplicates. The queue is locked: no one else puts."""
        keys = {
            at: indexed(item.dedupe, LONGEST_LANE)
            for at in places
            if (item := self._change.put[at]).dedupe is not None
        }
        if not keys:
            return list(places)
        self._connection.run(sql.FORGET_SEEN, queue=queue)
        statement = reading(sql.SEEN_BEFORE, locking=self._latest)
        sought = sorted(set(keys.values()))
        known = {row[0] for row in self._connection.rows_in(statement, queue=queue, keys=sought)}
        fresh, seen = [], []
        for at in places:
            key = keys.get(at)
            if key is not None and key in known:
                continue
            fresh.append(at)
            if key is not None:
                known.add(key)
                until = self._now + delay_ms(self._change.put[at].dedupe_window)
                seen.append({"queue": queue, "seen_key": key, "until": until})
        self._connection.run_many(sql.SEE, seen)
        return fresh

    def _stir(self) -> None:
        """Wake watches of queues whose lanes moved; where items are put, `NUMBER` does it."""
        moved = [self._queues[name].id for name in self._lanes if name not in self._puts]
        self._connection.run_in(sql.STIR, ids=sorted(moved))

    def _remember(self) -> None:
        """Record that it was done, and how much, in the same commit: both are stored or neither."""
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
            self._connection.run_many(sql.REMEMBER, rows)
        except Raced:
            raise given_up(unit) from None


def unit_row(session: str, unit: str, queue: int, done: int, at: int = 0) -> dict[str, Any]:
    """One record of a unit. Its number is made of the unit's name: no other unit has it."""
    digest = int.from_bytes(sha256(unit.encode()).digest()[:8]) >> 1
    return {
        "session": session,
        "n": digest // _PLACES * _PLACES + at,
        "tx": unit,
        "queue": queue,
        "done": done,
    }


def deleted(name: str) -> Fenced:
    return Fenced(f"queue {name!r} was deleted, and its items with it")


def make_queue(connection: Connection, name: str, *, fifo: bool) -> None:
    """Make a queue, unless another transaction has made it."""
    connection.run(sql.MAKE, id=secrets.randbits(62), name=name, fifo=int(fifo))


# Queues and lanes as rows


def queue_row(name: str, number: int, fifo: int, created: int) -> QueueRow:
    return QueueRow(number, Queue(name=name, fifo=bool(fifo), created_ms=created))


def lane_text(queue: Queue, key: str | None) -> str | None:
    """An item's lane as the index has it. Never an empty text, which Oracle takes for NULL."""
    lane = key_order_of(queue, key)
    if lane is None:
        return None
    return indexed(lane, LONGEST_LANE) if lane else _FIFO


def require_session(connection: Connection, session: str) -> int:
    """Keep the session from ending before this transaction does; returns the time in ms."""
    now: int | None = connection.value(sql.REQUIRE, session=session)
    if now is None:
        raise session_lost(session)
    return now


def session_lost(session: str) -> SessionLost:
    return SessionLost(f"session {session} is over, and what it held is free")


def find_queues(connection: Connection, names: Collection[str]) -> dict[str, QueueRow]:
    rows = connection.rows_in(sql.FIND, names=sorted(names))
    return {row[0]: queue_row(*row) for row in rows}


def lock_queues(connection: Connection, names: Collection[str]) -> dict[str, Locked]:
    """Lock the queues' rows, in the order of their names. The result has only existing queues."""
    rows = connection.rows_in(sql.LOCK_QUEUES, names=sorted(names))
    return {row[0]: Locked(queue_row(*row[:4]), *row[4:]) for row in rows}


def lanes_of(
    connection: Connection, queue: int, items: Iterable[int], *, latest: bool = False
) -> set[str]:
    """The lanes that the items are in. An item stays in its lane."""
    statement = reading(sql.LANES_OF, locking=latest)
    return {lane for _, lane in connection.rows_in(statement, queue=queue, ids=list(items))}


def settle(
    connection: Connection, queue: int, lanes: Collection[str], now: int, *, latest: bool = False
) -> None:
    """Show the first item of each lane, unless there is one at its front already.

    The queue's row must be locked: other transactions that change a front wait for that lock.
    """
    statement = reading(sql.LANES, locking=latest)
    firsts: dict[str, dict[int, int]] = {}
    for lane, state, first in connection.rows_in(statement, queue=queue, lanes=sorted(lanes)):
        firsts.setdefault(lane, {})[state] = first
    shown = [found[WAITING] for found in firsts.values() if set(found) == {WAITING}]
    connection.run_in(sql.SHOW, queue=queue, ids=shown, now=now)


def fence(queue: int, holder: Holder, held: Sequence[Held]) -> dict[str, Any]:
    """Parameters of the fence: the statement touches only items held at these deliveries."""
    return {
        "queue": queue,
        "session": holder.session,
        "tx": holder.transaction,
        "ids": [each.id for each in held],
        "pairs": [(each.id, each.delivery) for each in held],
    }


def item_row(
    queue: QueueRow, number: int, key: str | None, due: int, now: int, **columns: Any
) -> dict[str, Any]:
    """A new item's row for `sql.INSERT`; `columns` override its values."""
    lane = lane_text(queue.info, key)
    return {
        "queue": queue.id,
        "item": number,
        "state": WAITING if lane is not None else DELAYED if due > now else READY,
        "lane": lane,
        "item_key": key,
        "due_ms": due,
        "deliveries": 0,
        "suspect": 0,
        "put_ms": now,
        **columns,
    }
