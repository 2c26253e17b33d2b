"""QueueStore on SQLite: one row per item, one writer for all.

An item is counted and held in one transaction, and removed in another together with what its
handling put. A holder is a session of `sessions.py`; what a dead one holds is freed by whoever
looks next: a `take` that finds nothing, and every `take` after a tenth of a second.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.errors import Fenced, SessionLost
from pxrs.stores.queue_rules import (
    DIED_HOLDING,
    REMEMBERED_FOR,
    USED_UP,
    delay_ms,
    pick,
    tidy,
    validate_change,
    validate_lock,
    validate_releases,
    validate_take,
)
from pxrs.stores.sqlite import queue_ahead as ahead
from pxrs.stores.sqlite import queue_commits as commits
from pxrs.stores.sqlite import queue_rows as rows
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.ears import Ears, SlotWatch
from pxrs.stores.sqlite.queue_ahead import Habits
from pxrs.stores.sqlite.queue_puts import put_items
from pxrs.stores.sqlite.queue_rows import Candidate, HeldRow, QueueRow
from pxrs.stores.sqlite.queue_upkeep import LIMITS, QueueUpkeep, slot_of
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    NewItem,
    QueueChange,
    Release,
    Taken,
)

_REAP_EVERY = 0.1


class Wanted(NamedTuple):
    """What a `take` asks for."""

    holder: Holder
    number: int
    most: int | None
    lock_for: float | None


class SqliteQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        ears: Ears,
        clock: Clock,
        *,
        set_aside: bool = True,
    ) -> None:
        super().__init__(database, clock)
        self._habits = Habits(set_aside)
        self._coord = coord
        self._ears = ears
        # By queue: each is looked after by those who take from it.
        self._next_reap: dict[int, float] = {}
        self._ended_at: dict[str, float] = {}
        # Queues that had nothing for whoever took last: the next one looks before it writes.
        self._found_empty: set[str] = set()

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
        wanted = Wanted(holder, min(count, LIMITS.items), most, lock_for)
        if queue in self._found_empty:
            due = self._glance(queue, holder)
            if due is None or due > 0:
                self._require_session(holder.session)
                return Taken([], due)
        taken = None
        if count <= ahead.MOST and self._habits.expects(queue):
            taken = self._database.write(
                lambda turn: self._take_ahead(turn, queue, wanted), synced=False
            )
        if taken is None:
            taken = self._database.write(lambda turn: self._take(turn, queue, wanted))
        self._habits.took(queue, most, self._clock.monotonic())
        if taken.items:
            self._found_empty.discard(queue)
        else:
            self._found_empty.add(queue)
        return taken

    def _take_ahead(self, turn: Turn, name: str, wanted: Wanted) -> Taken | None:
        """Hand out what was set aside, if it is just what is wanted. See `queue_ahead`."""
        self._require_session(wanted.holder.session)
        connection = turn.connection
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        aside = ahead.find_aside(connection, name, wanted.holder.session, wanted.number, now_ms)
        if aside is None:
            return None
        ids = [item.id for item in aside.items]
        used_up = wanted.most is not None and any(
            item.deliveries >= wanted.most for item in aside.items
        )
        if len(ids) < wanted.number or aside.outranked or used_up:
            ahead.put_back(connection, ids)
            return None
        until = None if wanted.lock_for is None else now + wanted.lock_for
        ahead.hand_out(connection, ids, wanted.holder, wanted.most, until, now_ms)
        return Taken([_delivery(connection, aside.queue, item) for item in aside.items], None)

    def _take(self, turn: Turn, name: str, wanted: Wanted) -> Taken:
        self._require_session(wanted.holder.session)
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            return Taken([], None)
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        if now >= self._next_reap.get(queue.id, 0.0):
            self._reap_queue(turn, queue.id)
            self._next_reap[queue.id] = now + _REAP_EVERY
        rows.promote_due(connection, queue.id, now_ms)
        chosen = self._choose(turn, queue, wanted, now_ms)
        if not chosen and self._reap_queue(turn, queue.id):
            chosen = self._choose(turn, queue, wanted, now_ms)
        if not chosen:
            lanes = rows.lanes_held(connection, queue.id, wanted.holder, now)
            return Taken([], self._due(connection, queue.id, lanes))
        until = None if wanted.lock_for is None else now + wanted.lock_for
        ids = [item.id for item in chosen]
        rows.hold(connection, ids, wanted.holder, wanted.most, until, now_ms)
        turn.weight += sum(len(item.body or b"") for item in chosen)
        return Taken([_delivery(connection, queue, item) for item in chosen], None)

    def _choose(self, turn: Turn, queue: QueueRow, wanted: Wanted, now_ms: int) -> list[Candidate]:
        while True:
            candidates = self._candidates(turn.connection, queue, wanted, now_ms)
            chosen, used_up = pick(candidates, wanted.number, wanted.most)
            if not used_up:
                return chosen
            for item in used_up:
                rows.bury(turn.connection, item.id, item.error or USED_UP, now_ms)
                if item.lane is not None:
                    rows.settle(turn.connection, [(queue.id, item.lane)], now_ms)
            # What was behind them may be somebody else's.
            turn.slots.add(slot_of(queue.info.name))

    def _candidates(
        self, connection: sqlite3.Connection, queue: QueueRow, wanted: Wanted, now_ms: int
    ) -> list[Candidate]:
        """Fronts first, then what follows what the holder has or is about to have."""
        found = rows.ready_items(connection, queue.id, wanted.number)
        missing = wanted.number - len(found)
        if missing == 0:
            return found
        lanes = [item.lane for item in found if item.lane is not None]
        lanes += rows.lanes_held(connection, queue.id, wanted.holder, self._clock.monotonic())
        if lanes:
            found += rows.following_items(
                connection, queue.id, list(dict.fromkeys(lanes)), missing, now_ms
            )
        return found

    def _glance(self, name: str, holder: Holder) -> float | None:
        """Seconds until a `take` may find something, 0 if it may now; None if nobody knows.

        It only reads: workers that wait must not line up for the writer to be told to wait.
        """
        with self._database.reading() as connection:
            queue = rows.find_queue(connection, name)
            if queue is None:
                return None
            if rows.ready_items(connection, queue.id, 1):
                return 0.0
            now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
            lanes = rows.lanes_held(connection, queue.id, holder, now)
            if rows.following_items(connection, queue.id, lanes, 1, now_ms):
                return 0.0
            if ahead.is_waiting(connection, queue.id, holder.session):
                return 0.0
            if any(self._is_lost(held, {}) for held in rows.held_rows(connection, queue.id)):
                return 0.0
            return self._due(connection, queue.id, lanes)

    def _due(
        self, connection: sqlite3.Connection, queue: int, lanes: Sequence[str] = ()
    ) -> float | None:
        """In how many seconds there may be something; `lanes` are those of who asks."""
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        shows = (
            rows.first_due_ms(connection, queue),
            rows.first_behind_ms(connection, queue, lanes),
        )
        waits = [max(0.0, (visible - now_ms) / 1000) for visible in shows if visible is not None]
        waits += [
            max(0.0, held.lock_until - now)
            for held in rows.held_rows(connection, queue)
            if held.lock_until is not None
        ]
        return min(waits, default=None)

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)

        def work(turn: Turn) -> None:
            self._require_session(holder.session)
            now = self._clock.monotonic()
            for name, some in _by_queue(dict.fromkeys(held)).items():
                queue = rows.find_queue(turn.connection, name)
                if queue is None:
                    raise Fenced(f"queue {name!r} was deleted, and its items with it")
                if rows.extend(turn.connection, queue.id, holder, some, now, now + lock_for):
                    turn.slots.add(slot_of(name))

        self._database.write(work)

    # Committing

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, LIMITS)
        numbers = self._database.write(lambda turn: self.apply_in(turn, change, expecting=True))
        now = self._clock.monotonic()
        for name in {held.queue for held in change.remove}:
            self._habits.committed(name, now)
        return numbers

    def apply_in(
        self, turn: Turn, change: QueueChange, *, expecting: bool = False
    ) -> list[int | None]:
        """`apply` inside the caller's write transaction.

        With `expecting` the next items are set aside for a holder that takes in a loop.
        """
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        if change.remove:
            holder = change.holder
            self._require_session(holder.session)
            for name, held in sorted(_by_queue(change.remove).items()):
                queue = self._remove(turn, name, holder, held, now, now_ms)
                if expecting and len(held) <= ahead.MOST and self._habits.expects(name):
                    most, connection = self._habits.most(name), turn.connection
                    ahead.set_aside(connection, queue, holder.session, len(held), most, now)
        numbers = self._put(turn, change.put, now_ms)
        commits.remember(turn.connection, change.holder)
        return numbers

    def _remove(
        self, turn: Turn, name: str, holder: Holder, held: Sequence[Held], now: float, now_ms: int
    ) -> int:
        queue = rows.count_done(turn.connection, name, len(held))
        if queue is None:
            raise Fenced(f"queue {name!r} was deleted, and its items with it")
        lanes = rows.remove_held(turn.connection, queue, holder, held, now)
        if lanes:
            rows.settle(turn.connection, ((queue, lane) for lane in lanes), now_ms)
            turn.slots.add(slot_of(name))
        return queue

    def _put(self, turn: Turn, items: Sequence[NewItem], now_ms: int) -> list[int | None]:
        numbers: list[int | None] = [None] * len(items)
        places: dict[str, list[int]] = {}
        for at, item in enumerate(items):
            places.setdefault(item.queue, []).append(at)
        for name, where in sorted(places.items()):
            queue = rows.find_queue(turn.connection, name)
            if queue is None:
                queue = rows.make_queue(turn.connection, name, False, now_ms)
            some = [items[at] for at in where]
            for at, number in zip(
                where, put_items(turn.connection, queue, some, now_ms), strict=True
            ):
                numbers[at] = number
            turn.slots.add(slot_of(name))
            turn.weight += sum(len(item.body) for item in some)
        return numbers

    def applied(self, holder: Holder) -> bool:
        return self._database.write(lambda turn: commits.is_remembered(turn.connection, holder))

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        self._database.write(lambda turn: self._release(turn, holder, releases))

    def _release(self, turn: Turn, holder: Holder, releases: Sequence[Release]) -> None:
        if not self._coord.is_alive(holder.session):
            return
        connection = turn.connection
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        lanes: set[rows.Lane] = set()
        for release in releases:
            queue = rows.find_queue(connection, release.held.queue)
            if queue is None:
                continue
            found = rows.find_held(connection, queue.id, holder, release.held, now)
            if found is None:
                continue
            if release.dead:
                rows.bury(connection, found.id, tidy(release.error), now_ms)
            else:
                rows.give_back(
                    connection,
                    found.id,
                    visible=now_ms + delay_ms(release.delay),
                    error=tidy(release.error),
                    suspect=False,
                    now_ms=now_ms,
                )
            if found.lane is not None:
                lanes.add((queue.id, found.lane))
            turn.slots.add(slot_of(release.held.queue))
        rows.settle(connection, lanes, now_ms)

    # What the dead leave behind

    def reap(self) -> float | None:
        with self._database.reading() as connection:
            alive: dict[str, bool] = {}
            lost = [held for held in rows.held_rows(connection) if self._is_lost(held, alive)]
            queues = [row[0] for row in connection.execute("SELECT id FROM pxrs_queues").fetchall()]
            gone = self._forgotten_sessions(connection)
            # Left as they are, they would be due for ever: who sweeps would never rest.
            overdue = any(self._due(connection, queue) == 0 for queue in queues)
        if lost or gone or overdue:
            self._database.write(lambda turn: self._reap(turn, queues, gone))
        with self._database.reading() as connection:
            dues = [self._due(connection, queue) for queue in queues]
        return min((due for due in dues if due is not None), default=None)

    def _reap(self, turn: Turn, queues: Sequence[int], gone: Sequence[str]) -> None:
        for queue in queues:
            self._reap_queue(turn, queue)
            rows.promote_due(turn.connection, queue, self._clock.wall_ms())
        if gone:
            commits.forget_sessions(turn.connection, gone)

    def _reap_queue(self, turn: Turn, queue: int) -> bool:
        """Free what nobody holds any more in one queue; whether there was something."""
        connection = turn.connection
        now_ms = self._clock.wall_ms()
        alive: dict[str, bool] = {}
        lost = [held for held in rows.held_rows(connection, queue) if self._is_lost(held, alive)]
        for held in lost:
            if not ahead.was_handed_out(held.tx):
                ahead.put_back(connection, [held.id])
            elif held.most is not None and held.deliveries >= held.most:
                rows.bury(connection, held.id, DIED_HOLDING, now_ms)
            else:
                rows.give_back(
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

    def _is_lost(self, held: HeldRow, alive: dict[str, bool]) -> bool:
        if held.lock_until is not None and held.lock_until <= self._clock.monotonic():
            return True
        if held.session not in alive:
            alive[held.session] = self._coord.is_alive(held.session)
        return not alive[held.session]

    def _forgotten_sessions(self, connection: sqlite3.Connection) -> list[str]:
        """Sessions that ended so long ago that nobody will ask what they have done."""
        now = self._clock.monotonic()
        ended = [name for name in commits.sessions(connection) if not self._coord.is_alive(name)]
        self._ended_at = {name: self._ended_at.get(name, now) for name in ended}
        return [name for name in ended if self._ended_at[name] + REMEMBERED_FOR <= now]

    def _require_session(self, session: str) -> None:
        if not self._coord.is_alive(session):
            raise SessionLost(f"session {session} is over, and what it held is free")

    def watch(self, *queues: str) -> SlotWatch:
        return self._ears.watch(frozenset(map(slot_of, queues)), sessions=True)

    def close(self) -> None:
        self._found_empty.clear()


def _delivery(connection: sqlite3.Connection, queue: QueueRow, item: Candidate) -> Delivery:
    return Delivery(
        held=Held(queue.info.name, rows.number_of(item.id), item.deliveries + 1),
        body=rows.load_body(connection, item.id, item.body),
        key=item.key,
        priority=-item.rank,
        put_ms=item.put_ms,
        error=item.error,
    )


def _by_queue(held: Iterable[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for each in held:
        found.setdefault(each.queue, []).append(each)
    return found
