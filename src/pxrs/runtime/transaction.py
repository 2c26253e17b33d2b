"""Effectively once: the handler's own writes, what it sends and the checkpoint in one commit.

The claim's record is written in the caller's database transaction, conditional on the version
that this member last wrote. A stale owner's transaction finds another version and is rolled back
whole, its own statements included.

A connection of the caller's is lent for the block: what it had begun before becomes part of it,
and pxrs ends it either way. If the caller committed, positions would have moved past messages of
which nobody knows yet whether they count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from pxrs.clock import Clock
from pxrs.core.claims import Happened, Lost, Step, judge
from pxrs.errors import (
    CommitConflict,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    TransactionConflict,
)
from pxrs.runtime.holdings import Holdings, Mark
from pxrs.runtime.outgoing import Outgoing
from pxrs.runtime.topics import Topics
from pxrs.stores.api import Atomic, Stores
from pxrs.stores.connections import Lent
from pxrs.types import Conflict, Header, TopicPartition, Versioned


class Work(Protocol):
    """What a consumer has handed out and a transaction is about."""

    def marks(self) -> dict[TopicPartition, Mark]:
        """How far the partitions will be handled once the transaction is committed."""
        ...

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None: ...

    def rolled_back(self) -> None:
        """Hand it out again, from the checkpoints."""
        ...

    def lost(self, parts: frozenset[TopicPartition]) -> None: ...


class Transaction:
    """A unit of work. Leaving the block commits, leaving it by an exception rolls back."""

    def __init__(
        self,
        stores: Stores,
        topics: Topics,
        clock: Clock,
        holdings: Holdings,
        work: Work,
        connection: Any = None,
        *,
        keep_on_conflict: bool = False,
    ) -> None:
        self._stores = stores
        self._holdings = holdings
        self._work = work
        self._given = Lent(connection) if connection is not None else None
        self.keeps_on_conflict = keep_on_conflict
        self._outgoing = Outgoing(topics, clock)
        self._atomic: Atomic | None = None
        self._marks: dict[TopicPartition, Mark] = {}

    @property
    def connection(self) -> Any:
        """The database connection that commits, for the caller's own statements."""
        return self._running().connection

    def execute(self, statement: str, parameters: Any = ()) -> Any:
        """Run a statement of the caller's in the transaction."""
        return self._running().connection.execute(statement, parameters)

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: list[Header] | None = None,
    ) -> None:
        """Send a message when, and only if, the transaction commits."""
        self._running()
        self._outgoing.send(topic, value, key, partition, headers)

    def __enter__(self) -> Transaction:
        # Before the database's writer: whoever commits checkpoints takes them in this order.
        self._holdings.lock.acquire()
        try:
            self._marks = self._work.marks()
            atomic = self._stores.atomic(self._given)
            self._atomic = atomic.__enter__()
        except BaseException:
            self._holdings.lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        atomic, self._atomic = self._running(), None
        try:
            if error is None:
                self._commit(atomic)
            else:
                self._roll_back(atomic, error)
        finally:
            self._holdings.lock.release()

    def _roll_back(self, atomic: Atomic, error: BaseException) -> None:
        try:
            atomic.__exit__(type(error), error, error.__traceback__)
        except BaseException as another:
            self._rewind_after(another)
            raise
        self._rewind_after(error)

    def _rewind_after(self, error: BaseException) -> None:
        """Hand it all out again, unless the same messages are about to be tried again."""
        if not (self.keeps_on_conflict and isinstance(error, TransactionConflict)):
            self._work.rolled_back()

    def _commit(self, atomic: Atomic) -> None:
        try:
            steps = self._stage(atomic)
        except BaseException as error:
            self._roll_back(atomic, error)
            raise
        try:
            atomic.__exit__(None, None, None)
        except CommitConflict as conflict:
            self._refused(steps, conflict.current)
        except OutcomeUnknown as unknown:
            if not steps:
                # No claim tells whether it happened.
                raise
            if not self._happened(steps, unknown):
                self._not_committed()
        except PxrsError as error:
            self._rewind_after(error)
            raise
        except BaseException as error:
            # Ctrl-C, or something of the caller's that its session calls: before or after?
            if not self._happened(steps, error):
                self._work.rolled_back()
            raise
        else:
            self._succeeded(steps, atomic.versions)

    def _stage(self, atomic: Atomic) -> list[Step]:
        missing = frozenset(self._marks.keys() - self._holdings.parts)
        if missing:
            self._work.lost(missing)
            raise Fenced(f"owned by somebody else now: {sorted(missing)}")
        appends = self._outgoing.appends()
        # In the order in which the committer writes them.
        steps = sorted(self._holdings.steps_to_commit(self._marks), key=lambda step: step.put.key)
        atomic.check(*(step.check for step in steps))
        atomic.write(*(step.put for step in steps))
        for where, batch in appends:
            atomic.append(where, batch)
        return steps

    def _succeeded(self, steps: Sequence[Step], versions: Mapping[str, int]) -> None:
        self._holdings.wrote(steps, versions)
        self._work.committed(self._marks)

    def _refused(self, steps: Sequence[Step], current: Mapping[str, Versioned | None]) -> None:
        """A check did not hold, and nothing was done: was it lost, or only moved?"""
        owner = self._holdings.owner
        lost = frozenset(
            step.part
            for step in steps
            if step.put.key in current
            and isinstance(judge(step, owner, current[step.put.key]), Lost)
        )
        if lost:
            self._lose(lost)
            self._work.rolled_back()
            raise Fenced(f"not committed, owned by somebody else now: {sorted(lost)}")
        self._not_committed()

    def _not_committed(self) -> None:
        conflict = TransactionConflict("the transaction was not committed; run it again")
        self._rewind_after(conflict)
        raise conflict

    def _happened(self, steps: Sequence[Step], doubt: BaseException) -> bool:
        """No answer came: a check alone waits the old transaction out, then tells."""
        try:
            outcome = self._stores.coord.commit([step.check for step in steps], [])
        except PxrsError as error:
            # Nothing may be worked on that is known so little of; claiming it again will tell.
            parts = frozenset(step.part for step in steps)
            self._holdings.doubt(steps)
            self._work.lost(parts)
            raise OutcomeUnknown(
                f"the transaction may have been committed or not; the store does not say: {error}"
            ) from doubt
        if not isinstance(outcome, Conflict):
            return False
        owner = self._holdings.owner
        verdicts = [judge(step, owner, outcome.current.get(step.put.key)) for step in steps]
        mine = {
            step.put.key: verdict.version
            for step, verdict in zip(steps, verdicts, strict=True)
            if isinstance(verdict, Happened)
        }
        if not mine:
            self._refused(steps, outcome.current)
        # One of them proves all: they were one commit. The others were taken after it.
        self._lose(frozenset(step.part for step in steps if step.put.key not in mine))
        self._succeeded([step for step in steps if step.put.key in mine], mine)
        return True

    def _lose(self, parts: frozenset[TopicPartition]) -> None:
        if parts:
            self._holdings.drop(parts)
            self._work.lost(parts)

    def _running(self) -> Atomic:
        if self._atomic is None:
            raise InvalidRequest("use the transaction as a context manager, inside its block")
        return self._atomic
