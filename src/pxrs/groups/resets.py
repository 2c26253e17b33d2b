"""Records of explicit changes of checkpoints: who, when, from where to where."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from pxrs.core.records import HISTORY_LENGTH, SCHEMA, encode, resets_prefix
from pxrs.errors import StoreError
from pxrs.stores.api import CoordStore
from pxrs.types import Delete, Put


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was set by hand, not by handling messages."""

    topic: str
    partition: int
    before: int | None
    after: int | None
    by: str
    at_ms: int
    # Empty if it was asked for by hand.
    why: str = ""
    schema: int = SCHEMA


def record_of_reset(group: str, reset: Reset, write: str) -> Put:
    """The record, to be written in the commit that changes the checkpoint.

    Several of one `write` were made together.
    """
    # Sorted by time; the rest keeps those of the same millisecond apart.
    key = f"{resets_prefix(group)}{reset.at_ms:015}-{write}-{reset.partition:06}"
    return Put(key, encode(reset))


def forget_old_resets(coord: CoordStore, group: str) -> None:
    """Keep the last hundred records, as many as of generations; older ones are not read.

    Not in the commit of the reset itself, which may be full. If a removal fails, the next one
    makes up for it.
    """
    with suppress(StoreError):
        records = coord.list(resets_prefix(group))
        if len(records) <= HISTORY_LENGTH:
            return
        resets = list(dict.fromkeys(write_of(record.key) for record in records))
        kept = set(resets[-HISTORY_LENGTH:])
        old = [Delete(record.key) for record in records if write_of(record.key) not in kept]
        room = coord.limits.operations
        for start in range(0, len(old), room):
            coord.commit((), old[start : start + room])


def write_of(key: str) -> str:
    """The common part of the records of one reset."""
    return key.rpartition("-")[0]
