"""Evidence of units: finds out the outcome of a unit whose commit was not answered.

Each unit creates a record under its own name. So a unit that is still on its way can be stopped, by
creating that record first. A later commit of the same session removes the record, once the
committer knows that the unit was done. A process sweeps the records of a session that it has known
to be over for an hour of its own monotonic clock: no two hosts' clocks are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from pxrs.core.queue import REMEMBERED_FOR, given_up
from pxrs.errors import PxrsError
from pxrs.stores.queues_on_coord.drafts import Context, Draft
from pxrs.stores.queues_on_coord.layout import COMMITS, decode, encode, part_name
from pxrs.types import Delete, Outcome, QueueChange

_KEPT = 6 * REMEMBERED_FOR
_SESSIONS_KNOWN = 10_000


class Receipt(msgspec.Struct, frozen=True):
    """Record of a unit. Without a name the unit was given up. `at_ms` is for people."""

    transaction: str | None
    at_ms: int
    session: str = ""


class Receipts:
    """The units of one handle."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._coord = context.coord
        self._clock = context.clock
        # When each ended session was first seen to have ended.
        self._ended: dict[str, float] = {}

    def write(self, draft: Draft, change: QueueChange) -> None:
        """Add the unit's record, if it has a name. Raises `Fenced` if the unit was given up."""
        if not change.unit:
            return
        key = _key(change.holder.session, change.unit)
        if draft.refused is not None and key in draft.refused.current:
            raise given_up(change.unit)
        draft.put(key, encode(Receipt(change.unit, draft.now_ms, change.holder.session)), version=0)

    def outcome(self, session: str, unit: str) -> Outcome:
        """Read the record; if there is none create it, so that the unit itself never can."""
        key = _key(session, unit)
        alive = self._context.has_session(session)

        def build(draft: Draft) -> Outcome:
            found = self._coord.get(key)
            if found is not None:
                known = decode(found.value, Receipt).transaction is not None
                return Outcome.DONE if known else Outcome.NEVER
            if not alive:
                return Outcome.UNKNOWN
            draft.put(key, encode(Receipt(None, draft.now_ms, session)), version=0)
            return Outcome.NEVER

        return self._context.commit("what became of a transaction could not be found out", build)

    def forget(self, session: str, units: Sequence[str]) -> None:
        """Remove the records of units whose committer knows their outcome."""
        room = self._coord.limits.operations
        with suppress(PxrsError):
            # If this fails, they are swept with the session's others.
            for start in range(0, len(units), room):
                some = units[start : start + room]
                self._coord.commit([], [Delete(_key(session, unit)) for unit in some])

    def sweep(self) -> None:
        """Remove some records whose session ended long ago."""
        ended_long_ago = functools.cache(self._ended_long_ago)
        self._context.sweep(
            COMMITS, lambda record: ended_long_ago(decode(record.value, Receipt).session)
        )

    def _ended_long_ago(self, session: str) -> bool:
        """Whether this process has known for `_KEPT` s that it is over. No session comes back."""
        now = self._clock.monotonic()
        since = self._ended.get(session)
        if since is None:
            if session and self._context.has_session(session):
                return False
            if len(self._ended) >= _SESSIONS_KNOWN:
                # They will be seen again, and their hour begins anew.
                self._ended.clear()
            since = self._ended[session] = now
        return now - since >= _KEPT


def _key(session: str, unit: str) -> str:
    return f"{COMMITS}{part_name(session)}/{part_name(unit)}"
