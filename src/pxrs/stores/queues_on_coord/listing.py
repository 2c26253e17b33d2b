"""Reads whole queues: which items there are, and their states.

It lists all records: fine for some thousands of items.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple

from pxrs.core.queue import LIVE
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.layout import (
    NUMBERS_END,
    Entry,
    Item,
    Layout,
    Standing,
    decode_item,
    entry_of,
    number_of,
)
from pxrs.types import ItemState, StoredItem


class Stored(NamedTuple):
    """An item as it is stored, and its `entry`, which is None while the item is moving."""

    number: int
    item: Item
    body: bytes
    entry: Entry | None = None

    def state(self, at: Layout, now_ms: int) -> ItemState:
        if self.item.dead_ms is not None:
            return ItemState.DEAD
        return ItemState.READY if self.entry is None else at.state(self.entry, now_ms)

    def shown(self, at: Layout, now_ms: int) -> StoredItem:
        standing = self.item.standing or (self.entry.standing if self.entry else None)
        standing = standing or Standing(number=self.number)
        state = self.state(at, now_ms)
        # Shows the time of an item that is not due, also if it waits behind another of its key.
        is_late = state in (ItemState.DELAYED, ItemState.WAITING) and standing.visible_ms > now_ms
        return StoredItem(
            id=self.number,
            state=state,
            body=self.body,
            key=self.item.key,
            priority=self.item.priority,
            deliveries=standing.deliveries,
            put_ms=self.item.put_ms,
            taken_ms=standing.taken_ms,
            visible_ms=standing.visible_ms if is_late else None,
            dead_ms=self.item.dead_ms,
            error=standing.error,
            holder=standing.holder,
        )


def survey(coord: CoordStore, at: Layout) -> dict[int, Entry]:
    """The entries of the queue's live items. May miss one that moves meanwhile: `look_again`."""
    return _entries(coord, at.ready, at.delayed, at.all_waiting, at.metas)


def look_again(coord: CoordStore, at: Layout, seen: dict[int, Entry]) -> None:
    """Look once more in the folders that items move to: in the end all are seen."""
    seen |= _entries(coord, at.metas, at.ready)


def _entries(coord: CoordStore, *folders: str) -> dict[int, Entry]:
    found = [entry_of(record) for folder in folders for record in coord.list(folder)]
    return {entry.standing.number: entry for entry in found}


def live_items(
    coord: CoordStore,
    at: Layout,
    after: int | None = None,
    limit: int | None = None,
    seen: dict[int, Entry] | None = None,
) -> list[Stored]:
    """Items that are not dead, by number."""
    last = None if after is None else at.item(after)
    records = coord.list(at.items, after=last, limit=limit)
    if not records:
        return []
    seen = survey(coord, at) if seen is None else seen
    if any(number_of(record) not in seen for record in records):
        look_again(coord, at, seen)
    return [
        Stored(number, *decode_item(record.value), seen.get(number))
        for number, record in zip(map(number_of, records), records, strict=True)
    ]


def shown_items(
    coord: CoordStore, at: Layout, wanted: Sequence[ItemState], after: int, page: int, now_ms: int
) -> Iterator[StoredItem]:
    """Items in the wanted states, by number. Reads live and dead items side by side, in pages."""
    seen = survey(coord, at) if any(state in LIVE for state in wanted) else None
    while True:
        live = [] if seen is None else live_items(coord, at, after, page, seen)
        dead = []
        if ItemState.DEAD in wanted:
            records = coord.list(at.dlq, after=at.dead(after), limit=page)
            dead = [Stored(number_of(each), *decode_item(each.value)) for each in records]
        # Beyond the end of a full page there may be more items of its kind: cut both pages there.
        ends = [each[-1].number for each in (live, dead) if len(each) == page]
        end = min(ends, default=NUMBERS_END)
        for each in sorted([*live, *dead], key=lambda each: each.number):
            if each.number <= end and each.state(at, now_ms) in wanted:
                yield each.shown(at, now_ms)
        if end == NUMBERS_END:
            return
        after = end


def standing_in(
    coord: CoordStore,
    at: Layout,
    ids: Collection[int] | None,
    states: Container[ItemState],
    now_ms: int,
) -> list[Entry]:
    """Lists items in these states, all or only `ids`: live ones from the end, then dead ones."""
    seen = survey(coord, at)
    look_again(coord, at, seen)
    found = [
        entry
        for number, entry in sorted(seen.items(), reverse=True)
        if (ids is None or number in ids) and at.state(entry, now_ms) in states
    ]
    if ItemState.DEAD in states:
        by_number = (coord.get(at.dead(number)) for number in sorted(ids or ()))
        for record in coord.list(at.dlq) if ids is None else by_number:
            if record is not None:
                standing = Standing(number=number_of(record))
                found.append(Entry(record.key, record.version, standing))
    return found
