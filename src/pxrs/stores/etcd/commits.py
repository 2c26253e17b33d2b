"""Transactions whose outcome is known, whatever the network does.

Every transaction also writes a *slot*, a key that only this handle writes, and is conditional
on that slot being as this handle left it. So of several copies of one transaction (sent again
because no answer came, still on its way through some node) at most one is ever applied, and
the slot shows by the transaction's id whether one was. A conflict is final only when no copy
can come after it: "there is no such record" may become true again, so after a doubtful try the
slot is written once more before a conflict is reported. And since etcd may apply a transaction and
answer that it has no space, that answer counts only after the slot was read.

Slots belong to a lease of their own and vanish an hour after their last use.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pxrs.clock import Clock
from pxrs.errors import OutcomeUnknown, PxrsError, SessionLost, StoreFull
from pxrs.stores.etcd.failures import Remedy, remedy
from pxrs.stores.etcd.history import History
from pxrs.stores.etcd.nodes import Node, Nodes
from pxrs.stores.etcd.wire import first_kv, get_op, grpc, put_op, rpc, txn, unchanged

_LEASE_TTL = 3600
# A slot is not used for longer than this: its lease must not end under a transaction.
_SLOT_LIFE = 1800.0


@dataclass
class Slot:
    """A key that only this handle writes, and the revision at which it was written last."""

    key: bytes
    lease: int
    made: float
    revision: int = 0


class Outcome(NamedTuple):
    """The revision of a transaction's writes, or what its reads found instead."""

    revision: int | None
    reads: Sequence[Any] = ()


class SlotGone(Exception):  # noqa: N818 - what happened
    """The slot is not as this handle left it, and no copy of a transaction is on its way."""


class Commits:
    """Sends transactions for one handle, each with a slot of its own while it runs."""

    def __init__(self, nodes: Nodes, history: History, folder: bytes, clock: Clock) -> None:
        self._nodes = nodes
        self._history = history
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._lease: tuple[int, float] | None = None

    def run(
        self,
        compares: Sequence[Any],
        writes: Sequence[Any],
        reads: Sequence[Any],
        *,
        bound: bool = False,
    ) -> Outcome:
        """Do the writes if the comparisons hold, else the reads. `bound`: a write names a lease.

        Raises `OutcomeUnknown` if no node answered and it may have happened, `StoreUnavailable` if
        no node was reached.
        """
        while True:
            slot = self._take()
            try:
                outcome = _Transaction(self._nodes, self._history, slot).run(
                    compares, writes, reads
                )
            except SlotGone:
                # An operator removed it; no copy is under way that could still be applied.
                self._forget(slot.lease)
            except SessionLost:
                self._forget(slot.lease)
                if bound:
                    raise
            else:
                # Not reused after an error: a copy may still come, and find the slot as it expects.
                with self._lock:
                    self._free.append(slot)
                return outcome

    def close(self) -> None:
        """Revoke the lease of the slots, so that they vanish."""
        if self._lease is not None:
            request = rpc.LeaseRevokeRequest(ID=self._lease[0])
            self._nodes.ask(
                lambda node: node.leases.LeaseRevoke, request, min(1.0, self._nodes.farewell())
            )

    def _forget(self, lease: int) -> None:
        """Use no slot of this lease again."""
        with self._lock:
            self._free = [slot for slot in self._free if slot.lease != lease]
            if self._lease is not None and self._lease[0] == lease:
                self._lease = None

    def _take(self) -> Slot:
        now = self._clock.monotonic()
        with self._lock:
            while self._free:
                slot = self._free.pop()
                if now - slot.made < _SLOT_LIFE:
                    return slot
            lease = self._lease
        if lease is None or now - lease[1] >= _SLOT_LIFE:
            lease = self._new_lease(now)
        return Slot(self._folder + secrets.token_hex(8).encode(), *lease)

    def _new_lease(self, now: float) -> tuple[int, float]:
        request = rpc.LeaseGrantRequest(TTL=_LEASE_TTL)
        granted = self._nodes.ask(lambda node: node.leases.LeaseGrant, request)
        with self._lock:
            self._lease = (granted.ID, now)
            return self._lease


