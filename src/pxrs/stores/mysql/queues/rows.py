"""Queues and lanes as rows, inside somebody's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection

from pxrs.core.queue import indexed, lane_of
from pxrs.errors import SessionLost
from pxrs.stores.mysql.queues import admin_statements as kept
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.tables import LANE_BYTES
from pxrs.stores.mysql.schema import reading
from pxrs.stores.rows import WAITING
from pxrs.types import Held, Queue

T = TypeVar("T")
# Oracle takes a thousand values in a list.
_CHUNK = 1000
_FIFO = "f"


class QueueRow(NamedTuple):
    """A queue and its number in the database."""

    id: int
    info: Queue


def in_chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def lane_text(queue: Queue, key: str | None) -> str | None:
    """What stands in the index for an item's lane. Oracle takes no text at all for NULL."""
    lane = lane_of(queue, key)
    if lane is None:
        return None
    return indexed(lane, LANE_BYTES) if lane else _FIFO


def require_session(connection: Connection, session: str) -> int:
    """Keep the session from ending until this transaction does; the time in ms."""
    now: int | None = connection.execute(sql.REQUIRE, {"session": session}).scalar_one_or_none()
    if now is None:
        raise session_lost(session)
    return now


def session_lost(session: str) -> SessionLost:
    return SessionLost(f"session {session} is over, and what it held is free")


def find_queues(connection: Connection, names: Collection[str]) -> dict[str, QueueRow]:
    found: dict[str, QueueRow] = {}
    for some in in_chunks(sorted(names)):
        for row in connection.execute(kept.FIND, {"names": some}):
            found[row[0]] = _queue_row(*row[:4])
    return found


def _queue_row(name: str, number: int, fifo: int, created: int) -> QueueRow:
    return QueueRow(number, Queue(name=name, fifo=bool(fifo), created_ms=created))


class Locked(NamedTuple):
    """A queue whose row is locked: the next item's number, and the time."""

    queue: QueueRow
    next_item: int
    now: int


def lock_queues(connection: Connection, names: Collection[str]) -> dict[str, Locked]:
    """Lock the queues' rows, in the order of their names. One that is not there is missing."""
    found: dict[str, Locked] = {}
    for some in in_chunks(sorted(names)):
        for row in connection.execute(kept.LOCK_QUEUES, {"names": some}):
            found[row[0]] = Locked(_queue_row(*row[:4]), *row[4:])
    return found


def lanes_of(
    connection: Connection, queue: int, items: Iterable[int], *, latest: bool = False
) -> set[str]:
    """The lanes that the items are in. An item stays in its lane."""
    lanes: set[str] = set()
    for some in in_chunks(list(items)):
        rows = connection.execute(
            reading(sql.LANES_OF, latest=latest), {"queue": queue, "ids": some}
        )
        lanes |= {lane for _, lane in rows}
    return lanes


def settle(
    connection: Connection, queue: int, lanes: Collection[str], now: int, *, latest: bool = False
) -> None:
    """Show the first item of each lane, unless there is one at its front already.

    Under the lock of the queue's row: whoever else would change a front has to wait for it.
    """
    for some in in_chunks(sorted(lanes)):
        firsts: dict[str, dict[int, int]] = {}
        rows = connection.execute(
            reading(sql.LANES, latest=latest), {"queue": queue, "lanes": some}
        )
        for lane, state, first in rows:
            firsts.setdefault(lane, {})[state] = first
        shown = [found[WAITING] for found in firsts.values() if set(found) == {WAITING}]
        if shown:
            connection.execute(sql.SHOW, {"queue": queue, "ids": shown, "now": now})


def by_queue(held: Iterable[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for each in held:
        found.setdefault(each.queue, []).append(each)
    return found


def fence(held: Sequence[Held]) -> dict[str, Any]:
    """The very deliveries, for a statement that only touches what is held so."""
    return {
        "ids": [each.id for each in held],
        "pairs": [(each.id, each.delivery) for each in held],
    }
