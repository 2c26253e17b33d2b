"""What became of units: asked by those whose commit was not answered.

Each unit makes a record of its own, under its name, so a unit that is still on its way can be
told to stay away: by making that record first. The record goes with a later commit of the same
session, once the committer knows that it was done. Those of a session that has ended are swept by
whoever has known that for an hour of its own monotonic clock: no two hosts' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from pxrs.core.queue import REMEMBERED_FOR
from pxrs.errors import PxrsError
from pxrs.stores.queues_on_coord.draft import Draft, attempts
from pxrs.stores.queues_on_coord.layout import COMMITS, decode, encode, part_name
from pxrs.stores.queues_on_coord.shared import Tools
from pxrs.types import Check, Committed, Delete, Outcome, Put, QueueChange

_KEPT = 6 * REMEMBERED_FOR
_SWEPT_AT_ONCE = 50
_SESSIONS_KNOWN = 10_000


class Receipt(msgspec.Struct, frozen=True):
    """Of a unit that was committed, or given up: without its name. `at_ms` is for people."""

    transaction: str | None
    at_ms: int
    session: str = ""


class Receipts:
    """The units of one handle."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._coord = tools.coord
        self._clock = tools.clock
        self._swept = ""
        # When each ended session was first seen to have ended.
        self._ended: dict[str, float] = {}

    def write(self, draft: Draft, change: QueueChange) -> str | None:
        """Add the unit's record, which nobody may have made; its key. None if it has no name."""
        if not change.unit:
            return None
        key = _key(change.holder.session, change.unit)
        draft.require(key, 0)
        draft.put(key, encode(Receipt(change.unit, draft.now_ms, change.holder.session)))
        return key

    def outcome(self, session: str, unit: str) -> Outcome:
        """Read the record, or make it, and with that keep the unit from ever making it."""
        key = _key(session, unit)
        void = encode(Receipt(None, self._clock.wall_ms(), session))
        alive = self._tools.has_session(session)
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
        """Remove some whose session ended long ago, round and round."""
        found = self._coord.list(COMMITS, after=self._swept or None, limit=_SWEPT_AT_ONCE)
        self._swept = found[-1].key if len(found) == _SWEPT_AT_ONCE else ""
        sessions = {each.key: decode(each.value, Receipt).session for each in found}
        long_over = set(filter(self._ended_long_ago, set(sessions.values())))
        old = [each for each in found if sessions[each.key] in long_over]
        room = self._coord.limits.operations // 2
        if old:
            self._coord.commit(
                [Check(each.key, each.version) for each in old[:room]],
                [Delete(each.key) for each in old[:room]],
            )

    def _ended_long_ago(self, session: str) -> bool:
        """Whether we have known for so long that it has ended. One that has never comes back."""
        now = self._clock.monotonic()
        since = self._ended.get(session)
        if since is None:
            if session and self._tools.has_session(session):
                return False
            if len(self._ended) >= _SESSIONS_KNOWN:
                # They are seen again, and their hour begins anew.
                self._ended.clear()
            since = self._ended[session] = now
        return now - since >= _KEPT


def _key(session: str, unit: str) -> str:
    return f"{COMMITS}{part_name(session)}/{part_name(unit)}"
