"""The group machine: (a member's view of the records, the time) → what the member does.

Every member runs it over the same records; there is no coordinator to lose. A member that notices
that the members are not those of the target computes the next one and proposes it by
compare-and-set; exactly one wins. Nothing here reads a clock or a store.

States of a partition in the eyes of one member (`MOVES` is the table, the diagram in
`docs/groups.md` is drawn from it):

    away      not ours, and the target does not give it to us
    wanted    ours by the target; another member may still be working on it
    owned     ours
    leaving   ours, but another's by the target: finish, commit, release
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from pxrs.core.assign import Assignor
from pxrs.core.claims import free_or_dead
from pxrs.core.records import Claim, GroupTopic, Head, MemberRecord, Move
from pxrs.errors import IllegalMove
from pxrs.types import TopicPartition

# Why a target was computed: members that joined, left, or are gone; their topics; anything else.
ReasonKind = Literal["joined", "left", "gone", "topics", "other"]
PartState = Literal["away", "wanted", "owned", "leaving"]
PartEvent = Literal["gained", "given up", "claimed", "released", "fenced"]

MOVES: dict[tuple[PartState, PartEvent], PartState] = {
    ("away", "gained"): "wanted",
    ("wanted", "given up"): "away",
    ("wanted", "claimed"): "owned",
    ("owned", "given up"): "leaving",
    ("owned", "fenced"): "wanted",
    ("leaving", "gained"): "owned",
    ("leaving", "released"): "away",
    ("leaving", "fenced"): "away",
}

GroupState = Literal["EMPTY", "PREPARING_REBALANCE", "REBALANCING", "STABLE"]

_RANK_DELAY = 0.02
# If all members before it hang, no member waits longer than this for its turn: proposals that meet
# are harmless, one wins.
_MOST_RANK_DELAY = 1.0
# How many changes the reason of a generation names.
_MOST_REASONS = 20


def move(state: PartState, event: PartEvent) -> PartState:
    """The state after the event."""
    try:
        return MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a partition that is {state} can't be {event}") from None


class View(msgspec.Struct, frozen=True):
    """The records of a group, as a member saw them in one look.

    `claims` holds the claims of partitions that it waits for; None where there is no record.

    The records are read one after the other, so two rules hold. The head is read first, and
    decisions from the view are written only if the head is still at that version: a join
    touches it, so no target misses a member that had joined, and no owner is taken for dead
    because it joined after the members were read. `topics` is read anew for every look: two
    members that see different topics would undo each other's targets.
    """

    head: Head
    members: Mapping[str, MemberRecord]
    topics: Mapping[str, GroupTopic]
    claims: Mapping[TopicPartition, Claim | None]


class Me(NamedTuple):
    """This member: its name in the target and the id of this very start."""

    name: str
    id: str


class Rules(NamedTuple):
    """Timeouts in seconds, and the assignment strategy."""

    debounce: float
    revoke_timeout: float | None
    assign: Assignor


class Memory(msgspec.Struct, frozen=True):
    """A member's memory between two looks: since when each state lasts.

    `generation` is the last one it saw. A mismatch is one with its target: with a new target the
    wait begins anew. If it missed a generation, it may not have wanted its partitions all the
    time: the deadlines begin anew too.
    """

    generation: int = 0
    mismatch_since: float | None = None
    wanted_since: Mapping[TopicPartition, float] = {}
    gone_since: Mapping[str, float] = {}


class Decision(msgspec.Struct, frozen=True):
    """The actions of a member now, and when it must look again.

    `claim` are partitions that no other member can be working on; `force` those whose owner did
    not release them in time. `revoke` are ours, and another's by the target.
    """

    memory: Memory
    propose: Head | None
    revoke: frozenset[TopicPartition]
    claim: frozenset[TopicPartition]
    force: frozenset[TopicPartition]
    look_again_at: float | None


def decide(
    view: View, memory: Memory, me: Me, held: frozenset[TopicPartition], now: float, rules: Rules
) -> Decision:
    """Decides what a member does after one look at its group.

    `held` are the claims on the topics that the head names; a claim on a topic that was made
    again since is not among them, and neither is one that another member was found to own.
    A member without a record, or whose place another one has taken, claims and proposes
    nothing: the target of its name is not its own.
    """
    present, gone_since, grace_ends = _present(view, memory, now)
    subscriptions = {name: tuple(sorted(topics)) for name, topics in present.items()}
    here = (mine := view.members.get(me.name)) is not None and mine.id == me.id
    propose, mismatch_since, propose_at = (
        _proposal(view, memory, me, subscriptions, now, rules) if here else (None, None, None)
    )
    target = _target(view, me)
    wanted = target - held if here else set()
    claim, force, wanted_since, wanted_at = _wanted(view, memory, me, wanted, now, rules)
    times = [at for at in (grace_ends, propose_at, wanted_at) if at is not None]
    return Decision(
        memory=Memory(view.head.generation, mismatch_since, wanted_since, gone_since),
        propose=propose,
        revoke=frozenset(held - target),
        claim=claim,
        force=force,
        look_again_at=min(times) if times else None,
    )


def _present(
    view: View, memory: Memory, now: float
) -> tuple[dict[str, tuple[str, ...]], dict[str, float], float | None]:
    """Returns the members that count, with their topics: present ones, and awaited static ones."""
    present = {name: member.topics for name, member in view.members.items()}
    gone_since: dict[str, float] = {}
    grace_ends: list[float] = []
    for name, timeout in view.head.static.items():
        if name in view.members or name not in view.head.subscriptions:
            continue
        since = memory.gone_since.get(name, now)
        gone_since[name] = since
        if now < since + timeout:
            present[name] = view.head.subscriptions[name]
            grace_ends.append(since + timeout)
    return present, gone_since, min(grace_ends, default=None)


def _proposal(
    view: View,
    memory: Memory,
    me: Me,
    subscriptions: dict[str, tuple[str, ...]],
    now: float,
    rules: Rules,
) -> tuple[Head | None, float | None, float | None]:
    """Returns the next head if it is due, since when one is needed, and when it will be due."""
    if not needs_target(view, subscriptions):
        return None, None, None
    since = memory.mismatch_since
    if since is None or memory.generation != view.head.generation:
        since = now
    rank = sorted(view.members).index(me.name)
    due = since + rules.debounce + min(rank * _RANK_DELAY, _MOST_RANK_DELAY)
    if now < due:
        return None, since, due
    return next_head(view, subscriptions, me.name, rules.assign), since, None


def needs_target(view: View, subscriptions: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the target was computed for other members, topics or partition counts."""
    head = view.head
    return (
        subscriptions != head.subscriptions
        or _topics(view, subscriptions) != head.topics
        or _static(view, subscriptions) != head.static
    )


