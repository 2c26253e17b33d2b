"""Frees what dead processes left in queues, and returns when to look again."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.queue import DIED_HOLDING, REMEMBERED_FOR
from pxrs.stores.sqlite.age import note, read_age
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.queues import holds, rows, units
from pxrs.stores.sqlite.queues.admin import slot_of
from pxrs.stores.sqlite.queues.holds import HeldRow

_MOST_QUEUES = 1000
_REAP_EVERY = 0.1


class _Ended(NamedTuple):
    """Sessions that are over.

    `new`: their end is not noted yet. `gone`: they ended so long ago that no caller will ask for
    their units any more. `news`: there is something to write, if only the file's age.
    """

    new: list[str]
    gone: list[str]
    news: bool


class Reaper:
    """Frees items whose holder is gone."""

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        clock: Clock,
    ) -> None:
        self._database = database
        self._coord = coord
        self._clock = clock
        # By queue: the processes that take from a queue look after it.
        self._next_reap: dict[int, float] = {}

    def reap(self) -> float | None:
        """See `pxrs.stores.api.QueueStore.reap`."""
        with self._database.reading() as connection:
            lost = self.lost(connection)
            queues = [row[0] for row in connection.execute("SELECT id FROM pxrs_queues").fetchall()]
            ended = self._ended_sessions(connection)
            # Delayed items that stay unmarked would be due for ever: a caller would never sleep.
            overdue = any(self.due(connection, queue) == 0 for queue in queues)
        if lost or ended.news or overdue:
            self._database.write(lambda turn: self._reap(turn, queues, ended))
        with self._database.reading() as connection:
            dues = [self.due(connection, queue) for queue in queues]
        return min((due for due in dues if due is not None), default=None)

    def _reap(self, turn: Turn, queues: Sequence[int], ended: _Ended) -> None:
        for queue in queues:
            self.free(turn, queue)
            rows.promote_due(turn.connection, queue, self._clock.wall_ms())
        if ended.news:
            connection = turn.connection
            now = self._now_ms()
            age = read_age(connection).at(now)
            note(connection, age)
            units.note_ended(connection, ended.new, age.ms)
            units.forget_sessions(connection, ended.gone)

    def now_and_then(self, turn: Turn, queue: int, now: float) -> None:
        """Call `free`, if this process has not for a while."""
        if now >= self._next_reap.get(queue, 0.0):
            self.free(turn, queue)
            if len(self._next_reap) > _MOST_QUEUES:
                self._next_reap.clear()
            self._next_reap[queue] = now + _REAP_EVERY

    def free(self, turn: Turn, queue: int) -> bool:
        """Free items of one queue whose holder is gone; returns whether there were any."""
        connection = turn.connection
        now_ms = self._clock.wall_ms()
        lost = self.lost(connection, queue)
        for held in lost:
            if held.most is not None and held.deliveries >= held.most:
                holds.bury(connection, held.id, DIED_HOLDING, now_ms)
            else:
                holds.give_back(
                    connection,
                    held.id,
                    visible=now_ms,
                    error=DIED_HOLDING,
                    suspect=True,
                    now_ms=now_ms,
                )
            turn.slots.add(slot_of(held.name))
        rows.settle(
            connection, {(queue, held.lane) for held in lost if held.lane is not None}, now_ms
        )
        return bool(lost)

    def lost(self, connection: sqlite3.Connection, queue: int | None = None) -> list[HeldRow]:
        """Lists items whose holder is gone, in one queue or in all."""
        alive: dict[str, bool] = {}
        return [held for held in holds.held_rows(connection, queue) if self._is_lost(held, alive)]

    def _is_lost(self, held: HeldRow, alive: dict[str, bool]) -> bool:
        if held.lock_until is not None and held.lock_until <= self._clock.monotonic():
            return True
        if held.session not in alive:
            alive[held.session] = self._coord.is_alive(held.session)
        return not alive[held.session]

    def _ended_sessions(self, connection: sqlite3.Connection) -> _Ended:
        """Sessions that have units and are over.

        When their end was first seen is kept in the file. So it counts for later programs, even if
        none of them runs for as long as a caller might ask for a unit.
        """
        ended = [name for name in units.sessions(connection) if not self._coord.is_alive(name)]
        if not ended:
            return _Ended([], [], news=False)
        seen, noted = units.seen_to_end(connection), read_age(connection)
        now = self._now_ms()
        oldest = noted.at(now).ms - int(REMEMBERED_FOR * 1000)
        new = [name for name in ended if name not in seen]
        gone = [name for name in ended if seen.get(name, oldest + 1) <= oldest]
        return _Ended(new, gone, news=bool(new or gone) or noted.is_due(now))

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def due(
        self, connection: sqlite3.Connection, queue: int, lanes: Sequence[str] = ()
    ) -> float | None:
        """In how many seconds there may be an item to take; `lanes` are those of the caller."""
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        shows = (
            rows.first_due_ms(connection, queue),
            rows.first_behind_ms(connection, queue, lanes),
        )
        waits = [max(0.0, (visible - now_ms) / 1000) for visible in shows if visible is not None]
        waits += [
            max(0.0, held.lock_until - now)
            for held in holds.held_rows(connection, queue)
            if held.lock_until is not None
        ]
        return min(waits, default=None)
