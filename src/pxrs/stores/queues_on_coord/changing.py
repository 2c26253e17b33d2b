"""What holders do with what they hold: done, given back, held for longer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pxrs.core.queue import delay_ms, given_up, lane_of, validate_change, validate_for
from pxrs.errors import Fenced, PxrsError, SessionLost
from pxrs.stores.queues_on_coord.directory import Tails
from pxrs.stores.queues_on_coord.draft import (
    Draft,
    add,
    attach,
    attempts,
    bury,
    detach,
    loose,
    remove,
)
from pxrs.stores.queues_on_coord.layout import (
    Entry,
    Item,
    Layout,
    Standing,
    decode,
    encode,
    lane_name,
)
from pxrs.stores.queues_on_coord.receipts import Receipts
from pxrs.stores.queues_on_coord.shared import Tools, cost, lost
from pxrs.types import Committed, Held, Holder, NewItem, Queue, QueueChange, Release


class Changer:
    """Commits changes under the checks of everything they build on."""

    def __init__(self, tools: Tools, receipts: Receipts) -> None:
        self._tools = tools
        self._receipts = receipts

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, self._tools.limits)
        for attempt in attempts("a transaction could not be applied"):
            try:
                numbers = self._try_to_apply(change, fresh=attempt > 0)
            except SessionLost:
                raise self._who_ended(change.holder, change.remove) from None
            if numbers is not None:
                self._receipts.forget(change.holder.session, change.forget)
                return numbers
        raise AssertionError("attempts raise in the end")

    def _try_to_apply(self, change: QueueChange, *, fresh: bool) -> list[int | None] | None:
        """None if something that it builds on has changed."""
        draft = self._tools.draft()
        entries = self._held(change.holder, change.remove, fresh=fresh)
        for held, entry in zip(change.remove, entries, strict=True):
            remove(draft, Layout(held.queue), entry)
        if entries:
            self._vouch(draft, change.holder, entries)
        tails, seen = Tails(self._tools.directory, draft), Seen(draft)
        numbers = [self._put(draft, tails, seen, item) for item in change.put]
        tails.write()
        receipt = self._receipts.write(draft, change)
        outcome = draft.commit()
        if not isinstance(outcome, Committed):
            tails.refused()
            if receipt in outcome.current:
                raise given_up(change.unit)
            return None
        tails.committed(outcome)
        self._let_go(change.holder, change.remove, entries)
        return numbers

    def _put(self, draft: Draft, tails: Tails, seen: Seen, new: NewItem) -> int | None:
        at = Layout(new.queue)
        queue = tails.queue(new.queue) or Queue(name=new.queue)
        validate_for(queue, new)
        if new.dedupe is not None and not seen.add(at, new.dedupe, new.dedupe_window):
            return None
        standing = Standing(
            number=tails.next(new.queue),
            lane=lane_name(lane_of(queue, new.key)),
            priority=new.priority,
            visible_ms=draft.now_ms + delay_ms(new.delay),
        )
        item = Item(key=new.key, priority=new.priority, put_ms=draft.now_ms)
        add(draft, at, standing, item, bytes(new.body))
        return standing.number

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        """One that is dead by itself, the others in lots that fit into a commit."""
        lot: list[Release] = []
        room = self._tools.room
        for release in dict.fromkeys(releases):
            entry = self._tools.holds.find(holder, release.held)
            if entry is None:
                continue
            room -= cost(entry.standing)
            if lot and (room < 0 or release.dead):
                self._release(holder, lot)
                lot, room = [], self._tools.room - cost(entry.standing)
            lot.append(release)
            if release.dead:
                self._release(holder, lot)
                lot, room = [], self._tools.room
        if lot:
            self._release(holder, lot)

    def _release(self, holder: Holder, releases: Sequence[Release]) -> None:
        held = [release.held for release in releases]
        for attempt in attempts("items could not be given back"):
            try:
                if self._try_to_release(holder, releases, fresh=attempt > 0):
                    return
            except SessionLost:
                if len(releases) == 1 or not self._tools.has_session(holder.session):
                    self._let_go(holder, held, [])
                    return
                # The time of some of them is over.
                for release in releases:
                    self._release(holder, [release])
                return

    def _try_to_release(self, holder: Holder, releases: Sequence[Release], *, fresh: bool) -> bool:
        draft = self._tools.draft()
        entries: list[Entry] = []
        for release in releases:
            entry = self._tools.holds.find(holder, release.held, fresh=fresh)
            if entry is not None:
                self._give_back(draft, Layout(release.held.queue), entry, release)
                entries.append(entry)
        if entries:
            self._vouch(draft, holder, entries)
            if not isinstance(draft.commit(), Committed):
                return False
        self._let_go(holder, [release.held for release in releases], entries)
        return True

    def _give_back(self, draft: Draft, at: Layout, entry: Entry, release: Release) -> None:
        error = release.error or entry.standing.error
        if release.dead:
            bury(draft, at, entry, error)
            return
        detach(draft, at, entry)
        visible_ms = draft.now_ms + delay_ms(release.delay)
        attach(draft, at, loose(entry.standing, visible_ms, suspect=False, error=error))

    def extend(self, holder: Holder, held: Sequence[Held], seconds: float) -> None:
        wanted = list(dict.fromkeys(held))
        if not wanted:
            self._tools.require_session(holder.session)
            return
        deadline = self._tools.deadlines.open(seconds)
        before: list[Entry] = []
        try:
            for attempt in attempts("items could not be held for longer"):
                before = self._held(holder, wanted, fresh=attempt > 0)
                if self._try_to_extend(holder, wanted, before, deadline.id, seconds):
                    break
        except SessionLost:
            raise self._who_ended(holder, wanted) from None
        except Fenced:
            raise
        except BaseException:
            # It may count the time of a hold, for all we know: it has to end.
            self._tools.deadlines.abandon(deadline.id)
            raise
        finally:
            ends = [entry.standing.until for entry in before]
            self._tools.deadlines.release(deadline.id, *ends)

    def _try_to_extend(
        self,
        holder: Holder,
        held: Sequence[Held],
        entries: Sequence[Entry],
        deadline: str,
        seconds: float,
    ) -> bool:
        draft = self._tools.draft()
        self._vouch(draft, holder, entries)
        until_ms = draft.now_ms + delay_ms(seconds)
        longer = [replace(each.standing, until=deadline, until_ms=until_ms) for each in entries]
        for each, entry, standing in zip(held, entries, longer, strict=True):
            draft.require(entry.key, entry.version)
            draft.put(entry.key, encode(standing))
            draft.put(Layout(each.queue).until(each.id), b"", deadline)
        outcome = draft.commit()
        if not isinstance(outcome, Committed):
            return False
        for each, entry, standing in zip(held, entries, longer, strict=True):
            extended = Entry(entry.key, outcome.versions[entry.key], standing)
            self._tools.holds.add(holder, each.queue, extended)
        return True

    def _held(self, holder: Holder, held: Sequence[Held], *, fresh: bool) -> list[Entry]:
        entries = []
        for each in held:
            entry = self._tools.holds.find(holder, each, fresh=fresh)
            if entry is None:
                self._tools.holds.forget(holder, each)
                raise Fenced(f"item {each.id} of queue {each.queue!r} is not held any more")
            entries.append(entry)
        return entries

    def _vouch(self, draft: Draft, holder: Holder, entries: Sequence[Entry]) -> None:
        """Nothing is done for a session that is over, nor when the time of a hold is."""
        ends = {entry.standing.until for entry in entries} - {None}
        for session in (holder.session, *sorted(str(end) for end in ends)):
            draft.vouch(session)

    def _let_go(self, holder: Holder, held: Sequence[Held], entries: Sequence[Entry]) -> None:
        for each in held:
            self._tools.holds.forget(holder, each)
        self._tools.deadlines.release(*(entry.standing.until for entry in entries))

    def _who_ended(self, holder: Holder, held: Sequence[Held]) -> PxrsError:
        """The holder's session, or one by which the time of a hold was counted."""
        if not self._tools.has_session(holder.session):
            return lost(holder.session)
        names = ", ".join(f"{each.id} of queue {each.queue!r}" for each in held)
        return Fenced(f"of items {names} one was held for too long, and is not held any more")


class SeenRecord(msgspec.Struct, frozen=True):
    until_ms: int


class Seen:
    """The dedupe keys that one draft has to do with."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._added: set[str] = set()

    def add(self, at: Layout, dedupe: str, window: float) -> bool:
        """Whether it is new; then it counts from now on."""
        key = at.seen(dedupe)
        if key in self._added:
            return False
        found = self._draft.coord.get(key)
        if found is not None and is_seen(found.value, self._draft.now_ms):
            return False
        self._added.add(key)
        self._draft.require(key, 0 if found is None else found.version)
        self._draft.put(key, encode(SeenRecord(self._draft.now_ms + delay_ms(window))))
        return True


def is_seen(value: bytes, now_ms: int) -> bool:
    return decode(value, SeenRecord).until_ms > now_ms
