"""One commit in the making: what it expects, what it writes, and the lanes it touches."""

from __future__ import annotations

import time
from collections.abc import Iterator

from msgspec.structs import replace

from pxrs.chance import CHANCE
from pxrs.core.queue import tidy
from pxrs.errors import InvalidRequest, TransactionConflict
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.layout import (
    Entry,
    Item,
    LaneRecord,
    Layout,
    Standing,
    decode,
    decode_item,
    encode,
    encode_item,
    entry_of,
    holder_key,
)
from pxrs.types import Check, Committed, Conflict, Delete, Holder, Put, Write

_MOST_ATTEMPTS = 500
_LONGEST_PAUSE = 0.05


def attempts(what: str) -> Iterator[int]:
    """Numbers from 0; before every further one a random pause, so that rivals come apart."""
    for attempt in range(_MOST_ATTEMPTS):
        if attempt:
            time.sleep(CHANCE.random() * min(0.0005 * 2 ** min(attempt, 10), _LONGEST_PAUSE))
        yield attempt
    raise TransactionConflict(f"{what}: the records changed faster than they were read; try again")


class Draft:
    """Collects checks and writes. Nothing is done until `commit`."""

    def __init__(self, coord: CoordStore, now_ms: int) -> None:
        self.coord = coord
        self.now_ms = now_ms
        self._checks: dict[str, int] = {}
        self._writes: dict[str, Write] = {}
        self._lanes: dict[str, Lane] = {}

    def require(self, key: str, version: int) -> None:
        """Only if the record still has this version; 0: only if there is none, and it is put."""
        self._checks[key] = version

    def put(self, key: str, value: bytes, session: str | None = None) -> None:
        self._writes[key] = Put(key, value, session)

    def delete(self, key: str) -> None:
        self._writes[key] = Delete(key)

    def vouch(self, session: str) -> None:
        """Only if the session lives: a record is put with it."""
        self.put(holder_key(session), b"", session)

    def lane(self, at: Layout, name: str) -> Lane:
        key = at.lane(name)
        if key not in self._lanes:
            self._lanes[key] = Lane(self, at, name)
        return self._lanes[key]

    def commit(self) -> Committed | Conflict:
        for lane in self._lanes.values():
            lane.settle()
        self._lanes.clear()
        limits = self.coord.limits
        operations = len(self._checks) + len(self._writes)
        if operations > limits.operations:
            raise InvalidRequest(
                f"{operations} records have a part in this transaction; this store takes "
                f"{limits.operations}: take or put fewer items, of fewer keys and queues"
            )
        size = sum(len(write.value) for write in self._writes.values() if isinstance(write, Put))
        if size > limits.value_bytes:
            raise InvalidRequest(
                f"{size} bytes in one transaction; this store takes {limits.value_bytes} in all: "
                "put fewer items at once, or keep their bodies elsewhere"
            )
        return self.coord.commit(
            [Check(key, version) for key, version in self._checks.items()],
            list(self._writes.values()),
        )


