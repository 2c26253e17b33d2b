"""Counts the rows that a group has not handled, where offsets have gaps.

The newest rows are counted, up to a limit. The number below them is estimated: rows are assumed to
be as dense there as where they were counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pxrs.core.records import Ranges
from pxrs.types import Counted


def pending(first: int, end: int, done: Ranges) -> Ranges:
    """Returns the ranges from `first` up to `end` that are not in `done`, which is sorted."""
    found = []
    for start, stop in done:
        if first < min(start, end):
            found.append((first, min(start, end)))
        first = max(first, stop)
    if first < end:
        found.append((first, end))
    return tuple(found)


def length(ranges: Ranges) -> int:
    """Returns how many offsets the ranges have together."""
    return sum(end - start for start, end in ranges)


def count_rows(ranges: Ranges, seen: Sequence[int], low: int, end: int) -> Counted:
    """Returns how many rows of a partition are in the ranges.

    `seen` are the offsets of all its rows from `low` up to `end`, rising.
    """
    rows = sum(bisect_left(seen, stop) - bisect_left(seen, start) for start, stop in ranges)
    below = sum(max(0, min(stop, low) - start) for start, stop in ranges)
    if not below:
        return Counted(rows, exact=True)
    density = len(seen) / (end - low) if end > low else 0.0
    return Counted(rows + max(1, round(below * min(1.0, density))), exact=False)


def share(ranges: Ranges, partitions: int) -> Counted:
    """Returns an even share of the offsets, for sources that can't list their rows."""
    return Counted(-(-length(ranges) // partitions), exact=False)