def next_head(
    view: View, subscriptions: Mapping[str, tuple[str, ...]], coordinator: str, assign: Assignor
) -> Head:
    """Computes the target for these members, as the next generation. The caller adds the time."""
    topics = _topics(view, subscriptions)
    counts = {name: topic.partitions for name, topic in topics.items()}
    kept = {
        part: owner
        for part, owner in view.head.owner_of().items()
        if view.head.topics.get(part.topic) == topics.get(part.topic)
    }
    target: dict[str, dict[str, list[int]]] = {name: {} for name in subscriptions}
    for part, owner in sorted(assign(subscriptions, counts, kept).items()):
        target[owner].setdefault(part.topic, []).append(part.partition)
    return Head(
        generation=view.head.generation + 1,
        reason=_reason(view, subscriptions, topics),
        coordinator=coordinator,
        target={
            name: {topic: tuple(numbers) for topic, numbers in parts.items()}
            for name, parts in target.items()
        },
        topics=topics,
        subscriptions=dict(subscriptions),
        static=_static(view, subscriptions),
        touched=view.head.touched,
    )


def moves_between(before: Head, after: Head) -> Move:
    """Lists what a generation changed, for the history."""
    old, new = before.owner_of(), after.owner_of()
    return Move(
        generation=after.generation,
        reason=after.reason,
        coordinator=after.coordinator,
        at_ms=after.at_ms,
        members=tuple(sorted(after.subscriptions)),
        moves=tuple(
            (part.topic, part.partition, old.get(part), new.get(part))
            for part in sorted(old.keys() | new.keys())
            if old.get(part) != new.get(part)
        ),
    )


def _topics(view: View, subscriptions: Mapping[str, tuple[str, ...]]) -> dict[str, GroupTopic]:
    return _wanted_of(view.topics, subscriptions)


def _wanted_of(
    topics: Mapping[str, GroupTopic], subscriptions: Mapping[str, tuple[str, ...]]
) -> dict[str, GroupTopic]:
    wanted = {topic for names in subscriptions.values() for topic in names}
    return {name: topic for name, topic in topics.items() if name in wanted}


