"""Taking items: look at a few, then hold them in one commit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pxrs.chance import CHANCE
from pxrs.core.queue import USED_UP, delay_ms, given_up, pick
from pxrs.errors import Fenced, OutcomeUnknown, PxrsError, SessionLost
from pxrs.stores.api import Session
from pxrs.stores.queues_on_coord.draft import Draft, attempts, bury, hold
from pxrs.stores.queues_on_coord.layout import Entry, Layout, Standing, decode_item, entry_of
from pxrs.stores.queues_on_coord.reaping import Reaper
from pxrs.stores.queues_on_coord.shared import Tools, cost
from pxrs.types import Check, Committed, Conflict, Delivery, Held, Holder, Put, Taken

# Who met a rival looks at so many more, and begins anywhere among them.
_ELBOW_ROOM = 16


class Wish(NamedTuple):
    """What a `take` asks for."""

    at: Layout
    holder: Holder
    wanted: int
    most: int | None
    lock_for: float | None
    unit: str
    suspects: bool


# A take: its holder, and what that calls it.
_Name = tuple[Holder, str]
_Sent = tuple[Layout, Sequence[tuple[Entry, Standing]]]


class Sight(NamedTuple):
    """Items that may be had, in order, and when the first delayed one shows."""

    entries: list[Entry]
    next_ms: int | None


class Taker:
    """Hands out items."""

    def __init__(self, tools: Tools, reaper: Reaper) -> None:
        self._tools = tools
        self._reaper = reaper
        self._lock = threading.Lock()
        # What takes are about to hold, until their outcome is known; and takes that were given up.
        self._sent: dict[_Name, _Sent] = {}
        self._given_up: set[_Name] = set()

    def give_up(self, holder: Holder, unit: str) -> None:
        """Return when this very take has held what it will ever hold.

        Takes are the business of the process that has the session, so others need not know.
        """
        name = (holder, unit)
        with self._lock:
            self._given_up.add(name)
            sent = self._sent.get(name)
        if sent is not None:
            self._find_out(*sent)
            self._settle(name)

    def _begin(self, name: _Name, sent: _Sent) -> None:
        """Note it before it is sent: whatever interrupts it, it can be asked after."""
        with self._lock:
            if name in self._given_up:
                raise given_up(name[1])
            self._sent[name] = sent

    def _settle(self, name: _Name) -> None:
        with self._lock:
            self._sent.pop(name, None)

    def take(self, wish: Wish) -> Taken:
        """As many as one commit can hold, and can remove later."""
        if (wish.holder, wish.unit) in self._given_up:
            raise given_up(wish.unit)
        known = self._tools.directory.known(wish.at.queue)
        if known is None:
            self._tools.require_session(wish.holder.session)
            return Taken([], None)
        self._reaper.now_and_then(wish.at)
        crowded = 0
        for _ in attempts(f"nothing could be taken from queue {wish.at.queue!r}"):
            sight = self._look(wish, crowded)
            chosen, used_up, suspect = pick(
                sight.entries, wish.wanted, wish.most, suspects=wish.suspects
            )
            if used_up:
                self._bury(wish.at, used_up)
                continue
            if not chosen:
                reaped = self._reaper.reap(wish.at)
                if reaped.freed:
                    continue
                self._tools.require_session(wish.holder.session)
                waits = [*self._waits(sight, wish), *reaped.waits]
                return Taken([], min(waits, default=None), suspect)
            try:
                held = self._hold_in_time(wish, self._fitting(chosen))
            except SessionLost:
                # A hold of ours that gave us a right to what is behind it may have ended, too.
                if not self._tools.has_session(wish.holder.session):
                    raise
                self._reaper.reap(wish.at)
                continue
            if held:
                try:
                    items = self._deliver(wish, held)
                    waits = self._waits(sight, wish)
                except (SessionLost, OutcomeUnknown):
                    raise
                except PxrsError as error:
                    raise _held_all_the_same(error) from error
                if items:
                    return Taken(items, min(waits, default=None))
            crowded += 1
        raise AssertionError("attempts raise in the end")

    def _look(self, wish: Wish, crowded: int) -> Sight:
        """Fronts by rank; then what is behind those, or behind what the holder has."""
        coord, at, now_ms = self._tools.coord, wish.at, self._tools.clock.wall_ms()
        wanted = min(wish.wanted, self._tools.room)
        window = wanted + (_ELBOW_ROOM if crowded else 0)
        ready = [entry_of(record) for record in coord.list(at.ready, limit=window)]
        delayed = [entry_of(record) for record in coord.list(at.delayed, limit=window)]
        due = [entry for entry in delayed if entry.standing.visible_ms <= now_ms]
        later = [entry.standing.visible_ms for entry in delayed[len(due) :]]
        fronts = sorted(ready + due, key=lambda entry: entry.rank)
        if crowded:
            fronts = fronts[CHANCE.randint(0, max(0, len(fronts) - wanted)) :]
        fronts = fronts[:wanted]
        behind = self._behind(wish, fronts, wanted - len(fronts), now_ms)
        return Sight(fronts + behind, min(later, default=None))

    def _behind(self, wish: Wish, fronts: Sequence[Entry], wanted: int, now_ms: int) -> list[Entry]:
        lanes = [each.standing.lane for each in fronts if each.standing.lane is not None]
        lanes += sorted(self._tools.holds.lanes(wish.holder, wish.at.queue))
        found: list[Entry] = []
        for lane in lanes:
            if len(found) >= wanted:
                break
            prefix = wish.at.waiting_in(lane)
            for record in self._tools.coord.list(prefix, limit=wanted - len(found)):
                entry = entry_of(record)
                if entry.standing.visible_ms > now_ms:
                    break
                found.append(entry)
        return found

    def _fitting(self, chosen: Sequence[Entry]) -> list[Entry]:
        """So many that the transaction which removes them fits into a commit."""
        room, fitting = self._tools.room, []
        for entry in chosen:
            room -= cost(entry.standing)
            if room < 0:
                break
            fitting.append(entry)
        return fitting

    def _hold_in_time(self, wish: Wish, entries: Sequence[Entry]) -> list[Entry]:
        """With a session that ends the hold, if it is to have an end."""
        if wish.lock_for is None:
            return self._hold(wish, entries, None)
        deadline = self._tools.deadlines.open(wish.lock_for)
        try:
            held = self._hold(wish, entries, deadline)
        except (SessionLost, Fenced):
            self._tools.deadlines.release(deadline.id)
            raise
        except BaseException:
            # Something may be held by it, for all we know: it has to end.
            self._tools.deadlines.abandon(deadline.id)
            raise
        if not held:
            self._tools.deadlines.release(deadline.id)
        return held

    def _hold(self, wish: Wish, entries: Sequence[Entry], deadline: Session | None) -> list[Entry]:
        """Those that were in fact held: all of them, or none if somebody was faster."""
        tools, at = self._tools, wish.at
        known = tools.directory.known(at.queue)
        if known is None:
            return []
        draft = tools.draft()
        draft.require(at.head, known.head_version)
        held: list[tuple[Entry, Standing]] = []
        for entry in entries:
            standing = self._standing(entry.standing, wish, deadline, draft.now_ms)
            if hold(draft, at, entry, standing, wish.holder):
                held.append((entry, standing))
        if not held:
            return []
        for session in self._leaned_on(draft, wish, [standing for _, standing in held]):
            draft.vouch(session)
        versions = self._commit(draft, (wish.holder, wish.unit), (at, held))
        if not versions:
            tools.directory.forget(at.queue)
            return []
        taken = [
            Entry(at.meta(standing.number), versions[at.meta(standing.number)], standing)
            for _, standing in held
        ]
        for entry in taken:
            tools.holds.add(wish.holder, at.queue, entry)
        return taken

    def _commit(self, draft: Draft, name: _Name, sent: _Sent) -> Mapping[str, int]:
        """The versions of what is held now; none if somebody was faster."""
        self._begin(name, sent)
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
        self, standing: Standing, wish: Wish, deadline: Session | None, now_ms: int
    ) -> Standing:
        return replace(
            standing,
            deliveries=standing.deliveries + 1,
            taken_ms=now_ms,
            holder=wish.holder,
            most=wish.most,
            until=None if deadline is None else deadline.id,
            until_ms=None if wish.lock_for is None else now_ms + delay_ms(wish.lock_for),
        )

    def _leaned_on(self, draft: Draft, wish: Wish, taken: Sequence[Standing]) -> set[str]:
        """Sessions by which the holds end that give the right to what is behind them."""
        lanes = self._tools.holds.lanes(wish.holder, wish.at.queue)
        return {
            entry.standing.until
            for standing in taken
            if standing.lane is not None
            for entry in lanes.get(standing.lane, ())
            if entry.standing.until is not None
            and entry.standing.number in draft.lane(wish.at, standing.lane).held_before
        }

    def _find_out(self, at: Layout, held: Sequence[tuple[Entry, Standing]]) -> dict[str, int]:
        """Whether a commit that was not answered was done; if not, that it never will be."""
        entry, standing = held[0]
        record = self._tools.coord.get(entry.key)
        if record is not None and record.version == entry.version:
            again = Put(entry.key, record.value)
            outcome = self._tools.coord.commit([Check(entry.key, entry.version)], [again])
            if not isinstance(outcome, Conflict):
                return {}
        metas = [self._tools.coord.get(at.meta(each.number)) for _, each in held]
        found = [meta for meta in metas if meta is not None]
        mine = found and entry_of(found[0]).standing == standing
        return {meta.key: meta.version for meta in found} if mine else {}

    def _deliver(self, wish: Wish, taken: Sequence[Entry]) -> list[Delivery]:
        """The items with their bodies; one that was purged in between is not among them."""
        bodies = self._bodies(wish.at, [entry.standing.number for entry in taken])
        deliveries = []
        for entry in taken:
            standing, value = entry.standing, bodies.get(entry.standing.number)
            if value is None:
                continue
            item, body = decode_item(value)
            deliveries.append(
                Delivery(
                    held=Held(wish.at.queue, standing.number, standing.deliveries),
                    body=body,
                    key=item.key,
                    priority=item.priority,
                    put_ms=item.put_ms,
                    error=standing.error,
                )
            )
        return deliveries

    def _bodies(self, at: Layout, numbers: Sequence[int]) -> dict[int, bytes]:
        """One read for each run of neighbours."""
        coord = self._tools.coord
        found: dict[int, bytes] = {}
        for first, last in _runs(sorted(numbers)):
            if first == last:
                record = coord.get(at.item(first))
                records = [] if record is None else [record]
            else:
                records = coord.list(at.items, after=at.item(first - 1), limit=last - first + 1)
            by_key = {record.key: record.value for record in records}
            for number in range(first, last + 1):
                if at.item(number) in by_key:
                    found[number] = by_key[at.item(number)]
        return found

    def _bury(self, at: Layout, used_up: Sequence[Entry]) -> None:
        for entry in used_up:
            draft = self._tools.draft()
            if bury(draft, at, entry, entry.standing.error or USED_UP):
                draft.commit()

    def _waits(self, sight: Sight, wish: Wish) -> list[float]:
        """Seconds until a delayed item shows, also behind what the holder has."""
        now_ms = self._tools.clock.wall_ms()
        shows = [] if sight.next_ms is None else [sight.next_ms]
        for lane in self._tools.holds.lanes(wish.holder, wish.at.queue):
            first = self._tools.coord.list(wish.at.waiting_in(lane), limit=1)
            shows += [entry_of(record).standing.visible_ms for record in first]
        return [max(0.0, (show - now_ms) / 1000) for show in shows]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _held_all_the_same(error: PxrsError) -> OutcomeUnknown:
    """Something is held, or may be: whoever took it has to ask, whatever went wrong since."""
    return OutcomeUnknown(f"items may be held that could not be handed out: {error}")
