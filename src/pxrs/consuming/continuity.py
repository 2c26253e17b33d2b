"""Checks whether a log continues after the last batch that was read, or has others there. Pure.

An engine may lose its last batches and give their offsets again. If the log is not read until it is
longer than before, its end does not show that: the batches have to.
"""

from __future__ import annotations

from typing import NamedTuple

from pxrs.types import StoredBatch


class LastRead(NamedTuple):
    """The batch that was read last."""

    base: int
    next: int
    id: str


def last_read(batch: StoredBatch) -> LastRead | None:
    """The identity of a batch, to remember; None if its log does not name its batches."""
    # A source's rows come as something else, which has no name either.
    name = getattr(batch, "id", "")
    return LastRead(batch.base, batch.next, name) if name else None


def goes_on(last: LastRead | None, position: int, batch: StoredBatch) -> bool:
    """Whether the batch, read for this position, is the one that must come after the last.

    Where that is not known, because the position was changed since, the answer is true.
    """
    if last is None or not last.base < position <= last.next or not getattr(batch, "id", ""):
        return True
    if position < last.next:
        return batch.id == last.id
    return batch.base == position and batch.after in ("", last.id)
