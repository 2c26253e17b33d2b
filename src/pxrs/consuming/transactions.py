"""A consumer's transactions: a unit of work that moves its checkpoint, too. Effectively once.

The claim's record is written in the same commit as everything else, conditional on the version
that this member last wrote. A stale owner's transaction finds another version and is rolled back
whole, the caller's own statements included.

A connection of the caller's is lent for the block: what it had begun before becomes part of it,
and pxrs ends it either way. If the caller committed, positions would have moved past messages
before it is known whether they count.

Nothing in here waits and no thread is started: the simulator drives this very code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pxrs.consuming.in_hand import InFlight
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core.claims import Behind, Happened, Lost, OwnedClaim, Step, judge
from pxrs.errors import (
    CommitConflict,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    TransactionConflict,
)
from pxrs.groups.owned_claims import Mark, OwnedClaims, fenced, names_of
from pxrs.queues.held_items import Context
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.api import Atomic, CoordStore
from pxrs.stores.connections import Lent
from pxrs.types import Conflict, TopicPartition, Versioned


class Checkpoint:
    """The consumer's part in one unit of work."""

    def __init__(
        self,
        coord: CoordStore,
        owned_claims: OwnedClaims,
        work: Handed,
        *,
        keep_on_conflict: bool = False,
    ) -> None:
        self._coord = coord
        self._owned_claims = owned_claims
        self._work = work
        self.keeps_on_conflict = keep_on_conflict
        self._marks: dict[TopicPartition, Mark] = {}
        self._steps: list[Step] = []

    def begin(self, *, lent: bool = False) -> None:
        """Keep other threads of this process from committing checkpoints, until `end`.

        Before the database's writer is taken: all threads that commit checkpoints take the two in
        this order. A `lent` connection may hold the writer already: then they have to give way.
        """
        self._owned_claims.refuse_inside_transaction()
        self._owned_claims.wanted = lent
        try:
            self._owned_claims.lock.acquire()
        except BaseException:
            self._owned_claims.wanted = False
            raise
        try:
            self._owned_claims.wanted = False
            self._marks = self._work.marks()
            self._owned_claims.transacting = threading.get_ident()
        except BaseException:
            self._owned_claims.lock.release()
            raise

    def end(self) -> None:
        """End what `begin` began."""
        self._owned_claims.transacting = None
        self._owned_claims.lock.release()

    @property
    def is_staged(self) -> bool:
        """Whether a claim is written, which shows afterwards whether the commit happened."""
        return bool(self._steps)

    def stage(self, atomic: Atomic) -> None:
        """Add the checks and writes of the checkpoint. Raises `Fenced` if it is lost already."""
        missing = frozenset(self._marks.keys() - self._owned_claims.parts)
        if missing:
            self._work.lost(missing)
            raise fenced(missing)
        # In the order in which the committer writes them.
        self._steps = sorted(
            self._owned_claims.steps_to_commit(self._marks), key=lambda step: step.put.key
        )
        atomic.check(*(step.check for step in self._steps))
        atomic.write(*(step.put for step in self._steps))

    def rewind_after(self, error: BaseException) -> None:
        """Hand all messages out again, unless the transaction is about to be retried with them."""
        if not (self.keeps_on_conflict and isinstance(error, TransactionConflict)):
            self._work.rolled_back()

    def succeeded(self, versions: Mapping[str, int]) -> None:
        """Note that the commit was done."""
        self._record(self._steps, versions)

    def refused(self, current: Mapping[str, Versioned | None]) -> None:
        """Raise after a failed check, with nothing done: was a partition lost, or only moved?"""
        verdicts = self._judge(current)
        moved = self._owned_claims.refresh(
            each.owned_claim for each in verdicts.values() if isinstance(each, Behind)
        )
        self._work.moved(moved)
        lost = frozenset(part for part, each in verdicts.items() if isinstance(each, Lost))
        if lost:
            self._lose(lost)
            self._work.rolled_back()
            raise fenced(lost)
        if moved:
            # Some messages in hand may be handled by now, or some before them may not be.
            self.keeps_on_conflict = False
            self._work.rolled_back()
            raise TransactionConflict(
                "the transaction was not committed, as the store has another checkpoint than this "
                f"member's last: {names_of(moved)}; poll again, messages come from there on"
            )
        self.not_committed()

    def _judge(
        self, current: Mapping[str, Versioned | None]
    ) -> dict[TopicPartition, Happened | Behind | Lost]:
        owner = self._owned_claims.owner
        return {
            step.part: judge(step, owner, current[step.put.key])
            for step in self._steps
            if step.put.key in current
        }

    def not_committed(self) -> None:
        """Raise a conflict: nothing was done, and the transaction may be retried."""
        conflict = TransactionConflict("the transaction was not committed; run it again")
        self.rewind_after(conflict)
        raise conflict

    def happened(self, doubt: BaseException) -> bool:
        """Find out after a lost answer whether it was done: by a write of our own to the claims.

        The write waits for the transaction if that holds their locks. If the write succeeds, the
        transaction finds other versions whenever it arrives, and never lands: a mere look would
        not prove that.
        """
        touched = self._owned_claims.steps_to_touch(step.part for step in self._steps)
        try:
            outcome = self._coord.commit(
                [step.check for step in touched], [step.put for step in touched]
            )
        except BaseException as error:
            # These partitions must not be worked on in doubt; to claim them again will show.
            self._owned_claims.doubt(self._steps)
            self._work.lost(frozenset(step.part for step in self._steps))
            if not isinstance(error, PxrsError):
                raise
            raise OutcomeUnknown(
                f"the transaction may have been committed or not; the store does not say: {error}"
            ) from doubt
        if not isinstance(outcome, Conflict):
            self._owned_claims.wrote(touched, outcome.versions)
            return False
        self._find_out(outcome.current, doubt)
        return True

    def _find_out(self, current: Mapping[str, Versioned | None], doubt: BaseException) -> None:
        """Judge claims that have changed; returns if the transaction itself has changed them."""
        verdicts = self._judge(current)
        mine = [step for step in self._steps if isinstance(verdicts.get(step.part), Happened)]
        others = frozenset(step.part for step in self._steps if step not in mine)
        if not mine:
            if any(not isinstance(verdicts.get(part), Lost) for part in others):
                # A claim that is as before, or was changed by another write of ours, proves that
                # the transaction did not happen.
                self.refused(current)
            self._lose(others)
            raise OutcomeUnknown(
                "the transaction got no answer, and the members that took its partitions over have "
                f"overwritten the evidence: {names_of(others)}"
            ) from doubt
        # One of them proves all: they were one commit. Others were taken over after it.
        self._lose(others)
        self._record(mine, {key: found.version for key, found in current.items() if found})

    def _record(self, steps: Sequence[Step], versions: Mapping[str, int]) -> None:
        self._owned_claims.wrote(steps, versions)
        self._work.committed(self._marks)

    def _lose(self, parts: frozenset[TopicPartition]) -> None:
        if parts:
            self._owned_claims.drop(parts)
            self._work.lost(parts)


