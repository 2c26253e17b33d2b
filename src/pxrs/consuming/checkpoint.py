"""Effectively once: a consumer's checkpoint as part of a unit of work.

The claim's record is written in the same commit as everything else, conditional on the version
that this member last wrote. A stale owner's transaction finds another version and is rolled back
whole, the caller's own statements included.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from pxrs.core.claims import Behind, Happened, Holding, Lost, Step, judge
from pxrs.errors import OutcomeUnknown, PxrsError, TransactionConflict
from pxrs.groups.fencing import fenced, names_of
from pxrs.groups.owned_claims import Holdings, Mark
from pxrs.stores.api import Atomic, CoordStore
from pxrs.types import Conflict, TopicPartition, Versioned


class Work(Protocol):
    """What a consumer has handed out and a transaction is about."""

    def marks(self) -> dict[TopicPartition, Mark]:
        """How far the partitions will be handled once the transaction is committed."""
        ...

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None: ...

    def rolled_back(self) -> None:
        """Hand it out again, from the checkpoints."""
        ...

    def moved(self, found: Mapping[TopicPartition, Holding]) -> None:
        """The store has other checkpoints than were known here: these count."""
        ...

    def lost(self, parts: frozenset[TopicPartition]) -> None: ...


class Checkpoint:
    """The consumer's part in one unit of work."""

    def __init__(
        self, coord: CoordStore, holdings: Holdings, work: Work, *, keep_on_conflict: bool = False
    ) -> None:
        self._coord = coord
        self._holdings = holdings
        self._work = work
        self.keeps_on_conflict = keep_on_conflict
        self._marks: dict[TopicPartition, Mark] = {}
        self._steps: list[Step] = []

    def begin(self, *, lent: bool = False) -> None:
        """From now on nobody else in this process commits checkpoints.

        Before the database's writer is taken: whoever commits checkpoints takes them in this
        order. A `lent` connection may hold the writer already: then they have to give way.
        """
        self._holdings.refuse_inside_transaction()
        self._holdings.wanted = lent
        try:
            self._holdings.lock.acquire()
        except BaseException:
            self._holdings.wanted = False
            raise
        try:
            self._holdings.wanted = False
            self._marks = self._work.marks()
            self._holdings.transacting = threading.get_ident()
        except BaseException:
            self._holdings.lock.release()
            raise

    def end(self) -> None:
        """The end of what `begin` began."""
        self._holdings.transacting = None
        self._holdings.lock.release()

    @property
    def is_staged(self) -> bool:
        """Whether a claim is written that tells, afterwards, whether the commit happened."""
        return bool(self._steps)

    def stage(self, atomic: Atomic) -> None:
        """Add the checks and writes of the checkpoint. Raises `Fenced` if it is lost already."""
        missing = frozenset(self._marks.keys() - self._holdings.parts)
        if missing:
            self._work.lost(missing)
            raise fenced(missing)
        # In the order in which the committer writes them.
        self._steps = sorted(
            self._holdings.steps_to_commit(self._marks), key=lambda step: step.put.key
        )
        atomic.check(*(step.check for step in self._steps))
        atomic.write(*(step.put for step in self._steps))

    def rewind_after(self, error: BaseException) -> None:
        """Hand it all out again, unless the same messages are about to be tried again."""
        if not (self.keeps_on_conflict and isinstance(error, TransactionConflict)):
            self._work.rolled_back()

    def succeeded(self, versions: Mapping[str, int]) -> None:
        """The commit was done."""
        self._record(self._steps, versions)

    def refused(self, current: Mapping[str, Versioned | None]) -> None:
        """A check did not hold, and nothing was done: was it lost, or only moved? Raises."""
        verdicts = self._judge(current)
        moved = self._holdings.refresh(
            each.holding for each in verdicts.values() if isinstance(each, Behind)
        )
        self._work.moved(moved)
        lost = frozenset(part for part, each in verdicts.items() if isinstance(each, Lost))
        if lost:
            self._lose(lost)
            self._work.rolled_back()
            raise fenced(lost)
        if moved:
            # Of the messages in hand some may be handled by now, or some before them not.
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
        owner = self._holdings.owner
        return {
            step.part: judge(step, owner, current[step.put.key])
            for step in self._steps
            if step.put.key in current
        }

    def not_committed(self) -> None:
        """Nothing was done, and the same may be tried again. Raises."""
        conflict = TransactionConflict("the transaction was not committed; run it again")
        self.rewind_after(conflict)
        raise conflict

    def happened(self, doubt: BaseException) -> bool:
        """No answer came. The claims tell, once a write of our own stands in them.

        It waits for the transaction if that holds their locks. If it can be made, the transaction
        finds other versions whenever it arrives, and never lands: a mere look would not prove that.
        """
        touched = self._holdings.steps_to_touch(step.part for step in self._steps)
        try:
            outcome = self._coord.commit(
                [step.check for step in touched], [step.put for step in touched]
            )
        except BaseException as error:
            # Nothing may be worked on that is known so little of; claiming it again will tell.
            self._holdings.doubt(self._steps)
            self._work.lost(frozenset(step.part for step in self._steps))
            if not isinstance(error, PxrsError):
                raise
            raise OutcomeUnknown(
                f"the transaction may have been committed or not; the store does not say: {error}"
            ) from doubt
        if not isinstance(outcome, Conflict):
            self._holdings.wrote(touched, outcome.versions)
            return False
        self._find_out(outcome.current, doubt)
        return True

    def _find_out(self, current: Mapping[str, Versioned | None], doubt: BaseException) -> None:
        """Something has changed the claims; it returns if that was the transaction itself."""
        verdicts = self._judge(current)
        mine = [step for step in self._steps if isinstance(verdicts.get(step.part), Happened)]
        others = frozenset(step.part for step in self._steps if step not in mine)
        if not mine:
            if any(not isinstance(verdicts.get(part), Lost) for part in others):
                # A claim that is as it was, or was changed by another write of ours, proves that
                # it did not happen.
                self.refused(current)
            self._lose(others)
            raise OutcomeUnknown(
                "the transaction got no answer, and whoever took its partitions over has written "
                f"over what would tell: {names_of(others)}"
            ) from doubt
        # One of them proves all: they were one commit. The others were taken after it.
        self._lose(others)
        self._record(mine, {key: found.version for key, found in current.items() if found})

    def _record(self, steps: Sequence[Step], versions: Mapping[str, int]) -> None:
        self._holdings.wrote(steps, versions)
        self._work.committed(self._marks)

    def _lose(self, parts: frozenset[TopicPartition]) -> None:
        if parts:
            self._holdings.drop(parts)
            self._work.lost(parts)
