"""What some stores can do beyond the three protocols, to be asked for with `isinstance`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, runtime_checkable

from pxrs.errors import PxrsError
from pxrs.types import Check, Committed, Conflict, Fetched, LogPartition, Write


@runtime_checkable
class FetchesMany(Protocol):
    """A `LogStore` that gives several partitions' batches in one go.

    Over a network the rest is on its way while the first is decoded.
    """

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        """What `fetch` gives or raises for each of the partitions and offsets, in their order.

        Each at most `max_bytes`, but at least one batch. Close the iterator if it is not read to
        its end.
        """
        ...


@runtime_checkable
class GivesWay(Protocol):
    """A `CoordStore` with one writer, which a program may hold by a connection of its own."""

    def commit_unless(
        self, checks: Sequence[Check], writes: Sequence[Write], wanted: Callable[[], bool]
    ) -> Committed | Conflict:
        """`commit`, but it does not go on waiting for the writer once `wanted()`: `StoreBusy`.

        For a thread that holds what the writer's holder may come to wait for.
        """
        ...
