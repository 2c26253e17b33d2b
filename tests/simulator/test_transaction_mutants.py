"""Break transactions in one place: the simulator has to notice, and to say what broke."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from pxrs.consuming.in_hand import Uncommitted
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.transactions import Checkpoint, Handed, Transaction
from pxrs.core import claims
from pxrs.core.claims import OwnedClaim, Step
from pxrs.core.records import Claim, decode
from pxrs.groups.owned_claims import Applied, Mark, OwnedClaims
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.api import Atomic
from pxrs.testing.faults import Interrupted, Rates
from pxrs.types import Committed, Holder, QueueChange, TopicPartition, Versioned
from support.mutants import INTERRUPTED, NO_ANSWERS, Mutant, Patch, catch

pytestmark = pytest.mark.thorough


def checkpoint_beside_the_transaction(patch: Patch) -> None:
    """It is committed after the effects, in a commit of its own."""
    succeeded = Checkpoint.succeeded

    def late(self: Checkpoint, versions: Mapping[str, int]) -> None:
        outcome = self._coord.commit(
            [step.check for step in self._steps], [step.put for step in self._steps]
        )
        if isinstance(outcome, Committed):
            succeeded(self, outcome.versions)

    def stage(self: Checkpoint, atomic: Atomic) -> None:
        self._steps = self._owned_claims.steps_to_commit(self._marks)

    patch.setattr(Checkpoint, "stage", stage)
    patch.setattr(Checkpoint, "succeeded", late)


def transaction_is_not_fenced(patch: Patch) -> None:
    """The claims are written in it, whatever version the store has."""

    def stage(self: Checkpoint, atomic: Atomic) -> None:
        self._steps = self._owned_claims.steps_to_commit(self._marks)
        atomic.write(*(step.put for step in self._steps))

    patch.setattr(Checkpoint, "stage", stage)


def no_rewind_after_a_rollback(patch: Patch) -> None:
    patch.setattr(Handed, "rolled_back", lambda self: None)


def no_answer_means_not_committed(patch: Patch) -> None:
    patch.setattr(Checkpoint, "happened", lambda self, doubt: False)


def a_look_calls_it_off(patch: Patch) -> None:
    """Who got no answer looks at the claims, and writes nothing: it lands after that."""

    def happened(self: Checkpoint, doubt: BaseException) -> bool:
        outcome = self._coord.commit([step.check for step in self._steps], [])
        if isinstance(outcome, Committed):
            return False
        self._find_out(outcome.current, doubt)
        return True

    patch.setattr(Checkpoint, "happened", happened)


def no_answer_means_committed(patch: Patch) -> None:
    def happened(self: Checkpoint, doubt: BaseException) -> bool:
        self._work.committed(self._marks)
        return True

    patch.setattr(Checkpoint, "happened", happened)


def transaction_takes_the_next_epoch_for_its_own(patch: Patch) -> None:
    """What was handed out before a partition was lost is committed after it was claimed again."""
    patch.setattr(MemberSteps, "drop_stale", lambda self: frozenset())


def transaction_undoes_a_seek(patch: Patch) -> None:
    """What was in hand before the seek counts after it."""
    properly = Handed.marks

    def marks(self: Handed) -> dict[TopicPartition, Mark]:
        in_flight = self._steps.table.in_flight
        ends = {each.owned.part: each.messages[each.seen - 1].offset + 1 for each in in_flight}
        marks = properly(self)
        return marks | {part: Mark(end) for part, end in ends.items() if part in marks}

    patch.setattr(Handed, "marks", marks)


def loop_forgets_what_it_has_left(patch: Patch) -> None:
    """A transaction is about the partition that the loop is at, and no other."""
    patch.setattr(Uncommitted, "add", lambda self, owned: None)


def claims_found_after_a_doubt_are_forgotten(patch: Patch) -> None:
    """A transaction landed while its claim was let go, and nobody looks at that claim again."""

    def let_go(self: OwnedClaims, part: TopicPartition, found: Versioned) -> Applied:
        owned_claim = OwnedClaim(part, found.key, found.version, decode(found, Claim))
        return self._apply([claims.release(owned_claim, None, (), self._stamp())], None)

    patch.setattr(OwnedClaims, "let_go", let_go)
    patch.setattr(OwnedClaims, "_is_mine", lambda self, verdict: False)


def items_are_put_beside_the_transaction(patch: Patch) -> None:
    """They are there, whatever becomes of it."""
    put = UnitOfWork.put

    def at_once(self: UnitOfWork, queue: str, value: bytes) -> None:
        put(self, queue, value)
        change = QueueChange(Holder("", "beside"), put=(self._put.pop(),))
        with self._context.stores.atomic() as atomic:
            atomic.queue(change)

    patch.setattr(UnitOfWork, "put", at_once)


def taken_items_stay(patch: Patch) -> None:
    """They are free again after the commit, and handled twice."""

    def change(self: UnitOfWork) -> QueueChange:
        return QueueChange(self._held.holder, put=tuple(self._put))

    patch.setattr(UnitOfWork, "_change", change)


def only_those_who_take_put(patch: Patch) -> None:
    """A transaction that holds nothing has no items to commit."""
    stage = UnitOfWork._stage

    def taken_only(self: UnitOfWork, atomic: Atomic, change: QueueChange | None) -> None:
        stage(self, atomic, change if self._held.taken else None)

    patch.setattr(UnitOfWork, "_stage", taken_only)


def interrupted_is_handed_out_again(patch: Patch) -> None:
    """Ctrl-C came after the commit: the claim is known to be written, the messages come again.

    To hand them out again is not enough to break it: the claim would fence whoever does not know
    of that commit.
    """
    record = Checkpoint._record

    def half(self: Checkpoint, steps: Sequence[Step], versions: Mapping[str, int]) -> None:
        if isinstance(sys.exception(), Interrupted):
            self._owned_claims.wrote(steps, versions)
            self._work.rolled_back()
        else:
            record(self, steps, versions)

    patch.setattr(Checkpoint, "_record", half)


def interrupted_is_committed(patch: Patch) -> None:
    """What was in hand when Ctrl-C came counts as handled."""
    happened = Transaction._happened

    def hopeful(self: Transaction, doubt: BaseException) -> bool:
        return isinstance(doubt, Interrupted) or happened(self, doubt)

    patch.setattr(Transaction, "_happened", hopeful)


def interrupted_again_is_forgotten(patch: Patch) -> None:
    """Ctrl-C while it finds out what became of a commit: the claims are worked on as before."""
    doubt, lost = OwnedClaims.doubt, Handed.lost
    forgot: list[bool] = []

    def forgetful(self: OwnedClaims, steps: Sequence[Step]) -> None:
        if isinstance(sys.exception(), Interrupted):
            forgot.append(True)
        else:
            doubt(self, steps)

    def keep(self: Handed, parts: frozenset[TopicPartition]) -> None:
        if forgot:
            forgot.pop()
        else:
            lost(self, parts)

    patch.setattr(OwnedClaims, "doubt", forgetful)
    patch.setattr(Handed, "lost", keep)


def number_is_given_out_again(patch: Patch) -> None:
    """Evidence by a number that a crash hands out again, as `pg_xact_status` gives it.

    The number that a transaction would get is noted when it is sent. If it is lost with the
    server, whoever commits next gets that number, and it counts as committed.
    """
    stage, happened = Checkpoint.stage, Checkpoint.happened
    sent: WeakKeyDictionary[Checkpoint, int] = WeakKeyDictionary()

    def last_number(self: Checkpoint) -> int:
        coord: Any = self._coord
        revision: int = coord._inner._inner._revision
        return revision

    def note(self: Checkpoint, atomic: Atomic) -> None:
        stage(self, atomic)
        sent[self] = last_number(self) + 1

    def by_number(self: Checkpoint, doubt: BaseException) -> bool:
        if last_number(self) >= sent[self]:
            self._work.committed(self._marks)
            return True
        return happened(self, doubt)

    patch.setattr(Checkpoint, "stage", note)
    patch.setattr(Checkpoint, "happened", by_number)


TRANSACTIONS = {"transactions": True}
QUEUES = {"transactions": True, "queues": True}

MUTANTS = [
    Mutant(checkpoint_beside_the_transaction, r"without moving its checkpoint", TRANSACTIONS),
    Mutant(transaction_is_not_fenced, r"wrote|epoch|went back|twice", TRANSACTIONS),
    Mutant(no_rewind_after_a_rollback, r"was not handled", TRANSACTIONS),
    Mutant(
        no_answer_means_not_committed,
        r"was committed.* told|twice",
        {**TRANSACTIONS, "rates": NO_ANSWERS},
    ),
    Mutant(
        a_look_calls_it_off,
        r"was committed.* told|twice",
        {**TRANSACTIONS, "rates": Rates(unknown_late=0.1, unlocked=1.0, longest_delay=1.0)},
    ),
    Mutant(
        no_answer_means_committed,
        r"left no effect",
        {**TRANSACTIONS, "rates": NO_ANSWERS},
    ),
    Mutant(
        interrupted_is_handed_out_again,
        r"twice|done before|and has the effects",
        {**TRANSACTIONS, "rates": INTERRUPTED},
    ),
    Mutant(
        interrupted_is_committed,
        r"was not handled|and has the effects|without moving|no rest",
        {**TRANSACTIONS, "rates": INTERRUPTED},
    ),
    Mutant(
        interrupted_again_is_forgotten,
        r"was not handled|and has the effects|without moving|no rest|twice",
        {**TRANSACTIONS, "rates": INTERRUPTED},
    ),
    Mutant(
        number_is_given_out_again,
        r"left no effect|and has the effects",
        {**TRANSACTIONS, "rates": Rates(unknown_lost=0.2), "interleave": 0.2},
        first=25,
    ),
    Mutant(
        transaction_takes_the_next_epoch_for_its_own,
        r"handed out before|was not handled|and has the effects|without moving|twice",
        {**TRANSACTIONS, "trouble": 1.0, "members": 3, "interleave": 0.2, "steps": 250},
        first=60,
    ),
    Mutant(loop_forgets_what_it_has_left, r"was not handled|without moving", TRANSACTIONS),
    Mutant(transaction_undoes_a_seek, r"was not handled", TRANSACTIONS),
    Mutant(items_are_put_beside_the_transaction, r"without moving its checkpoint", QUEUES),
    Mutant(taken_items_stay, r"took tasks \[\d+\], removed \[\]", QUEUES),
    Mutant(only_those_who_take_put, r"was not handled|and has the effects", QUEUES),
    Mutant(
        claims_found_after_a_doubt_are_forgotten,
        r"no rest",
        {**TRANSACTIONS, "rates": NO_ANSWERS, "revoke_timeout": None, "interleave": 0.1},
        first=225,
    ),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(mutant, monkeypatch)
