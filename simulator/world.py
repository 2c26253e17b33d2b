"""The world of one run: members, a producer, time and trouble, one random step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

from pxrs.testing.faults import FaultyStores
from pxrs.types import Holder, NewItem, QueueChange, Versioned, Write
from simulator.account import Broken
from simulator.actor import Actor
from simulator.caller import MODES
from simulator.effects import TASKS, Landed
from simulator.ledger import Ledger
from simulator.observed import ObservedStores
from simulator.operator import Operator
from simulator.plan import OPERATOR, Plan
from simulator.stage import Died, Events, Process, Stage, weighed
from simulator.topics import WorldTopics
from simulator.trace import describe


class World(Stage):
    """Everything there is in one run. One thread; all chance comes from the plan's seed."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(Random(f"run {plan.seed}"), plan.ttl, plan.rates, trace)
        self.plan = plan
        self.ledger = Ledger(self.stores.coord, self.clock.monotonic, plan)
        self.actors: list[Actor] = []
        seen = ObservedStores(self.stores, OPERATOR, self._heard)
        self._operator = Operator(
            FaultyStores(seen, self.faults, OPERATOR), self.clock, self.rng, self.say
        )
        self._operating = False
        self.topics = WorldTopics(self.stores, self.clock, self.ledger, self.rng)
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
            FaultyStores(seen, self.faults, who),
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

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive]

    def _awake(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive and not actor.frozen]

    # Steps

    def run(self) -> None:
        """All random steps, those in the middle of others included."""
        while self._steps < self.plan.steps:
            self.step()

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
                self._work: 60,
                self._attend: 6,
                self._commit: 8,
                self._commit_seen: 3,
                self.topics.produce: 8,
                self._pass_time: 12,
                self._break_loop: 1,
                self._seek: 1,
                self._pause_or_resume: 1,
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
        actor = self._pick(lambda each: not each.stewarding)
        if actor is not None and (actor.due or self.rng.random() < 0.5):
            with self._at(actor, "stewarding"):
                self.say(f"{actor.who} looks")
                actor.background()

    def _commit(self) -> None:
        actor = self._pick(lambda each: not each.stewarding)
        if actor is not None:
            with self._at(actor, "stewarding"):
                self.say(f"{actor.who} commits")
                actor.commit()

    def _work(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is not None:
            with self._at(actor, "calling"):
                actor.work()

    def _attend(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is not None:
            with self._at(actor, "calling"):
                actor.attend()

    def _commit_seen(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is not None:
            with self._at(actor, "calling"):
                actor.commit_seen()

    def _break_loop(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is not None:
            actor.give_up()

    def _pause_or_resume(self) -> None:
        actor = self._pick(lambda each: not each.calling)
        if actor is not None:
            actor.pause_or_resume()

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
        actor = self._pick(lambda each: not each.stewarding and not each.calling)
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
        actor = self._pick(lambda each: not each.stewarding and not each.calling)
        if actor is not None and len(self.living) > 1:
            with self._at(actor, "stewarding"), self._at(actor, "calling"):
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
        if self.topics.there:
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
        elif actor.stewarding or actor.calling:
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
