"""Taking items: look at a few, then hold them in one commit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from pxrs.chance import CHANCE
from pxrs.core.queue import USED_UP, delay_ms, delivery_of, given_up, pick
from pxrs.errors import OutcomeUnknown, PxrsError, SessionLost
from pxrs.stores.api import Session, lots
from pxrs.stores.queues_on_coord.drafts import Attempts, Context, Draft, cost
from pxrs.stores.queues_on_coord.holds import Deadlines, Holds, Reaper
from pxrs.stores.queues_on_coord.layout import (
    Entry,
    Layout,
    Standing,
    decode_item,
    entry_of,
    number_of,
)
from pxrs.stores.queues_on_coord.listing import Stored
from pxrs.types import Check, Committed, Conflict, Delivery, Holder, Put, Taken, Versioned

# A take that lost against a rival looks at this many more items, and begins at a random one.
_ELBOW_ROOM = 16


class TakeRequest(NamedTuple):
    """The arguments of a `take`."""

    at: Layout
    holder: Holder
    wanted: int
    most: int | None
    lock_for: float | None
    unit: str
    suspects: bool


# Names a take: its holder, and the holder's name for it.
_Name = tuple[Holder, str]
_Sent = tuple[Layout, Sequence[tuple[Entry, Standing]]]


class Sight(NamedTuple):
    """Items that can be taken, in order, and when the first delayed one shows."""

    entries: list[Entry]
    next_ms: int | None


class Taker:
    """Hands out items."""

    def __init__(
        self, context: Context, holds: Holds, deadlines: Deadlines, reaper: Reaper
    ) -> None:
        self._context = context
        self._holds = holds
        self._deadlines = deadlines
        self._reaper = reaper
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        # Items that takes are about to hold, until the outcome is known; takes that were given up.
        self._sent: dict[_Name, _Sent] = {}
        self._given_up: set[_Name] = set()

    def give_up(self, holder: Holder, unit: str) -> None:
        """Refuse this take from now on; returns when it can't hold anything more.

        Only the process that has the session makes takes with it, so no other needs to know.
        """
        name = (holder, unit)
        with self._lock:
            self._given_up.add(name)
            sent = self._sent.get(name)
        if sent is not None:
            self._find_out(*sent)
            self._settle(name)

    def _settle(self, name: _Name) -> None:
        with self._lock:
            self._sent.pop(name, None)

    def take(self, request: TakeRequest) -> Taken:
        """Hold as many items as one commit can hold, and another can remove later.

        Raises `OutcomeUnknown` if items may be held that were not handed out: `held` finds them.
        After any other error none are held.
        """
        unseen: list[Entry] = []
        try:
            with ExitStack() as turn:
                return self._take(request, unseen, turn)
        except (SessionLost, OutcomeUnknown):
            raise
        except PxrsError as error:
            if not unseen:
                raise
            raise _held_all_the_same(error) from error

    def _take(self, request: TakeRequest, unseen: list[Entry], turn: ExitStack) -> Taken:
        """Take. It adds held items to `unseen` before anything else can fail.

        After losing against a rival, the threads of this process take turns: threads that look at
        the same time choose the same few items, and all but one of them have looked in vain.
        """
        if (request.holder, request.unit) in self._given_up:
            raise given_up(request.unit)
        known = self._context.directory.known(request.at.queue)
        if known is None:
            self._context.require_session(request.holder.session)
            return Taken([], None)
        self._reaper.now_and_then(request.at)
        crowded = False
        attempts = Attempts(f"nothing could be taken from queue {request.at.queue!r}")
        while True:
            attempts.begin()
            sight = self._look(request, crowded)
            chosen, used_up, suspect = pick(
                sight.entries, request.wanted, request.most, suspects=request.suspects
            )
            if used_up:
                self._bury(request.at, used_up)
                continue
            if not chosen:
                reaped = self._reaper.reap(request.at)
                if reaped.freed:
                    continue
                self._context.require_session(request.holder.session)
                waits = [*self._waits(sight, request), *reaped.waits]
                return Taken([], min(waits, default=None), suspect)
            try:
                # As many as one commit can remove later.
                fitting = next(lots(chosen, cost, (self._context.room,)))
                held = self._hold_in_time(request, fitting)
            except SessionLost:
                # Or it was an earlier hold of this holder that ended, which gave it the right to
                # the items behind.
                if not self._context.has_session(request.holder.session):
                    raise
                self._reaper.reap(request.at)
                continue
            unseen += held
            if held and (items := self._deliver(request, held)):
                return Taken(items, min(self._waits(sight, request), default=None))
            if not crowded:
                turn.enter_context(self._turn)
            crowded = True

    def _look(self, request: TakeRequest, crowded: bool) -> Sight:
        """Fronts by rank; then the items behind those, or behind what the holder has."""
        coord, at, now_ms = self._context.coord, request.at, self._context.clock.wall_ms()
        wanted = min(request.wanted, self._context.room)
        window = wanted + (_ELBOW_ROOM if crowded else 0)
        ready = [entry_of(record) for record in coord.list(at.ready, limit=window)]
        delayed = [entry_of(record) for record in coord.list(at.delayed, limit=window)]
        due = [entry for entry in delayed if entry.standing.visible_ms <= now_ms]
        later = [entry.standing.visible_ms for entry in delayed[len(due) :]]
        fronts = sorted(ready + due, key=lambda entry: entry.rank)
        if crowded:
            fronts = fronts[CHANCE.randint(0, max(0, len(fronts) - wanted)) :]
        fronts = fronts[:wanted]
        behind = self._behind(request, fronts, wanted - len(fronts), now_ms)
        return Sight(fronts + behind, min(later, default=None))

    def _behind(
        self, request: TakeRequest, fronts: Sequence[Entry], wanted: int, now_ms: int
    ) -> list[Entry]:
        orders = [each.standing.key_order for each in fronts if each.standing.key_order is not None]
        orders += sorted(self._holds.by_key_order(request.holder, request.at.queue))
        found: list[Entry] = []
        for order in orders:
            if len(found) >= wanted:
                break
            prefix = request.at.waiting_in(order)
            for record in self._context.coord.list(prefix, limit=wanted - len(found)):
                entry = entry_of(record)
                if entry.standing.visible_ms > now_ms:
                    break
                found.append(entry)
        return found

    def _hold_in_time(self, request: TakeRequest, entries: Sequence[Entry]) -> list[Entry]:
        """Hold the entries, with a session that ends the hold if it has a deadline."""
        if request.lock_for is None:
            return self._hold(request, entries, None)
        with self._deadlines.counting(request.lock_for) as deadline:
            return self._hold(request, entries, deadline)

    def _hold(
        self, request: TakeRequest, entries: Sequence[Entry], deadline: Session | None
    ) -> list[Entry]:
        """Hold the entries in one commit: all of them, or none if another holder was faster."""
        at, draft = request.at, self._context.draft()
        if not draft.require_queue(at):
            return []
        held: list[tuple[Entry, Standing]] = []
        for entry in entries:
            standing = self._standing(entry.standing, request, deadline, draft.now_ms)
            if draft.hold(at, entry, standing, request.holder):
                held.append((entry, standing))
        if not held:
            return []
        draft.vouch(*self._leaned_on(draft, request, [standing for _, standing in held]))
        versions = self._commit(draft, (request.holder, request.unit), (at, held))
        if not versions:
            return []
        taken = [
            Entry(at.meta(standing.number), versions[at.meta(standing.number)], standing)
            for _, standing in held
        ]
        for entry in taken:
            self._holds.add(request.holder, at.queue, entry)
        return taken

    def _commit(self, draft: Draft, name: _Name, sent: _Sent) -> Mapping[str, int]:
        """Commit, find out the outcome, and return the versions of the held entries, if any."""
        with self._lock:
            if name in self._given_up:
                raise given_up(name[1])
            # Noted before it is sent: after any interrupt, its outcome can be found out.
            self._sent[name] = sent
        try:
            outcome = draft.commit()
            versions = outcome.versions if isinstance(outcome, Committed) else {}
        except OutcomeUnknown:
            try:
                versions = self._find_out(*sent)
            except PxrsError as error:
                raise _held_all_the_same(error) from error
        except PxrsError:
            self._settle(name)
            raise
        self._settle(name)
        return versions

    def _standing(
        self, standing: Standing, request: TakeRequest, deadline: Session | None, now_ms: int
    ) -> Standing:
        return replace(
            standing,
            deliveries=standing.deliveries + 1,
            taken_ms=now_ms,
            holder=request.holder,
            most=request.most,
            until=None if deadline is None else deadline.id,
            until_ms=None if request.lock_for is None else now_ms + delay_ms(request.lock_for),
        )

    def _leaned_on(self, draft: Draft, request: TakeRequest, taken: Sequence[Standing]) -> set[str]:
        """Sessions that end the holds which give the right to the items behind them."""
        mine = self._holds.by_key_order(request.holder, request.at.queue)
        return {
            entry.standing.until
            for standing in taken
            if standing.key_order is not None
            for entry in mine.get(standing.key_order, ())
            if entry.standing.until is not None
            and entry.standing.number in draft.order(request.at, standing.key_order).held_before
        }

    def _find_out(self, at: Layout, held: Sequence[tuple[Entry, Standing]]) -> dict[str, int]:
        """Find out whether an unanswered commit was done; if not, make sure it never will be.

        Returns the versions of the held entries; empty if it was not done.
        """
        entry, standing = held[0]
        record = self._context.coord.get(entry.key)
        if record is not None and record.version == entry.version:
            again = Put(entry.key, record.value)
            outcome = self._context.coord.commit([Check(entry.key, entry.version)], [again])
            if not isinstance(outcome, Conflict):
                return {}
        metas = [self._context.coord.get(at.meta(each.number)) for _, each in held]
        found = [meta for meta in metas if meta is not None]
        mine = found and entry_of(found[0]).standing == standing
        return {meta.key: meta.version for meta in found} if mine else {}

    def _deliver(self, request: TakeRequest, taken: Sequence[Entry]) -> list[Delivery]:
        """The items with their bodies, without those that were purged in between."""
        at, now_ms = request.at, self._context.clock.wall_ms()
        bodies = self._bodies(at, [entry.standing.number for entry in taken])
        found = [
            Stored(entry.standing.number, *decode_item(bodies[entry.standing.number]), entry)
            for entry in taken
            if entry.standing.number in bodies
        ]
        return [delivery_of(at.queue, each.shown(at, now_ms)) for each in found]

    def _bodies(self, at: Layout, numbers: Sequence[int]) -> dict[int, bytes]:
        """Items as they are stored. One read for each run of adjacent numbers."""
        coord = self._context.coord
        found: list[Versioned | None] = []
        for _, run in groupby(enumerate(sorted(numbers)), lambda each: each[1] - each[0]):
            first, *others = (number for _, number in run)
            if others:
                found += coord.list(at.items, after=at.item(first - 1), limit=1 + len(others))
            else:
                found.append(coord.get(at.item(first)))
        return {number_of(record): record.value for record in found if record is not None}

    def _bury(self, at: Layout, used_up: Sequence[Entry]) -> None:
        for entry in used_up:
            draft = self._context.draft()
            if draft.bury(at, entry, entry.standing.error or USED_UP):
                draft.commit()

    def _waits(self, sight: Sight, request: TakeRequest) -> list[float]:
        """Seconds until delayed items show, also those behind items that the holder has."""
        now_ms = self._context.clock.wall_ms()
        shows = [] if sight.next_ms is None else [sight.next_ms]
        for order in self._holds.by_key_order(request.holder, request.at.queue):
            first = self._context.coord.list(request.at.waiting_in(order), limit=1)
            shows += [entry_of(record).standing.visible_ms for record in first]
        return [max(0.0, (show - now_ms) / 1000) for show in shows]


def _held_all_the_same(error: PxrsError) -> OutcomeUnknown:
    """The error for a take that failed but may hold items: `held` finds them."""
    return OutcomeUnknown(f"items may be held that could not be handed out: {error}")
