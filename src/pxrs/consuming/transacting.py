"""A consumer's transactions: what they are about, and how they begin.

Nothing in here waits and no thread is started: the simulator drives this very code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pxrs.consuming.checkpoint import Checkpoint
from pxrs.consuming.in_hand import Run
from pxrs.consuming.member_steps import Worker
from pxrs.consuming.owned_partition import Seat
from pxrs.consuming.transactions import Transaction
from pxrs.core.claims import Holding
from pxrs.core.progress import Progress
from pxrs.errors import InvalidRequest, TransactionConflict
from pxrs.groups.fencing import fenced
from pxrs.groups.owned_claims import Mark
from pxrs.queues.held_items import Desk
from pxrs.types import TopicPartition

T = TypeVar("T")


class Transactions:
    """Begins the transactions of one consumer. `on_lost` is called when one finds itself fenced."""

    def __init__(self, shared: Desk, worker: Worker, on_lost: Callable[[], None]) -> None:
        self._shared = shared
        self._worker = worker
        self._on_lost = on_lost

    def begin(self, connection: Any = None, *, keep_on_conflict: bool = False) -> Transaction:
        """A transaction over what is in hand now. See `Consumer.transaction`."""
        checkpoint = Checkpoint(
            self._shared.stores.coord,
            self._worker.holdings,
            Handed(self._worker, self._on_lost),
            keep_on_conflict=keep_on_conflict,
        )
        return Transaction(self._shared, checkpoint, connection)

    def attempts(self, connection: Any, most: int) -> Iterator[Transaction]:
        """Transactions over the same messages, one after the other; the last one gives them up."""
        if most < 1:
            raise InvalidRequest(f"{most} attempts; at least 1 is needed")
        for left in reversed(range(most)):
            yield self.begin(connection, keep_on_conflict=left > 0)

    def run(self, work: Callable[[Transaction], T], connection: Any, attempts: int) -> T:
        """`work(tx)`, again on a conflict that may pass; what it returns."""
        for begun in self.attempts(connection, attempts):
            try:
                with begun as tx:
                    return work(tx)
            except TransactionConflict:
                if not begun.keeps_on_conflict:
                    raise
        raise AssertionError("unreachable: the last attempt raises")


class Handed:
    """See `pxrs.consuming.checkpoint.Work`: what is with the caller, and what its loop has left."""

    def __init__(self, worker: Worker, on_lost: Callable[[], None]) -> None:
        self._worker = worker
        self._desk = worker.desk
        self._on_lost = on_lost
        self._runs: list[Run] = []
        self._seats: list[Seat] = []

    def marks(self) -> dict[TopicPartition, Mark]:
        with self._desk.lock:
            if self._worker.given_back:
                raise InvalidRequest(
                    "the transaction before did not commit, and its messages were given back: what "
                    "is done about them now would be done again. Poll first, they come again; or "
                    "let consumer.run_transaction(work) try again over the same messages"
                )
            self._runs = [run for run in self._worker.runs if run.seen]
            seats = (*self._worker.loose.seats, *(run.seat for run in self._runs))
            self._seats = list(dict.fromkeys(seats))
            stale = self._worker.drop_stale_runs()
            if stale:
                self.rolled_back()
                raise fenced(stale)
            marks = {seat.part: self._mark(seat) for seat in self._seats}
            return {part: mark for part, mark in marks.items() if mark is not None}

    def _mark(self, seat: Seat) -> Mark | None:
        """How far it is handled with what is in hand. None if it was not started."""
        before = seat.mark()
        if before is None:
            return None
        progress = Progress(before.checkpoint, before.done)
        for run in self._runs:
            # After a seek it goes on elsewhere, whatever was in hand before; but the claim is
            # written all the same, and fences what the caller does about those messages.
            if run.seat is seat and run.progress is seat.progress:
                progress.finish(run.messages[0].offset, run.messages[run.seen - 1].offset + 1)
        return Mark(progress.checkpoint, progress.runs)

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        with self._desk.lock:
            for run in self._runs:
                run.count(run.seen)
            self._worker.loose.clear()
        self._desk.committed(marks)

    def rolled_back(self) -> None:
        with self._desk.lock:
            self._worker.runs = [run for run in self._worker.runs if run not in self._runs]
            self._worker.loose.clear()
            self._worker.given_back |= bool(self._seats)
            self._desk.rewind(self._seats)

    def moved(self, found: Mapping[TopicPartition, Holding]) -> None:
        with self._desk.lock:
            for seat in self._seats:
                if seat.part in found:
                    seat.found(found[seat.part])

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        self._worker.given_back |= bool(self._seats)
        self._desk.gone(parts, lost=True)
        self._on_lost()
