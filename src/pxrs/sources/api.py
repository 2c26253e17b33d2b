"""The fourth seam: an ordered stream that exists already, read in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pxrs.stores.api import Watch
from pxrs.types import Bounds, Row


class SourceRead(NamedTuple):
    """Rows by rising offset, and the offset up to which (not included) these are all of them."""

    rows: list[Row]
    next: int


class LastKeys(NamedTuple):
    """Offset and key of all rows from `low` on, up to where was asked for, by rising offset."""

    rows: Sequence[tuple[int, bytes | None]]
    low: int


class Source(Protocol):
    """The read half of a log: offsets rise but have gaps. Thread-safe.

    Most have one stream. Where there are several, each has offsets of its own, and a partition of
    the virtual topic lies in one of them.

    **A row is final when it is returned**: no row with a lower offset can appear later. What a
    checkpoint has passed is never looked at again, so a source that knows less must wait.
    """

    @property
    def streams(self) -> int:
        """How many streams it has, numbered from 0. Never changes."""
        ...

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        """Rows from `offset` on, at most `limit`, below `until`; none at the end.

        Their sizes together are a few megabytes at most, or it is one row. `next` is above
        `offset` unless nothing is final there yet, and not above `until`. `OffsetOutOfRange` if
        rows from `offset` on were removed by whoever keeps the stream.
        """
        ...

    def bounds(self, stream: int) -> Bounds:
        """The first offset that can be read, and the end: what may come later is not below it.

        Rows below the end may not be final yet.
        """
        ...

    def final(self, stream: int) -> int | None:
        """The offset up to which (not included) all rows are final; None if it is not known yet."""
        ...

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        """Offset of the first row of `timestamp` (ms) or later; None if there is none."""
        ...

    def watch(self) -> Watch:
        """Wakes when there may be more to read: rows that came, or that have become final."""
        ...

    def close(self) -> None:
        """Let go of it; it may be called twice. Reads raise `Closed` from then on."""
        ...


@runtime_checkable
class TellsLastKeys(Protocol):
    """A `Source` that can tell cheaply which rows there are, so that a lag is counted in rows."""

    def last_keys(
        self, stream: int, start: int, end: int, limit: int, partition: int | None = None
    ) -> LastKeys | None:
        """The last rows from `start` up to `end`, final or not: about `limit`, or all of them.

        With `partition` those of one partition of the virtual topic only, without
        keys; None if that can't be done.
        """
        ...


@runtime_checkable
class FiltersPartitions(Protocol):
    """A `Source` that can leave out the rows of other partitions where they are kept."""

    def read_partition(
        self, stream: int, partition: int, offset: int, limit: int
    ) -> SourceRead | None:
        """`read`, of one partition of the virtual topic only; None if that can't be done."""
        ...
