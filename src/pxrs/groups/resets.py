"""Explicit changes of checkpoints are recorded: who, when, from where to where."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pxrs.clock import Clock
from pxrs.core.records import HISTORY_LENGTH, SCHEMA, encode, resets_prefix
from pxrs.errors import StoreError
from pxrs.stores.api import CoordStore
from pxrs.types import Delete, Put, TopicPartition


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was set by hand, not by handling messages."""

    topic: str
    partition: int
    before: int | None
    after: int | None
    by: str
    at_ms: int
    # Empty where somebody asked for it.
    why: str = ""
    schema: int = SCHEMA


def record_of_seek(
    group: str,
    by: str,
    part: TopicPartition,
    before: int | None,
    after: int | None,
    clock: Clock,
    new_id: Callable[[], str] | None = None,
    why: str = "",
) -> Put:
    """The record, to be written in the commit that changes the checkpoint."""
    write = new_id() if new_id is not None else secrets.token_hex(6)
    return record_of_reset(group, by, part, before, after, clock.wall_ms(), write, why)


def record_of_reset(
    group: str,
    by: str,
    part: TopicPartition,
    before: int | None,
    after: int | None,
    at_ms: int,
    write: str,
    why: str = "",
) -> Put:
    """The same for one of several partitions of a topic; `write` says that they are one."""
    reset = Reset(
        topic=part.topic,
        partition=part.partition,
        before=before,
        after=after,
        by=by,
        at_ms=at_ms,
        why=why,
    )
    # Sorted by time; the rest keeps those of the same millisecond apart.
    key = f"{resets_prefix(group)}{at_ms:015}-{write}-{part.partition:06}"
    return Put(key, encode(reset))


def forget_old_resets(coord: CoordStore, group: str) -> None:
    """Keep the last hundred, as of the generations; older ones are not read.

    Not in the commit of the reset itself, which may be full. One that fails is made up for by the
    next one.
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
