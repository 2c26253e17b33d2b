"""What became of units: asked by those whose commit was not answered.

Each unit makes a record of its own, under its name, so a unit that is still on its way can be
told to stay away: by making that record first. The record goes with a later commit of the same
session, once the committer knows the outcome. Those of ended sessions are swept after an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from pxrs.clock import Clock
from pxrs.errors import PxrsError
from pxrs.stores.api import CoordStore
from pxrs.stores.queue_rules import REMEMBERED_FOR
from pxrs.stores.recipe.draft import Draft, attempts
from pxrs.stores.recipe.layout import COMMITS, decode, encode, part_name
from pxrs.types import Check, Committed, Delete, Outcome, Put, QueueChange

_KEPT_MS = int(6 * REMEMBERED_FOR * 1000)
_SWEPT_AT_ONCE = 50


class Receipt(msgspec.Struct, frozen=True):
    """Of a unit that was committed, or given up: without its name."""

    transaction: str | None
    at_ms: int


class Receipts:
    """The units of one handle."""

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock
        self._swept = ""

    def write(self, draft: Draft, change: QueueChange) -> str:
        """Add the unit's record, which nobody may have made; its key."""
        key = _key(change.holder.session, change.unit)
        draft.require(key, 0)
        draft.put(key, encode(Receipt(change.unit, draft.now_ms)))
        return key

    def outcome(self, session: str, unit: str, *, alive: bool) -> Outcome:
        """Read the record, or make it, and with that keep the unit from ever making it."""
        key = _key(session, unit)
        void = encode(Receipt(None, self._clock.wall_ms()))
        for _ in attempts("what became of a transaction could not be found out"):
            found = self._coord.get(key)
            if found is not None:
                known = decode(found.value, Receipt).transaction is not None
                return Outcome.DONE if known else Outcome.NEVER
            if not alive:
                return Outcome.UNKNOWN
            if isinstance(self._coord.commit([Check(key, 0)], [Put(key, void)]), Committed):
                return Outcome.NEVER
        raise AssertionError("attempts raise in the end")

    def forget(self, session: str, units: Sequence[str]) -> None:
        """Their committer knows what became of them."""
        room = self._coord.limits.operations
        with suppress(PxrsError):
            # What stays is swept with the session's others.
            for start in range(0, len(units), room):
                some = units[start : start + room]
                self._coord.commit([], [Delete(_key(session, unit)) for unit in some])

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


def _key(session: str, unit: str) -> str:
    return f"{COMMITS}{part_name(session)}/{part_name(unit)}"