class Transaction(UnitOfWork[str | bytes]):
    """Leaving the block commits, leaving it by an exception rolls back and hands out again."""

    def __init__(self, shared: Context, checkpoint: Checkpoint, connection: Any = None) -> None:
        super().__init__(shared, connection=None if connection is None else Lent(connection))
        self._checkpoint = checkpoint
        self._has_one_try = True
        self._inside = False

    @property
    def _keeps_on_conflict(self) -> bool:
        """Whether the same messages are still in hand after a conflict, to be tried again."""
        return self._checkpoint.keeps_on_conflict

    def __enter__(self) -> Transaction:
        self._checkpoint.begin(lent=self._given is not None)
        try:
            if self._given is not None:
                # The caller has the connection already, and will not ask for it.
                self._open_atomic()
        except BaseException as error:
            # To fail here is to leave it by an exception: the next poll must not count it.
            try:
                self._checkpoint.rewind_after(error)
            finally:
                self._checkpoint.end()
            raise
        self._inside = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._inside = False
            self._checkpoint.end()

    def _require_open(self) -> None:
        if not self._inside:
            raise InvalidRequest("use the transaction as a context manager, inside its block")
        super()._require_open()

    def _undo(self, error: BaseException) -> None:
        try:
            super()._undo(error)
        except BaseException as another:
            self._checkpoint.rewind_after(another)
            raise
        self._checkpoint.rewind_after(error)

    def _commit(self) -> None:
        try:
            atomic = self._open_atomic()
            self._checkpoint.stage(atomic)
            # Claims show afterwards whether it was done; where there are none, the unit does.
            has_items = bool(self._held.taken or self._put)
            needs_unit = has_items or not self._checkpoint.is_staged
            self._stage(atomic, self._change() if needs_unit else None)
        except BaseException as error:
            self._undo(error)
            raise
        self._land(atomic)

    def _land(self, atomic: Atomic) -> None:
        """Commit, and find out the outcome if there is doubt."""
        checkpoint = self._checkpoint
        try:
            atomic.__exit__(None, None, None)
        except CommitConflict as conflict:
            self._answered(committed=False)
            checkpoint.refused(conflict.current)
        except OutcomeUnknown as unknown:
            if not self._happened(unknown):
                self._answered(committed=False)
                checkpoint.not_committed()
            self._answered(committed=True)
        except PxrsError as error:
            self._answered(committed=False)
            checkpoint.rewind_after(error)
            raise
        except BaseException as error:
            # Ctrl-C, or an error of the caller's code in its session: before the commit or after?
            self._leave_block(error)
            if not self._happened(error):
                checkpoint.rewind_after(error)
            raise
        else:
            self._answered(committed=True)
            checkpoint.succeeded(atomic.versions)

    def _happened(self, doubt: BaseException) -> bool:
        """Find out after a lost answer: by the claims, or by the unit if no claim was written."""
        if self._checkpoint.is_staged:
            return self._checkpoint.happened(doubt)
        return self._was_committed()


