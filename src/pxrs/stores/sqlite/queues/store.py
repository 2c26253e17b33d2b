"""QueueStore on SQLite: one row per item, one writer for all.

An item is counted and held in one transaction. Another one removes it, together with what its
handler put. Only the second one waits for the disk: a count and a hold survive every process, and
a power cut that undoes them ends their holder, too. The last delivery that an item may have is the
exception. It must never be made twice, so it is on the disk before the item is handed out.

A holder is a session of `sessions.py`. What a dead one holds is freed by the next look: by a `take`
that finds nothing, and by every `take` after a tenth of a second.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

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
from pxrs.stores.sqlite.queues import holds, rows, units
from pxrs.stores.sqlite.queues.admin import LIMITS, QueueUpkeep, slot_of
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

_MOST_QUEUES = 1000


class Wanted(NamedTuple):
    """The arguments of a `take`."""

    holder: Holder
    number: int
    most: int | None
    lock_for: float | None
    suspects: bool


class _LastDelivery(Exception):  # noqa: N818 - no failure: the take is repeated, synced
    """A take without a sync has found an item that may be delivered only once more."""


class SqliteQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        changes: ChangeListener,
        clock: Clock,
    ) -> None:
        super().__init__(database, clock)
        self._coord = coord
        self._reaper = Reaper(database, coord, clock)
        # Takes that were given up. None of them can be on its way, as there is no network. Those of
        # a lent session are noted in the file, because another process may have the session.
        self._given_up: set[tuple[str, str]] = set()
        self._changes = changes
        # Queues that had nothing for the last take: the next take looks before it writes.
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
        taken = self._take_now(queue, wanted, unit)
        if taken.items or taken.suspect:
            self._found_empty.discard(queue)
        else:
            if len(self._found_empty) > _MOST_QUEUES:
                self._found_empty.clear()
            self._found_empty.add(queue)
        return taken

    def _take_now(self, name: str, wanted: Wanted, unit: str) -> Taken:
        if wanted.most != 1:
            with suppress(_LastDelivery):
                return self._take_in_turn(name, wanted, unit, synced=False)
        return self._take_in_turn(name, wanted, unit, synced=True)

    def _take_in_turn(self, name: str, wanted: Wanted, unit: str, *, synced: bool) -> Taken:
        session = wanted.holder.session

        def work(turn: Turn) -> Taken:
            self._require_session(session)
            taken = self._take(turn, name, wanted, unit if is_lent(session) else "")
            if not synced and any(item.held.delivery == wanted.most for item in taken.items):
                raise _LastDelivery
            return taken

        return self._database.write(work, synced=synced)

    def _take(self, turn: Turn, name: str, wanted: Wanted, unit: str) -> Taken:
        """Holds what there is, unless `unit` was given up in the file."""
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
        if not holds.hold(connection, ids, wanted.holder, wanted.most, until, now_ms, unit):
            raise given_up(unit)
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
            # Another holder may be able to take the items behind them.
            turn.slots.add(slot_of(queue.info.name))

    def _candidates(
        self, connection: sqlite3.Connection, queue: QueueRow, wanted: Wanted, now_ms: int
    ) -> list[Candidate]:
        """Fronts of lanes first, then the items behind those that the holder has or will have."""
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

        It only reads: waiting workers must not queue for the writer only to learn that they have
        to wait.
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
        held = list(dict.fromkeys(held))

        def work(turn: Turn) -> None:
            self._require_session(holder.session)
            now = self._clock.monotonic()
            for name, some in by_queue(held).items():
                queue = rows.id_of(turn.connection, name)
                if queue is None:
                    raise Fenced(f"queue {name!r} was deleted, and its items with it")
                if holds.extend(turn.connection, queue, holder, some, now, now + lock_for):
                    turn.slots.add(slot_of(name))

        self._database.write(work, synced=False)

    # Committing

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, LIMITS)
        return self._database.write(lambda turn: self.apply_in(turn, change))

    def apply_in(self, turn: Turn, change: QueueChange) -> list[int | None]:
        """`apply` inside the caller's write transaction."""
        now_ms = self._clock.wall_ms()
        # An item that was held when this process got the writer is held still. Since then no other
        # process could take it, nor could its holder extend it, however long a handler's own
        # statements have taken.
        now = self._clock.monotonic() if turn.since is None else turn.since
        if change.remove:
            holder = change.holder
            self._require_session(holder.session)
            for name, held in sorted(by_queue(change.remove).items()):
                self._remove(turn, name, holder, held, now, now_ms)
        numbers = self._put(turn, change.put, now_ms) if change.put else []
        units.note(turn.connection, change)
        return numbers

    def _remove(
        self, turn: Turn, name: str, holder: Holder, held: Sequence[Held], now: float, now_ms: int
    ) -> None:
        queue = rows.id_of(turn.connection, name)
        if queue is None:
            raise Fenced(f"queue {name!r} was deleted, and its items with it")
        lanes = holds.remove_held(turn.connection, queue, holder, held, now)
        if lanes:
            rows.settle(turn.connection, ((queue, lane) for lane in lanes), now_ms)
            turn.slots.add(slot_of(name))

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
        """See `QueueStore`. It writes: the next commit undoes for good one whose sync failed."""

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
        # The next commit undoes for good a take whose sync failed.
        self._database.write(lambda turn: None)
        return held_in(self, queue, holder)

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
            found = holds.find_held(connection, queue.id, holder, release.held, now)
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
