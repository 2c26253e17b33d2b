"""A toy group: members that do what the group machine says, over a store that is a dict.

One thread, time by hand. A look can be stopped between any two reads, so that members see the
group in different moments. Every commit to a claim is checked against what a claim promises.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pxrs.core import claims
from pxrs.core.assign import sticky
from pxrs.core.claims import OwnedClaim, Stamp, Step
from pxrs.core.group import (
    Decision,
    GroupState,
    Me,
    Memory,
    Rules,
    View,
    decide,
    group_state,
    moves_between,
)
from pxrs.core.records import (
    Claim,
    GroupTopic,
    Head,
    MemberRecord,
    Move,
    claim_key,
    claims_prefix,
    decode,
    encode,
    head_key,
    member_key,
    members_prefix,
)
from pxrs.types import (
    Check,
    Committed,
    Conflict,
    Delete,
    Put,
    TopicPartition,
    Versioned,
    Write,
)

GROUP = "g"
_ROUNDS = 500
Parts = Iterable[TopicPartition]


class Store:
    """Compare-and-set on a dict. Every change of a claim has to keep a claim's promises."""

    def __init__(self) -> None:
        self.records: dict[str, Versioned] = {}
        self.changes = 0

    def get(self, key: str) -> Versioned | None:
        return self.records.get(key)

    def list(self, prefix: str) -> list[Versioned]:
        return [record for key, record in sorted(self.records.items()) if key.startswith(prefix)]

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        wrong = {check.key: self.get(check.key) for check in checks if not self._holds(check)}
        if wrong:
            return Conflict(wrong)
        self.changes += 1
        versions: dict[str, int] = {}
        for write in writes:
            if isinstance(write, Delete):
                self.records.pop(write.key, None)
                continue
            record = Versioned(write.key, write.value, self.changes)
            if write.key.startswith(claims_prefix(GROUP)):
                self._check_claim(self.get(write.key), record)
            self.records[write.key] = record
            versions[write.key] = self.changes
        return Committed(versions)

    def _holds(self, check: Check) -> bool:
        record = self.get(check.key)
        return (record.version if record is not None else 0) == check.version

    @staticmethod
    def _check_claim(before: Versioned | None, after: Versioned) -> None:
        old = decode(before, Claim) if before is not None else Claim()
        new = decode(after, Claim)
        assert new.epoch == old.epoch + (new.owner != old.owner), "a new owner, a new epoch"
        assert (new.checkpoint or 0) >= (old.checkpoint or 0), "a checkpoint went back"


class Seen(NamedTuple):
    """A decision, with what it was made from."""

    view: View
    head_version: int
    found: Mapping[TopicPartition, Versioned | None]
    decision: Decision


class Process:
    """One member's process. `busy` partitions have a handler running and are not released."""

    def __init__(
        self, world: World, name: str, topics: tuple[str, ...], rejoin_timeout: float | None = None
    ) -> None:
        self.world = world
        self.name = name
        self.topics = topics
        self.rejoin_timeout = rejoin_timeout
        self.busy: set[TopicPartition] = set()
        self.displaced = False
        self.steps: Generator[None, None, list[str]] | None = None
        self.join()

    def join(self) -> None:
        """Start, or start again: under a new id, holding nothing."""
        world = self.world
        world.starts += 1
        self.me = Me(self.name, f"{self.name}.{world.starts}")
        self.memory = Memory()
        self.held: dict[TopicPartition, OwnedClaim] = {}
        record = MemberRecord(id=self.me.id, topics=self.topics, rejoin_timeout=self.rejoin_timeout)
        head = msgspec.structs.replace(world.head, touched=self.me.id)
        world.store.commit(
            [], [Put(head_key(GROUP), encode(head)), Put(world.key_of(self), encode(record))]
        )

    def leave(self) -> None:
        """Release all and say goodbye."""
        for part in list(self.held):
            self._release(part)
        head = self.world.head
        head = msgspec.structs.replace(head, left=(*head.left, self.name), touched=self.me.id)
        self.world.store.commit(
            [], [Put(head_key(GROUP), encode(head)), Delete(self.world.key_of(self))]
        )

    def look(self, *, members_first: bool = False) -> Generator[None, None, list[str]]:
        """One look, with a pause between any two reads; what did not work out."""
        seen = yield from self.see(members_first=members_first)
        yield
        return self.act(seen)

    def see(self, *, members_first: bool = False) -> Generator[None, None, Seen]:
        store = self.world.store
        found = store.get(head_key(GROUP))
        head = decode(found, Head) if found is not None else Head()
        self._drop_what_others_have(head)
        yield
        members = self.world.members if members_first else {}
        yield
        keys = {
            part: claim_key(GROUP, head.topics[part.topic].id, part.partition)
            for part in head.target_of(self.name) - self.held.keys()
        }
        records = {part: store.get(key) for part, key in keys.items()}
        yield
        if not members_first:
            members = self.world.members
        view = View(
            head,
            members,
            dict(self.world.topics),
            {part: decode(record, Claim) if record else None for part, record in records.items()},
        )
        held = frozenset(self.held)
        decision = decide(view, self.memory, self.me, held, self.world.now, self.world.rules)
        self.memory = decision.memory
        return Seen(view, found.version if found is not None else 0, records, decision)

    def act(self, seen: Seen) -> list[str]:
        """Do what was decided, as far as it still can be done."""
        decision = seen.decision
        mine = seen.view.members.get(self.name)
        if mine is None:
            self.join()
            return ["starts again: its session was over"]
        if mine.id != self.me.id:
            self.held = {}
            self.displaced = True
            return ["is displaced"]
        trouble = []
        for part in decision.revoke - self.busy:
            if part in self.held:
                self._release(part)
        guard = Check(head_key(GROUP), seen.head_version)
        for part in sorted(decision.claim | decision.force):
            key = claim_key(GROUP, seen.view.head.topics[part.topic].id, part.partition)
            step = claims.take(part, key, seen.found[part], self._stamp())
            owner = decode(found, Claim).owner if (found := seen.found[part]) else None
            version = self._apply(step, guard)
            if version is None:
                trouble.append(f"too late for {spell([part])}")
                continue
            self.held[part] = step.done(version)
            living = {member.id for member in self.world.members.values()}
            assert part in decision.force or owner not in living, "taken from the living"
        if decision.propose is not None:
            put = Put(head_key(GROUP), encode(decision.propose))
            if isinstance(self.world.store.commit([guard], [put]), Committed):
                self.world.history.append(moves_between(seen.view.head, decision.propose))
            else:
                trouble.append("too late to propose")
        return trouble

    def work(self, part: TopicPartition) -> bool:
        """Handle one more message; false if that was refused."""
        owned_claim = self.held[part]
        offset = (owned_claim.claim.checkpoint or 0) + 1
        step = claims.advance(owned_claim, offset, (), None, self._stamp())
        version = self._apply(step)
        if version is None:
            del self.held[part]
            return False
        self.held[part] = step.done(version)
        return True

    def _drop_what_others_have(self, head: Head) -> None:
        """An idle member is told by nobody that it was fenced; a change of the head tells."""
        for part, owned_claim in list(self.held.items()):
            record = self.world.store.get(owned_claim.key)
            topic = head.topics.get(part.topic)
            made_again = topic and owned_claim.key != claim_key(GROUP, topic.id, part.partition)
            if record is None or decode(record, Claim).owner != self.me.id or made_again:
                del self.held[part]

    def _release(self, part: TopicPartition) -> None:
        self._apply(claims.release(self.held.pop(part), None, (), self._stamp()))

    def _apply(self, step: Step, *guard: Check) -> int | None:
        outcome = self.world.store.commit([*guard, step.check], [step.put])
        return outcome.versions[step.put.key] if isinstance(outcome, Committed) else None

    def _stamp(self) -> Stamp:
        return Stamp(self.me.id, self.me.name, f"w{self.world.store.changes}", 0)


