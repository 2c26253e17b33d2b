"""Tracks which offsets of a partition are done: finished in any order → one checkpoint.

The checkpoint is the first offset that is not done; everything below it is. Finished ranges above
it are kept beside it, so that a new owner can skip them.

Offsets of a source have gaps, in which no message is. Each gap is done with the message behind it,
so a message that is finished early is one range, however far the one before it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pxrs.core.records import Ranges
from pxrs.errors import InvalidRequest

# The limit for a claim's ranges, as JSON.
MOST_BYTES = 4096


class Progress:
    """Offsets done so far in one partition. Ranges are disjoint, sorted and never touch."""

    __slots__ = ("_ends", "_gaps", "_last_found", "_starts", "checkpoint")

    def __init__(self, checkpoint: int, ranges: Ranges = ()) -> None:
        self.checkpoint = checkpoint
        # Where the gap before a message begins, for those that have one and are not done.
        self._gaps: dict[int, int] = {}
        # The highest of these messages.
        self._last_found = -1
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
        return self._gaps.get(offset, offset) <= self.checkpoint

    def found(self, start: int, offsets: Sequence[int], end: int) -> None:
        """Note that from `start` up to `end` only these offsets, in rising order, have messages."""
        known = self._gaps_left()
        if offsets:
            # Found again from the middle of a gap, it begins where it did.
            start = min(start, known.get(offsets[0], start))
            # Those without a gap before them, too: that says the same, and this is faster.
            known.update(zip(offsets, (start, *map((1).__add__, offsets)), strict=False))
            start = offsets[-1] + 1
            self._last_found = max(self._last_found, offsets[-1])
        self._gaps = known
        if start < end:
            self._finish(start, end)

    def _gaps_left(self) -> dict[int, int]:
        """The gaps before messages that are not done, as far as they were found."""
        if self._last_found < self.checkpoint:
            # Most often all are done.
            return {}
        return {offset: gap for offset, gap in self._gaps.items() if offset >= self.checkpoint}

    def copy(self) -> Progress:
        """Return another one with the same progress."""
        copy = Progress(self.checkpoint, self.ranges)
        copy._gaps, copy._last_found = self._gaps, self._last_found
        return copy

    def finish(self, start: int, end: int | None = None) -> None:
        """Mark a message, or those from `start` up to `end`, as done, with the gap before them.

        Marking twice changes nothing.
        """
        end = start + 1 if end is None else end
        if end <= start:
            raise InvalidRequest(f"end must be above start, got {start} up to {end}")
        self._finish(self._gaps.get(start, start), end)

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
