"""Queues as people look after them. By listing: fine for some thousands of items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from pxrs.core.queue import LIVE, LOOSE, is_suspect, lane_of, states_or, validate_restored
from pxrs.errors import InvalidRequest, QueueNotFound
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.changing import is_seen
from pxrs.stores.queues_on_coord.directory import Tails
from pxrs.stores.queues_on_coord.draft import Draft, add, attempts, remove
from pxrs.stores.queues_on_coord.layout import (
    NUMBERS_END,
    Entry,
    Item,
    Layout,
    Standing,
    Tail,
    decode,
    decode_item,
    encode_item,
    entry_of,
    lane_name,
)
from pxrs.stores.queues_on_coord.reaping import Reaper
from pxrs.stores.queues_on_coord.shared import Tools, cost
from pxrs.types import (
    Check,
    Committed,
    Delete,
    ItemState,
    Queue,
    QueueStats,
    StoredItem,
    Versioned,
)

_PAGE = 100
_SWEPT_AT_ONCE = 50


class Stored(NamedTuple):
    """An item as it lies in the queue, and how it stands; nobody knows how if it just moves."""

    number: int
    item: Item
    body: bytes
    entry: Entry | None


class Survey:
    """How the live items of a queue stand. Who moves meanwhile may be missed: look again."""

    def __init__(self, coord: CoordStore, at: Layout) -> None:
        self._coord = coord
        self._at = at
        self.entries: dict[int, Entry] = {}
        self._look(at.ready, at.delayed, at.all_waiting, at.metas)

    def look_again(self) -> None:
        """What was anywhere else before its turn is ready now, or held: by and by all is seen."""
        self._look(self._at.metas, self._at.ready)

    def _look(self, *folders: str) -> None:
        for folder in folders:
            found = map(entry_of, self._coord.list(folder))
            self.entries |= {entry.standing.number: entry for entry in found}


class Upkeep:
    """Looks and clears out."""

    def __init__(self, tools: Tools, reaper: Reaper) -> None:
        self._tools = tools
        self._reaper = reaper
        self._swept: dict[str, str] = {}

    def stats(self, at: Layout) -> QueueStats:
        self._reaper.reap(at)
        coord = self._tools.coord
        for _ in attempts(f"queue {at.queue!r} could not be counted"):
            before = coord.get(at.tail)
            if before is None:
                return QueueStats()
            live = list(self._live(at, None, None))
            dead = len(coord.list(at.dlq))
            after = coord.get(at.tail)
            if after is not None and after.version == before.version:
                return self._count(at, decode(after.value, Tail), live, dead)
        return QueueStats()

    def _count(self, at: Layout, tail: Tail, live: Sequence[Stored], dead: int) -> QueueStats:
        counts = dict.fromkeys(ItemState, 0)
        now_ms = self._tools.clock.wall_ms()
        for each in live:
            counts[self._state(at, each, now_ms)] += 1
        return QueueStats(
            ready=counts[ItemState.READY],
            delayed=counts[ItemState.DELAYED],
            held=counts[ItemState.HELD],
            waiting=counts[ItemState.WAITING],
            dead=dead,
            oldest_ms=min((each.item.put_ms for each in live), default=None),
            put=tail.put,
            done=tail.put - tail.dropped - len(live) - dead,
        )

    def peek(
        self, at: Layout, states: Sequence[ItemState], after: int | None, limit: int
    ) -> list[StoredItem]:
        wanted = states_or(states, LIVE)
        if after is not None and after >= NUMBERS_END:
            return []
        self._reaper.reap(at)
        found = self._shown(at, wanted, max(0, after or 0), min(limit, _PAGE))
        return list(islice(found, limit))

    def drop(self, at: Layout, ids: Sequence[int]) -> int:
        return self._remove(at, set(ids), (*LOOSE, ItemState.DEAD))

    def purge(self, at: Layout, states: Sequence[ItemState]) -> int:
        return self._remove(at, None, states_or(states, LOOSE))

    def redrive(self, at: Layout, ids: Sequence[int]) -> int:
        return sum(self._revive(at, number) for number in dict.fromkeys(ids))

    def sweep(self, at: Layout) -> None:
        """Remove some of the dedupe keys that do not count any more, round and round."""
        coord, now_ms = self._tools.coord, self._tools.clock.wall_ms()
        found = coord.list(at.all_seen, after=self._swept.get(at.queue), limit=_SWEPT_AT_ONCE)
        self._swept.pop(at.queue, None)
        if len(found) == _SWEPT_AT_ONCE:
            self._swept[at.queue] = found[-1].key
        old = [record for record in found if not is_seen(record.value, now_ms)]
        if old:
            coord.commit(
                [Check(record.key, record.version) for record in old],
                [Delete(record.key) for record in old],
            )

    def next_due(self, at: Layout) -> list[float]:
        """Seconds until a delayed item shows that does not show yet."""
        now_ms = self._tools.clock.wall_ms()
        last_due = f"{at.delayed}{now_ms:015d}.~"
        first = self._tools.coord.list(at.delayed, after=last_due, limit=1)
        return [(entry_of(record).standing.visible_ms - now_ms) / 1000 for record in first]

    def survey(self, at: Layout) -> Survey:
        """How every live item stands, but for those that move just now."""
        survey = Survey(self._tools.coord, at)
        survey.look_again()
        return survey

    def _live(
        self, at: Layout, after: int | None, limit: int | None, survey: Survey | None = None
    ) -> Iterator[Stored]:
        last = None if after is None else at.item(after)
        records = self._tools.coord.list(at.items, after=last, limit=limit)
        if not records:
            return
        survey = survey or Survey(self._tools.coord, at)
        if any(_number(record) not in survey.entries for record in records):
            survey.look_again()
        for record in records:
            number = _number(record)
            yield Stored(number, *decode_item(record.value), survey.entries.get(number))

    def _shown(
        self, at: Layout, wanted: Sequence[ItemState], after: int, page: int
    ) -> Iterator[StoredItem]:
        """Page by page, the live and the dead side by side."""
        coord, now_ms = self._tools.coord, self._tools.clock.wall_ms()
        survey = Survey(coord, at) if any(state in LIVE for state in wanted) else None
        while True:
            live = [] if survey is None else list(self._live(at, after, page, survey))
            dead = []
            if ItemState.DEAD in wanted:
                records = coord.list(at.dlq, after=at.dead(after), limit=page)
                dead = [Stored(_number(each), *decode_item(each.value), None) for each in records]
            # Beyond the end of a full page there may be more of the one than of the other.
            ends = [each[-1].number for each in (live, dead) if len(each) == page]
            end = min(ends, default=NUMBERS_END)
            for each in sorted([*live, *dead], key=lambda each: each.number):
                if each.number <= end and self._state(at, each, now_ms) in wanted:
                    yield self._show(at, each, now_ms)
            if end == NUMBERS_END:
                return
            after = end

    def _state(self, at: Layout, stored: Stored, now_ms: int) -> ItemState:
        if stored.item.dead_ms is not None:
            return ItemState.DEAD
        return ItemState.READY if stored.entry is None else at.state(stored.entry, now_ms)

    def _show(self, at: Layout, stored: Stored, now_ms: int) -> StoredItem:
        state = self._state(at, stored, now_ms)
        standing = stored.item.standing or (stored.entry.standing if stored.entry else None)
        standing = standing or Standing(number=stored.number)
        return StoredItem(
            id=stored.number,
            state=state,
            body=stored.body,
            key=stored.item.key,
            priority=stored.item.priority,
            deliveries=standing.deliveries,
            put_ms=stored.item.put_ms,
            taken_ms=standing.taken_ms,
            visible_ms=_shows_at(state, standing, now_ms),
            dead_ms=stored.item.dead_ms,
            error=standing.error,
            holder=standing.holder,
        )

    def _remove(self, at: Layout, ids: set[int] | None, states: Sequence[ItemState]) -> int:
        """Those at a lane's end first: else every removal would show the next one."""
        self._reaper.reap(at)
        now_ms = self._tools.clock.wall_ms()
        picked = [
            entry
            for number, entry in sorted(self.survey(at).entries.items(), reverse=True)
            if (ids is None or number in ids) and at.state(entry, now_ms) in states
        ]
        removed = sum(self._remove_lot(at, lot, states) for lot in self._lots(picked))
        if ItemState.DEAD in states:
            removed += self._remove_dead(at, ids)
        return removed

    def _lots(self, entries: Iterable[Entry]) -> Iterator[list[Entry]]:
        lot: list[Entry] = []
        room = self._tools.room
        for entry in entries:
            room -= cost(entry.standing)
            if lot and room < 0:
                yield lot
                lot, room = [], self._tools.room - cost(entry.standing)
            lot.append(entry)
        if lot:
            yield lot

    def _remove_lot(self, at: Layout, lot: list[Entry], states: Sequence[ItemState]) -> int:
        """In one commit; those that have moved meanwhile are looked up again."""
        for _ in attempts(f"items of queue {at.queue!r} could not be removed"):
            draft = self._tools.draft()
            tails = Tails(self._tools.directory, draft)
            if not lot or tails.queue(at.queue) is None:
                return 0
            for entry in lot:
                remove(draft, at, entry)
            tails.drop(at.queue, len(lot))
            tails.write()
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                tails.committed(outcome)
                return len(lot)
            tails.refused()
            now = self.survey(at).entries
            numbers = [entry.standing.number for entry in lot]
            again = [now[number] for number in numbers if number in now]
            lot = [entry for entry in again if at.state(entry, draft.now_ms) in states]
        return 0

    def _remove_dead(self, at: Layout, ids: set[int] | None) -> int:
        coord = self._tools.coord
        if ids is None:
            records: Iterable[Versioned | None] = coord.list(at.dlq)
        else:
            records = map(coord.get, map(at.dead, sorted(ids)))
        return sum(self._remove_one_dead(at, record) for record in records if record is not None)

    def _remove_one_dead(self, at: Layout, record: Versioned) -> bool:
        for _ in attempts(f"a dead item of queue {at.queue!r} could not be removed"):
            draft = self._tools.draft()
            tails = Tails(self._tools.directory, draft)
            if tails.queue(at.queue) is None:
                return False
            draft.require(record.key, record.version)
            draft.delete(record.key)
            tails.drop(at.queue, 1)
            tails.write()
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                tails.committed(outcome)
                return True
            tails.refused()
            if record.key in outcome.current:
                return False
        return False

    def _revive(self, at: Layout, number: int) -> bool:
        """Put a dead item at the end, as if it had never been handed out."""
        for _ in attempts(f"a dead item of queue {at.queue!r} could not be put back"):
            record = self._tools.coord.get(at.dead(number))
            if record is None:
                return False
            item, body = decode_item(record.value)
            draft = self._tools.draft()
            tails = Tails(self._tools.directory, draft)
            if tails.queue(at.queue) is None or item.standing is None:
                return False
            standing = Standing(
                number=tails.next(at.queue, put=0),
                lane=item.standing.lane,
                priority=item.priority,
                visible_ms=draft.now_ms,
                error=item.standing.error,
            )
            fresh = replace(item, standing=None, dead_ms=None, put_ms=draft.now_ms)
            draft.require(record.key, record.version)
            draft.delete(record.key)
            add(draft, at, standing, fresh, body)
            tails.write()
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                tails.committed(outcome)
                return True
            tails.refused()
        return False


