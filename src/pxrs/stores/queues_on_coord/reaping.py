"""Freeing what is held by nobody: the lock is gone, the record of who held it is not."""

from __future__ import annotations

from typing import NamedTuple

from pxrs.core.queue import DIED_HOLDING
from pxrs.stores.queues_on_coord.draft import attach, bury, detach, loose
from pxrs.stores.queues_on_coord.layout import Entry, Layout, entry_of
from pxrs.stores.queues_on_coord.shared import Tools
from pxrs.types import Committed

# A queue that is never empty is looked through so often by who takes from it.
_EVERY = 1.0
# An engine may end a session a little late; its end wakes who waits, too.
_OVERDUE = 0.25


class Reaped(NamedTuple):
    """How many were freed, and in how many seconds the holds end that have an end."""

    freed: int
    waits: list[float]


class Reaper:
    """Frees, in any process. Time is the engine's: a lock is there or it is not."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._last: dict[str, float] = {}

    def now_and_then(self, at: Layout) -> None:
        now = self._tools.clock.monotonic()
        if now - self._last.get(at.queue, now - _EVERY) >= _EVERY:
            self.reap(at)

    def reap(self, at: Layout) -> Reaped:
        """The held ones first, then the locks: one that was given up in between was moved."""
        coord = self._tools.coord
        self._last[at.queue] = self._tools.clock.monotonic()
        held = [entry_of(record) for record in coord.list(at.metas)]
        if not held:
            return Reaped(0, [])
        locks = {record.key for record in coord.list(at.locks)}
        now_ms = self._tools.clock.wall_ms()
        freed, waits = 0, []
        for entry in held:
            if not _is_locked(at, entry, locks):
                freed += self._free(at, entry)
            elif entry.standing.until_ms is not None:
                left = (entry.standing.until_ms - now_ms) / 1000
                waits.append(left if left > 0 else _OVERDUE)
        return Reaped(freed, waits)

    def _free(self, at: Layout, entry: Entry) -> bool:
        """False if somebody else was faster, its holder too."""
        standing = entry.standing
        draft = self._tools.draft()
        if standing.most is not None and standing.deliveries >= standing.most:
            if not bury(draft, at, entry, DIED_HOLDING):
                return False
        else:
            detach(draft, at, entry)
            attach(draft, at, loose(standing, draft.now_ms, suspect=True, error=DIED_HOLDING))
        return isinstance(draft.commit(), Committed)


def _is_locked(at: Layout, entry: Entry, locks: set[str]) -> bool:
    number = entry.standing.number
    if at.lock(number) not in locks:
        return False
    return entry.standing.until is None or at.until(number) in locks
