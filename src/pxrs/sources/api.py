"""The fourth seam: an ordered stream that exists already, read in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pxrs.stores.api import Watch
from pxrs.types import Bounds, Row


class SourceRead(NamedTuple):
    """Rows by rising offset, and the offset up to which (not included) no other row exists.

    `size` is about how many bytes of memory they take, if the source has counted that already.
    """

    rows: list[Row]
    next: int
    size: int | None = None


class LastKeys(NamedTuple):
    """Offset and key of all rows from `low` up to the wanted end, by rising offset."""

    rows: Sequence[tuple[int, bytes | None]]
    low: int


class Source(Protocol):
    """The read half of a log: offsets rise but have gaps. Thread-safe.

    Most sources have one stream. Where there are several, each has offsets of its own, and a
    partition of the virtual topic lies in one of them.

    **A row is final when it is returned**: no row with a lower offset can appear later. Rows below
    a checkpoint are never read again, so a source that can't be sure yet must wait.
    """

    @property
    def streams(self) -> int:
        """The number of streams, which are numbered from 0. Never changes."""
        ...

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        """Rows from `offset` on, at most `limit`, below `until`; none at the end.

        Their sizes together are a few megabytes at most, or it is one row. `next` is above
        `offset` unless nothing is final there yet, and not above `until`. `OffsetOutOfRange` if
        rows from `offset` on were removed from the stream.
        """
        ...

    def bounds(self, stream: int) -> Bounds:
        """The first offset that can be read, and the end: no row that comes later is below it.

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
        """Return a watch that wakes when rows may have come, or may have become final."""
        ...

    def close(self) -> None:
        """Close it; may be called twice. Reads raise `Closed` from then on."""
        ...


@runtime_checkable
class NoticesAnotherStream(Protocol):
    """A `Source` that notices when other rows stand where those stood that were read."""

    def incarnation(self, stream: int, since: int | None = None) -> int:
        """See `stores.api.NoticesAnother`."""
        ...


@runtime_checkable
class TellsLastKeys(Protocol):
    """A `Source` that can list its rows cheaply, so that a lag is counted in rows."""

    def last_keys(
        self, stream: int, start: int, end: int, limit: int, partition: int | None = None
    ) -> LastKeys | None:
        """The last rows from `start` up to `end`, final or not: about `limit`, or all of them.

        With `partition` only those of one partition of the virtual topic, without keys; None if
        the source can't do that.
        """
        ...


@runtime_checkable
class FiltersPartitions(Protocol):
    """A `Source` that can read the rows of one partition only."""

    def read_partition(
        self, stream: int, partition: int, offset: int, limit: int
    ) -> SourceRead | None:
        """`read`, for one partition of the virtual topic only; None if the source can't do that."""
        ...
