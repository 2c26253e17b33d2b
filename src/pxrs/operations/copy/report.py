"""How far a copy is, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import msgspec


class Phase(enum.StrEnum):
    """What a copy is at, in this order."""

    MESSAGES = "messages"
    ITEMS = "items"
    RECORDS = "records"
    VERIFY = "verify"


class Count(NamedTuple):
    """So many of so many, as far as is known. `VERIFY` counts messages."""

    phase: Phase
    done: int
    total: int


OnProgress = Callable[[Count], None]


class PartitionSum(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition holds, and a checksum over all its batches and where they lie."""

    topic: str
    partition: int
    start: int
    end: int
    batches: int
    bytes: int
    checksum: str


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in both stores at the end.

    `differences` says in plain words what is not equal; there are none in a copy that is
    complete. `copied` counts what this run did. A copy that was complete is only verified again.
    """

    source: str
    target: str
    complete: bool
    resumed: bool
    only_verified: bool
    topics: int
    groups: int
    claims: int
    records: int
    queues: int
    items: int
    copied: dict[str, int]
    partitions: tuple[PartitionSum, ...]
    differences: tuple[str, ...]

    @property
    def messages(self) -> int:
        return sum(part.end - part.start for part in self.partitions)


class Tally:
    """Counts what is done and tells whoever wants to know."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._tell = on_progress or (lambda count: None)
        self._totals: dict[Phase, int] = {}
        self.done: dict[Phase, int] = dict.fromkeys(Phase, 0)

    def expect(self, phase: Phase, total: int) -> None:
        """How many there will be. Said again when it is known better."""
        self._totals[phase] = total
        self._tell(Count(phase, self.done[phase], total))

    def add(self, phase: Phase, number: int) -> None:
        self.done[phase] += number
        total = max(self._totals.get(phase, 0), self.done[phase])
        self._tell(Count(phase, self.done[phase], total))
