"""QueueStore on SQL: taking, giving back, and what the dead leave behind.

An item is counted and held in one transaction, and removed in another together with what its
handling put. Taking skips what others have locked, so workers don't wait for each other. A holder
is a session of `sessions.py`; what it has is free when the row of its session is gone, or at its
deadline by the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pxrs.core.queue import (
    delay_ms,
    given_up,
    held_in,
    tidy,
    validate_change,
    validate_lock,
    validate_releases,
    validate_take,
)
from pxrs.errors import Fenced, PxrsError
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.coord import SqlCoord
from pxrs.stores.mysql.failures import Raced
from pxrs.stores.mysql.queues import statements as sql
from pxrs.stores.mysql.queues.admin import LIMITS, QueueUpkeep
from pxrs.stores.mysql.queues.changes import (
    VOID,
    Applied,
    Change,
    deleted,
    fence,
    find_queues,
    lanes_of,
    lock_queues,
    require_session,
    settle,
    unit_row,
)
from pxrs.stores.mysql.queues.taking import QueueNeeded, Take, due_in, is_due
from pxrs.stores.rows import by_queue
from pxrs.stores.timed_sessions import is_lent
from pxrs.stores.wakeups import QUEUE, LocalWatch
from pxrs.types import Delivery, Held, Holder, Outcome, QueueChange, Release, Taken

_FREE_EVERY = 0.1
_TIDY_EVERY = 60.0
_MOST = 2**62


class SqlQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(self, coord: SqlCoord) -> None:
        super().__init__(coord.database, coord.changes)
        self._sessions = coord.sessions
        self._clock = coord.sessions.clock
        self._next_free: dict[str, float] = {}
        self._next_tidy = 0.0
        # Takes that were given up. None of them can be on its way: a take is counted and held
        # before its commit is sent. Another process may have those of a session that is lent, so
        # they have a record.
        self._given_up: set[tuple[str, str]] = set()

    # Taking

    def take(
        self,
        queue: str,
        holder: Holder,
        count: int,
        *,
        most: int | None = None,
        lock_for: float | None = None,
        unit: str = "",
        suspects: bool = True,
    ) -> Taken:
        validate_take(count, most, lock_for)
        if (holder.session, unit) in self._given_up:
            raise given_up(unit)
        self._database.require_skip_locked()
        number = min(count, LIMITS.items)
        bound = None if most is None else min(most, _MOST)
        take = Take(queue, holder, number, bound, lock_for, suspects, unit)
        now = self._clock.monotonic()
        if now >= self._next_free.get(queue, 0.0):
            self._next_free[queue] = now + _FREE_EVERY
            self._free_named(queue)
        taken = self._take(take)
        if not taken.items:
            self._sessions.look_if_due()
            if self._free_named(queue):
                taken = self._take(take)
        return taken

    def _take(self, take: Take) -> Taken:
        try:
            taken = self._database.write(take.run)
        except QueueNeeded:
            take.locking = True
            taken = self._database.write(take.run)
        if take.moved:
            self._changes.ring(QUEUE, [take.queue])
        return taken

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        wanted = by_queue(dict.fromkeys(held))

        def work(connection: Connection) -> set[str]:
            until = require_session(connection, holder.session) + delay_ms(lock_for)
            queues = find_queues(connection, wanted)
            sooner = set()
            for name, some in sorted(wanted.items()):
                if name not in queues:
                    raise deleted(name)
                these = fence(queues[name].id, holder, some)
                ends = connection.rows_in(sql.MINE, **these)
                if len(ends) < len(some):
                    raise Fenced(f"an item of queue {name!r} is not held any more")
                if any(end > until for (end,) in ends):
                    sooner.add(name)
                connection.run_in(sql.EXTEND, **these, until=until)
            # Those who wait have been told a later time, or none.
            for name in sorted(sooner):
                connection.run(sql.STIR, ids=[queues[name].id])
            return sooner

        self._changes.ring(QUEUE, self._database.write(work))

    # Committing

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, LIMITS)

        def work(connection: Connection) -> Applied:
            changing = Change(connection, change)
            changing.require()
            return changing.run()

        applied = self._database.write(work)
        self.committed(change, applied)
        return applied.numbers

    def committed(self, change: QueueChange, applied: Applied) -> None:
        """Tell who waits of a change that is committed."""
        self._changes.ring(QUEUE, applied.stirred)
        if change.forget:
            with suppress(PxrsError):
                # They go with the session, then.
                self._forget_units(change.holder.session, change.forget)

    def outcome(self, session: str, unit: str) -> Outcome:
        """The first to write the unit's record decides: its commit, or this call."""

        def work(connection: Connection) -> Outcome | None:
            found = connection.value(sql.BECAME, session=session, tx=unit)
            if found is not None:
                return Outcome.NEVER if found == VOID else Outcome.DONE
            try:
                connection.run(sql.REMEMBER, **unit_row(session, unit, 0, VOID))
            except Raced:
                connection.rollback()
                return None
            if connection.value(sql.REQUIRE, session=session) is None:
                # It may have been there, and be forgotten.
                connection.rollback()
                return Outcome.UNKNOWN
            return Outcome.NEVER

        while True:
            found = self._database.write(work)
            if found is not None:
                return found

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._given_up.add((holder.session, unit))
        if is_lent(holder.session):
            self.outcome(holder.session, unit)
        if not self._database.is_oracle:
            # Oracle shows no transaction what is not committed.
            self._database.write(lambda connection: _await_take(connection, queue, holder))
        return held_in(self, queue, holder)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        if not releases:
            return

        def work(connection: Connection) -> set[str]:
            if connection.value(sql.REQUIRE, session=holder.session) is None:
                return set()
            return _release(connection, holder, releases)

        self._changes.ring(QUEUE, self._database.write(work))

    # What the dead leave behind

    def reap(self) -> float | None:
        self._sessions.look_if_due()
        found = self._database.read(sql.DUE)
        overdue = [
            (queue, name)
            for queue, name, now, shows, ends, gone in found
            if gone or is_due(now, shows) or is_due(now, ends)
        ]
        for queue, name in overdue:
            self._free(queue, name)
        if self._clock.monotonic() >= self._next_tidy:
            self._next_tidy = self._clock.monotonic() + _TIDY_EVERY
            self._tidy()
        if overdue:
            found = self._database.read(sql.DUE)
        dues = [due_in(now, shows, ends) for _, _, now, shows, ends, _ in found]
        return min((due for due in dues if due is not None), default=None)

    def _free_named(self, name: str) -> bool:
        """Free items of the queue whose holder is gone or late; whether there were any."""
        lost = self._database.read(sql.LOST_NAMED, name=name)
        return any(self._free(queue, name) for (queue,) in lost)

    def _free(self, queue: int, name: str) -> bool:
        freed = self._database.write(lambda connection: _free(connection, queue, name))
        if freed:
            self._changes.ring(QUEUE, [name])
        return freed

    def watch(self, *queues: str) -> LocalWatch:
        self._database.check_open()
        return self._changes.watch(QUEUE, queues)

    def close(self) -> None:
        """The connections are the database's."""


