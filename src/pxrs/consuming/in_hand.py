"""The messages that a consumer's caller has in hand, and those that its loop left uncommitted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.groups.owned_claims import Mark
from pxrs.types import Message, TopicPartition


class InFlight:
    """Messages of one partition that were handed out: how many the caller has seen and handled.

    The caller's loop counts up without a lock; readers take the table's. What it handles counts
    for the progress under which it was handed out: a seek begins another one.
    """

    __slots__ = ("begun", "handled", "in_loop", "messages", "owned", "progress", "seen", "turn")

    def __init__(self, owned: OwnedPartition, messages: list[Message]) -> None:
        self.owned = owned
        self.turn = owned.turn
        self.messages = messages
        self.seen = 0
        self.handled = 0
        # Whether a loop shows it message by message, so that the current one is not handled.
        self.in_loop = False
        # Whether the caller has it; false for those that a loop has yet to come to.
        self.begun = True
        self.progress = owned.progress

    def count(self, done: int) -> None:
        """Note in the progress that the first `done` messages are done."""
        if done and self.progress is not None:
            self.progress.finish(self.messages[0].offset, self.messages[done - 1].offset + 1)

    @property
    def is_void(self) -> bool:
        """Whether a loop will pass it over: it was fetched for a turn that has ended since."""
        return not self.begun and self.turn != self.owned.turn

    def hold_back(self) -> None:
        """Give back what the caller has not seen; it is handed out again."""
        owned = self.owned
        if owned.turn == self.turn and self.seen < len(self.messages):
            owned.go_to(min(owned.handed, self.messages[self.seen].offset))
            if self.seen:
                # The message that it works on may have to be given back, too.
                self.turn = owned.turn

    def recall(self) -> None:
        """End the caller's loop after its current message, because the partition has to go.

        The loop may be a message further already: that one is fetched again, and is handled by
        then.
        """
        if self.in_loop:
            self.owned.shown = max(self.owned.shown, self.owned.handed)
            self.hold_back()

    @property
    def is_uncommitted(self) -> bool:
        """Whether what was handled of its partition has yet to be committed."""
        return self.progress is not self.owned.progress or self.owned.moved() is not None


def line_up(flights: list[InFlight], lock: threading.RLock) -> None:
    """Prepare flights that a loop is about to show, one after the other."""
    with lock:
        for flight in flights:
            flight.in_loop, flight.begun = True, False


class Reached:
    """How far a partition was handled, with its progress of that moment."""

    __slots__ = ("_progress", "mark", "owned")

    def __init__(self, owned: OwnedPartition, mark: Mark) -> None:
        self.owned = owned
        self.mark = mark
        self._progress = owned.progress

    @property
    def is_current(self) -> bool:
        """Whether there was no seek, and no message was given back, since."""
        return self.owned.progress is self._progress


class Extent(NamedTuple):
    """The extent of a commit: what the caller had been handed when it asked for it.

    Messages handed out while the commit waits for its turn are no part of it. `partitions`: those
    that the caller means. `lost`: those that it had lost by then.
    """

    partitions: list[OwnedPartition]
    reached: list[Reached]
    lost: frozenset[TopicPartition]

    def marks(
        self, partitions: Mapping[TopicPartition, OwnedPartition]
    ) -> dict[TopicPartition, Mark]:
        """Returns the marks to commit, with these owned partitions."""
        return {
            each.owned.part: each.mark
            for each in self.reached
            if each.is_current and partitions.get(each.owned.part) is each.owned
        }


class Uncommitted:
    """Partitions of which a loop has handled messages that are not committed.

    A loop goes on to the next partition's messages by itself, so a caller that commits after some
    turns of it means all of these. Under the table's lock.
    """

    __slots__ = ("_lost", "_partitions")

    def __init__(self) -> None:
        self._partitions: dict[TopicPartition, OwnedPartition] = {}
        self._lost: set[TopicPartition] = set()

    @property
    def partitions(self) -> list[OwnedPartition]:
        return list(self._partitions.values())

    def add(self, owned: OwnedPartition) -> None:
        """Add one. If it was lost and claimed again, what was handled before is still lost."""
        if self._partitions.setdefault(owned.part, owned) is not owned:
            self._partitions[owned.part] = owned
            self._lost.add(owned.part)

    def drop(self, lost: Callable[[OwnedPartition], bool]) -> set[TopicPartition]:
        """Forget those that were lost, and return them."""
        gone = self._lost | {part for part, owned in self._partitions.items() if lost(owned)}
        self._partitions = {
            part: owned for part, owned in self._partitions.items() if part not in gone
        }
        self._lost = set()
        return gone

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """Returns partitions that were lost and claimed again since the last commit."""
        return frozenset(self._lost)

    def settle(self, extent: Extent, gone: set[OwnedPartition]) -> None:
        """Note what was committed, or lost and reported. A loop may have gone on meanwhile."""
        done = {owned for owned in extent.partitions if owned in gone or owned.moved() is None}
        self._partitions = {
            part: owned for part, owned in self._partitions.items() if owned not in done
        }
        self._lost -= extent.lost

    def clear(self) -> None:
        """Forget all: it was committed, or will be handled again."""
        self._partitions, self._lost = {}, set()
