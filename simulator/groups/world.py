"""The world of one run: members, a producer, time and trouble, one random step after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random

from pxrs.core.group import group_state
from pxrs.core.records import Claim, Head, MemberRecord, claim_key, decode, head_key, members_prefix
from pxrs.stores.api import Stores
from pxrs.testing.faults import FaultyStores
from pxrs.types import Holder, ItemState, NewItem, QueueChange, TopicPartition, Versioned, Write
from simulator.groups.actor import Actor
from simulator.groups.caller import MODES
from simulator.groups.judge import TASKS, Landed, Ledger
from simulator.groups.observed import ObservedStores, describe
from simulator.groups.operator import Operator, WorldTopics
from simulator.groups.plan import GROUP, OPERATOR, Plan
from simulator.groups.tables import reading
from simulator.stage import Broken, Died, Events, Process, Stage, weighed


class World(Stage):
    """Everything there is in one run. One thread; all chance comes from the plan's seed."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(Random(f"run {plan.seed}"), plan.ttl, plan.rates, trace)
        self.plan = plan
        self.ledger = Ledger(self.stores.coord, self.clock.monotonic, plan)
        self.actors: list[Actor] = []
        seen = ObservedStores(self.stores, OPERATOR, self._heard)
        self._operator = Operator(
            self._reading(FaultyStores(seen, self.faults, OPERATOR)),
            self.clock,
            self.rng,
            self.say,
        )
        self._operating = False
        self.topics = WorldTopics(
            self.stores, self.clock, self.ledger, self.rng, sources=plan.sources
        )
        self._steps = 0
        self._broken: Broken | None = None
        for name, partitions in plan.topics.items():
            self.topics.create(name, partitions)
        if plan.queues:
            tasks = tuple(NewItem(queue=TASKS, body=b"btask") for _ in range(plan.tasks))
            self.stores.queues.apply(QueueChange(Holder("", "world"), put=tasks))
        for number in range(plan.members):
            self.start(f"m{number}", static=number < plan.static)
        self._events = self._weigh()

    # Who is there

    def start(self, name: str, *, static: bool) -> Actor:
        """A process starts, as a new member or as a static one that comes back."""
        self._starts += 1
        who = f"{name}#{self._starts}"
        seen = ObservedStores(self.stores, who, self._heard)
        actor = Actor(
            who,
            self._reading(FaultyStores(seen, self.faults, who)),
            self.clock,
            self.plan,
            self.ledger,
            self.rng,
            self.say,
            self._called,
            self._wait,
            static=static,
            mode="transactions" if self.plan.transactions else self.rng.choice(MODES),
        )
        self.actors.append(actor)
        self.say(f"{who} starts ({actor.mode}{', static' if static else ''})")
        return actor

    def _reading(self, stores: Stores) -> Stores:
        """The stores of one process, with the tables that it reads."""
        if not self.plan.sources:
            return stores
        return reading(stores, lambda: self.topics.tables, self.clock)

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive]

    def _awake(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive and not actor.frozen]

    # Steps

    def run(self) -> None:
        """All random steps, those in the middle of others included; then the end."""
        while self._steps < self.plan.steps:
            self.step()
        settle(self)

    def step(self) -> None:
        self._steps += 1
        events, weights = self._events
        with self.judged():
            self.rng.choices(events, weights)[0]()

    @contextmanager
    def judged(self) -> Iterator[None]:
        """A broken promise ends it, whatever the code under test has made of the judge's error."""
        try:
            yield
        finally:
            if self._broken is not None:
                raise self._broken

    def _weigh(self) -> Events:
        trouble, operator = self.plan.trouble, self.plan.operator
        return weighed(
            {
                self._background: 30,
                partial(self._call, Actor.work): 60,
                partial(self._call, Actor.attend): 6,
                partial(self._call, Actor.commit, "in_background"): 8,
                partial(self._call, Actor.commit_seen): 3,
                self.topics.produce: 8,
                self._pass_time: 12,
                partial(self._call, Actor.give_up): 1,
                self._seek: 1,
                partial(self._call, Actor.pause_or_resume): 1,
                self._reset: operator,
                self._freeze: 1.0 * trouble,
                self._crash: 0.6 * trouble,
                self._restart: 0.4 * trouble,
                self._join: 0.8 * trouble,
                self._leave: 0.6 * trouble,
                self._cut_off: 0.8 * trouble,
                self._new_topic: 0.2 if self.plan.pattern else 0.0,
                self._delete_topic: 0.3 * operator,
                self._make_again: 0.5 * operator,
                self._forget_group: 0.2 * operator,
                self._trim: 0.5 * operator,
            }
        )

    def _background(self) -> None:
        actor = self._pick(lambda each: not each.in_background)
        if actor is not None and (actor.due or self.rng.random() < 0.5):
            with self._at(actor, "in_background"):
                self.say(f"{actor.who} looks")
                actor.background()

    def _call(self, act: Callable[[Actor], None], thread: str = "calling") -> None:
        """Somebody's thread, the caller's or the background's, does this."""
        actor = self._pick(lambda each: not getattr(each, thread))
        if actor is not None:
            with self._at(actor, thread):
                act(actor)

    def _seek(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is None:
            return
        parts = sorted(actor.member.table.partitions)
        if parts:
            part = self.rng.choice(parts)
            offset = self.rng.randint(0, self.topics.end_of(part) if self.topics.has(part) else 10)
            self.say(f"{actor.who} seeks {part.topic}/{part.partition} to {offset}")
            with self._at(actor, "calling"):
                actor.seek(part, offset)

    def _reset(self) -> None:
        if self.topics.there:
            self._operate(lambda: self._operator.reset(self.topics))

    def _operate(self, act: Callable[[], None]) -> None:
        """One thing at a time."""
        if not self._operating:
            self._operating = True
            try:
                act()
            finally:
                self._operating = False

    # Time

    def _pass_time(self) -> None:
        self.advance(self.rng.choice((0.01, 0.05, 0.2, 0.5, 1.0, self.plan.ttl)))

    def _state_of(self, process: Process) -> str:
        assert isinstance(process, Actor)
        return f", {process.remaining:.2f} s of its lease left"

    # Trouble

    def _freeze(self) -> None:
        actor = self._pick(lambda each: not each.in_background and not each.calling)
        if actor is not None:
            self._freeze_for(actor, (0.5, 1.0, 1.5, 3.0))

    def _crash(self) -> None:
        living = self.living
        if len(living) > 1:
            actor = self.rng.choice(living)
            self.say(f"{actor.who} is killed")
            actor.end()

    def _restart(self) -> None:
        """A static member starts again, whether or not its former process is gone."""
        names = sorted({actor.name for actor in self.actors if actor.static})
        if names:
            name = self.rng.choice(names)
            for actor in self.living:
                if actor.name == name and self.rng.random() < 0.7:
                    self.say(f"{actor.who} is killed")
                    actor.end()
            self.start(name, static=True)

    def _join(self) -> None:
        if len(self.living) < 12:
            self.start(f"n{self._starts}", static=False)

    def _leave(self) -> None:
        actor = self._pick(lambda each: not each.in_background and not each.calling)
        if actor is not None and len(self.living) > 1:
            with self._at(actor, "in_background"), self._at(actor, "calling"):
                actor.leave()

    def _cut_off(self) -> None:
        actor = self._pick(lambda each: True)
        if actor is not None:
            self._cut_off_one(None if self.rng.random() < 0.2 else actor.who)

    def _new_topic(self) -> None:
        self.topics.create(f"t{len(self.topics.names)}", self.rng.randint(1, 4))

    def _delete_topic(self) -> None:
        if self.topics.there:
            self._operate(lambda: self._operator.delete(self.topics))

    def _forget_group(self) -> None:
        self._operate(self._operator.forget_group)

    def _trim(self) -> None:
        """Retention removes what is old."""
        if self.topics.there and not self.plan.sources:
            self.say(self.topics.trim())

    def _make_again(self) -> None:
        gone = sorted(self.topics.names - self.topics.there.keys())
        if gone:
            name, partitions = self.rng.choice(gone), self.rng.randint(1, 6)
            self.say(f"{OPERATOR} makes {name} again, with {partitions} partitions")
            self.topics.create(name, partitions)

    # In the middle of a store call

    def _called(self, who: str, what: str) -> None:
        """Before a call to the store, or a lock: others may come first, and the caller may die."""
        actor = next((each for each in self.actors if each.who == who), None)
        if actor is not None and not actor.alive:
            # What it does about its own death reaches nobody.
            raise Died(who)
        if self._is_deep or self.rng.random() >= self.plan.interleave:
            return
        if actor is None:
            self._let_others_go_first(who, what, 6)
        elif actor.in_background or actor.calling:
            self._let_wait(actor, what)

    def _let_wait(self, actor: Actor, what: str) -> None:
        frozen = self.rng.random() < 0.2
        if frozen:
            self.say(f"… {actor.who} is frozen")
        longest = self.rng.choice((6, 6, 80)) if frozen else 6
        with self._waiting(actor, frozen=frozen):
            self._let_others_go_first(actor.who, what, longest)

    def _let_others_go_first(self, who: str, what: str, most: int) -> None:
        steps = self.rng.randint(1, most)
        self.say(f"… {who} waits before {what}")
        self._meanwhile(steps)
        self.say(f"… {who} goes on with {what}")

    @contextmanager
    def _at(self, actor: Actor, what: str) -> Iterator[None]:
        setattr(actor, what, True)
        actor.lock.steps.append(what)
        try:
            yield
        finally:
            setattr(actor, what, False)
            actor.lock.steps.pop()

    def _pick(self, can: Callable[[Actor], bool]) -> Actor | None:
        able = [actor for actor in self._awake() if can(actor)]
        return self.rng.choice(able) if able else None

    def _heard(
        self,
        who: str,
        before: Mapping[str, Versioned | None],
        writes: Sequence[Write],
        landed: Landed | None,
    ) -> None:
        if self._trace is not None:
            for line in describe(before, writes):
                self.say(f"{who} {line}")
        if who == OPERATOR:
            self.topics.look()
        try:
            self.ledger.heard(who, before, writes, landed)
        except Broken as broken:
            self._broken = self._broken or broken
            raise

    def _interruptible(self, who: str) -> bool:
        actor = next((each for each in self.actors if each.who == who), None)
        return actor is not None and actor.interruptible

    def _no_answer(self, who: str, why: str, keys: Sequence[str]) -> None:
        super()._no_answer(who, why, keys)
        self.ledger.in_doubt(who, keys)


_ROUND = 0.1
_PATIENCE = 30.0


def settle(world: World) -> None:
    """Let everybody who lives go on until nothing is left to do, or raise `Broken`."""
    world.end_trouble()
    world.topics.writers_end()
    for actor in world.living:
        actor.hurry()
    plan = world.plan
    patience = _PATIENCE + 2 * plan.ttl + 2 * plan.rejoin_timeout + (plan.revoke_timeout or 0.0)
    end = world.clock.monotonic() + patience
    while unrest := _round(world):
        if world.clock.monotonic() > end:
            raise Broken(f"no rest {patience:g} s after the last fault: {unrest}")
    _check_shares(world)
    _check_tasks(world)


def _round(world: World) -> str | None:
    """One second of everybody's life; then what is not as it should be."""
    for _ in range(10):
        if not world.living:
            world.start("last", static=False)
        with world.judged():
            for actor in world.living:
                if actor.due:
                    actor.background()
                actor.attend()
                actor.work()
                while actor.busy and world.rng.random() < 0.8:
                    actor.work()
            world.advance(_ROUND)
    return _unrest(world)


def claims_of(world: World) -> dict[TopicPartition, Claim]:
    """All claims, as the store holds them."""
    claims = {}
    for topic in world.topics.there.values():
        for number in range(topic.partitions):
            found = world.stores.coord.get(claim_key(GROUP, topic.id, number))
            if found is not None:
                claims[TopicPartition(topic.name, number)] = decode(found, Claim)
    return claims


def _unrest(world: World) -> str | None:
    coord = world.stores.coord
    found = coord.get(head_key(GROUP))
    prefix = members_prefix(GROUP)
    members = {
        record.key.removeprefix(prefix): decode(record, MemberRecord)
        for record in coord.list(prefix)
    }
    claims = claims_of(world)
    state = group_state(decode(found, Head) if found is not None else None, members, claims)
    if state != "STABLE":
        return f"the group is {state}"
    ids = {actor.member.membership.me.id: actor for actor in world.living}
    gone = sorted({member.id for member in members.values()} - ids.keys())
    if gone:
        return f"{gone[0]} is not there, and its session is not over yet"
    for part in sorted(world.ledger.accounts):
        claim, account = claims.get(part), world.ledger.accounts[part]
        if claim is None or claim.owner not in ids:
            return f"{account} is owned by {claim and claim.owner}, which is not there"
        owned_claim = ids[claim.owner].member.owned_claims.get(part)
        if owned_claim is None or owned_claim.epoch != claim.epoch:
            return f"{claim.owner} does not know that it owns {account} at epoch {claim.epoch}"
        end = world.topics.end_of(part)
        first = account.first_to_handle(claim)
        if first < end and account.prefix < end:
            return f"{account} was handled up to {account.prefix} of {end}"
        if first < end:
            return f"{account} was committed up to {claim.checkpoint} of {end}"
        since = first if claim.checkpoint is None else 0
        if world.plan.transactions and (missing := account.without_effect(since, end)):
            return f"{account} has no effects of {missing}"
    return None


def _check_shares(world: World) -> None:
    """Everybody subscribes to everything: fair to within one partition, per topic for `range`."""
    claims = claims_of(world)
    groups = (
        [claims]
        if world.plan.strategy != "range"
        else [
            {part: claim for part, claim in claims.items() if part.topic == name}
            for name in sorted(world.topics.there)
        ]
    )
    for group in groups:
        shares = Counter(claim.name for claim in group.values())
        counts = [shares[actor.name] for actor in world.living]
        if max(counts) - min(counts) > 1:
            raise Broken(f"unfair: {dict(sorted(shares.items()))} of {len(world.living)} members")


def _check_tasks(world: World) -> None:
    if world.plan.queues:
        left = world.stores.queues.peek(TASKS, tuple(ItemState), limit=world.plan.tasks)
        world.ledger.told.tasks_left({item.id for item in left}, world.plan.tasks)
