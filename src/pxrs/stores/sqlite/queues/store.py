"""QueueStore on SQLite: one row per item, one writer for all.

An item is counted and held in one transaction, and removed in another together with what its
handling put. A holder is a session of `sessions.py`; what a dead one holds is freed by the one that
looks next: a `take` that finds nothing, and every `take` after a tenth of a second.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from pxrs.clock import Clock
from pxrs.core.queue import (
    USED_UP,
    Picked,
    delay_ms,
    given_up,
    held_in,
    pick,
    tidy,
    validate_change,
    validate_lock,
    validate_releases,
    validate_take,
)
from pxrs.errors import Fenced, SessionLost
from pxrs.stores.rows import Candidate, QueueRow, by_queue
from pxrs.stores.sqlite.change_listener import ChangeListener, SlotWatch
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.queues import ahead, holds, rows, units
from pxrs.stores.sqlite.queues.admin import LIMITS, QueueUpkeep, slot_of
from pxrs.stores.sqlite.queues.ahead import Ahead, Aside
from pxrs.stores.sqlite.queues.holds import Hands
from pxrs.stores.sqlite.queues.puts import put_items
from pxrs.stores.sqlite.queues.reaper import Reaper
from pxrs.stores.timed_sessions import is_lent
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    NewItem,
    Outcome,
    QueueChange,
    Release,
    Taken,
)


class Wanted(NamedTuple):
    """The arguments of a `take`."""

    holder: Holder
    number: int
    most: int | None
    lock_for: float | None
    suspects: bool


class SqliteQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        changes: ChangeListener,
        clock: Clock,
        *,
        set_aside: bool = True,
    ) -> None:
        ahead = Ahead(
            database.folder, database.path, clock.monotonic, self._give_back, enabled=set_aside
        )
        super().__init__(database, clock, ahead)
        database.origin.on_fork(ahead.abandon)
        coord.before_a_session_ends(ahead.give_back)
        self._coord = coord
        self._reaper = Reaper(database, coord, clock, ahead.verdicts)
        # Takes that were given up. None of them can be on its way, as there is no network. Another
        # process may have those of a session that is lent, so they are noted in the file.
        self._given_up: set[tuple[str, str]] = set()
        self._changes = changes
        # Queues that had nothing for the last take: the next one looks before it writes.
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
        unit: str = "",
        suspects: bool = True,
    ) -> Taken:
        validate_take(count, most, lock_for)
        if (holder.session, unit) in self._given_up:
            raise given_up(unit)
        wanted = Wanted(holder, min(count, LIMITS.items), most, lock_for, suspects)
        if queue in self._found_empty:
            due = self._glance(queue, holder)
            if due is None or due > 0:
                self._require_session(holder.session)
                return Taken([], due)
        taken = self._take_aside(queue, wanted) if self._ahead else None
        if taken is None:
            taken = self._take_now(queue, wanted, unit)
        if self._ahead.enabled:
            self._ahead.habits.took(queue, count, most, self._clock.monotonic())
        if taken.items or taken.suspect:
            self._found_empty.discard(queue)
        else:
            self._found_empty.add(queue)
        return taken

    def _take_aside(self, name: str, wanted: Wanted) -> Taken | None:
        """Hand out what was set aside, if it is just what is wanted. See `ahead`."""
        holder = wanted.holder
        aside = self._ahead.find(name, holder.session, wanted.number, wanted.most)
        if aside is None or self._is_outranked(aside):
            return None
        self._require_session(holder.session)
        items = [self._delivery_aside(aside, row) for row in aside.rows]
        if not self._ahead.lend(aside, holder):
            return None
        if wanted.lock_for is not None:
            try:
                self._extend(holder, [item.held for item in items], wanted.lock_for, synced=False)
            except BaseException:
                # They were not handed out.
                self._ahead.note(aside)
                raise
        return Taken(items, None)

    def _is_outranked(self, aside: Aside) -> bool:
        now_ms = self._clock.wall_ms()
        rung = self._database.control.counters((slot_of(aside.name),))
        if aside.rung == rung and (aside.due_ms is None or aside.due_ms > now_ms):
            return False
        with self._database.reading() as connection:
            return ahead.is_outranked(connection, aside.queue, aside.rows[0][0], now_ms)

    def _delivery_aside(self, aside: Aside, row: tuple[Any, ...]) -> Delivery:
        rank, item, deliveries, key, put_ms, error, body = row[:7]
        if body is None:
            with self._database.reading() as connection:
                body = rows.load_body(connection, item, None)
        return Delivery(
            held=Held(aside.name, rows.number_of(item), deliveries),
            body=body,
            key=key,
            priority=-rank,
            put_ms=put_ms,
            error=error,
        )

    def _give_back(self, asides: Sequence[Aside]) -> None:
        """Give back what was set aside, for all processes."""
        self._database.write(lambda turn: self._put_back(turn, asides), synced=False)

    def _put_back(self, turn: Turn, asides: Sequence[Aside]) -> None:
        for aside in asides:
            ahead.put_back(turn.connection, aside)
            turn.slots.add(slot_of(aside.name))

    def _take_now(self, name: str, wanted: Wanted, unit: str) -> Taken:
        asides = self._ahead.withdraw(name)
        session = wanted.holder.session

        def work(turn: Turn) -> Taken:
            self._require_session(session)
            if is_lent(session) and units.find(turn.connection, session, unit) is not None:
                raise given_up(unit)
            self._put_back(turn, asides)
            return self._take(turn, name, wanted)

        try:
            return self._database.write(work)
        except BaseException:
            for aside in asides:
                self._ahead.note(aside)
            raise

    def _take(self, turn: Turn, name: str, wanted: Wanted) -> Taken:
        connection = turn.connection
        queue = rows.find_queue(connection, name)
        if queue is None:
            return Taken([], None)
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        self._reaper.now_and_then(turn, queue.id, now)
        rows.promote_due(connection, queue.id, now_ms)
        chosen, _, suspect = self._choose(turn, queue, wanted, now_ms)
        if not chosen and self._reaper.free(turn, queue.id):
            chosen, _, suspect = self._choose(turn, queue, wanted, now_ms)
        if not chosen:
            lanes = holds.lanes_held(connection, queue.id, wanted.holder, now)
            return Taken([], self._reaper.due(connection, queue.id, lanes), suspect)
        until = None if wanted.lock_for is None else now + wanted.lock_for
        ids = [item.id for item in chosen]
        holds.hold(connection, ids, wanted.holder, wanted.most, until, now_ms)
        turn.weight += sum(len(item.body or b"") for item in chosen)
        items = [
            item.delivery(
                name, rows.number_of(item.id), rows.load_body(connection, item.id, item.body)
            )
            for item in chosen
        ]
        return Taken(items, None)

    def _choose(
        self, turn: Turn, queue: QueueRow, wanted: Wanted, now_ms: int
    ) -> Picked[Candidate]:
        while True:
            candidates = self._candidates(turn.connection, queue, wanted, now_ms)
            picked = pick(candidates, wanted.number, wanted.most, suspects=wanted.suspects)
            if not picked.used_up:
                return picked
            for item in picked.used_up:
                holds.bury(turn.connection, item.id, item.error or USED_UP, now_ms)
                if item.lane is not None:
                    rows.settle(turn.connection, [(queue.id, item.lane)], now_ms)
            # What was behind them may be another holder's.
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
        lanes += holds.lanes_held(connection, queue.id, wanted.holder, self._clock.monotonic())
        if lanes:
            found += rows.following_items(
                connection, queue.id, list(dict.fromkeys(lanes)), missing, now_ms
            )
        return found

    def _glance(self, name: str, holder: Holder) -> float | None:
        """Seconds until a `take` may find something, 0 if it may now; None if that is not known.

        It only reads: workers that wait must not line up for the writer to be told to wait.
        """
        with self._database.reading() as connection:
            queue = rows.find_queue(connection, name)
            if queue is None:
                return None
            if rows.ready_items(connection, queue.id, 1):
                return 0.0
            now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
            lanes = holds.lanes_held(connection, queue.id, holder, now)
            if rows.following_items(connection, queue.id, lanes, 1, now_ms):
                return 0.0
            if self._reaper.lost(connection, queue.id):
                return 0.0
            return self._reaper.due(connection, queue.id, lanes)

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        self._extend(holder, list(dict.fromkeys(held)), lock_for, synced=True)

    def _extend(
        self, holder: Holder, held: Sequence[Held], lock_for: float, *, synced: bool
    ) -> None:
        def work(turn: Turn) -> None:
            self._require_session(holder.session)
            now, hands = self._clock.monotonic(), self._hands(holder)
            for name, some in by_queue(held).items():
                queue = rows.id_of(turn.connection, name)
                if queue is None:
                    raise Fenced(f"queue {name!r} was deleted, and its items with it")
                if holds.extend(turn.connection, queue, hands, some, now, now + lock_for):
                    turn.slots.add(slot_of(name))

        self._database.write(work, synced=synced)

    def _hands(self, holder: Holder) -> Hands:
        return Hands(holder.session, self._ahead.names(holder))

    # Committing

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, LIMITS)
        asides: list[Aside] = []
        numbers = self._database.write(lambda turn: self.apply_in(turn, change, asides))
        self.applied_all_of(change)
        for aside in asides:
            self._ahead.offer(aside)
        return numbers

    def applied_all_of(self, change: QueueChange) -> None:
        """The change is committed."""
        if change.remove:
            self._ahead.done_with(change.holder, change.remove)
            now = self._clock.monotonic()
            for name in {held.queue for held in change.remove}:
                self._ahead.habits.committed(name, now)

    def apply_in(
        self, turn: Turn, change: QueueChange, asides: list[Aside] | None = None
    ) -> list[int | None]:
        """`apply` inside the caller's write transaction.

        Where `asides` go, the next items are set aside for a holder that takes in a loop.
        """
        now_ms = self._clock.wall_ms()
        # What was held when the writer was got is held still: no other process could take it since,
        # nor could its holder extend it, however long a handler's own statements have taken.
        now = self._clock.monotonic() if turn.since is None else turn.since
        if change.remove:
            holder = change.holder
            self._require_session(holder.session)
            hands = self._hands(holder)
            for name, held in sorted(by_queue(change.remove).items()):
                queue = self._remove(turn, name, hands, held, now, now_ms)
                wanted = self._ahead.habits.expected(name)
                # What is set aside, and what was lent of it, only this process knows: a holder that
                # may go on through another would lose it.
                if asides is not None and wanted is not None and not is_lent(holder.session):
                    self._reaper.now_and_then(turn, queue, now)
                    asides += self._set_aside(turn, name, queue, holder.session, *wanted)
        numbers = self._put(turn, change.put, now_ms) if change.put else []
        units.note(turn.connection, change)
        return numbers

    def _set_aside(
        self, turn: Turn, name: str, queue: int, session: str, count: int, most: int | None
    ) -> list[Aside]:
        """Hold the next items for the session, for a moment; as a list of one, or none."""
        connection, now_ms = turn.connection, self._clock.wall_ms()
        due_ms = rows.first_due_ms(connection, queue)
        if due_ms is not None and due_ms <= now_ms:
            rows.promote_due(connection, queue, now_ms)
            due_ms = rows.first_due_ms(connection, queue)
        mark, number = self._ahead.next_mark()
        found = ahead.set_aside(connection, queue, session, mark, count, most, now_ms)
        if not found:
            return []
        aside = Aside(
            name=name,
            queue=queue,
            session=session,
            mark=mark,
            number=number,
            asked=count,
            most=most,
            rows=found,
            rung=self._database.control.counters((slot_of(name),)),
            due_ms=due_ms,
            until=self._clock.monotonic() + ahead.PATIENCE,
        )
        # Before the commit: nothing may be set aside that this process does not know of.
        self._ahead.note(aside)
        return [aside]

    def _remove(
        self, turn: Turn, name: str, hands: Hands, held: Sequence[Held], now: float, now_ms: int
    ) -> int:
        queue = rows.id_of(turn.connection, name)
        if queue is None:
            raise Fenced(f"queue {name!r} was deleted, and its items with it")
        lanes = holds.remove_held(turn.connection, queue, hands, held, now)
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
            some = [items[at] for at in where]
            found = put_items(turn.connection, name, some, now_ms)
            for at, number in zip(where, found, strict=True):
                numbers[at] = number
            turn.slots.add(slot_of(name))
            turn.weight += sum(len(item.body) for item in some)
        return numbers

    def outcome(self, session: str, unit: str) -> Outcome:
        """A commit whose sync failed is undone for good by the next one: so this one writes."""

        def work(turn: Turn) -> Outcome:
            found = units.find(turn.connection, session, unit)
            if found is None:
                if not self._coord.is_alive(session):
                    return Outcome.UNKNOWN
                units.give_up(turn.connection, session, unit)
            return found or Outcome.NEVER

        return self._database.write(work)

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._given_up.add((holder.session, unit))
        if is_lent(holder.session):
            self.outcome(holder.session, unit)
        # A take whose sync failed is undone for good by the next commit.
        self._database.write(lambda turn: None)
        return held_in(self, queue, holder)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        self._database.write(lambda turn: self._release(turn, holder, releases))
        self._ahead.done_with(holder, [release.held for release in releases])

    def _release(self, turn: Turn, holder: Holder, releases: Sequence[Release]) -> None:
        if not self._coord.is_alive(holder.session):
            return
        connection, hands = turn.connection, self._hands(holder)
        now, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        lanes: set[rows.Lane] = set()
        for release in releases:
            queue = rows.find_queue(connection, release.held.queue)
            if queue is None:
                continue
            found = holds.find_held(connection, queue.id, hands, release.held, now)
            if found is None:
                continue
            if release.dead:
                holds.bury(connection, found.id, tidy(release.error), now_ms)
            else:
                holds.give_back(
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

    def reap(self) -> float | None:
        return self._reaper.reap()

    def _require_session(self, session: str) -> None:
        if not self._coord.is_alive(session):
            raise SessionLost(f"session {session} is over, and what it held is free")

    def watch(self, *queues: str) -> SlotWatch:
        return self._changes.watch(frozenset(map(slot_of, queues)), sessions=True)

    def close(self) -> None:
        self._found_empty.clear()
        self._ahead.close()
