"""The record in the target that says whose copy it is, and whether it is complete."""

from __future__ import annotations

import msgspec

from pxrs.core.records import decode, encode
from pxrs.errors import CopyRefused, OutcomeUnknown
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Put

FOLDER = "copy/"
_KEY = FOLDER + "state"


class CopyState(msgspec.Struct, frozen=True, kw_only=True):
    """`topics`: the ids of all logs that the copy may have made, for those that go meanwhile."""

    source: str
    topics: tuple[str, ...] = ()
    complete: bool = False
    schema: int = 1


def read_state(coord: CoordStore) -> CopyState | None:
    """What is known of a copy into this store."""
    record = coord.get(_KEY)
    return None if record is None else decode(record, CopyState)


def write_state(coord: CoordStore, before: CopyState | None, after: CopyState) -> None:
    """Replace what was read. Raises `CopyRefused` if another copy has written meanwhile."""
    while before != after:
        record = coord.get(_KEY)
        found = None if record is None else decode(record, CopyState)
        if found == after:
            return
        if found != before:
            raise CopyRefused("another copy into the same store is under way; let it finish")
        version = 0 if record is None else record.version
        try:
            outcome = coord.commit([Check(_KEY, version)], [Put(_KEY, encode(after))])
        except OutcomeUnknown:
            continue
        if isinstance(outcome, Committed):
            return
