"""What is with a consumer's caller: messages in hand, and what its loop has left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pxrs.consuming.owned_partition import Seat
from pxrs.groups.owned_claims import Mark
from pxrs.types import Message, TopicPartition


class Run:
    """Messages of one partition on their way to the caller: how many it has seen and handled.

    The caller's loop counts up without a lock; whoever reads takes the desk's. What it handles
    counts for the progress under which it was handed out: after a seek that is another one.
    """

    __slots__ = ("begun", "handled", "in_loop", "messages", "progress", "seat", "seen", "turn")

    def __init__(self, seat: Seat, messages: list[Message]) -> None:
        self.seat = seat
        self.turn = seat.turn
        self.messages = messages
        self.seen = 0
        self.handled = 0
        # Whether a loop shows it message by message, so that the current one is not handled.
        self.in_loop = False
        # Whether the caller has it; not those that a loop has yet to come to.
        self.begun = True
        self.progress = seat.progress

    def count(self, done: int) -> None:
        """Tell the progress that the first `done` messages are done."""
        if done and self.progress is not None:
            self.progress.finish(self.messages[0].offset, self.messages[done - 1].offset + 1)

    def begin(self, lock: threading.RLock) -> bool:
        """Whether a loop may show it. From then on its partition is in the caller's hands."""
        with lock:
            self.begun = self.seat.turn == self.turn
            return self.begun

    @property
    def is_void(self) -> bool:
        """Whether a loop will pass it over: it was fetched for a turn that has ended since."""
        return not self.begun and self.turn != self.seat.turn

    def hold_back(self) -> None:
        """What the caller has not seen is handed out again, later."""
        seat = self.seat
        if seat.turn == self.turn and self.seen < len(self.messages):
            seat.go_to(min(seat.handed, self.messages[self.seen].offset))
            if self.seen:
                # What it is at may have to be given back, too.
                self.turn = seat.turn

    @property
    def is_loose(self) -> bool:
        """Whether somebody has yet to commit what was handled of its partition."""
        return self.progress is not self.seat.progress or self.seat.has_moved


def line_up(runs: list[Run], lock: threading.RLock) -> None:
    """A loop is about to show them, one after the other."""
    with lock:
        for run in runs:
            run.in_loop, run.begun = True, False


def recall(runs: list[Run]) -> None:
    """A partition has to go: the caller's loop ends after the message that it is at.

    It may be a message further already: that one is fetched again, and is handled by then.
    """
    for run in runs:
        if run.in_loop:
            run.seat.shown = max(run.seat.shown, run.seat.handed)
            run.hold_back()


class Reached:
    """How far a partition was handled, under its progress of that moment."""

    __slots__ = ("_progress", "mark", "seat")

    def __init__(self, seat: Seat, mark: Mark) -> None:
        self.seat = seat
        self.mark = mark
        self._progress = seat.progress

    @property
    def is_current(self) -> bool:
        """Whether nobody has sought, or given messages back, since."""
        return self.seat.progress is self._progress


class Extent(NamedTuple):
    """How far a commit goes: what the caller had been handed when it asked for it.

    What is handed out while the commit waits for its turn is no part of it. `seats`: the
    partitions that the caller means. `lost`: those that it had lost by then.
    """

    seats: list[Seat]
    reached: list[Reached]
    lost: frozenset[TopicPartition]

    def marks(self, seats: Mapping[TopicPartition, Seat]) -> dict[TopicPartition, Mark]:
        """What there is to commit of it, with these seats at the desk."""
        return {
            each.seat.part: each.mark
            for each in self.reached
            if each.is_current and seats.get(each.seat.part) is each.seat
        }


class Elsewhere(NamedTuple):
    """Who handles what a consumer takes away, and keeps the account of it: `Runner`.

    `in_hand`: whether somebody is at a message of this partition. `since`: since when somebody
    has been at the same one. `most`: how many messages may be out.
    """

    in_hand: Callable[[Seat], bool]
    since: Callable[[], float | None]
    most: int | None = None


class Loose:
    """Partitions of which a loop has handled messages that nobody has committed.

    A loop goes on to the next partition's messages by itself, so the one who commits after some
    turns of it means all of these. Under the desk's lock.
    """

    __slots__ = ("_lost", "_seats")

    def __init__(self) -> None:
        self._seats: dict[TopicPartition, Seat] = {}
        self._lost: set[TopicPartition] = set()

    @property
    def seats(self) -> list[Seat]:
        return list(self._seats.values())

    def add(self, seat: Seat) -> None:
        """One more. If it was lost and claimed again, what was handled before is lost still."""
        if self._seats.setdefault(seat.part, seat) is not seat:
            self._seats[seat.part] = seat
            self._lost.add(seat.part)

    def drop(self, lost: Callable[[Seat], bool]) -> set[TopicPartition]:
        """Forget those that were lost; which they are."""
        gone = self._lost | {part for part, seat in self._seats.items() if lost(seat)}
        self._seats = {part: seat for part, seat in self._seats.items() if part not in gone}
        self._lost = set()
        return gone

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """Those that were lost and claimed again since somebody committed."""
        return frozenset(self._lost)

    def settle(self, extent: Extent, gone: set[Seat]) -> None:
        """So much was committed, or was lost and is told. A loop may have gone on meanwhile."""
        done = {seat for seat in extent.seats if seat in gone or not seat.has_moved}
        self._seats = {part: seat for part, seat in self._seats.items() if seat not in done}
        self._lost -= extent.lost

    def clear(self) -> None:
        """All of it was committed, or is to be handled again."""
        self._seats, self._lost = {}, set()
