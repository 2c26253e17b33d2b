"""What was written where, without keeping a handle per message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pxrs.errors import PxrsError
    from pxrs.producing.handles import PendingBatch


@dataclass
class Written:
    """Messages of one partition. Other producers' messages may lie between first and last."""

    first: int
    last: int
    messages: int


@dataclass
class Tally:
    """Counts batches as they are settled."""

    partitions: dict[int, Written] = field(default_factory=dict)
    lost: int = 0
    error: PxrsError | None = None
    _open: dict[PendingBatch, None] = field(default_factory=dict)

    def add(self, parcels: Iterable[PendingBatch]) -> None:
        """Note these batches; count those that are settled by now."""
        for parcel in parcels:
            if parcel not in self._open:
                parcel.waiters.append(None)  # as long as it lives: the command tells of it
                self._open[parcel] = None
        self.settle()

    def settle(self) -> None:
        """Count what is settled. A settled batch never grows."""
        for parcel in [parcel for parcel in self._open if parcel.settled]:
            del self._open[parcel]
            if parcel.error is not None:
                parcel.told = True
                self.lost += parcel.count
                self.error = self.error or parcel.error
            else:
                self._count(parcel.partition, parcel.base, parcel.count)

    @property
    def messages(self) -> int:
        return sum(written.messages for written in self.partitions.values())

    def rows(self) -> list[dict[str, Any]]:
        """By partition."""
        return [
            {"partition": number, "first": it.first, "last": it.last, "messages": it.messages}
            for number, it in sorted(self.partitions.items())
        ]

    def _count(self, partition: int, base: int, messages: int) -> None:
        last = base + messages - 1
        it = self.partitions.setdefault(partition, Written(base, last, 0))
        it.first, it.last = min(it.first, base), max(it.last, last)
        it.messages += messages
