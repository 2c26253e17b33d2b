"""The identity of a store: a word that its coordination keeps, and that no copy takes along.

Messages may be kept apart from the coordination. When a store is copied, both stores have topics
with the same ids. The identity of the store that made a topic tells them apart in a log that both
use: `KeepsOwners`.
"""

from __future__ import annotations

import secrets

from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Put

FOLDER = "store/"
_KEY = FOLDER + "identity"


def identity_of(coord: CoordStore) -> str:
    """Return the store's identity; the first call makes it."""
    while True:
        record = coord.get(_KEY)
        if record is not None:
            return record.value.decode()
        made = secrets.token_hex(8)
        if isinstance(coord.commit([Check(_KEY, 0)], [Put(_KEY, made.encode())]), Committed):
            return made