class _Transaction:
    def __init__(self, nodes: Nodes, history: History, slot: Slot) -> None:
        self._nodes = nodes
        self._history = history
        self._slot = slot
        self._mark = secrets.token_hex(12).encode()
        # How many copies may be on their way.
        self._doubtful = 0

    def run(self, compares: Sequence[Any], writes: Sequence[Any], reads: Sequence[Any]) -> Outcome:
        slot = self._slot
        request = txn(
            [unchanged(slot.key, slot.revision), self._history.condition(), *compares],
            [put_op(slot.key, self._mark, slot.lease), *writes],
            [get_op(slot.key), get_op(self._history.key), *reads],
        )
        try:
            answer = self._send(request)
        except StoreFull as full:
            return self._look(full)
        if answer.succeeded:
            slot.revision = answer.header.revision
            return Outcome(slot.revision)
        self._history.compare(first_kv(answer.responses[1]))
        happened = self._judge(first_kv(answer.responses[0]))
        if happened is not None:
            return happened
        if self._doubtful:
            settled = self._settle()
            if settled is not None:
                return settled
        return Outcome(None, answer.responses[2:])

    def _judge(self, found: Any) -> Outcome | None:
        """Return the success of an earlier copy, if the slot that was found shows one."""
        if found is not None and found.value == self._mark:
            self._slot.revision = found.mod_revision
            return Outcome(found.mod_revision)
        if (0 if found is None else found.mod_revision) != self._slot.revision:
            if not self._doubtful:
                raise SlotGone
            raise OutcomeUnknown(
                "the outcome of this commit is unknown because its evidence was removed from etcd; "
                "nothing but pxrs may write under its prefix"
            )
        return None

    def _settle(self) -> Outcome | None:
        """Make sure that no copy comes after the conflict that was seen."""
        slot, void = self._slot, b"void " + self._mark
        request = txn(
            [unchanged(slot.key, slot.revision)],
            [put_op(slot.key, void, slot.lease)],
            [get_op(slot.key)],
        )
        try:
            answer = self._send(request)
        except StoreFull as full:
            raise OutcomeUnknown(
                f"a commit was not answered, and its outcome can't be found out: {full}"
            ) from full
        if answer.succeeded:
            slot.revision = answer.header.revision
            return None
        found = first_kv(answer.responses[0])
        if found is not None and found.value == void:
            slot.revision = found.mod_revision
            return None
        return self._judge(found)

    def _look(self, full: StoreFull) -> Outcome:
        """Find out the outcome of a transaction that etcd answered with "no space".

        etcd may have applied it: the transaction that crosses the quota is applied and answered
        with that error. Refused or applied, this copy is no longer on its way. Reading needs no
        space.
        """
        request = rpc.RangeRequest(key=self._slot.key)
        try:
            answer = self._nodes.ask(lambda node: node.kv.Range, request)
        except PxrsError as error:
            raise _unknown(error) from error
        happened = self._judge(answer.kvs[0] if answer.kvs else None)
        if happened is not None:
            return happened
        if self._doubtful:
            raise _unknown(full) from full
        raise full

    def _send(self, request: Any) -> Any:
        def send(node: Node, left: float, words: list[tuple[str, str]]) -> Any:
            try:
                return node.kv.Txn(request, timeout=left, metadata=words)
            except grpc.RpcError as error:
                self._doubtful += remedy(error) is Remedy.ANOTHER_NODE
                raise

        try:
            return self._history.follow(lambda: self._nodes.call(send, size=request.ByteSize()))
        except (SessionLost, StoreFull):
            # Leases do not come back: copies fail as well. A transaction that was answered with "no
            # space" may have been applied: the caller has to look.
            raise
        except PxrsError as error:
            if not self._doubtful:
                raise
            raise _unknown(error) from error


def _unknown(error: PxrsError) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"a commit was sent to etcd and not answered ({error}); "
        "it may have happened or may still happen"
    )
