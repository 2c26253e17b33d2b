"""One take: which items a holder gets, counted and held in one transaction.

It waits for nobody: what others have locked is skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Connection

from pxrs.core.queue import Picked, delay_ms, pick
from pxrs.stores.mysql.queues import admin_statements as kept
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.changes import holding
from pxrs.stores.mysql.queues.rows import in_chunks, lock_queues, session_lost, settle
from pxrs.stores.mysql.queues.tables import NEVER
from pxrs.types import Delivery, Held, Holder, Taken

_BUSY_MS = 20


class Wanted(NamedTuple):
    """What a `take` asks for."""

    queue: str
    holder: Holder
    number: int
    most: int | None
    lock_for: float | None
    suspects: bool


class Candidate(NamedTuple):
    """An item that may be handed out."""

    id: int
    deliveries: int
    suspect: bool
    grade: int
    key: str | None
    put_ms: int
    error: str | None
    body: bytes
    lane: str | None


class Sight(NamedTuple):
    """What a first look at a queue finds: the time, what is ready, due and held."""

    now: int
    queue: int | None
    ready: int | None
    shows: int | None
    ends: int | None
    lanes: int


class QueueNeeded(Exception):  # noqa: N818 - the transaction is run again
    """A lane loses its front: the queue has to be locked before the items are."""


class Take:
    """One take inside a transaction. `moved`: something can be had by others that could not be."""

    def __init__(self, wanted: Wanted, *, locking: bool) -> None:
        self._wanted = wanted
        self._locking = locking
        self.moved = False

    def run(self, connection: Connection) -> Taken:
        wanted = self._wanted
        self.moved = False
        sight = _look(connection, wanted)
        if sight.queue is None:
            return Taken([], None)
        if self._locking and not lock_queues(connection, [wanted.queue]):
            return Taken([], None)
        overdue = is_due(sight.now, sight.shows)
        if overdue:
            connection.execute(sql.PROMOTE, {"queue": sight.queue, "now": sight.now})
        if sight.ready is None and not overdue and not sight.lanes:
            return Taken([], due_in(sight.now, sight.shows, sight.ends))
        chosen, _, suspect = self._choose(connection, sight)
        if not chosen:
            behind = _first_behind(connection, sight, wanted.holder)
            shows = [
                each for each in (sight.shows, behind) if each is not None and each > sight.now
            ]
            # If another take has locked what is there it may leave some of it.
            busy = sight.now + _BUSY_MS if overdue or sight.ready is not None else None
            due = due_in(sight.now, min(shows, default=None), sight.ends, busy)
            return Taken([], due, suspect)
        until = NEVER if wanted.lock_for is None else sight.now + delay_ms(wanted.lock_for)
        values = {
            "queue": sight.queue,
            "new_session": wanted.holder.session,
            "new_tx": wanted.holder.transaction,
            "new_most": wanted.most,
            "until": until,
            "now": sight.now,
        }
        for some in in_chunks([item.id for item in chosen]):
            connection.execute(sql.HOLD, {**values, "ids": some})
        return Taken([_delivery(wanted.queue, item) for item in chosen], None)

    def _choose(self, connection: Connection, sight: Sight) -> Picked[Candidate]:
        wanted = self._wanted
        while True:
            candidates = self._candidates(connection, sight)
            picked = pick(candidates, wanted.number, wanted.most, suspects=wanted.suspects)
            used_up = picked.used_up
            if not used_up:
                return picked
            lanes = {item.lane for item in used_up if item.lane is not None}
            if lanes and not self._locking:
                raise QueueNeeded
            values = {"queue": sight.queue, "now": sight.now}
            for some in in_chunks([item.id for item in used_up]):
                connection.execute(sql.BURY, {**values, "ids": some})
            if lanes:
                settle(connection, sight.queue or 0, lanes, sight.now)
                connection.execute(kept.STIR, {"ids": [sight.queue]})
                # What was behind them may be somebody else's.
                self.moved = True

    def _candidates(self, connection: Connection, sight: Sight) -> list[Candidate]:
        """Fronts first, then what follows what the holder has or is about to have."""
        number = self._wanted.number
        queue = {"queue": sight.queue}
        rows = connection.execute(limited(sql.FRONTS, connection, number), queue).fetchmany(number)
        found = [Candidate(*row) for row in rows]
        if len(found) == number:
            return found
        lanes = [item.lane for item in found if item.lane is not None]
        if sight.lanes:
            lanes += _lanes_held(connection, sight, self._wanted.holder)
        for lane in dict.fromkeys(lanes):
            missing = number - len(found)
            if missing == 0:
                break
            behind = limited(sql.BEHIND, connection, missing)
            for row in connection.execute(behind, {**queue, "lane": lane}).fetchmany(missing):
                if row[-1] > sight.now:
                    break
                found.append(Candidate(*row[:-1]))
        return found


def limited(statement: Any, connection: Connection, number: int) -> Any:
    """Of locked rows only so many. Oracle can't limit them: there they are locked as fetched."""
    return statement if connection.dialect.name == "oracle" else statement.limit(number)


def _look(connection: Connection, wanted: Wanted) -> Sight:
    values = {"name": wanted.queue, **holding(wanted.holder)}
    row = connection.execute(sql.LOOK, values).one_or_none()
    if row is None:
        raise session_lost(wanted.holder.session)
    return Sight(*row)


def _lanes_held(connection: Connection, sight: Sight, holder: Holder) -> list[str]:
    """The lanes that the holder may go on with: it is not late with any item of them."""
    values = {"queue": sight.queue, **holding(holder)}
    ends: dict[str, int] = {}
    for lane, until in connection.execute(sql.LANES_HELD, values):
        ends[lane] = min(until, ends.get(lane, until))
    return sorted(lane for lane, until in ends.items() if until > sight.now)


def _first_behind(connection: Connection, sight: Sight, holder: Holder) -> int | None:
    """When the next item shows in one of the lanes that the holder may go on with."""
    if not sight.lanes:
        return None
    found = [
        connection.execute(sql.FIRST_BEHIND, {"queue": sight.queue, "lane": lane}).scalar()
        for lane in _lanes_held(connection, sight, holder)
    ]
    return min((each for each in found if each is not None), default=None)


def is_due(now: int, moment: int | None) -> bool:
    return moment is not None and moment <= now


def due_in(now: int, *moments: int | None) -> float | None:
    """In how many seconds the first of them is; None if none of them ever is."""
    known = [moment for moment in moments if moment is not None and moment < NEVER]
    return max(0.0, (min(known) - now) / 1000) if known else None


def _delivery(queue: str, item: Candidate) -> Delivery:
    return Delivery(
        held=Held(queue, item.id, item.deliveries + 1),
        body=item.body,
        key=item.key,
        priority=-item.grade,
        put_ms=item.put_ms,
        error=item.error or "",
    )
