"""What logs that keep a row per batch have in common."""

from __future__ import annotations

from collections.abc import Sequence

from pxrs.types import StoredBatch


def storable(number: int) -> int:
    """The number, or the nearest that a column can hold: no offset or time lies beyond."""
    return max(-(2**63), min(number, 2**63 - 1))


def up_to_a_hole(rows: Sequence[tuple[int, int, bytes]]) -> list[StoredBatch]:
    """The batches that follow each other. What follows a missing one is for the next fetch."""
    batches = [StoredBatch(*rows[0])]
    for row in rows[1:]:
        if row[0] != batches[-1].next:
            break
        batches.append(StoredBatch(*row))
    return batches


def first_kept(
    rows: Sequence[tuple[int, int, int]], before_timestamp: int | None, max_bytes: int | None
) -> int:
    """The base of the first batch that stays; the newest one always does.

    `rows` are base, newest timestamp and size of all batches, in order.
    """
    total = sum(size for _, _, size in rows)
    for base, newest, size in rows:
        old = before_timestamp is not None and newest < before_timestamp
        over = max_bytes is not None and total > max_bytes
        if not old and not over:
            return base
        total -= size
    return rows[-1][0] if rows else 0
