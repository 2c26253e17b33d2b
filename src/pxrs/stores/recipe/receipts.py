"""Which transactions were applied: asked by those whose commit was not answered.

Each commit writes a *slot*, a record of its own for the time being, under a check. So a commit
that is still on its way can be told to stay away: by writing the slot once more. A session's
slots are used in turn and stay when it ends; they are swept after an hour, by the wall clock.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.stores.api import CoordStore
from pxrs.stores.queue_rules import REMEMBERED, REMEMBERED_FOR
from pxrs.stores.recipe.draft import Draft, attempts
from pxrs.stores.recipe.layout import COMMITS, decode, encode, part_name
from pxrs.types import Check, Committed, Delete, Holder, Put

_SESSIONS_KNOWN = 1000
_KEPT_MS = int(6 * REMEMBERED_FOR * 1000)
_SWEPT_AT_ONCE = 50


class Receipt(msgspec.Struct, frozen=True):
    """Whose commit it was. Without a transaction: nobody's, and nobody's will come."""

    transaction: str | None
    at_ms: int


class Slot(NamedTuple):
    key: str
    version: int


class Receipts:
    """The slots of one handle."""

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock
        self._lock = threading.Lock()
        self._handle = secrets.token_hex(4)
        self._free: dict[str, deque[Slot]] = {}
        self._made = 0
        self._doubtful: dict[Holder, Slot] = {}
        self._swept = ""

    def slot(self, session: str) -> Slot:
        """The one that was not used for longest, or a new one while there are few."""
        with self._lock:
            free = self._free.get(session)
            if free is not None and len(free) >= REMEMBERED:
                return free.popleft()
            return self._new(session)

    def write(self, draft: Draft, slot: Slot, holder: Holder) -> None:
        draft.require(slot.key, slot.version)
        draft.put(slot.key, encode(Receipt(holder.transaction, draft.now_ms)))

    def written(self, session: str, slot: Slot, outcome: Committed) -> None:
        self._give_back(session, Slot(slot.key, outcome.versions[slot.key]))

    def unused(self, session: str, slot: Slot) -> None:
        """Nothing was done with it."""
        if slot.version:
            self._give_back(session, slot)

    def doubt(self, holder: Holder, slot: Slot) -> None:
        """Its commit was sent and not answered."""
        with self._lock:
            self._doubtful[holder] = slot

    def applied(self, holder: Holder) -> bool:
        with self._lock:
            slot = self._doubtful.get(holder)
        if slot is None:
            found = self._coord.list(_folder(holder.session))
            return any(_names(record.value, holder) for record in found)
        answer = self._settle(holder, slot)
        with self._lock:
            self._doubtful.pop(holder, None)
        return answer

    def sweep(self) -> None:
        """Remove some that are too old to be asked for, round and round."""
        found = self._coord.list(COMMITS, after=self._swept or None, limit=_SWEPT_AT_ONCE)
        self._swept = found[-1].key if len(found) == _SWEPT_AT_ONCE else ""
        before = self._clock.wall_ms() - _KEPT_MS
        old = [each for each in found if decode(each.value, Receipt).at_ms < before]
        room = self._coord.limits.operations // 2
        if old:
            self._coord.commit(
                [Check(each.key, each.version) for each in old[:room]],
                [Delete(each.key) for each in old[:room]],
            )

    def _settle(self, holder: Holder, slot: Slot) -> bool:
        """Read the receipt, or see to it that it is never written."""
        void = encode(Receipt(None, self._clock.wall_ms()))
        for _ in attempts("what became of a transaction could not be found out"):
            found = self._coord.get(slot.key)
            if found is not None and _names(found.value, holder):
                return True
            if (0 if found is None else found.version) != slot.version:
                return False
            outcome = self._coord.commit([Check(slot.key, slot.version)], [Put(slot.key, void)])
            if isinstance(outcome, Committed):
                return False
        return False

    def _new(self, session: str) -> Slot:
        self._made += 1
        return Slot(f"{_folder(session)}{self._handle}-{self._made}", 0)

    def _give_back(self, session: str, slot: Slot) -> None:
        with self._lock:
            free = self._free.pop(session, None) or deque()
            free.append(slot)
            # At the end: those that were not heard of for longest are forgotten first.
            self._free[session] = free
            if len(self._free) > _SESSIONS_KNOWN:
                del self._free[next(iter(self._free))]


def _folder(session: str) -> str:
    return f"{COMMITS}{part_name(session)}/"


def _names(value: bytes, holder: Holder) -> bool:
    return decode(value, Receipt).transaction == holder.transaction
