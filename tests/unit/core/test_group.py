"""The group machine: its table, what it decides, and that groups come to rest.

The scenarios in `scenarios/` tell how a group lives; here is what must hold in all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from random import Random
from typing import NamedTuple, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pxrs.core.assign import sticky
from pxrs.core.group import (
    MOVES,
    Decision,
    GroupState,
    Me,
    Memory,
    PartEvent,
    PartState,
    Rules,
    View,
    decide,
    group_state,
    move,
    moves_between,
    needs_target,
    next_head,
)
from pxrs.core.records import Claim, GroupTopic, Head, MemberRecord, encode, head_key
from pxrs.errors import IllegalMove
from pxrs.types import Put, TopicPartition
from support.toygroup import Process, World

STATES: tuple[PartState, ...] = get_args(PartState)
EVENTS: tuple[PartEvent, ...] = get_args(PartEvent)

# The table


def bits(state: PartState) -> tuple[bool, bool]:
    """What a state says: whether the partition is meant to be ours, and whether it is."""
    return state in ("wanted", "owned"), state in ("owned", "leaving")


def dumb_move(state: PartState, event: PartEvent) -> PartState | None:
    """The same machine, told as what each event does to the two bits."""
    meant, ours = bits(state)
    after = {
        "gained": (True, ours) if not meant else None,
        "given up": (False, ours) if meant else None,
        "claimed": (True, True) if meant and not ours else None,
        "released": (False, False) if ours and not meant else None,
        "fenced": (meant, False) if ours else None,
    }[event]
    return next((state for state in STATES if bits(state) == after), None)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_the_table_is_complete_and_refuses_the_rest(state: PartState, event: PartEvent) -> None:
    expected = dumb_move(state, event)
    before = dict(MOVES)
    if expected is None:
        with pytest.raises(IllegalMove, match=f"that is {state} can't be {event}"):
            move(state, event)
    else:
        assert move(state, event) == expected
    assert before == MOVES


def test_every_state_can_be_reached_and_left_again() -> None:
    def reached_from(start: PartState) -> set[PartState]:
        states = {start}
        while more := {new for (old, _), new in MOVES.items() if old in states} - states:
            states |= more
        return states

    assert all(reached_from(state) == set(STATES) for state in STATES)
    assert {event for _, event in MOVES} == set(EVENTS)


# One look. The world below: a and b share `orders`, as generation 3 says.

ME = Me("a", "a.1")
RULES = Rules(debounce=0.3, revoke_timeout=30.0, assign=sticky)
ORDERS = GroupTopic("o1", 4)
TOPICS = {"orders": ORDERS}
MEMBERS = {
    "a": MemberRecord(id="a.1", topics=("orders",)),
    "b": MemberRecord(id="b.1", topics=("orders",)),
}
HEAD = Head(
    generation=3,
    target={"a": {"orders": (0, 1)}, "b": {"orders": (2, 3)}},
    topics=TOPICS,
    subscriptions={"a": ("orders",), "b": ("orders",)},
)


def orders(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("orders", number) for number in numbers)


def look(
    *,
    head: Head = HEAD,
    members: Mapping[str, MemberRecord] = MEMBERS,
    topics: Mapping[str, GroupTopic] = TOPICS,
    claims: Mapping[TopicPartition, Claim | None] | None = None,
    held: frozenset[TopicPartition] = frozenset(),
    memory: Memory | None = None,
    me: Me = ME,
    now: float = 100.0,
    rules: Rules = RULES,
) -> Decision:
    view = View(head, members, topics, claims or {})
    return decide(view, memory or Memory(), me, held, now, rules)


def by(owner: str, epoch: int = 1) -> Claim:
    return Claim(owner=owner, name=owner.split(".")[0], epoch=epoch)


def test_in_a_stable_group_there_is_nothing_to_do() -> None:
    assert look(held=orders(0, 1)) == Decision(
        memory=Memory(generation=3),
        propose=None,
        revoke=frozenset(),
        claim=frozenset(),
        force=frozenset(),
        look_again_at=None,
    )


@pytest.mark.parametrize(("rank", "wait"), [(0, 0.0), (1, 0.02), (50, 1.0), (499, 1.0)])
def test_the_last_of_many_members_waits_no_longer_than_a_second(rank: int, wait: float) -> None:
    names = [f"m{number:03}" for number in range(500)]
    members = {name: MemberRecord(id=f"{name}.1", topics=("orders",)) for name in names}
    first = look(members=members, me=Me(names[rank], f"{names[rank]}.1"))
    assert first.propose is None
    assert first.look_again_at == pytest.approx(100.0 + RULES.debounce + wait)


@pytest.mark.parametrize(
    ("owner", "claimed"),
    [
        pytest.param(None, True, id="never claimed"),
        pytest.param(Claim(epoch=4), True, id="released"),
        pytest.param(by("x.1"), True, id="its owner is gone"),
        pytest.param(by("a.0"), True, id="own former self"),
        pytest.param(by("b.0"), True, id="a former self of another"),
        pytest.param(by("b.1"), False, id="its owner lives"),
    ],
)
def test_what_is_meant_for_us_is_claimed_if_nobody_can_be_working_on_it(
    owner: Claim | None, claimed: bool
) -> None:
    (part,) = orders(1)
    decision = look(held=orders(0), claims={part: owner})
    assert decision.claim == (orders(1) if claimed else frozenset())
    assert decision.force == frozenset()
    assert decision.look_again_at == (None if claimed else 130.0)


def test_the_deadline_is_counted_from_when_the_partition_was_first_wanted() -> None:
    (part,) = orders(1)
    first = look(held=orders(0), claims={part: by("b.1")})
    for now, force in ((129.9, False), (130.0, True), (131.0, True)):
        decision = look(held=orders(0), claims={part: by("b.1")}, memory=first.memory, now=now)
        assert bool(decision.force) is force
        assert decision.look_again_at == (None if force else 130.0)
        assert decision.memory == first.memory


def test_the_deadline_starts_anew_for_what_was_not_wanted_in_between() -> None:
    (part,) = orders(1)
    waits = look(held=orders(0), claims={part: by("b.1")}).memory
    had_it = look(held=orders(0, 1), memory=waits, now=120.0).memory
    assert had_it.wanted_since == {}
    again = look(held=orders(0), claims={part: by("b.1")}, memory=had_it, now=131.0)
    assert (again.force, again.look_again_at) == (frozenset(), 161.0)


def test_without_a_deadline_nothing_is_taken_by_force() -> None:
    (part,) = orders(1)
    patient = RULES._replace(revoke_timeout=None)
    memory = Memory(wanted_since={part: 0.0}, generation=3)
    decision = look(held=orders(0), claims={part: by("b.1")}, memory=memory, now=1e9, rules=patient)
    assert (decision.claim, decision.force) == (frozenset(), frozenset())
    assert decision.look_again_at is None


def test_a_claim_that_was_not_read_is_read_at_once() -> None:
    decision = look(held=orders(0), claims={}, now=100.0)
    assert decision.claim == decision.force == frozenset()
    assert decision.look_again_at == 100.0


def test_what_is_held_and_meant_for_another_is_given_away() -> None:
    assert look(held=orders(0, 1, 2)).revoke == orders(2)


@pytest.mark.parametrize(
    "topics",
    [{}, {"orders": GroupTopic("o2", 4)}],
    ids=["deleted", "made again"],
)
def test_partitions_of_a_topic_that_is_gone_are_given_away_and_not_claimed(
    topics: Mapping[str, GroupTopic],
) -> None:
    claims = dict.fromkeys(orders(1))
    decision = look(topics=topics, held=orders(0), claims=claims)
    assert (decision.revoke, decision.claim) == (orders(0), frozenset())
    memory = decision.memory
    proposed = look(topics=topics, memory=memory, now=100.3).propose
    assert proposed is not None
    assert proposed.topics == topics
    assert len(proposed.owner_of()) == 4 * len(topics)


def test_a_topic_that_was_made_again_starts_from_a_clean_slate() -> None:
    """Nothing is sticky about it: who had its namesake does not matter."""
    odd = Head(
        generation=3,
        target={"a": {"orders": (1, 3)}, "b": {"orders": (0, 2)}},
        topics=TOPICS,
        subscriptions=HEAD.subscriptions,
    )
    view = View(odd, MEMBERS, {"orders": GroupTopic("o2", 4)}, {})
    assert next_head(view, odd.subscriptions, "a", sticky).target == {
        "a": {"orders": (0, 1)},
        "b": {"orders": (2, 3)},
    }
    same = next_head(View(odd, MEMBERS, TOPICS, {}), odd.subscriptions, "a", sticky)
    assert same.target == odd.target


# Who is not there


@pytest.mark.parametrize(
    "members",
    [
        {"b": MEMBERS["b"]},
        {**MEMBERS, "a": MemberRecord(id="a.2", topics=("orders",))},
    ],
    ids=["its session is over", "another took its place"],
)
def test_whoever_is_not_there_claims_and_proposes_nothing(
    members: Mapping[str, MemberRecord],
) -> None:
    free = orders(1)
    newcomer = {**members, "c": MemberRecord(id="c.1", topics=("orders",))}
    memory = Memory(mismatch_since=0.0, wanted_since=dict.fromkeys(free, 0.0), generation=3)
    for claim in (None, by("a.2"), by("b.1")):
        decision = look(
            members=newcomer, memory=memory, held=orders(0), claims=dict.fromkeys(free, claim)
        )
        assert decision.propose is None
        assert decision.claim == decision.force == decision.revoke == frozenset()


# Proposals


def test_a_proposal_is_the_next_generation_for_those_who_are_there() -> None:
    head = Head(
        generation=3,
        target=HEAD.target,
        topics=TOPICS,
        subscriptions=HEAD.subscriptions,
        left=("b",),
        touched="t7",
    )
    members = {"a": MEMBERS["a"], "c": MemberRecord(id="c.1", topics=("orders", "none"))}
    waits = look(head=head, members=members, held=orders(0, 1))
    assert (waits.propose, waits.look_again_at) == (None, 100.3)
    decision = look(head=head, members=members, held=orders(0, 1), memory=waits.memory, now=100.3)
    assert decision.look_again_at is None
    assert decision.propose == Head(
        generation=4,
        reason="c joined, b left",
        coordinator="a",
        target={"a": {"orders": (0, 1)}, "c": {"orders": (2, 3)}},
        topics=TOPICS,
        subscriptions={"a": ("orders",), "c": ("none", "orders")},
        touched="t7",
    )


def test_each_proposer_waits_a_little_longer_than_the_one_before_it() -> None:
    members = {
        name: MemberRecord(id=f"{name}.1", topics=("orders",)) for name in ("d", "b", "a", "c")
    }
    head = Head(generation=3)
    times = [
        look(head=head, members=members, me=Me(name, f"{name}.1")).look_again_at for name in "abcd"
    ]
    assert times == pytest.approx([100.3, 100.32, 100.34, 100.36])


def test_the_wait_is_counted_from_the_first_change_and_anew_for_a_new_target() -> None:
    more = {**MEMBERS, "c": MemberRecord(id="c.1", topics=("orders",))}
    most = {**more, "d": MemberRecord(id="d.1", topics=("orders",))}
    first = look(members=more, held=orders(0, 1)).memory
    second = look(members=most, memory=first, held=orders(0, 1), now=100.2)
    assert second.look_again_at == 100.3
    view = View(HEAD, more, TOPICS, {})
    head = next_head(view, dict.fromkeys(more, ("orders",)), "b", sticky)
    third = look(head=head, members=most, memory=second.memory, now=100.31, held=orders(0, 1))
    assert third.propose is None
    assert third.look_again_at == pytest.approx(100.61)


def test_what_was_put_right_by_itself_is_forgotten() -> None:
    more = {**MEMBERS, "c": MemberRecord(id="c.1", topics=("orders",))}
    memory = look(members=more).memory
    assert memory.mismatch_since == 100.0
    assert look(memory=memory, now=100.1).memory.mismatch_since is None


@pytest.mark.parametrize(
    ("head", "members", "topics", "needed"),
    [
        pytest.param(HEAD, MEMBERS, TOPICS, False, id="as it was"),
        pytest.param(HEAD, {"a": MEMBERS["a"]}, TOPICS, True, id="a member less"),
        pytest.param(HEAD, MEMBERS, {}, True, id="no topic"),
        pytest.param(HEAD, MEMBERS, {"orders": GroupTopic("o2", 4)}, True, id="made again"),
        pytest.param(HEAD, MEMBERS, {"orders": GroupTopic("o1", 5)}, True, id="more partitions"),
        pytest.param(
            HEAD, MEMBERS, {**TOPICS, "x": GroupTopic("x", 1)}, False, id="a topic nobody wants"
        ),
        pytest.param(
            HEAD,
            {**MEMBERS, "b": MemberRecord(id="b.1", topics=("orders", "x"))},
            TOPICS,
            True,
            id="other topics",
        ),
        pytest.param(
            HEAD,
            {**MEMBERS, "b": MemberRecord(id="b.9", topics=("orders",))},
            TOPICS,
            False,
            id="started again",
        ),
        pytest.param(
            HEAD,
            {**MEMBERS, "b": MemberRecord(id="b.1", topics=("orders",), rejoin_timeout=1.0)},
            TOPICS,
            True,
            id="static now",
        ),
    ],
)
def test_needs_target(
    head: Head,
    members: Mapping[str, MemberRecord],
    topics: Mapping[str, GroupTopic],
    needed: bool,
) -> None:
    subscriptions = {name: tuple(sorted(member.topics)) for name, member in members.items()}
    assert needs_target(View(head, members, topics, {}), subscriptions) is needed


# Static members

STATIC = Head(
    generation=3,
    target=HEAD.target,
    topics=TOPICS,
    subscriptions=HEAD.subscriptions,
    static={"b": 10.0},
)
ALONE = {"a": MEMBERS["a"]}


def test_a_static_member_is_waited_for() -> None:
    gone = look(head=STATIC, members=ALONE, held=orders(0, 1))
    assert (gone.propose, gone.look_again_at) == (None, 110.0)
    late = look(head=STATIC, members=ALONE, held=orders(0, 1), memory=gone.memory, now=110.0)
    assert late.look_again_at == pytest.approx(110.3)
    last = look(head=STATIC, members=ALONE, held=orders(0, 1), memory=late.memory, now=110.4)
    assert last.propose is not None
    assert (last.propose.static, last.propose.reason) == ({}, "b is gone")


def test_a_static_member_that_comes_back_is_waited_for_anew() -> None:
    back = {**ALONE, "b": MemberRecord(id="b.2", topics=("orders",), rejoin_timeout=10.0)}
    gone = look(head=STATIC, members=ALONE, held=orders(0, 1)).memory
    here = look(head=STATIC, members=back, held=orders(0, 1), memory=gone, now=105.0)
    assert (here.memory.gone_since, here.look_again_at) == ({}, None)
    again = look(head=STATIC, members=ALONE, held=orders(0, 1), memory=here.memory, now=108.0)
    assert again.look_again_at == 118.0


def test_a_static_members_own_word_replaces_what_the_head_remembers() -> None:
    members = {
        "a": MemberRecord(id="a.1", topics=("orders",), rejoin_timeout=3.0),
        "b": MemberRecord(id="b.2", topics=("orders",), rejoin_timeout=60.0),
        "c": MemberRecord(id="c.1", topics=("orders",)),
    }
    head = Head(
        generation=3,
        topics=TOPICS,
        subscriptions=dict.fromkeys("abcd", ("orders",)),
        static={"b": 10.0, "c": 10.0, "d": 7.0, "e": 7.0},
    )
    view = View(head, members, TOPICS, {})
    after = next_head(view, dict.fromkeys("abcd", ("orders",)), "a", sticky)
    assert after.static == {"a": 3.0, "b": 60.0, "d": 7.0}
    assert after.reason == ", ".join(
        f"{name} changed its rejoin timeout" for name in ("a", "b", "c")
    )


# History


@pytest.mark.parametrize(
    ("head", "members", "topics", "reason"),
    [
        pytest.param(Head(), "ab", TOPICS, "a joined, b joined", id="first"),
        pytest.param(HEAD, "abc", TOPICS, "c joined", id="join"),
        pytest.param(HEAD, "a", TOPICS, "b is gone", id="crash"),
        pytest.param(HEAD, "ac", TOPICS, "c joined, b is gone", id="both"),
        pytest.param(HEAD, "ab", {}, "topic orders is gone", id="deleted"),
        pytest.param(
            HEAD, "ab", {"orders": GroupTopic("o2", 4)}, "topic orders was made again", id="again"
        ),
        pytest.param(
            HEAD, "ab", {"orders": GroupTopic("o1", 6)}, "topic orders has 6 partitions", id="count"
        ),
        pytest.param(HEAD, "ab", TOPICS, "asked for", id="nothing changed"),
    ],
)
def test_reasons_can_be_read(
    head: Head, members: str, topics: Mapping[str, GroupTopic], reason: str
) -> None:
    there = {name: MemberRecord(id=f"{name}.1", topics=("orders",)) for name in members}
    view = View(head, there, topics, {})
    assert next_head(view, dict.fromkeys(members, ("orders",)), "a", sticky).reason == reason


def test_the_history_tells_what_changed_hands() -> None:
    view = View(HEAD, ALONE, {"orders": GroupTopic("o1", 4)}, {})
    after = next_head(view, {"a": ("orders",)}, "a", sticky)
    told = moves_between(HEAD, after)
    assert (told.generation, told.reason, told.coordinator) == (4, "b is gone", "a")
    assert told.members == ("a",)
    assert told.moves == (("orders", 2, "b", "a"), ("orders", 3, "b", "a"))
    back = moves_between(after, HEAD)
    assert back.moves == (("orders", 2, "a", "b"), ("orders", 3, "a", "b"))
    assert moves_between(Head(), HEAD).moves[0] == ("orders", 0, None, "a")
    assert moves_between(HEAD, Head()).moves[0] == ("orders", 0, "a", None)


# The state of a group

OWNED = {TopicPartition("orders", n): by("a.1" if n < 2 else "b.1") for n in range(4)}


@pytest.mark.parametrize(
    ("head", "members", "claims", "state"),
    [
        pytest.param(None, {}, {}, "EMPTY", id="nothing"),
        pytest.param(HEAD, {}, OWNED, "EMPTY", id="nobody"),
        pytest.param(None, MEMBERS, {}, "EMPTY", id="no head yet"),
        pytest.param(Head(), MEMBERS, {}, "PREPARING_REBALANCE", id="no target yet"),
        pytest.param(HEAD, ALONE, OWNED, "PREPARING_REBALANCE", id="one is gone"),
        pytest.param(STATIC, ALONE, OWNED, "PREPARING_REBALANCE", id="one is waited for"),
        pytest.param(
            HEAD,
            {**MEMBERS, "b": MemberRecord(id="b.1", topics=("orders", "x"))},
            OWNED,
            "PREPARING_REBALANCE",
            id="one wants other topics",
        ),
        pytest.param(HEAD, MEMBERS, {}, "REBALANCING", id="not claimed"),
        pytest.param(
            HEAD,
            MEMBERS,
            {**OWNED, TopicPartition("orders", 1): Claim(epoch=2)},
            "REBALANCING",
            id="one is free",
        ),
        pytest.param(
            HEAD,
            MEMBERS,
            {**OWNED, TopicPartition("orders", 1): by("b.1")},
            "REBALANCING",
            id="one is with another",
        ),
        pytest.param(
            HEAD,
            {**MEMBERS, "b": MemberRecord(id="b.2", topics=("orders",))},
            OWNED,
            "REBALANCING",
            id="one has started again",
        ),
        pytest.param(HEAD, MEMBERS, OWNED, "STABLE", id="all as meant"),
    ],
)
def test_group_state(
    head: Head | None,
    members: Mapping[str, MemberRecord],
    claims: Mapping[TopicPartition, Claim],
    state: GroupState,
) -> None:
    assert group_state(head, members, claims) == state


@pytest.mark.parametrize(
    ("topics", "state"),
    [
        (HEAD.topics, "STABLE"),
        ({**HEAD.topics, "nobody's": GroupTopic("n-1", 4)}, "STABLE"),
        ({}, "PREPARING_REBALANCE"),
        ({name: GroupTopic("made again", 2) for name in HEAD.topics}, "PREPARING_REBALANCE"),
    ],
    ids=["as it was", "of no interest", "gone", "made again"],
)
def test_group_state_knows_of_topics(topics: dict[str, GroupTopic], state: GroupState) -> None:
    """A new target is due when the topics are not those of the target."""
    assert group_state(HEAD, MEMBERS, OWNED, topics) == state


# Reads at different moments


def test_an_owner_that_joined_after_the_members_were_read_is_not_taken_for_dead() -> None:
    """b saw the members, then c joined and got the partition that b was waiting for."""
    world = World(debounce=0.1)
    world.make_topic("x", 2)
    a = Process(world, "a", ("x",))
    world.settle([a])
    b = Process(world, "b", ("x",))
    while world.head.target_of("b") != {TopicPartition("x", 1)}:
        finish_look(a)
        world.now += 0.1
    looking = b.look(members_first=True)
    next(looking)
    next(looking)
    c = Process(world, "c", ("x",))
    taken = Head(
        generation=world.head.generation + 1,
        target={"a": {"x": (0,)}, "b": {}, "c": {"x": (1,)}},
        topics=dict(world.topics),
        subscriptions=dict.fromkeys("abc", ("x",)),
    )
    world.store.commit([], [Put(head_key("g"), encode(taken))])
    finish_look(a)
    finish_look(c)
    assert world.claims[TopicPartition("x", 1)].owner == c.me.id
    assert finish_look(b, looking) == ["too late for x 1"]
    assert world.claims[TopicPartition("x", 1)].owner == c.me.id


def finish_look(
    process: Process, looking: Generator[None, None, list[str]] | None = None
) -> list[str]:
    """Run a look to its end; what did not work out."""
    looking = looking or process.look()
    while True:
        try:
            next(looking)
        except StopIteration as stop:
            trouble: list[str] = stop.value
            return trouble


# Any group comes to rest


class Event(NamedTuple):
    kind: str
    who: int
    what: int


KINDS = {
    "step": 40,
    "look": 12,
    "tick": 10,
    "work": 4,
    "join": 3,
    "busy": 1,
    "crash": 1,
    "expire": 1,
    "leave": 1,
    "again": 1,
    "remake": 1,
}


def events(seed: int, count: int) -> Iterator[Event]:
    """Hypothesis draws seeds, not events: what breaks groups takes hundreds of them."""
    rng = Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=count)
    return (Event(kind, rng.randrange(6), rng.randrange(6)) for kind in kinds)


NAMES = "abcdef"
TICKS = (0.0, 0.02, 0.1, 0.3, 1.0, 4.0)


class Chaos:
    """A world in which anything happens, each member somewhere in the middle of a look."""

    def __init__(self, revoke_timeout: float | None) -> None:
        self.world = World(debounce=0.1, revoke_timeout=revoke_timeout)
        self.world.make_topic("x", 5)
        self.world.make_topic("y", 2)
        self.processes: list[Process] = []

    def happens(self, event: Event) -> None:
        if event.kind == "join":
            self.join(NAMES[event.who], event.what)
        elif event.kind == "tick":
            self.world.now += TICKS[event.what]
        elif event.kind == "remake":
            self.world.make_topic("xy"[event.who % 2], 1 + event.what)
        elif self.processes:
            process = self.processes[event.who % len(self.processes)]
            getattr(self, f"_{event.kind}")(process, event.what)
            if process.displaced:
                self.processes.remove(process)

    def join(self, name: str, what: int) -> None:
        if name not in self.world.members:
            topics = (("x",), ("x", "y"), ("y", "x"))[what % 3]
            wait = (None, 2.0)[what % 2]
            self.processes = [process for process in self.processes if process.name != name]
            self.processes.append(Process(self.world, name, topics, wait))

    def _step(self, process: Process, what: int) -> None:
        """Go on with the look that the member is in the middle of."""
        if process.displaced:
            return
        process.steps = process.steps or process.look(members_first=what % 2 == 0)
        if next(process.steps, self) is self:
            process.steps = None

    def _look(self, process: Process, what: int) -> None:
        for _ in range(5):
            self._step(process, what)

    def _work(self, process: Process, what: int) -> None:
        if process.held:
            process.work(sorted(process.held)[what % len(process.held)])

    def _busy(self, process: Process, what: int) -> None:
        process.busy = set(sorted(process.held)[:what])

    def _crash(self, process: Process, what: int) -> None:
        self.world.expire(process)
        self.processes.remove(process)

    def _expire(self, process: Process, what: int) -> None:
        self.world.expire(process)

    def _leave(self, process: Process, what: int) -> None:
        mine = self.world.members.get(process.name)
        if mine is not None and mine.id == process.me.id:
            process.leave()
        self.processes.remove(process)

    def _again(self, process: Process, what: int) -> None:
        """A second process under the same name."""
        self.processes.append(Process(self.world, process.name, process.topics, 2.0))

    def rest(self) -> None:
        """No more trouble: all handlers end, and everybody looks as often as it asks to."""
        for process in list(self.processes):
            process.busy.clear()
            for _ in range(10):
                self._step(process, 0)
        self.world.settle(self.processes)
        self.processes = [process for process in self.processes if not process.displaced]


seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(0, 400)


@settings(max_examples=3 * settings().max_examples)
@given(seeds, lengths, st.sampled_from([None, 0.5, 3.0]))
def test_any_group_comes_to_rest_with_every_partition_owned_once(
    seed: int, length: int, revoke_timeout: float | None
) -> None:
    chaos = Chaos(revoke_timeout)
    for event in events(seed, length):
        chaos.happens(event)
    chaos.rest()
    world = chaos.world
    assert world.state == ("STABLE" if world.members else "EMPTY")
    assert {process.me.id for process in chaos.processes} == {
        member.id for member in world.members.values()
    }
    for process in chaos.processes:
        assert process.held.keys() == world.head.target_of(process.name)
        assert all(world.claims[part].owner == process.me.id for part in process.held)
    wanted = {topic for process in chaos.processes for topic in process.topics}
    owned = [part for process in chaos.processes for part in process.held]
    assert sorted(owned) == sorted(
        TopicPartition(name, number)
        for name in wanted
        for number in range(world.topics[name].partitions)
    )


@given(seeds, lengths)
def test_in_a_group_at_rest_one_change_means_one_generation(seed: int, length: int) -> None:
    chaos = Chaos(3.0)
    for event in events(seed, length):
        chaos.happens(event)
    chaos.rest()
    assume(chaos.processes)
    before = chaos.world.head.generation
    chaos.processes.append(Process(chaos.world, "newcomer", ("x",)))
    chaos.world.settle(chaos.processes)
    assert chaos.world.head.generation == before + 1
    assert chaos.world.state == "STABLE"
