"""The world of one run: members, a producer, time and trouble, one random step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

from pxrs.stores.memory import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyStores
from pxrs.testing.simulator.account import Broken
from pxrs.testing.simulator.actor import Actor, Died
from pxrs.testing.simulator.caller import MODES
from pxrs.testing.simulator.effects import TASKS, Landed
from pxrs.testing.simulator.ledger import Ledger
from pxrs.testing.simulator.observed import ObservedStores
from pxrs.testing.simulator.operator import Operator
from pxrs.testing.simulator.plan import OPERATOR, Plan
from pxrs.testing.simulator.topics import WorldTopics
from pxrs.testing.simulator.trace import describe
from pxrs.types import Holder, NewItem, QueueChange, Versioned, Write

_DEEPEST = 2


class World:
    """Everything there is in one run. One thread; all chance comes from the plan's seed."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.rng = Random(f"run {plan.seed}")
        self.clock = VirtualClock()
        self.stores = MemoryStores(clock=self.clock)
        self._trace = trace
        self.ledger = Ledger(self.stores.coord, self.clock.monotonic, plan)
        self.faults = Faults(
            self.rng, self.clock, plan.rates, before_call=self._called, no_answer=self._no_answer
        )
        self.actors: list[Actor] = []
        seen = ObservedStores(self.stores, OPERATOR, self._heard)
        self._operator = Operator(
            FaultyStores(seen, self.faults, OPERATOR), self.clock, self.rng, self.say
        )
        self._operating = False
        self.topics = WorldTopics(self.stores, self.clock, self.ledger, self.rng)
        self._starts = 0
        self._depth = self._steps = 0
        self._quiet = False
        self._broken: Broken | None = None
        self._renew_at: dict[str, float] = {}
        for name, partitions in plan.topics.items():
            self.topics.create(name, partitions)
        if plan.queues:
            tasks = tuple(NewItem(queue=TASKS, body=b"btask") for _ in range(plan.tasks))
            self.stores.queues.apply(QueueChange(Holder("", "world"), put=tasks))
        for number in range(plan.members):
            self.start(f"m{number}", static=number < plan.static)
        self._events = self._weigh()

    # Who is there

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.monotonic():9.3f} {'  ' * self._depth}{text}")

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
        self._quiet = True

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

    def _weigh(self) -> tuple[list[Callable[[], None]], list[float]]:
        trouble = self.plan.trouble
        events: list[tuple[Callable[[], None], float]] = [
            (self._steward, 30),
            (self._work, 60),
            (self._attend, 6),
            (self._commit, 8),
            (self._commit_seen, 3),
            (self.topics.produce, 8),
            (self._pass_time, 12),
            (self._break_loop, 1),
            (self._seek, 1),
            (self._pause_or_resume, 1),
            (self._reset, self.plan.operator),
            (self._freeze, 1.0 * trouble),
            (self._crash, 0.6 * trouble),
            (self._restart, 0.4 * trouble),
            (self._join, 0.8 * trouble),
            (self._leave, 0.6 * trouble),
            (self._cut_off, 0.8 * trouble),
            (self._new_topic, 0.2 if self.plan.pattern else 0.0),
            (self._delete_topic, 0.3 * self.plan.operator),
            (self._make_again, 0.5 * self.plan.operator),
            (self._forget_group, 0.2 * self.plan.operator),
            (self._trim, 0.5 * self.plan.operator),
        ]
        return [event for event, _ in events], [weight for _, weight in events]

    def _steward(self) -> None:
        actor = self._pick(lambda each: not each.stewarding)
        if actor is not None and (actor.due or self.rng.random() < 0.5):
            with self._at(actor, "stewarding"):
                self.say(f"{actor.who} looks")
                actor.steward()

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
        parts = sorted(actor.worker.desk.seats)
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

    def advance(self, seconds: float) -> None:
        """Let time pass; meanwhile the session threads of those who are awake renew."""
        end = self.clock.monotonic() + seconds
        while (now := self.clock.monotonic()) < end:
            self.clock.advance(min(end - now, self.plan.ttl / 6))
            self.faults.arrive()
            now = self.clock.monotonic()
            for actor in self.living:
                if actor.frozen and 0 < actor.thaw_at <= now:
                    actor.frozen, actor.thaw_at = False, 0.0
                    self.say(f"{actor.who} wakes up, {actor.remaining:.2f} s of its lease left")
                if not actor.frozen and now >= self._renew_at.get(actor.who, 0.0):
                    self._renew_at[actor.who] = now + self.plan.ttl / 3
                    actor.renew()

    def _wait(self, actor: Actor) -> None:
        """A transaction waits for a store that is away."""
        self.advance(self.rng.choice((0.05, 0.2, 0.5)))
        if not actor.alive:
            raise Died(actor.who)

    # Trouble

    def _freeze(self) -> None:
        actor = self._pick(lambda each: not each.stewarding and not each.calling)
        if actor is not None:
            seconds = self.rng.choice((0.5, 1.0, 1.5, 3.0)) * self.plan.ttl
            actor.frozen, actor.thaw_at = True, self.clock.monotonic() + seconds
            self.say(f"{actor.who} freezes for {seconds:g} s")

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
            with self._at(actor, "calling"), self._at(actor, "stewarding"):
                actor.leave()

    def _cut_off(self) -> None:
        actor = self._pick(lambda each: True)
        if actor is not None:
            who = None if self.rng.random() < 0.2 else actor.who
            seconds = self.rng.choice((0.2, 0.7, 1.5)) * self.plan.ttl
            self.say(f"{who or 'everybody'} is cut off from the store for {seconds:g} s")
            self.faults.cut_off(who, self.clock.monotonic() + seconds)

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
        if self._quiet or self._depth >= _DEEPEST or self.rng.random() >= self.plan.interleave:
            return
        if actor is None:
            self._meanwhile(who, what, self.rng.randint(1, 6))
        elif actor.stewarding or actor.calling:
            self._let_wait(actor, what)

    def _let_wait(self, actor: Actor, what: str) -> None:
        frozen = self.rng.random() < 0.2
        if frozen:
            self.say(f"… {actor.who} is frozen")
        actor.frozen, before = frozen or actor.frozen, actor.frozen
        longest = self.rng.choice((6, 6, 80)) if frozen else 6
        try:
            self._meanwhile(actor.who, what, self.rng.randint(1, longest))
        finally:
            actor.frozen = before
        if not actor.alive:
            raise Died(actor.who)

    def _meanwhile(self, who: str, what: str, steps: int) -> None:
        self._depth += 1
        self.say(f"… {who} waits before {what}")
        try:
            for _ in range(steps):
                self.step()
        finally:
            self._depth -= 1
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

    def _no_answer(self, who: str, why: str, keys: Sequence[str]) -> None:
        self.say(f"{who} gets no answer: {why}")
        self.ledger.in_doubt(who, keys)
