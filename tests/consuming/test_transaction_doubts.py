"""A consumer's transaction that got no answer, or was overtaken: who knows what after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.transactions import Transactions
from pxrs.errors import Fenced, OutcomeUnknown, TransactionConflict
from pxrs.testing.faults import NOTHING, Interrupted, Rates
from support.stepping import TTL, Group

pytestmark = pytest.mark.engine("memory")


def send_one(transactions: Transactions) -> None:
    with transactions.begin() as tx:
        tx.send("out", "effect", "k")


def test_messages_in_hand_during_a_seek_do_not_undo_it() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    transactions = group.transactions(member, "a")
    assert group.poll(member) == [0, 1, 2, 3, 4]
    member.seek("t", 0, 3)
    send_one(transactions)
    assert (group.claim().checkpoint, group.claim().done) == (3, ())
    assert group.poll(member) == [3, 4]
    send_one(transactions)
    assert (group.claim().checkpoint, group.sent()) == (5, 2)


def test_messages_of_a_deleted_topic_are_not_those_of_its_namesake() -> None:
    """Its claim is another one, and its epochs go on above those of the old one."""
    group = Group()
    member = group.member("a")
    group.look(member)
    group.poll(member)
    group.topics.delete("t")
    group.make_topic()
    group.look(member)
    assert (group.claim().owner, group.claim().epoch) == (member.membership.me.id, 2)
    with pytest.raises(Fenced):
        send_one(group.transactions(member, "a"))
    assert (group.claim().checkpoint, group.sent()) == (None, 0)
    assert group.poll(member) == [0, 1, 2, 3, 4]


def lose_the_answer(group: Group, then: Callable[[], None]) -> None:
    """The next transaction is done without an answer; `then` is what its owner sleeps through."""
    group.faults.rates = Rates(unknown_applied=1)

    def before_call(who: str, what: str) -> None:
        if what == "commit":
            group.faults.rates = NOTHING
            group.faults.before_call = None
            then()

    group.faults.before_call = before_call


def test_nobody_is_told_that_it_failed_once_it_was_taken_over() -> None:
    """It was committed, and then the next owner's claim stands where it would say so."""
    group = Group()
    a, b = group.member("a"), group.member("b")
    group.look(a, b)
    group.poll(a)

    def take_over() -> None:
        group.clock.advance(TTL)
        b.membership.join()
        group.look(b)

    lose_the_answer(group, take_over)
    with pytest.raises(OutcomeUnknown, match="overwritten the evidence"):
        send_one(group.transactions(a, "a"))
    assert (group.sent(), group.claim().owner) == (1, b.membership.me.id)
    assert group.poll(b) == []


def test_it_is_known_to_have_happened_while_the_claim_is_its_owners() -> None:
    group = Group()
    a = group.member("a")
    group.look(a)
    group.poll(a)
    lose_the_answer(group, lambda: None)
    send_one(group.transactions(a, "a"))
    assert (group.sent(), group.claim().checkpoint) == (1, 5)
    assert group.poll(a) == []


def leave_in_doubt(group: Group, member: MemberSteps, name: str) -> None:
    """A transaction that holds its locks, and of which the store does not say what became."""
    group.poll(member)
    group.faults.rates = Rates(unknown_late=1, longest_delay=1000.0)
    with pytest.raises(OutcomeUnknown, match="does not say"):
        send_one(group.transactions(member, name))
    group.faults.rates = NOTHING
    assert (member.owned_claims.parts, group.sent()) == (frozenset(), 0)


def test_it_lands_while_its_claim_is_let_go() -> None:
    """The claim is read, then the transaction changes it, then it is to be released."""
    group = Group()
    b = group.member("b")
    group.look(b)
    leave_in_doubt(group, b, "b")
    a = group.member("a")
    # The target gives it to a, which waits for b to let go.
    group.look(a, b)
    assert (group.claim().owner, group.claim().checkpoint) == (a.membership.me.id, 5)
    assert not b.owned_claims.doubts
    assert group.sent() == 1


def test_it_lands_while_it_is_claimed_again_and_then_the_target_changes() -> None:
    group = Group()
    b = group.member("b")
    group.look(b)
    leave_in_doubt(group, b, "b")
    # One look: it claims again, finds another version than it had read, and has to look again.
    b.membership.look()
    assert group.claim().checkpoint == 5
    a = group.member("a")
    group.look(a)
    group.look(a, b)
    assert group.claim().owner == a.membership.me.id
    assert not b.owned_claims.doubts


def test_one_that_was_lost_may_be_run_again() -> None:
    group = Group()
    a = group.member("a")
    group.look(a)
    assert group.poll(a) == [0, 1, 2, 3, 4]
    group.faults.rates = Rates(unknown_lost=1)
    group.faults.before_call = lambda who, what: (
        setattr(group.faults, "rates", NOTHING) if what == "commit" else None
    )
    with pytest.raises(TransactionConflict):
        send_one(group.transactions(a, "a"))
    assert group.poll(a) == [0, 1, 2, 3, 4]
    send_one(group.transactions(a, "a"))
    assert (group.sent(), group.claim().checkpoint) == (1, 5)


@pytest.mark.parametrize(("fate", "sent"), [("done", 1), ("lost", 0)])
def test_interrupted_twice_is_settled_by_claiming_again(fate: str, sent: int) -> None:
    """Ctrl-C while it commits, and again while it finds out: nothing counts that is not there."""
    group = Group()
    member = group.member("a")
    group.look(member)
    transactions = group.transactions(member, "a")
    assert group.poll(member) == [0, 1, 2, 3, 4]
    group.interrupt(fate, "lost")
    with pytest.raises(Interrupted):
        send_one(transactions)
    group.faults.rates = NOTHING
    assert group.poll(member) == []
    group.look(member)
    assert (group.sent(), group.claim().checkpoint) == (sent, 5 if sent else None)
    assert group.poll(member) == ([] if sent else [0, 1, 2, 3, 4])
