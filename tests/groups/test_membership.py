"""Single interleavings of members, step by step; the simulator looks for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pxrs.core.assign import sticky
from pxrs.core.group import Me, Memory, Rules, View, decide
from pxrs.core.records import Claim, GroupTopic, Head, MemberRecord, resets_prefix
from pxrs.errors import Displaced, Fenced, OutcomeUnknown, PxrsError, StoreFull
from pxrs.groups.admin import Groups
from pxrs.testing.faults import NOTHING, FaultyCoord, FaultyStores, Interrupted, Rates
from pxrs.types import Check, TopicPartition, Write
from support.stepping import TTL, Group

pytestmark = pytest.mark.engine("memory")

PART = TopicPartition("t", 0)


def test_frozen_static_process_does_not_push_out_its_successor() -> None:
    group = Group()
    old = group.member("a", "old", static=True)
    group.look(old)
    group.clock.advance(TTL)
    new = group.member("a", "new", static=True)
    group.look(new)
    with pytest.raises(Displaced):
        old.membership.look()
    group.look(new)
    assert group.claim().owner == new.membership.me.id


def test_process_that_was_frozen_comes_back_if_nobody_took_its_name() -> None:
    group = Group()
    member = group.member("a", static=True)
    group.look(member)
    before = member.membership.me
    group.clock.advance(TTL)
    group.look(member)
    assert group.claim().owner == member.membership.me.id != before.id


@pytest.mark.parametrize(
    "rates",
    [Rates(unknown_applied=1), Rates(unknown_late=1, longest_delay=0.5)],
    ids=["answer lost", "late"],
)
def test_claim_that_nobody_knows_of_is_released(rates: Rates) -> None:
    """No answer came, it was done all the same, and meanwhile the target gave it to another."""
    group = Group()
    b = group.member("b")
    b.membership.look()
    group.faults.rates = rates
    with pytest.raises(OutcomeUnknown):
        b.membership.look()
    group.faults.rates = NOTHING
    assert b.owned_claims.parts == frozenset()
    group.clock.advance(0.5)
    a = group.member("a")
    group.look(a)
    assert group.claim().owner == b.membership.me.id
    group.look(a, b)
    assert group.claim().owner == a.membership.me.id
    assert a.owned_claims.parts == {PART}
    assert not b.owned_claims.doubts


def test_claim_that_nobody_knew_of_is_kept_if_it_is_ours() -> None:
    group = Group()
    a = group.member("a")
    a.membership.look()
    group.faults.rates = Rates(unknown_applied=1)
    with pytest.raises(OutcomeUnknown):
        a.membership.look()
    group.faults.rates = NOTHING
    group.look(a)
    assert group.claim().owner == a.membership.me.id
    assert a.owned_claims.parts == {PART}
    assert not a.owned_claims.doubts


@pytest.mark.parametrize("fate", ["done", "lost"])
def test_a_join_without_an_answer_is_made_again(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a consumer while a node, or a connection, dies need not hear of it."""
    group = Group()
    commit, errors = FaultyCoord.commit, [OutcomeUnknown("no answer")]

    def answer_later(self: FaultyCoord, checks: Sequence[Check], writes: Sequence[Write]) -> Any:
        if errors:
            if fate == "done":
                commit(self, checks, writes)
            raise errors.pop()
        return commit(self, checks, writes)

    monkeypatch.setattr(FaultyCoord, "commit", answer_later)
    member = group.member("a")
    member.membership.join()
    assert not errors
    before = member.membership.me
    group.look(member)
    assert group.claim().owner == member.membership.me.id == before.id


def test_topics_announced_without_an_answer_are_announced_again() -> None:
    """The store knows what they were in between; now they are what they were at first."""
    group = Group()
    names: list[tuple[str, ...]] = [("t",)]
    member = group.member("a", names=lambda: names[-1])
    group.look(member)
    names.append(())
    group.faults.rates = Rates(unknown_applied=1)
    with pytest.raises(OutcomeUnknown):
        member.membership.look()
    group.faults.rates = NOTHING
    names.append(("t",))
    group.look(member)
    assert member.owned_claims.parts == {PART}


