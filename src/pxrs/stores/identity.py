"""The identity of a store: a word that its coordination keeps, and that no copy takes along.

Messages may be kept apart from the coordination. When a store is copied, both stores have topics
with the same ids. The identity of the store that made a topic tells them apart in a log that both
use: `KeepsOwners`.

A handle also knows by it that its database was dropped and made anew. What the handle knows is
wrong then: versions, topics, and epochs that begin at 1 again. So it refuses everything, and a
handle that is opened afterwards starts with the data that is there.
"""

from __future__ import annotations

import logging
import secrets
import threading

from pxrs.errors import StoreDamaged
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Put

FOLDER = "store/"
_KEY = FOLDER + "identity"
_LOG = logging.getLogger("pxrs.store")


def identity_of(coord: CoordStore) -> str:
    """Return the store's identity; the first call makes it."""
    while True:
        record = coord.get(_KEY)
        if record is not None:
            return record.value.decode()
        made = secrets.token_hex(8)
        if isinstance(coord.commit([Check(_KEY, 0)], [Put(_KEY, made.encode())]), Committed):
            return made


class SameStore:
    """Refuses everything once another store was found at the place of the first. Thread-safe."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._known = ""
        self._lost: StoreDamaged | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another store was found."""
        return self._lost is not None

    def compare(self, identity: str) -> None:
        """Compare the identity that was found with the first one; raises `StoreDamaged`."""
        with self._lock:
            self._known = self._known or identity
            if identity != self._known and self._lost is None:
                self._lost = StoreDamaged(
                    f"{self._place} is another store now: it was dropped or replaced while this "
                    "process used it; start this process again to go on with the data that it has "
                    "now (topics that are gone must be created again)"
                )
                _LOG.error("%s", self._lost)
        self.require()

    def require(self) -> None:
        """Raise `StoreDamaged` if another store was found."""
        if self._lost is not None:
            raise self._lost
