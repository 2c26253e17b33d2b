"""QueueStore on SQL: taking, giving back, and what the dead leave behind.

An item is counted and held in one transaction, and removed in another together with what its
handling put. Taking skips what others have locked, so workers don't wait for each other. A holder
is a session of `sessions.py`; what it has is free when the row of its session is gone, or at its
deadline by the database's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from pxrs.clock import Clock
from pxrs.errors import Fenced
from pxrs.stores.queue_rules import (
    REMEMBERED,
    delay_ms,
    pick,
    tidy,
    validate_change,
    validate_lock,
    validate_releases,
    validate_take,
)
from pxrs.stores.sql import queue_statements as sql
from pxrs.stores.sql.database import Database
from pxrs.stores.sql.ears import Ears
from pxrs.stores.sql.queue_changes import Applied, Change, holding
from pxrs.stores.sql.queue_rows import (
    by_queue,
    fence,
    find_queues,
    in_chunks,
    lanes_of,
    lock_queues,
    require_session,
    session_lost,
    settle,
)
from pxrs.stores.sql.queue_tables import NEVER
from pxrs.stores.sql.queue_upkeep import LIMITS, QueueUpkeep
from pxrs.stores.wakeups import LocalWatch
from pxrs.types import Delivery, Held, Holder, QueueChange, Release, Taken

_FREE_EVERY = 0.1
_BUSY_MS = 20
_TIDY_EVERY = 60.0
_MOST_SESSIONS = 1000
_MOST = 2**62


class Wanted(NamedTuple):
    """What a `take` asks for."""

    queue: str
    holder: Holder
    number: int
    most: int | None
    lock_for: float | None


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


class _QueueNeeded(Exception):  # noqa: N818 - the transaction is run again
    """A lane loses its front: the queue has to be locked before the items are."""


class SqlQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(self, database: Database, ears: Ears, clock: Clock) -> None:
        super().__init__(database, ears)
        self._clock = clock
        self._next_free: dict[str, float] = {}
        self._next_tidy = 0.0
        # How many commits each session made: now and then the old ones are forgotten.
        self._commits: Counter[str] = Counter()

    # Taking

    def take(
        self,
        queue: str,
        holder: Holder,
        count: int,
        *,
        most: int | None = None,
        lock_for: float | None = None,
    ) -> Taken:
        validate_take(count, most, lock_for)
        self._database.require_skip_locked()
        number = min(count, LIMITS.items)
        wanted = Wanted(queue, holder, number, None if most is None else min(most, _MOST), lock_for)
        now = self._clock.monotonic()
        if now >= self._next_free.get(queue, 0.0):
            self._next_free[queue] = now + _FREE_EVERY
            self._free_named(queue)
        taken = self._take(wanted)
        if not taken.items:
            self._ears.observer.look_if_due()
            if self._free_named(queue):
                taken = self._take(wanted)
        return taken

    def _take(self, wanted: Wanted) -> Taken:
        for locking in (False, True):
            taking = _Take(wanted, locking=locking)
            try:
                taken = self._database.write(taking.run)
            except _QueueNeeded:
                continue
            if taking.moved:
                self._ears.ring_queues([wanted.queue])
            return taken
        raise AssertionError("unreachable")

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        wanted = by_queue(dict.fromkeys(held))

        def work(connection: Connection) -> set[str]:
            until = require_session(connection, holder.session) + delay_ms(lock_for)
            queues = find_queues(connection, wanted).queues
            sooner = set()
            for name, some in sorted(wanted.items()):
                if name not in queues:
                    raise Fenced(f"queue {name!r} was deleted, and its items with it")
                if _extend(connection, queues[name].id, holder, some, until):
                    sooner.add(name)
            # Whoever waits was told of a later time, or of none.
            if sooner:
                ids = sorted(queues[name].id for name in sooner)
                connection.execute(sql.STIR, {"ids": ids})
            return sooner

        self._ears.ring_queues(self._database.write(work))

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
        self._ears.ring_queues(applied.stirred)
        session = change.holder.session
        if len(self._commits) > _MOST_SESSIONS:
            self._commits.clear()
        self._commits[session] += 1
        if self._commits[session] % REMEMBERED == 0:
            self._forget_commits(session, keep=REMEMBERED)

    def applied(self, holder: Holder) -> bool:
        """What was committed, or rolled back, has let go of its row: this waits for it."""
        return self._database.write(
            lambda connection: bool(connection.execute(sql.APPLIED, holding(holder)).all())
        )

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        if not releases:
            return

        def work(connection: Connection) -> set[str]:
            session = {"session": holder.session}
            if connection.execute(sql.REQUIRE, session).scalar_one_or_none() is None:
                return set()
            return _release(connection, holder, releases)

        self._ears.ring_queues(self._database.write(work))

    # What the dead leave behind

    def reap(self) -> float | None:
        self._ears.observer.look_if_due()
        found = self._database.read(sql.DUE)
        overdue = [
            (queue, name)
            for queue, name, now, shows, ends, gone in found
            if gone or _is_due(now, shows) or _is_due(now, ends)
        ]
        for queue, name in overdue:
            self._free(queue, name)
        if self._clock.monotonic() >= self._next_tidy:
            self._next_tidy = self._clock.monotonic() + _TIDY_EVERY
            self._tidy()
        if overdue:
            found = self._database.read(sql.DUE)
        dues = [_due(now, shows, ends) for _, _, now, shows, ends, _ in found]
        return min((due for due in dues if due is not None), default=None)

    def _free_named(self, name: str) -> bool:
        """Free what nobody holds any more in the queue; whether there was any of it."""
        lost = self._database.read(sql.LOST_NAMED, name=name)
        return any(self._free(queue, name) for (queue,) in lost)

    def _free(self, queue: int, name: str) -> bool:
        freed = self._database.write(lambda connection: _free(connection, queue))
        if freed:
            self._ears.ring_queues([name])
        return freed

    def watch(self, *queues: str) -> LocalWatch:
        self._database.check_open()
        return self._ears.watch_queues(queues)

    def close(self) -> None:
        """The connections are the database's."""


