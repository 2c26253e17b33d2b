"""What the parts of a recipe's queue store have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pxrs.clock import Clock
from pxrs.errors import SessionLost
from pxrs.stores.api import CoordStore
from pxrs.stores.queues_on_coord.directory import Directory
from pxrs.stores.queues_on_coord.draft import Draft
from pxrs.stores.queues_on_coord.holds import Deadlines, Holds
from pxrs.stores.queues_on_coord.layout import Standing, holder_key
from pxrs.types import QueueLimits

# Records that have a part in a commit: of the transaction itself and of one queue, ...
_OVERHEAD = 9
# ... of an item that is removed (meta twice, item, two locks), ...
_PER_ITEM = 5
# ... and of its key (the lane twice, and the one that shows next twice).
_PER_LANE = 4
# For everything about an item but its body.
_HEADER_BYTES = 32 * 1024


@dataclass(frozen=True)
class Tools:
    """One handle's."""

    coord: CoordStore
    clock: Clock
    directory: Directory
    holds: Holds
    deadlines: Deadlines

    @property
    def limits(self) -> QueueLimits:
        """What surely fits into one commit of the store, for items without a key, in one queue."""
        return QueueLimits(
            items=self.room // _PER_ITEM,
            body_bytes=self.coord.limits.value_bytes - _HEADER_BYTES,
        )

    @property
    def room(self) -> int:
        """How many records of items can have a part in one commit."""
        return self.coord.limits.operations - _OVERHEAD

    def draft(self) -> Draft:
        return Draft(self.coord, self.clock.wall_ms())

    def has_session(self, session: str) -> bool:
        """Whether it lives. Writes only where nothing was written with it yet."""
        try:
            self.require_session(session)
        except SessionLost:
            return False
        return True

    def require_session(self, session: str) -> None:
        """Raise `SessionLost` if it is over: a record that was put with it would be gone."""
        if self.coord.get(holder_key(session)) is None:
            draft = self.draft()
            draft.vouch(session)
            draft.commit()


def cost(standing: Standing) -> int:
    """How many records have a part in removing it."""
    return _PER_ITEM + (0 if standing.lane is None else _PER_LANE)


def lost(session: str) -> SessionLost:
    return SessionLost(f"session {session} is over, and what it held is free")