T = TypeVar("T")


class Transactions:
    """Begins the transactions of one consumer. `on_lost` is called when one finds itself fenced."""

    def __init__(self, shared: Context, steps: MemberSteps, on_lost: Callable[[], None]) -> None:
        self._shared = shared
        self._steps = steps
        self._on_lost = on_lost

    def begin(self, connection: Any = None, *, keep_on_conflict: bool = False) -> Transaction:
        """A transaction over what is in hand now. See `Consumer.transaction`."""
        checkpoint = Checkpoint(
            self._shared.stores.coord,
            self._steps.owned_claims,
            Handed(self._steps, self._on_lost),
            keep_on_conflict=keep_on_conflict,
        )
        return Transaction(self._shared, checkpoint, connection)

    def attempts(self, connection: Any, most: int) -> Iterator[Transaction]:
        """Transactions over the same messages, one after the other; the last one gives them up."""
        if most < 1:
            raise InvalidRequest(f"attempts must be at least 1, got {most}")
        for left in reversed(range(most)):
            yield self.begin(connection, keep_on_conflict=left > 0)

    def run(self, work: Callable[[Transaction], T], connection: Any, attempts: int) -> T:
        """Run `work(tx)`, again on a conflict that may pass; returns its result."""
        for begun in self.attempts(connection, attempts):
            try:
                with begun as tx:
                    return work(tx)
            except TransactionConflict:
                if not begun._keeps_on_conflict:
                    raise
        raise AssertionError("unreachable: the last attempt raises")


class Handed:
    """The messages that a transaction covers: with the caller, or left by its loop."""

    def __init__(self, steps: MemberSteps, on_lost: Callable[[], None]) -> None:
        self._steps = steps
        self._table = steps.table
        self._on_lost = on_lost
        self._in_flight: list[InFlight] = []
        self._partitions: list[OwnedPartition] = []

    def marks(self) -> dict[TopicPartition, Mark]:
        """Returns the progress of the partitions once the transaction is committed."""
        with self._table.lock:
            if self._steps.given_back:
                raise InvalidRequest(
                    "the transaction before did not commit, and its messages were given back: what "
                    "is done about them now would be done again. Poll first, they come again; or "
                    "let consumer.run_transaction(work) try again over the same messages"
                )
            self._in_flight = [flight for flight in self._table.in_flight if flight.seen]
            partitions = (
                *self._steps.uncommitted.partitions,
                *(flight.owned for flight in self._in_flight),
            )
            self._partitions = list(dict.fromkeys(partitions))
            stale = self._steps.drop_stale()
            if stale:
                self.rolled_back()
                raise fenced(stale)
            marks = {owned.part: self._mark(owned) for owned in self._partitions}
            return {part: mark for part, mark in marks.items() if mark is not None}

    def _mark(self, owned: OwnedPartition) -> Mark | None:
        """Returns its progress with what is in hand. None if it was not started."""
        if owned.progress is None:
            return None
        progress = owned.progress.copy()
        for flight in self._in_flight:
            # After a seek it goes on elsewhere, regardless of messages in hand; but the claim is
            # written all the same, and fences what the caller does about those messages.
            if flight.owned is owned and flight.progress is owned.progress:
                progress.finish(
                    flight.messages[0].offset, flight.messages[flight.seen - 1].offset + 1
                )
        return Mark(progress.checkpoint, progress.ranges)

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """Note that the messages are handled."""
        with self._table.lock:
            for flight in self._in_flight:
                flight.count(flight.seen)
            self._steps.uncommitted.clear()
        self._table.committed(marks)

    def rolled_back(self) -> None:
        """Hand the messages out again, from the checkpoints."""
        with self._table.lock:
            self._table.in_flight = [
                flight for flight in self._table.in_flight if flight not in self._in_flight
            ]
            self._steps.uncommitted.clear()
            self._steps.given_back |= bool(self._partitions)
            self._table.rewind(self._partitions)

    def moved(self, found: Mapping[TopicPartition, OwnedClaim]) -> None:
        """Adopt the checkpoints of the store, which differ from those known here."""
        with self._table.lock:
            for owned in self._partitions:
                if owned.part in found:
                    owned.found(found[owned.part])

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        """Note that other members own these partitions now."""
        self._steps.given_back |= bool(self._partitions)
        self._table.gone(parts, lost=True)
        self._on_lost()
