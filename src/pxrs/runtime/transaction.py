"""A consumer's transaction: a unit of work that moves its checkpoint, too.

A connection of the caller's is lent for the block: what it had begun before becomes part of it,
and pxrs ends it either way. If the caller committed, positions would have moved past messages of
which nobody knows yet whether they count.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pxrs.errors import CommitConflict, InvalidRequest, OutcomeUnknown, PxrsError
from pxrs.runtime.checkpoint import Checkpoint
from pxrs.runtime.hold import Desk
from pxrs.runtime.unit_of_work import UnitOfWork
from pxrs.stores.api import Atomic
from pxrs.stores.connections import Lent


class Transaction(UnitOfWork):
    """Leaving the block commits, leaving it by an exception rolls back and hands out again."""

    def __init__(self, desk: Desk, checkpoint: Checkpoint, connection: Any = None) -> None:
        super().__init__(desk, connection=None if connection is None else Lent(connection))
        self._checkpoint = checkpoint
        self._has_one_try = True
        self._inside = False

    @property
    def keeps_on_conflict(self) -> bool:
        """Whether the same messages are still in hand after a conflict, to be tried again."""
        return self._checkpoint.keeps_on_conflict

    def __enter__(self) -> Transaction:
        self._checkpoint.begin(lent=self._given is not None)
        try:
            if self._given is not None:
                # The caller need not ask for the connection: it has it.
                self._open_atomic()
        except BaseException as error:
            # One that never began is left by an exception too: the next poll must not count it.
            try:
                self._checkpoint.rewind_after(error)
            finally:
                self._checkpoint.end()
            raise
        self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            # Claims tell afterwards whether it was done; where there are none, the unit does.
            has_items = bool(self._hold.taken or self._put)
            needs_unit = has_items or not self._checkpoint.is_staged
            self._stage(atomic, self._change() if needs_unit else None)
        except BaseException as error:
            self._undo(error)
            raise
        self._land(atomic)

    def _land(self, atomic: Atomic) -> None:
        """Commit, and find out what became of it."""
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
            # Ctrl-C, or something of the caller's that its session calls: before or after?
            self._leave_block(error)
            if not self._happened(error):
                checkpoint.rewind_after(error)
            raise
        else:
            self._answered(committed=True)
            checkpoint.succeeded(atomic.versions)

    def _happened(self, doubt: BaseException) -> bool:
        """No answer came: the claims tell, or the unit where no claim was written."""
        if self._checkpoint.is_staged:
            return self._checkpoint.happened(doubt)
        return self._was_committed()
