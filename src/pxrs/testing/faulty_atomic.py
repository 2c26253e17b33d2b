"""Transactions that fail. See `pxrs.testing.faults`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from pxrs.errors import PxrsError, StoreBusy, TransactionConflict
from pxrs.stores.api import Atomic
from pxrs.testing.trouble import Faults
from pxrs.types import Appended, Batch, Check, LogPartition, QueueChange, Write


class FaultyAtomic:
    """An `Atomic` that fails when it begins or when it commits.

    One that is done late holds its locks until then, and whoever commits something about the same
    records waits for it; or it has not reached the store yet, and holds none. Whoever commits may
    be interrupted: before it is done, after that, or while it is on its way.
    """

    def __init__(
        self, inner: AbstractContextManager[Atomic], faults: Faults, who: str = ""
    ) -> None:
        self._block = inner
        self._begun: Atomic | None = None
        self._left = False
        self._faults = faults
        self._who = who
        self._keys: set[str] = set()
        self._writes: list[Write] = []

    @property
    def _entered(self) -> Atomic:
        assert self._begun is not None, "use it as a context manager"
        return self._begun

    @property
    def connection(self) -> Any:
        return self._entered.connection

    def lost(self, error: BaseException) -> PxrsError | None:
        return self._entered.lost(error)

    @property
    def joined(self) -> bool:
        return self._entered.joined

    @property
    def is_exclusive(self) -> bool:
        return self._entered.is_exclusive

    @property
    def versions(self) -> dict[str, int]:
        return self._entered.versions

    @property
    def appended(self) -> list[Appended]:
        return self._entered.appended

    @property
    def queued(self) -> list[int | None]:
        return self._entered.queued

    def check(self, *checks: Check) -> None:
        self._keys.update(check.key for check in checks)
        self._entered.check(*checks)

    def write(self, *writes: Write) -> None:
        self._keys.update(write.key for write in writes)
        self._writes += writes
        self._entered.write(*writes)

    def append(self, where: LogPartition, batch: Batch) -> None:
        self._entered.append(where, batch)

    def queue(self, change: QueueChange) -> None:
        self._entered.queue(change)

    def __enter__(self) -> FaultyAtomic:
        faults = self._faults
        faults.call(self._who, "begin", faults.rates.unavailable)
        if faults.happens(faults.rates.busy):
            raise StoreBusy("somebody else is writing")
        self._begun = self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # What is on its way already is out of its sender's hands.
            if not self._left:
                self._block.__exit__(kind, error, trace)
            return
        faults, self._left = self._faults, True
        try:
            self._fail_before()
        except BaseException as failure:
            self._block.__exit__(type(failure), failure, failure.__traceback__)
            raise
        faults.interrupt(
            self._who,
            "commit the transaction",
            self._commit,
            writes=self._writes,
            locking=self._keys,
        )
        if faults.happens(faults.rates.unknown_late):
            is_there = not faults.happens(faults.rates.unlocked)
            faults.put_off(self._commit, locking=self._keys if is_there else ())
            raise faults.unknown(self._who, "the transaction is on its way", self._writes)
        self._commit()
        if faults.happens(faults.rates.unknown_applied):
            raise faults.unknown(self._who, "the answer to the transaction was lost", self._writes)

    def _fail_before(self) -> None:
        """Fail without having done anything."""
        faults = self._faults
        faults.call(self._who, "commit the transaction", faults.rates.unavailable)
        if faults.happens(faults.rates.busy):
            raise TransactionConflict("another transaction was in the way")
        if faults.happens(faults.rates.unknown_lost):
            raise faults.unknown(self._who, "the transaction was lost", self._writes)
        faults.wait_for_locks(self._keys)

    def _commit(self) -> None:
        self._block.__exit__(None, None, None)
