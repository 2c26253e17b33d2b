"""Queues and lanes as rows, inside a transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pxrs.core.queue import indexed, key_order_of
from pxrs.errors import SessionLost
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.schema import LONGEST_LANE
from pxrs.stores.mysql.statements import latest as reading
from pxrs.stores.rows import DELAYED, READY, WAITING
from pxrs.types import Held, Holder, Queue

_FIFO = "f"


class QueueRow(NamedTuple):
    """A queue and its number in the database."""

    id: int
    info: Queue


class Locked(NamedTuple):
    """A queue whose row is locked: the next item's number, and the time."""

    queue: QueueRow
    next_item: int
    now: int


def queue_row(name: str, number: int, fifo: int, created: int) -> QueueRow:
    return QueueRow(number, Queue(name=name, fifo=bool(fifo), created_ms=created))


def lane_text(queue: Queue, key: str | None) -> str | None:
    """What stands in the index for an item's lane. Oracle takes no text at all for NULL."""
    lane = key_order_of(queue, key)
    if lane is None:
        return None
    return indexed(lane, LONGEST_LANE) if lane else _FIFO


def require_session(connection: Connection, session: str) -> int:
    """Keep the session from ending until this transaction does; the time in ms."""
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
    """Lock the queues' rows, in the order of their names. One that is not there is missing."""
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

    Under the lock of the queue's row: whoever else would change a front has to wait for it.
    """
    statement = reading(sql.LANES, locking=latest)
    firsts: dict[str, dict[int, int]] = {}
    for lane, state, first in connection.rows_in(statement, queue=queue, lanes=sorted(lanes)):
        firsts.setdefault(lane, {})[state] = first
    shown = [found[WAITING] for found in firsts.values() if set(found) == {WAITING}]
    connection.run_in(sql.SHOW, queue=queue, ids=shown, now=now)


def by_queue(held: Iterable[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for each in held:
        found.setdefault(each.queue, []).append(each)
    return found


def fence(queue: int, holder: Holder, held: Sequence[Held]) -> dict[str, Any]:
    """The very deliveries, for a statement that only touches what the holder holds so."""
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
    """An item for `sql.INSERT`: a new one, but for what `columns` says."""
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
