"""Explicit changes of checkpoints are recorded: who, when, from where to where."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from pxrs.clock import Clock
from pxrs.core.records import SCHEMA, encode, resets_prefix
from pxrs.types import Put, TopicPartition


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was set by somebody's wish, not by handling messages."""

    topic: str
    partition: int
    before: int | None
    after: int | None
    by: str
    at_ms: int
    schema: int = SCHEMA


def record_of_seek(
    group: str,
    by: str,
    part: TopicPartition,
    before: int | None,
    after: int | None,
    clock: Clock,
    new_id: Callable[[], str] | None = None,
) -> Put:
    """The record, to be written in the commit that changes the checkpoint."""
    now = clock.wall_ms()
    reset = Reset(
        topic=part.topic, partition=part.partition, before=before, after=after, by=by, at_ms=now
    )
    tail = new_id() if new_id is not None else secrets.token_hex(3)
    # Sorted by time; the tail keeps two of the same millisecond apart.
    return Put(f"{resets_prefix(group)}{now:015}-{tail}", encode(reset))