class World:
    """A group, its topics, its members and the time."""

    def __init__(self, *, debounce: float = 0.3, revoke_timeout: float | None = 30.0) -> None:
        self.store = Store()
        self.topics: dict[str, GroupTopic] = {}
        self.rules = Rules(debounce, revoke_timeout, sticky)
        self.now = 0.0
        self.starts = 0
        self.history: list[Move] = []

    @property
    def head(self) -> Head:
        found = self.store.get(head_key(GROUP))
        return decode(found, Head) if found is not None else Head()

    @property
    def members(self) -> dict[str, MemberRecord]:
        prefix = members_prefix(GROUP)
        return {
            record.key.removeprefix(prefix): decode(record, MemberRecord)
            for record in self.store.list(prefix)
        }

    @property
    def claims(self) -> dict[TopicPartition, Claim]:
        """The claims of topics that are there."""
        return {
            TopicPartition(name, number): decode(record, Claim)
            for name, topic in sorted(self.topics.items())
            for number in range(topic.partitions)
            if (record := self.store.get(claim_key(GROUP, topic.id, number))) is not None
        }

    @property
    def state(self) -> GroupState:
        return group_state(self.head, self.members, self.claims)

    @staticmethod
    def key_of(process: Process) -> str:
        return member_key(GROUP, process.name)

    def make_topic(self, name: str, partitions: int) -> None:
        """Make a topic, or make it again: it gets an id of its own."""
        self.starts += 1
        self.topics[name] = GroupTopic(f"{name}-{self.starts}", partitions)

    def expire(self, process: Process) -> None:
        """Its session ends; the process may not know."""
        mine = self.members.get(process.name)
        if mine is not None and mine.id == process.me.id:
            self.store.commit([], [Delete(self.key_of(process))])

    def settle(self, processes: Sequence[Process]) -> None:
        """Let everybody look when something has changed or it asked to, until nobody does."""
        times: list[float] = []
        before = -1
        for _ in range(_ROUNDS):
            if self.store.changes == before:
                if not times:
                    return
                self.now = min(times)
            before = self.store.changes
            times = []
            for process in processes:
                if process.displaced:
                    continue
                seen = finish(process.see())
                process.act(seen)
                at = seen.decision.look_again_at
                if at is not None:
                    assert at >= self.now, "asked to look in the past"
                    times.append(at)
        raise AssertionError("the group does not come to rest")


def finish(steps: Generator[None, None, Seen]) -> Seen:
    """Run a look without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            seen: Seen = stop.value
            return seen


def spell(parts: Parts) -> str:
    """`orders 0-2 5` for partitions."""
    words: dict[str, list[list[int]]] = {}
    for topic, number in sorted(parts):
        runs = words.setdefault(topic, [])
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        " ".join([topic, *(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)])
        for topic, runs in words.items()
    )
