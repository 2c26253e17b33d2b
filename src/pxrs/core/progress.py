"""Tracks which offsets of a partition are done: finished in any order → one checkpoint.

The checkpoint is the first offset that is not done; everything below it is. Finished ranges above
it are kept beside it, so that a new owner can skip them.

Offsets of a source have gaps, in which no message is. Each gap is done with the message behind it,
so a message that is finished early is one range, however far the one before it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pxrs.core.records import Ranges
from pxrs.errors import InvalidRequest

# The limit for a claim's ranges, as JSON.
MOST_BYTES = 4096


class _Stretch(NamedTuple):
    """Offsets that have messages, in rising order. From `start` on there are no others between."""

    start: int
    offsets: Sequence[int]


class Progress:
    """Offsets done so far in one partition. Ranges are disjoint, sorted and never touch."""

    __slots__ = ("_ends", "_starts", "_stretches", "checkpoint")

    def __init__(self, checkpoint: int, ranges: Ranges = ()) -> None:
        self.checkpoint = checkpoint
        # What was found, the newest last; none of them is all done.
        self._stretches: list[_Stretch] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.finish(start, end)

    @property
    def ranges(self) -> Ranges:
        """Finished ranges above the checkpoint: start, and end not included."""
        return tuple(zip(self._starts, self._ends, strict=True))

    @property
    def full(self) -> bool:
        """Whether there are too many gaps to remember more: wait for the oldest to close.

        A run is written as `[start,end],`. One more fits while this is false, and an end that
        grows by a digit.
        """
        if not self._ends:
            return False
        longest = 2 * len(str(self._ends[-1])) + 6
        return (len(self._ends) + 1) * longest + 2 > MOST_BYTES

    def is_done(self, offset: int) -> bool:
        """Whether the offset is finished."""
        if offset < self.checkpoint:
            return True
        place = bisect_right(self._starts, offset) - 1
        return place >= 0 and offset < self._ends[place]

    def is_first(self, offset: int) -> bool:
        """Whether the checkpoint moves once the message of this offset is finished."""
        return self._gap_before(offset, offset) <= self.checkpoint

    def found(self, start: int, offsets: Sequence[int], end: int) -> None:
        """Note that from `start` up to `end` only these offsets, in rising order, have messages."""
        stretches = [each for each in self._stretches if each.offsets[-1] >= self.checkpoint]
        if offsets:
            # Found again from the middle of a gap, it begins where it did.
            start = min(start, self._gap_before(offsets[0], start))
            stretches.append(_Stretch(start, offsets))
            start = offsets[-1] + 1
        self._stretches = stretches
        if start < end:
            self._finish(start, end)

    def _gap_before(self, offset: int, otherwise: int) -> int:
        """The start of the gap before this message, as it was found last."""
        for first, offsets in reversed(self._stretches):
            place = bisect_left(offsets, offset)
            if place < len(offsets) and offsets[place] == offset:
                return offsets[place - 1] + 1 if place else first
        return otherwise

    def copy(self) -> Progress:
        """Return another one with the same progress."""
        copy = Progress(self.checkpoint, self.ranges)
        copy._stretches = self._stretches
        return copy

    def finish(self, start: int, end: int | None = None) -> None:
        """Mark a message, or those from `start` up to `end`, as done, with the gap before them.

        Marking twice changes nothing.
        """
        end = start + 1 if end is None else end
        if end <= start:
            raise InvalidRequest(f"end must be above start, got {start} up to {end}")
        self._finish(self._gap_before(start, start), end)

    def _finish(self, start: int, end: int) -> None:
        start = max(start, self.checkpoint)
        if end <= start:
            return
        if start == self.checkpoint:
            self._advance(end)
        else:
            self._insert(start, end)

    def _advance(self, end: int) -> None:
        """Move the checkpoint, over every run that it now reaches."""
        place = bisect_right(self._starts, end)
        if place:
            end = max(end, self._ends[place - 1])
            del self._starts[:place], self._ends[:place]
        self.checkpoint = end

    def _insert(self, start: int, end: int) -> None:
        """Merge with the ranges that overlap or touch it."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ends[first] < start:
            first += 1
        last = bisect_right(self._starts, end)
        if last > first:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
