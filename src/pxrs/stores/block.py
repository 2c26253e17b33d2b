"""Collects the changes of an `Atomic` block, the same way on every engine that has one."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Generic, TypeVar

from pxrs.core.queue import require_first, validate_change
from pxrs.errors import InvalidRequest, NotAtomic, OutcomeUnknown, PxrsError
from pxrs.stores.api import validate_batch, validate_commit
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Check,
    Limits,
    LogPartition,
    QueueChange,
    QueueLimits,
    Write,
)

T = TypeVar("T")


class Block(ABC, Generic[T]):
    """Collects changes while it runs on a `T`; afterwards it holds their results.

    The engine enters it, applies what was collected, and leaves it. See `pxrs.stores.api.Atomic`.
    """

    def __init__(self, limits: Limits, queue_limits: QueueLimits) -> None:
        self._limits = limits
        self._queue_limits = queue_limits
        self._running_on: T | None = None
        self._used = False
        self._checks: list[Check] = []
        self._writes: list[Write] = []
        self._appends: list[Append] = []
        self._change: QueueChange | None = None
        self.versions: dict[str, int] = {}
        self.appended: list[Appended] = []
        self.queued: list[int | None] = []

    @property
    def is_exclusive(self) -> bool:
        return False

    def check(self, *checks: Check) -> None:
        self._running()
        self._checks += checks

    def write(self, *writes: Write) -> None:
        self._running()
        self._writes += writes

    def append(self, where: LogPartition, batch: Batch) -> None:
        self._running()
        if batch.producer_id >= 0:
            raise InvalidRequest("a batch inside a transaction must carry no producer id")
        validate_batch(batch)
        self._appends.append(Append(where, batch))

    def queue(self, change: QueueChange) -> None:
        self._running()
        require_first(self._change)
        validate_change(change, self._queue_limits)
        self._change = change

    def lost(self, error: BaseException) -> PxrsError | None:
        """Return None: where there is no server, no connection can be lost."""
        return None

    def _require_new(self) -> None:
        if self._used:
            raise InvalidRequest("a block of atomic() can be used once; call atomic() again")

    def _enter(self, on: T) -> None:
        self._running_on = on
        self._used = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._used and self._running_on is None:
            # The block was left before; now an error leaves it once more. There is nothing to do.
            return
        self._end(self._running(), error)

    @abstractmethod
    def _end(self, on: T, error: BaseException | None) -> None:
        """Apply and commit what was collected; undo it if the block is left by an error.

        Call `_leave` afterwards. An interrupt before that must leave the block as it was, because
        it is ended once more.
        """

    def _leave(self) -> None:
        self._running_on = None

    def _running(self) -> T:
        if self._running_on is None:
            raise InvalidRequest("use atomic() as a context manager, and only inside its block")
        return self._running_on

    def _validate(self) -> None:
        validate_commit(self._checks, self._writes, self._limits)


class LentBlock(Block[T]):
    """A block of an engine in whose transactions callers may run their own statements.

    It runs in one of three ways: on pxrs' own connection; on one that comes as `Lent`, which pxrs
    commits together with what its caller had begun before; or inside a transaction that the caller
    will end.
    """

    def __init__(self, limits: Limits, queue_limits: QueueLimits, connection: object) -> None:
        super().__init__(limits, queue_limits)
        # Imported here: it imports sqlite3, which programs on other stores need not load.
        from pxrs.stores.connections import loan_of

        self._loan, self._lent = loan_of(connection)
        # Whether the transaction was begun outside.
        self._is_older = False
        self._mark = ""

    @property
    def joined(self) -> bool:
        return self._loan is not None and not self._lent

    def _end(self, on: T, error: BaseException | None) -> None:
        try:
            if error is None:
                self._finish(on)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._let_go(on, error)
            self._leave()

    def _finish(self, on: T) -> None:
        if self._loan is not None and self._lent:
            self._loan.flush()
        self._refuse_ended(on)
        self._validate()
        with savepoint(lambda text: self._run(on, text)) if self._is_older else nullcontext():
            self._apply(on)
        if not self.joined:
            self._commit(on)
            self._committed()

    @abstractmethod
    def _let_go(self, on: T, error: BaseException | None) -> None:
        """After an error roll back what pxrs has to end; leave a transaction of the caller's alone.

        In any case give back what the block took, such as a connection. A second call does no harm.
        """

    @abstractmethod
    def _refuse_ended(self, on: T) -> None:
        """Raise unless the transaction that the block began, or found, is still open."""

    @abstractmethod
    def _run(self, on: T, statement: str) -> object: ...

    @abstractmethod
    def _apply(self, on: T) -> None:
        """Execute the collected changes."""

    @abstractmethod
    def _commit(self, on: T) -> None: ...

    @abstractmethod
    def _committed(self) -> None:
        """Wake the watches that wait for what was committed."""

    def _set_mark(self, on: T) -> None:
        """Mark the transaction with a savepoint, unless it is marked.

        The savepoint is gone once that transaction has ended, by the caller or the engine itself,
        even if another one has begun since: what is done then would land without what was done
        before.
        """
        if not self._mark:
            mark = f"pxrs_{secrets.token_hex(8)}"
            self._run(on, f"SAVEPOINT {mark}")
            self._mark = mark

    def _require_unended(self, is_there: bool, hint: str = "") -> None:
        if not is_there or (self._loan is not None and self._loan.ended()):
            raise InvalidRequest(
                "the transaction was ended inside its block. What a COMMIT in there has written "
                "stays; checkpoints, messages and items of the block were not written, so its "
                "messages and items will be delivered again. Leave COMMIT and ROLLBACK to the block"
                f"{hint and '; '}{hint}"
            )


def commit_as_caller(commit: Callable[[], object]) -> None:
    """Commit through the caller's object, which may call code of the caller's afterwards.

    A pxrs error that comes out of that code does not show whether the commit succeeded.
    """
    try:
        commit()
    except (NotAtomic, OutcomeUnknown):
        raise
    except PxrsError as error:
        raise OutcomeUnknown(f"committed or not, something failed with it: {error}") from error


@contextmanager
def savepoint(run: Callable[[str], object]) -> Iterator[None]:
    """Runs a block in a savepoint: a failure undoes only what was done inside of it."""
    run("SAVEPOINT pxrs_block")
    try:
        yield
    except BaseException:
        # The engine may have rolled back the whole transaction, savepoints included, or be gone.
        with suppress(Exception):
            run("ROLLBACK TO SAVEPOINT pxrs_block")
            run("RELEASE SAVEPOINT pxrs_block")
        raise
    run("RELEASE SAVEPOINT pxrs_block")
