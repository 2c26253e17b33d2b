"""One take: which items a holder gets, counted and held in one transaction.

It waits for no other transaction: it skips items that others have locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pxrs.core.queue import Picked, delay_ms, given_up, pick
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.changes import lock_queues, session_lost, settle
from pxrs.stores.rows import Candidate
from pxrs.stores.timed_sessions import is_lent
from pxrs.types import Holder, Taken

# The deadline of a hold that has none.
_NEVER = 2**62
_BUSY_MS = 20


class Sight(NamedTuple):
    """A first look at a queue: the time, and what is ready, due and held."""

    now: int
    queue: int | None
    ready: int | None
    shows: int | None
    ends: int | None
    lanes: int


class QueueNeeded(Exception):  # noqa: N818 - the transaction is run again
    """A lane loses its front: the queue must be locked before the items are."""


@dataclass
class Take:
    """One take inside a transaction. `locking`: the queue is locked before its items.

    `moved` afterwards: other holders can take items that they could not take before.
    """

    queue: str
    holder: Holder
    number: int
    most: int | None
    lock_for: float | None
    suspects: bool
    unit: str
    locking: bool = False
    moved: bool = False

    def run(self, connection: Connection) -> Taken:
        self.moved = False
        sight = self._look(connection)
        if sight.queue is None:
            return Taken([], None)
        if self.locking and not lock_queues(connection, [self.queue]):
            return Taken([], None)
        overdue = is_due(sight.now, sight.shows)
        if overdue:
            connection.run(sql.PROMOTE, queue=sight.queue, now=sight.now)
        if sight.ready is None and not overdue and not sight.lanes:
            return Taken([], due_in(sight.now, sight.shows, sight.ends))
        chosen, _, suspect = self._choose(connection, sight)
        if not chosen:
            behind = self._first_behind(connection, sight)
            shows = [
                each for each in (sight.shows, behind) if each is not None and each > sight.now
            ]
            # Another take may have locked the items, and may leave some of them.
            is_busy = overdue or sight.ready is not None or is_due(sight.now, behind)
            busy = sight.now + _BUSY_MS if is_busy else None
            due = due_in(sight.now, min(shows, default=None), sight.ends, busy)
            return Taken([], due, suspect)
        connection.run_in(
            sql.HOLD,
            queue=sight.queue,
            ids=[item.id for item in chosen],
            most=self.most,
            until=_NEVER if self.lock_for is None else sight.now + delay_ms(self.lock_for),
            now=sight.now,
            **self._holder,
        )
        self._refuse_given_up(connection)
        return Taken(
            [item.delivery(self.queue, item.id, item.body or b"") for item in chosen], None
        )

    def _refuse_given_up(self, connection: Connection) -> None:
        """Raise if another process has given up this take: possible only with a lent session.

        Checked after the items are held: a process that gives it up later sees them, and waits for
        the commit.
        """
        session = self.holder.session
        if is_lent(session) and connection.value(sql.BECAME, session=session, tx=self.unit):
            raise given_up(self.unit)

    @property
    def _holder(self) -> dict[str, str]:
        return {"session": self.holder.session, "tx": self.holder.transaction}

    def _look(self, connection: Connection) -> Sight:
        rows = connection.rows(sql.LOOK, name=self.queue, **self._holder)
        if not rows:
            raise session_lost(self.holder.session)
        return Sight(*rows[0])

    def _choose(self, connection: Connection, sight: Sight) -> Picked[Candidate]:
        while True:
            candidates = self._candidates(connection, sight)
            picked = pick(candidates, self.number, self.most, suspects=self.suspects)
            used_up = picked.used_up
            if not used_up:
                return picked
            lanes = {item.lane for item in used_up if item.lane is not None}
            if lanes and not self.locking:
                raise QueueNeeded
            ids = [item.id for item in used_up]
            connection.run_in(sql.BURY, queue=sight.queue, ids=ids, now=sight.now)
            if lanes:
                settle(connection, sight.queue or 0, lanes, sight.now)
                connection.run(sql.STIR, ids=[sight.queue])
                # Other holders may take the items behind them.
                self.moved = True

    def _candidates(self, connection: Connection, sight: Sight) -> list[Candidate]:
        """Fronts of lanes first, then the items behind those that the holder has or will have."""
        number = self.number
        rows = connection.rows(sql.FRONTS, queue=sight.queue, limit=number)
        found = [Candidate(*row) for row in rows]
        if len(found) == number:
            return found
        lanes = [item.lane for item in found if item.lane is not None]
        lanes += self._lanes_held(connection, sight)
        for lane in dict.fromkeys(lanes):
            missing = number - len(found)
            if missing == 0:
                break
            rows = connection.rows(sql.BEHIND, queue=sight.queue, lane=lane, limit=missing)
            ids = [number for (number,) in rows]
            locked = connection.rows_in(sql.LOCK_BEHIND, queue=sight.queue, ids=ids)
            # An item that another transaction has locked ends the row: those behind it must wait.
            for number, (*columns, due) in zip(ids, locked, strict=False):
                if columns[0] != number or due > sight.now:
                    break
                found.append(Candidate(*columns))
        return found

    def _lanes_held(self, connection: Connection, sight: Sight) -> list[str]:
        """The lanes in which the holder may take more: no lock on an item of them has run out."""
        if not sight.lanes:
            return []
        ends: dict[str, int] = {}
        mine = [row[0] for row in connection.rows(sql.IN_LANES, queue=sight.queue, **self._holder)]
        these = {"queue": sight.queue, "ids": mine, **self._holder}
        for lane, until in connection.rows_in(sql.LANES_HELD, **these):
            ends[lane] = min(until, ends.get(lane, until))
        return sorted(lane for lane, until in ends.items() if until > sight.now)

    def _first_behind(self, connection: Connection, sight: Sight) -> int | None:
        """Returns when the next item of a lane of the holder is due."""
        found = [
            connection.value(sql.FIRST_BEHIND, queue=sight.queue, lane=lane)
            for lane in self._lanes_held(connection, sight)
        ]
        return min((each for each in found if each is not None), default=None)


def is_due(now: int, moment: int | None) -> bool:
    return moment is not None and moment <= now


def due_in(now: int, *moments: int | None) -> float | None:
    """In how many seconds the first of these moments is; None if there is none."""
    known = [moment for moment in moments if moment is not None and moment < _NEVER]
    return max(0.0, (min(known) - now) / 1000) if known else None