def test_a_beginning_at_the_end_without_an_answer_is_not_put_off() -> None:
    """What has come since belongs to the group."""
    group = Group()
    member = group.member("a", start="latest")
    group.look(member)
    group.faults.rates = Rates(unknown_applied=1)
    with pytest.raises(OutcomeUnknown):
        group.poll(member)
    group.faults.rates = NOTHING
    group.send()
    assert group.poll(member) == [5, 6, 7, 8, 9]
    assert group.claim().checkpoint == 5


def test_seek_without_an_answer_starts_where_the_store_says() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    assert [message.offset for message in member.one_by_one(member.hand_out(3))] == [0, 1, 2]
    member.commit_handled()
    group.faults.rates = Rates(unknown_applied=1)
    with pytest.raises(OutcomeUnknown):
        member.seek("t", 0, 1)
    group.faults.rates = NOTHING
    assert member.hand_out(10) == []
    group.look(member)
    member.fetch(lambda: None)
    assert [message.offset for message in member.one_by_one(member.hand_out(1))] == [1]


@pytest.mark.parametrize(("fate", "start"), [("done", 1), ("lost", 3)])
def test_interrupted_seek_starts_where_the_store_says(fate: str, start: int) -> None:
    """Ctrl-C came before the commit or after it: the work does not go on where it was."""
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    assert [message.offset for message in member.one_by_one(member.hand_out(3))] == [0, 1, 2]
    member.commit_handled()
    group.interrupt(fate)
    with pytest.raises(Interrupted):
        member.seek("t", 0, 1)
    group.faults.rates = NOTHING
    assert member.hand_out(10) == []
    group.look(member)
    member.fetch(lambda: None)
    assert [message.offset for message in member.one_by_one(member.hand_out(1))] == [start]


def test_interrupted_release_does_not_take_away_what_is_worked_on_again() -> None:
    """It was on its way when Ctrl-C came: a write of the owner's makes it impossible."""
    group = Group()
    member = group.member("a")
    group.look(member)
    member.table.leaving(frozenset([PART]))
    group.interrupt("late")
    with pytest.raises(Interrupted):
        member.membership.release_what_is_finished()
    group.faults.rates = NOTHING
    assert PART in member.owned_claims.doubts
    member.membership.look()
    group.clock.advance(TTL / 2)
    group.faults.arrive()
    assert (group.claim().owner, group.claim().epoch) == (member.membership.me.id, 1)