def _static(view: View, subscriptions: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Returns the rejoin timeouts of static members: from their records while they are present."""
    known: dict[str, float | None] = dict(view.head.static)
    known |= {name: member.rejoin_timeout for name, member in view.members.items()}
    return {
        name: wait for name, wait in known.items() if wait is not None and name in subscriptions
    }


def _reason(
    view: View, subscriptions: Mapping[str, tuple[str, ...]], topics: dict[str, GroupTopic]
) -> str:
    before = view.head.subscriptions
    stayed = sorted(before.keys() & subscriptions.keys())
    words = [f"{name} joined" for name in sorted(subscriptions.keys() - before.keys())]
    words += [
        f"{name} {'left' if name in view.head.left else 'is gone'}"
        for name in sorted(before.keys() - subscriptions.keys())
    ]
    words += [
        f"{name} changed its topics" for name in stayed if before[name] != subscriptions[name]
    ]
    # A topic that came or went with its subscribers is no reason by itself.
    wanted = {topic for name in stayed for topic in before[name]}
    for name in sorted(view.head.topics.keys() | topics.keys()):
        old, new = view.head.topics.get(name), topics.get(name)
        if old is None and name in wanted:
            words.append(f"topic {name} is new")
        elif old is not None and name not in view.topics:
            words.append(f"topic {name} is gone")
        elif old is not None and new is not None and old.id != new.id:
            words.append(f"topic {name} was made again")
        elif old is not None and new is not None and old != new:
            words.append(f"topic {name} has {new.partitions} partitions")
    static = _static(view, subscriptions)
    words += [
        f"{name} changed its rejoin timeout"
        for name in stayed
        if static.get(name) != view.head.static.get(name)
    ]
    if len(words) > _MOST_REASONS:
        words[_MOST_REASONS:] = [f"and {len(words) - _MOST_REASONS} more"]
    return ", ".join(words) or "asked for"


def kinds_of_reason(reason: str) -> frozenset[ReasonKind]:
    """Returns the kinds of what `_reason` has written, for counting: there are only a few."""
    kinds = map(_kind_of, reason.split(", "))
    return frozenset(kind for kind in kinds if kind is not None)


def _kind_of(words: str) -> ReasonKind | None:
    if words.startswith("and ") and words.endswith(" more"):
        return None
    if words.startswith("topic ") or words.endswith(" changed its topics"):
        return "topics"
    for ending in ("joined", "left", "gone"):
        if words.endswith(f" {ending}"):
            return ending
    return "other"


def _target(view: View, me: Me) -> set[TopicPartition]:
    """Returns this member's partitions in the target, of topics for which it was computed."""
    return {
        part
        for part in view.head.target_of(me.name)
        if part.topic in view.topics
        and view.topics[part.topic].id == view.head.topics[part.topic].id
    }


def _wanted(
    view: View,
    memory: Memory,
    me: Me,
    wanted: set[TopicPartition],
    now: float,
    rules: Rules,
) -> tuple[
    frozenset[TopicPartition], frozenset[TopicPartition], dict[TopicPartition, float], float | None
]:
    """Decides which partitions of our target to claim or force, and when to look again."""
    living = {member.id for member in view.members.values()}
    seen_all = view.head.generation <= memory.generation + 1
    since = {part: memory.wanted_since.get(part, now) if seen_all else now for part in wanted}
    claim, force = set(), set()
    look_at: list[float] = []
    for part in wanted:
        if part not in view.claims:
            look_at.append(now)
        elif free_or_dead(view.claims[part], me.name, living):
            claim.add(part)
        elif rules.revoke_timeout is not None:
            due = since[part] + rules.revoke_timeout
            if now >= due:
                force.add(part)
            else:
                look_at.append(due)
    return frozenset(claim), frozenset(force), since, min(look_at, default=None)


def group_state(
    head: Head | None,
    members: Mapping[str, MemberRecord],
    claims: Mapping[TopicPartition, Claim],
    topics: Mapping[str, GroupTopic] | None = None,
) -> GroupState:
    """Derives the state of a group from its records and the existing topics.

    While the group waits for a static member it is PREPARING_REBALANCE: the partitions of that
    member have no owner, and only the members' own clocks know for how long.
    """
    if head is None or not members:
        return "EMPTY"
    subscriptions = {name: tuple(sorted(member.topics)) for name, member in members.items()}
    if subscriptions != dict(head.subscriptions):
        return "PREPARING_REBALANCE"
    if topics is not None and _wanted_of(topics, subscriptions) != head.topics:
        return "PREPARING_REBALANCE"
    for part, name in head.owner_of().items():
        claim = claims.get(part)
        if claim is None or claim.owner != members[name].id:
            return "REBALANCING"
    return "STABLE"