class _Take:
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
        if self._locking and sight.queue not in lock_queues(connection, [sight.queue]):
            return Taken([], None)
        due = _is_due(sight.now, sight.shows)
        if due:
            connection.execute(sql.PROMOTE, {"queue": sight.queue, "now": sight.now})
        if sight.ready is None and not due and not sight.lanes:
            return Taken([], _due(sight.now, sight.shows, sight.ends))
        chosen = self._choose(connection, sight)
        if not chosen:
            behind = _first_behind(connection, sight, wanted.holder)
            shows = [
                each for each in (sight.shows, behind) if each is not None and each > sight.now
            ]
            # If another take has locked what is there it may leave some of it.
            busy = None if sight.ready is None else sight.now + _BUSY_MS
            return Taken([], _due(sight.now, min(shows, default=None), sight.ends, busy))
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

    def _choose(self, connection: Connection, sight: Sight) -> list[Candidate]:
        while True:
            candidates = self._candidates(connection, sight)
            chosen, used_up = pick(candidates, self._wanted.number, self._wanted.most)
            if not used_up:
                return chosen
            lanes = {item.lane for item in used_up if item.lane is not None}
            if lanes and not self._locking:
                raise _QueueNeeded
            values = {"queue": sight.queue, "now": sight.now}
            for some in in_chunks([item.id for item in used_up]):
                connection.execute(sql.BURY, {**values, "ids": some})
            if lanes:
                settle(connection, sight.queue or 0, lanes, sight.now)
                connection.execute(sql.STIR, {"ids": [sight.queue]})
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


def _is_due(now: int, moment: int | None) -> bool:
    return moment is not None and moment <= now


def _due(now: int, *moments: int | None) -> float | None:
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


def _extend(
    connection: Connection, queue: int, holder: Holder, held: Sequence[Held], until: int
) -> bool:
    """Hold on until then; whether that is sooner than it was for any of them."""
    sooner = False
    for some in in_chunks(held):
        values = {"queue": queue, **holding(holder), **fence(some)}
        ends = connection.execute(sql.MINE, values).scalars().all()
        if len(ends) < len(some):
            raise Fenced(f"an item of queue {some[0].queue!r} is not held any more")
        sooner = sooner or any(end > until for end in ends)
        connection.execute(sql.EXTEND, {**values, "until": until})
    return sooner


def _release(connection: Connection, holder: Holder, releases: Sequence[Release]) -> set[str]:
    """Give back what is still held; the queues. They are locked first, and stirred with it."""
    queues = find_queues(connection, {each.held.queue for each in releases}).queues
    if not queues:
        return set()
    connection.execute(sql.STIR, {"ids": sorted(queue.id for queue in queues.values())})
    alike: dict[tuple[str, float, str, bool], list[Held]] = {}
    for each in releases:
        what = (each.held.queue, each.delay, tidy(each.error), each.dead)
        alike.setdefault(what, []).append(each.held)
    for (name, delay, error, dead), held in alike.items():
        if name not in queues:
            continue
        values = {"queue": queues[name].id, **holding(holder), "error": error or None}
        if not dead:
            values["delay"] = delay_ms(delay)
        for some in in_chunks(held):
            connection.execute(sql.GIVE_UP if dead else sql.GIVE_BACK, {**values, **fence(some)})
    for name, held in by_queue(each.held for each in releases).items():
        if name in queues:
            _settle_lanes_of(connection, queues[name].id, (each.id for each in held))
    return set(queues)


def _settle_lanes_of(connection: Connection, queue: int, items: Iterable[int]) -> None:
    lanes = lanes_of(connection, queue, items)
    if lanes:
        settle(connection, queue, lanes, connection.execute(sql.NOW).scalar_one())


def _free(connection: Connection, queue: int) -> bool:
    """Free what nobody holds any more, and show what is due; whether anything was freed."""
    locked = lock_queues(connection, [queue])
    if queue not in locked:
        return False
    now = locked[queue].now
    connection.execute(sql.PROMOTE, {"queue": queue, "now": now})
    lost = connection.execute(sql.LOST, {"queue": queue}).all()
    if not lost:
        return False
    for some in in_chunks(lost):
        values = {
            "queue": queue,
            "ids": [row[0] for row in some],
            "pairs": [(row[0], row[1]) for row in some],
            "gone": sorted({row[3] for row in some if row[4] is None}),
        }
        connection.execute(sql.FREE, values)
    settle(connection, queue, {row[2] for row in lost if row[2] is not None}, now)
    connection.execute(sql.STIR, {"ids": [queue]})
    return True
