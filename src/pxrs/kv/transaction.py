"""Keys and values inside a transaction: written when, and only if, it commits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from pxrs.core import kv
from pxrs.core.kv import Change, KeyBatch
from pxrs.errors import CommitConflict, PxrsError, TransactionConflict
from pxrs.kv.store import KeyValues
from pxrs.stores.api import Atomic
from pxrs.types import Entry, Version


class TransactionKeys:
    """`tx.kv`: puts and deletes with everything else that the transaction does, or not at all.

    Conditions are checked when it commits: `VersionMismatch` and `AlreadyExists` are raised then,
    and nothing of the transaction was done. `entered` guards the transaction's state.
    """

    def __init__(
        self, keys: KeyValues, entered: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._keys = keys
        self._entered = entered
        self._changes: list[Change] = []

    def put(
        self,
        key: str | bytes,
        value: str | bytes,
        *,
        if_match: Version | None = None,
        ttl: float | None = None,
    ) -> None:
        """Write a value when this transaction commits. See `KeyValues.put`."""
        change = self._keys._put_change(key, value, if_match, ttl)
        with self._entered():
            self._changes.append(change)

    def delete(self, key: str | bytes, *, if_match: Version | None = None) -> None:
        """Remove a key, if it is there, when this transaction commits. See `KeyValues.delete`."""
        change = self._keys._delete_change(key, if_match)
        with self._entered():
            self._changes.append(change)

    def get(self, key: str | bytes) -> Entry | None:
        """The key as it is in the store, without what this transaction is going to write.

        To commit only if it is still so, give its version to `put` or `delete` as `if_match`.
        """
        return self._keys.get(key)

    def _forget(self) -> None:
        self._changes.clear()

    def _stage(self, atomic: Atomic) -> None:
        """Adds the writes to a commit; raises the error of a condition that does not hold."""
        if not self._changes:
            return
        batch = KeyBatch(self._changes)
        attempt = self._keys._attempt([batch], {}, fresh=True, all_of_them=True)
        for answer in attempt.answers[0]:
            if isinstance(answer, PxrsError):
                raise answer
        atomic.check(*attempt.draft.checks)
        atomic.write(*attempt.draft.writes)

    def _may_have_caused(self, conflict: CommitConflict | TransactionConflict) -> bool:
        """Whether a commit failed only because another one wrote to the same shards.

        Why the engine rolled a transaction back is not known; to do it again is safe.
        """
        if isinstance(conflict, TransactionConflict):
            return True
        return all(key.startswith(kv.HEADS) for key in conflict.current)