def test_a_refusal_after_no_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try was done; that there is no room for the second one says nothing of it."""
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    assert [message.offset for message in member.one_by_one(member.hand_out(3))] == [0, 1, 2]
    commit = FaultyCoord.commit
    errors: list[PxrsError] = [OutcomeUnknown("no answer"), StoreFull("no room")]

    def fail(self: FaultyCoord, checks: Sequence[Check], writes: Sequence[Write]) -> Any:
        if len(errors) == 2:
            commit(self, checks, writes)
        raise errors.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(FaultyCoord, "commit", fail)
        with pytest.raises(OutcomeUnknown):
            member.commit_handled()
    assert group.claim().checkpoint == 3
    assert PART in member.owned_claims.doubts


def test_seek_of_a_lost_partition_leaves_no_record() -> None:
    group = Group()
    a = group.member("a")
    group.look(a)
    b = group.member("a", "again")
    group.look(b)
    assert group.claim().owner == b.membership.me.id
    with pytest.raises(Fenced, match="another member owns"):
        a.seek("t", 0, 1)
    assert group.stores.coord.list(resets_prefix("g")) == []


def test_leaving_a_loop_loses_nothing() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    loop = member.one_by_one(member.hand_out(10))
    assert next(loop).offset == 0
    assert next(loop).offset == 1
    loop.close()  # type: ignore[attr-defined]
    member.finish()
    member.commit_handled()
    assert group.claim().checkpoint == 1


def test_a_batch_in_hand_can_be_committed_if_its_partition_stays_after_all() -> None:
    """It was to go to somebody who has left again."""
    group = Group()
    member = group.member("b")
    group.look(member)
    member.fetch(lambda: None)
    messages = member.all_at_once(member.hand_out(3))
    a = group.member("a")
    group.look(a, member)
    assert member.table.partitions[PART].state == "leaving"
    a.membership.leave()
    group.look(member)
    assert member.table.partitions[PART].state == "owned"
    member.commit_message(messages[1])
    assert group.claim().checkpoint == 2
    assert group.poll(member) == [3, 4]


@pytest.mark.parametrize("is_left", [False, True])
def test_pausing_stops_a_loop_that_is_in_the_middle(is_left: bool) -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    loop = member.one_by_one(member.hand_out(100))
    assert next(loop).offset == 0
    member.pause({PART})
    if is_left:
        loop.close()  # type: ignore[attr-defined]
    else:
        assert list(loop) == []
    assert group.poll(member) == []
    member.table.pause([PART], paused=False)
    assert group.poll(member) == ([0, 1, 2, 3, 4] if is_left else [1, 2, 3, 4])
    member.finish()
    member.commit_handled()
    assert group.claim().checkpoint == 5


def test_batch_that_was_left_is_not_handled() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    loop = member.by_partition(member.hand_out(2))
    assert [message.offset for message in next(loop)] == [0, 1]
    loop.close()  # type: ignore[attr-defined]
    member.finish()
    member.fetch(lambda: None)
    assert [message.offset for message in member.hand_out(2)[0].messages] == [0, 1]


def test_nothing_is_handed_out_after_the_lease() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    member.fetch(lambda: None)
    loop = member.one_by_one(member.hand_out(3))
    assert next(loop).offset == 0
    group.clock.advance(TTL)
    assert next(loop, None) is None
    assert member.hand_out(3) == []


def test_a_freeze_while_the_lease_is_looked_at_promises_nothing() -> None:
    group = Group()
    member = group.member("a")
    group.look(member)
    membership, clock = member.membership, member.membership._clock
    assert membership.safe_until() > clock.monotonic()

    class Freezing:
        """The process stands still before it looks at the clock."""

        def monotonic(self) -> float:
            group.clock.advance(TTL)
            return clock.monotonic()

        def wall_ms(self) -> int:
            return clock.wall_ms()

    membership._clock = Freezing()
    assert membership.safe_until() <= clock.monotonic()


def test_deadline_starts_anew_after_a_generation_that_was_missed() -> None:
    """Wanted in 5, another's in 6, wanted again in 7: nobody was asked to let go before 7."""
    rules = Rules(debounce=0.0, revoke_timeout=10.0, assign=sticky)
    members = {name: MemberRecord(id=f"{name}.1", topics=("t",)) for name in ("a", "b")}
    topics = {"t": GroupTopic("id", 1)}

    def view(generation: int) -> View:
        head = Head(
            generation=generation,
            target={"a": {"t": (0,)}, "b": {}},
            topics=topics,
            subscriptions={"a": ("t",), "b": ("t",)},
        )
        return View(head, members, topics, {PART: Claim(owner="b.1", name="b", epoch=1)})

    me = Me("a", "a.1")
    first = decide(view(5), Memory(generation=5), me, frozenset(), 0.0, rules)
    assert decide(view(6), first.memory, me, frozenset(), 11.0, rules).force == {PART}
    missed = decide(view(7), first.memory, me, frozenset(), 11.0, rules)
    assert missed.force == frozenset()
    assert missed.look_again_at == 21.0


def test_a_group_that_is_deleted_by_force_leaves_no_checkpoint_that_came_meanwhile() -> None:
    """Between the operator's look and his commit a member claims, handles and commits."""
    group = Group()
    member = group.member("a")
    member.membership.look()
    stores = FaultyStores(group.stores, group.faults, "operator")
    groups = Groups(stores.coord, stores.log, group.topics, group.clock)

    def before_call(who: str, what: str) -> None:
        if (who, what) == ("operator", "commit"):
            group.faults.before_call = None
            group.look(member)
            group.poll(member)
            member.finish()
            member.commit_handled()

    group.faults.before_call = before_call
    groups.delete("g", force=True)
    assert group.claim().checkpoint is None
    group.look(member)
    assert group.poll(member) == [0, 1, 2, 3, 4]