def _await_take(connection: Connection, queue: str, holder: Holder) -> None:
    """Reads with a lock, which waits for the commit of a take that is under way."""
    connection.run("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
    session, tx = holder.session, holder.transaction
    found = connection.rows(sql.HELD_BY, name=queue, session=session, tx=tx)
    if found:
        connection.rows_in(sql.LOCK_ITEMS, queue=found[0][0], ids=[row[1] for row in found])


def _release(connection: Connection, holder: Holder, releases: Sequence[Release]) -> set[str]:
    """Give back what is still held; the queues. They are locked first, and stirred with it."""
    locked = lock_queues(connection, {each.held.queue for each in releases})
    queues = {name: each.queue.id for name, each in locked.items()}
    if not queues:
        return set()
    connection.run(sql.STIR, ids=list(queues.values()))
    alike: dict[tuple[str, float, str, bool], list[Held]] = {}
    for each in releases:
        what = (each.held.queue, each.delay, tidy(each.error), each.dead)
        alike.setdefault(what, []).append(each.held)
    for (name, delay, error, dead), held in alike.items():
        if name in queues:
            these = {**fence(queues[name], holder, held), "error": error or None}
            if dead:
                connection.run_in(sql.GIVE_UP, **these)
            else:
                connection.run_in(sql.GIVE_BACK, **these, delay=delay_ms(delay))
    for name, held in by_queue(each.held for each in releases).items():
        if name in queues:
            lanes = lanes_of(connection, queues[name], (each.id for each in held))
            if lanes:
                settle(connection, queues[name], lanes, connection.value(sql.NOW))
    return set(queues)


def _free(connection: Connection, queue: int, name: str) -> bool:
    """Free items whose holder is gone or late, and show what is due; whether any was freed."""
    locked = lock_queues(connection, [name]).get(name)
    if locked is None or locked.queue.id != queue:
        return False
    connection.run(sql.PROMOTE, queue=queue, now=locked.now)
    lost = connection.rows(sql.LOST, queue=queue)
    if not lost:
        return False
    connection.run_in(
        sql.FREE,
        queue=queue,
        ids=[row[0] for row in lost],
        pairs=[(row[0], row[1]) for row in lost],
        gone=tuple({row[3] for row in lost if row[4] is None}) or ("",),
    )
    settle(connection, queue, {row[2] for row in lost if row[2] is not None}, locked.now)
    connection.run(sql.STIR, ids=[queue])
    return True
