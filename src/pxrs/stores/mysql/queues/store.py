"""QueueStore on SQL: takes, releases, and frees what dead holders leave behind.

An item is counted and held in one transaction. Another one removes it, together with what its
handler put. A take skips items that others have locked, so workers don't wait for each other. A
holder is a session of `sessions.py`; its items are free when the row of its session is gone, or at
their deadline by the database's clock.
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
_MOST_QUEUES = 1000


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
        # before its commit is sent. Those of a lent session have a record in the database, because
        # another process may have the session.
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
            if len(self._next_free) > _MOST_QUEUES:
                self._next_free.clear()
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
            # Waiting workers know a later time, or none.
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
        """Wake the watches after a change was committed."""
        self._changes.ring(QUEUE, applied.stirred)
        if change.forget:
            with suppress(PxrsError):
                # If this fails, they are forgotten with the session.
                self._forget_units(change.holder.session, change.forget)

    def outcome(self, session: str, unit: str) -> Outcome:
        """See `QueueStore`. The first to write the unit's record decides: its commit or this."""

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
                # The record may have existed, and been forgotten.
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
            # Oracle has no reads of uncommitted data.
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

        while True:
            try:
                stirred = self._database.write(work)
            except _LockedItems as locked:
                self._database.write(locked.wait)
            else:
                break
        self._changes.ring(QUEUE, stirred)

    # What dead holders leave behind

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
        """Free items of the queue whose holder is gone or late; returns whether there were any."""
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
        """Do nothing: the connections belong to the `Database`."""


class _LockedItems(Exception):  # noqa: N818 - wait for them, and try again
    """Another transaction has locked items that this one was to change under a queue's lock.

    That can be a caller's own transaction, which has removed them and lasts as long as the caller
    likes. To wait for it with the queue locked would keep all others from putting to the queue.
    """

    def __init__(self, queue: int, ids: Sequence[int]) -> None:
        super().__init__(queue, ids)
        self._queue = queue
        self._ids = ids

    def wait(self, connection: Connection) -> None:
        """Wait until the items are unlocked, or gone, in a transaction that locks no queue."""
        connection.rows_in(sql.LOCK_ITEMS, queue=self._queue, ids=list(self._ids))


def _await_take(connection: Connection, queue: str, holder: Holder) -> None:
    """Wait for the commit of a take that is under way, by reading its items with a lock."""
    connection.run("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
    session, tx = holder.session, holder.transaction
    found = connection.rows(sql.HELD_BY, name=queue, session=session, tx=tx)
    if found:
        connection.rows_in(sql.LOCK_ITEMS, queue=found[0][0], ids=[row[1] for row in found])


def _release(connection: Connection, holder: Holder, releases: Sequence[Release]) -> set[str]:
    """Give back items that are still held; returns the queues, which are locked first."""
    locked = lock_queues(connection, {each.held.queue for each in releases})
    queues = {name: each.queue.id for name, each in locked.items()}
    if not queues:
        return set()
    held_here = by_queue(each.held for each in releases if each.held.queue in queues)
    mine = {
        (name, number)
        for name, held in held_here.items()
        for number in _lock_mine(connection, queues[name], holder, held)
    }
    connection.run(sql.STIR, ids=list(queues.values()))
    alike: dict[tuple[str, float, str, bool], list[Held]] = {}
    for each in releases:
        if (each.held.queue, each.held.id) not in mine:
            continue
        what = (each.held.queue, each.delay, tidy(each.error), each.dead)
        alike.setdefault(what, []).append(each.held)
    for (name, delay, error, dead), held in alike.items():
        these = {**fence(queues[name], holder, held), "error": error or None}
        if dead:
            connection.run_in(sql.GIVE_UP, **these)
        else:
            connection.run_in(sql.GIVE_BACK, **these, delay=delay_ms(delay))
    for name, held in held_here.items():
        lanes = lanes_of(connection, queues[name], (each.id for each in held))
        if lanes:
            settle(connection, queues[name], lanes, connection.value(sql.NOW))
    return set(queues)


def _lock_mine(
    connection: Connection, queue: int, holder: Holder, held: Sequence[Held]
) -> set[int]:
    """Lock those of the items that are still held by the holder; returns their numbers.

    Raises `_LockedItems` instead of waiting for another transaction. An item that has gone since it
    was read is not locked either: then the wait is over at once, and the next try does not find it.
    """
    mine = {row[0] for row in connection.rows_in(sql.STILL_MINE, **fence(queue, holder, held))}
    locked = connection.rows_in(sql.LOCK_FREE_ITEMS, queue=queue, ids=sorted(mine))
    if len(locked) < len(mine):
        raise _LockedItems(queue, sorted(mine))
    return mine


def _free(connection: Connection, queue: int, name: str) -> bool:
    """Free items whose holder is gone or late, show items that are due; whether any was freed."""
    locked = lock_queues(connection, [name]).get(name)
    if locked is None or locked.queue.id != queue:
        return False
    connection.run(sql.PROMOTE, queue=queue, now=locked.now)
    lost = connection.rows(sql.LOST, queue=queue)
    # What others have locked is about to be removed, or extended; if not, the next look finds it.
    # To wait with the queue locked would keep all others from putting to it.
    ids = [row[0] for row in lost]
    unlocked = {row[0] for row in connection.rows_in(sql.LOCK_FREE_ITEMS, queue=queue, ids=ids)}
    lost = [row for row in lost if row[0] in unlocked]
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
