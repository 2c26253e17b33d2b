"""Which offsets begin where in the stream: what this process happens to have seen."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

_MOST = 512


class Mark(NamedTuple):
    """The first of the partition's messages at or after `seq` begins with `offset`.

    That stays true as long as the message is there: sequences and offsets only rise.
    """

    offset: int
    seq: int


class Marks:
    """Marks of one partition, sorted; every other one is forgotten when there are too many."""

    def __init__(self) -> None:
        self._sorted: list[Mark] = []

    def add(self, offset: int, seq: int) -> None:
        at = bisect_left(self._sorted, (offset,))
        if at < len(self._sorted) and self._sorted[at].offset == offset:
            return
        if len(self._sorted) >= _MOST:
            del self._sorted[:-2:2]
        insort(self._sorted, Mark(offset, seq))

    def at(self, offset: int) -> int | None:
        """The sequence from which to look for a batch that begins with `offset`."""
        at = bisect_left(self._sorted, (offset,))
        if at < len(self._sorted) and self._sorted[at].offset == offset:
            return self._sorted[at].seq
        return None

    def around(self, offset: int) -> tuple[Mark | None, Mark | None]:
        """The nearest marks at or below, and above."""
        at = bisect_left(self._sorted, (offset + 1,))
        below = self._sorted[at - 1] if at else None
        above = self._sorted[at] if at < len(self._sorted) else None
        return below, above

    def clear(self) -> None:
        self._sorted.clear()