def _shows_at(state: ItemState, standing: Standing, now_ms: int) -> int | None:
    """The time of one that is not due, also of one that waits behind another of its key."""
    late = state in (ItemState.DELAYED, ItemState.WAITING) and standing.visible_ms > now_ms
    return standing.visible_ms if late else None


def _number(record: Versioned) -> int:
    return int(record.key.rpartition("-")[2])


# Records that have a part in a commit: of an item, which must not be there yet, ...
_PER_ITEM = 3
# ... and of its key: the lane itself, the one that showed so far, and the one that shows now.
_PER_LANE = 8
# What a lot may weigh, and what an item weighs besides its body and its error.
_LOT_BYTES = 500_000
_HEADER_BYTES = 1_000


class Restorer:
    """Adds in lots that fit into a commit; each of them is conditional on the queue's tail.

    So two who restore the same can't both find it missing. Below the tail nobody else makes an
    item of a given number, and one that is there goes one way only, from live to dead: read in
    this order, it is not missed.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def restore(self, at: Layout, items: Sequence[StoredItem]) -> int:
        validate_restored(items, self._tools.limits)
        for item in items:
            if item.id >= NUMBERS_END:
                raise InvalidRequest(f"item {item.id}: numbers end at {NUMBERS_END - 1} here")
        queue = self._tools.directory.find(at.queue)
        if queue is None:
            raise QueueNotFound(at.queue)
        return sum(self._restore(at, lot) for lot in self._lots(queue, items))

    def _lots(self, queue: Queue, items: Sequence[StoredItem]) -> Iterator[list[StoredItem]]:
        lot: list[StoredItem] = []
        room, weight = self._tools.room, 0
        for item in items:
            cost = _PER_ITEM + (0 if lane_of(queue, item.key) is None else _PER_LANE)
            size = len(item.body) + len(item.error.encode()) + _HEADER_BYTES
            if lot and (cost > room or weight + size > _LOT_BYTES):
                yield lot
                lot, room, weight = [], self._tools.room, 0
            lot.append(item)
            room, weight = room - cost, weight + size
        if lot:
            yield lot

    def _restore(self, at: Layout, lot: Sequence[StoredItem]) -> int:
        for _ in attempts(f"items could not be restored to queue {at.queue!r}"):
            draft = self._tools.draft()
            tails = Tails(self._tools.directory, draft)
            queue = tails.queue(at.queue)
            if queue is None:
                raise QueueNotFound(at.queue)
            end = tails.end(at.queue)
            fresh = [item for item in lot if item.id >= end or not self._is_there(at, item.id)]
            if not fresh:
                return 0
            for item in fresh:
                _add(draft, at, queue, item)
                tails.admit(at.queue, item.id)
            tails.write()
            outcome = draft.commit()
            if isinstance(outcome, Committed):
                tails.committed(outcome)
                return len(fresh)
            tails.refused()
        raise AssertionError("attempts raise in the end")

    def _is_there(self, at: Layout, number: int) -> bool:
        coord = self._tools.coord
        return coord.get(at.item(number)) is not None or coord.get(at.dead(number)) is not None


def _add(draft: Draft, at: Layout, queue: Queue, stored: StoredItem) -> None:
    standing = Standing(
        number=stored.id,
        lane=lane_name(lane_of(queue, stored.key)),
        priority=stored.priority,
        visible_ms=stored.visible_ms or stored.put_ms,
        deliveries=stored.deliveries,
        suspect=is_suspect(stored),
        error=stored.error,
        taken_ms=stored.taken_ms,
    )
    item = Item(key=stored.key, priority=stored.priority, put_ms=stored.put_ms)
    if stored.state is ItemState.DEAD:
        draft.require(at.dead(stored.id), 0)
        dead = Item(
            key=stored.key,
            priority=stored.priority,
            put_ms=stored.put_ms,
            standing=standing,
            dead_ms=stored.dead_ms,
        )
        draft.put(at.dead(stored.id), encode_item(dead, stored.body))
        return
    draft.require(at.item(stored.id), 0)
    add(draft, at, standing, item, stored.body)