class Lane:
    """A key's items, in order: of all that nobody holds the first shows, if none is held.

    Every change of it writes the lane's record under a check: one at a time.
    """

    def __init__(self, draft: Draft, at: Layout, name: str) -> None:
        self._draft = draft
        self._at = at
        self._name = name
        found = draft.coord.get(at.lane(name))
        record = LaneRecord() if found is None else decode(found.value, LaneRecord)
        self._version = 0 if found is None else found.version
        self.held_before = frozenset(record.held)
        self.held = set(record.held)
        self.holder = record.holder
        self.front = record.front
        self._added: dict[int, Standing] = {}
        self._gone: set[int] = set()

    def add(self, standing: Standing) -> None:
        """It stands in the lane, at the place of its number."""
        self._added[standing.number] = standing

    def _hide_front(self) -> None:
        """What shows goes back into the lane if one with a lower number has come."""
        if self.front is None or not self._added:
            return
        if int(self.front.rpartition(".")[2]) < min(self._added):
            return
        found = self._draft.coord.get(self.front)
        if found is not None:
            entry = entry_of(found)
            self._draft.require(entry.key, entry.version)
            self._draft.delete(entry.key)
            self._added[entry.standing.number] = entry.standing
            self.front = None

    def leave(self, entry: Entry) -> None:
        """An item that nobody held does not stand in the lane any more."""
        if self.front == entry.key:
            self.front = None
        else:
            self._gone.add(entry.standing.number)

    def yields(self, entry: Entry, holder: Holder) -> bool:
        """Whether the holder may have it: as the front, or behind what it holds."""
        if self.held:
            return self.holder == holder
        return self.front == entry.key

    def hold(self, number: int, holder: Holder) -> None:
        self.held.add(number)
        self.holder = holder

    def settle(self) -> None:
        """Show the first item, unless some are held; write what has become of the lane."""
        if not self.held:
            self.holder = None
            self._hide_front()
            if self.front is None:
                self._show_first()
        for number, standing in self._added.items():
            self._draft.put(self._at.waiting(self._name, number), encode(standing))
        key = self._at.lane(self._name)
        if self.held or self.front is not None:
            record = LaneRecord(tuple(sorted(self.held)), self.holder, self.front)
            self._draft.require(key, self._version)
            self._draft.put(key, encode(record))
        elif self._version:
            self._draft.require(key, self._version)
            self._draft.delete(key)

    def _show_first(self) -> None:
        waiting = [] if not self._version else self._waiting()
        stored = [each.standing for each in waiting if each.standing.number not in self._gone]
        first = min([*stored, *self._added.values()], key=lambda each: each.number, default=None)
        if first is None:
            return
        if self._added.pop(first.number, None) is None:
            self._draft.delete(self._at.waiting(self._name, first.number))
        self.front = self._at.shown(first, self._draft.now_ms)
        self._draft.put(self.front, encode(first))

    def _waiting(self) -> list[Entry]:
        prefix = self._at.waiting_in(self._name)
        return [
            entry_of(record) for record in self._draft.coord.list(prefix, limit=len(self._gone) + 1)
        ]


# Errors of all items of a transaction have to fit into one commit.
_LONGEST_ERROR = 2_000


def short(error: str) -> str:
    """An error's text as it is kept."""
    return tidy(error[:_LONGEST_ERROR])


def attach(draft: Draft, at: Layout, standing: Standing) -> None:
    """Let it be handed out when its time and its turn have come."""
    if standing.lane is None:
        draft.put(at.shown(standing, draft.now_ms), encode(standing))
    else:
        draft.lane(at, standing.lane).add(standing)


def detach(draft: Draft, at: Layout, entry: Entry) -> None:
    """It stands nowhere any more, if it still stands there now."""
    standing = entry.standing
    draft.require(entry.key, entry.version)
    draft.delete(entry.key)
    lane = None if standing.lane is None else draft.lane(at, standing.lane)
    if standing.holder is None:
        if lane is not None:
            lane.leave(entry)
        return
    draft.delete(at.lock(standing.number))
    if standing.until is not None:
        draft.delete(at.until(standing.number))
    if lane is not None:
        lane.held.discard(standing.number)


def hold(draft: Draft, at: Layout, entry: Entry, held: Standing, holder: Holder) -> bool:
    """Hand it out: counted and locked in the same commit. False if it is not its turn."""
    if held.lane is not None and not draft.lane(at, held.lane).yields(entry, holder):
        return False
    detach(draft, at, entry)
    draft.put(at.meta(held.number), encode(held))
    draft.put(at.lock(held.number), b"", holder.session)
    if held.until is not None:
        draft.put(at.until(held.number), b"", held.until)
    if held.lane is not None:
        draft.lane(at, held.lane).hold(held.number, holder)
    return True


def loose(standing: Standing, visible_ms: int, *, suspect: bool, error: str) -> Standing:
    """As it stands when nobody holds it any more."""
    return replace(
        standing,
        visible_ms=visible_ms,
        suspect=suspect,
        error=short(error),
        holder=None,
        most=None,
        until=None,
        until_ms=None,
    )


def remove(draft: Draft, at: Layout, entry: Entry) -> None:
    detach(draft, at, entry)
    draft.delete(at.item(entry.standing.number))


def bury(draft: Draft, at: Layout, entry: Entry, error: str) -> bool:
    """It is dead; false if it is not there any more."""
    number = entry.standing.number
    found = draft.coord.get(at.item(number))
    if found is None:
        return False
    item, body = decode_item(found.value)
    remove(draft, at, entry)
    standing = loose(entry.standing, 0, suspect=False, error=error)
    dead = replace(item, standing=standing, dead_ms=draft.now_ms)
    draft.put(at.dead(number), encode_item(dead, body))
    return True


def add(draft: Draft, at: Layout, standing: Standing, item: Item, body: bytes) -> None:
    """A new item, or a dead one that begins again."""
    draft.put(at.item(standing.number), encode_item(item, body))
    attach(draft, at, standing)
