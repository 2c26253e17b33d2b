"""Effectively once: the handler's own writes, what it sends and the checkpoint in one commit.

The claim's record is written in the caller's database transaction, conditional on the version
that this member last wrote. A stale owner's transaction finds another version and is rolled back
whole, its own statements included.
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
    TransactionConflict,
)
from pxrs.runtime.holdings import Holdings, Mark
from pxrs.runtime.outgoing import Outgoing
from pxrs.runtime.topics import Topics
from pxrs.stores.api import Atomic, Stores
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
        self._given = connection
        self._keep_on_conflict = keep_on_conflict
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
                atomic.__exit__(kind, error, trace)
                self._work.rolled_back()
        finally:
            self._holdings.lock.release()

    def _commit(self, atomic: Atomic) -> None:
        try:
            steps = self._stage(atomic)
        except BaseException as error:
            atomic.__exit__(type(error), error, error.__traceback__)
            self._work.rolled_back()
            raise
        try:
            atomic.__exit__(None, None, None)
        except CommitConflict as conflict:
            self._refused(steps, conflict.current)
        except OutcomeUnknown:
            self._find_out(steps)
        except BaseException:
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
            self._holdings.drop(lost)
            self._work.lost(lost)
            self._work.rolled_back()
            raise Fenced(f"rolled back, owned by somebody else now: {sorted(lost)}")
        if not self._keep_on_conflict:
            self._work.rolled_back()
        raise TransactionConflict("a checkpoint moved meanwhile; run the transaction again")

    def _find_out(self, steps: Sequence[Step]) -> None:
        """No answer came: a check alone waits the old transaction out, then tells."""
        outcome = self._stores.coord.commit([step.check for step in steps], [])
        if not isinstance(outcome, Conflict):
            if not self._keep_on_conflict:
                self._work.rolled_back()
            raise TransactionConflict("the transaction was not committed; run it again")
        verdicts = {
            step.put.key: judge(step, self._holdings.owner, outcome.current.get(step.put.key))
            for step in steps
        }
        if all(isinstance(verdict, Happened) for verdict in verdicts.values()):
            versions = {
                key: verdict.version
                for key, verdict in verdicts.items()
                if isinstance(verdict, Happened)
            }
            self._succeeded(steps, versions)
            return
        self._refused(steps, outcome.current)

    def _running(self) -> Atomic:
        if self._atomic is None:
            raise InvalidRequest("use the transaction as a context manager, inside its block")
        return self._atomic
