"""The world of one run of queues: workers, time and trouble, one random step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from pxrs.stores.memory import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyStores
from pxrs.testing.simulator.account import Broken
from pxrs.testing.simulator.actor import Died
from pxrs.testing.simulator.queues.judge import Judge
from pxrs.testing.simulator.queues.observed import ObservedStores
from pxrs.testing.simulator.queues.plan import Plan
from pxrs.testing.simulator.queues.worker import Worker

_DEEPEST = 2
_PATIENCE = 60.0
# The keeper's own calls: its thread does not wait for the one that works.
_ASIDE = ("renew", "close the session", "open a session", "reap")


class World:
    """Everything there is in one run. One thread; all chance comes from the plan's seed."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.rng = Random(f"queue run {plan.seed}")
        self.clock = VirtualClock()
        self.stores = MemoryStores(clock=self.clock)
        self.judge = Judge(self.stores, plan, self.clock.monotonic)
        self.faults = Faults(
            self.rng, self.clock, plan.rates, before_call=self._called, no_answer=self._no_answer
        )
        self._trace = trace
        self._starts = self._values = self._depth = 0
        self._quiet = False
        self._renew_at: dict[str, float] = {}
        self.workers: list[Worker] = []
        for name, queue in plan.queues.items():
            self.stores.queues.create(name, fifo=queue.fifo)
        for _ in range(plan.workers):
            self.start()
        self._events = self._weigh()

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.monotonic():9.3f} {'  ' * self._depth}{text}")

    def start(self) -> Worker:
        self._starts += 1
        who = f"w{self._starts}"
        stores = FaultyStores(ObservedStores(self.stores, self.judge), self.faults, who)
        worker = Worker(
            who, stores, self.clock, self.plan, self.judge, self.rng, self.say, self._wait
        )
        self.workers.append(worker)
        self.say(f"{who} starts")
        return worker

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    # Steps

    def run(self) -> None:
        """All random steps, then the end."""
        for _ in range(self.plan.steps):
            self.step()
            self.judge.check()
        self._settle()

    def step(self) -> None:
        events, weights = self._events
        self.rng.choices(events, weights)[0]()

    def _weigh(self) -> tuple[list[Callable[[], None]], list[float]]:
        trouble = self.plan.trouble
        events: list[tuple[Callable[[], None], float]] = [
            (self._take, 30),
            (self._put, 20),
            (self._end_one, 20),
            (self._extend, 3),
            (self._tidy, 6),
            (self._pass_time, 10),
            (self._freeze, 1.5 * trouble),
            (self._crash, 1.5 * trouble),
            (self._cut_off, 1.0 * trouble),
        ]
        return [event for event, _ in events], [weight for _, weight in events]

    def _take(self) -> None:
        with self._one() as worker:
            if worker is not None:
                queue = self.rng.choice(sorted(self.plan.queues))
                worker.take(queue, self.rng.choice((1, 1, 1, 3)))

    def _put(self) -> None:
        with self._one() as worker:
            if worker is None:
                return
            for _ in range(self.rng.randint(1, 3)):
                name = self.rng.choice(sorted(self.plan.queues))
                queue = self.plan.queues[name]
                self._values += 1
                key = f"k{self.rng.randrange(queue.keys)}" if queue.keys else None
                plain = queue.fifo
                worker.put(
                    name,
                    f"v{self._values}",
                    key,
                    0 if plain else self.rng.choice((0, 0, 0, 5)),
                    0.0 if plain else self.rng.choice((0.0, 0.0, 0.0, 1.5)),
                )

    def _end_one(self) -> None:
        with self._one() as worker:
            if worker is not None:
                worker.end_one()

    def _extend(self) -> None:
        with self._one() as worker:
            if worker is not None:
                worker.extend()

    def _tidy(self) -> None:
        with self._one() as worker:
            if worker is not None:
                worker.tidy()

    @contextmanager
    def _one(self) -> Iterator[Worker | None]:
        able = [worker for worker in self.living if not worker.frozen and not worker.busy]
        worker = self.rng.choice(able) if able else None
        if worker is not None:
            worker.busy = True
        try:
            yield worker
        finally:
            if worker is not None:
                worker.busy = False

    # Time

    def _pass_time(self) -> None:
        self.advance(self.rng.choice((0.01, 0.2, 0.5, 1.0, self.plan.ttl)))

    def advance(self, seconds: float) -> None:
        """Let time pass; meanwhile the keepers of those who are awake renew."""
        end = self.clock.monotonic() + seconds
        while (now := self.clock.monotonic()) < end:
            self.clock.advance(min(end - now, self.plan.ttl / 6))
            self.faults.arrive()
            now = self.clock.monotonic()
            for worker in self.living:
                if worker.frozen and 0 < worker.thaw_at <= now:
                    worker.frozen, worker.thaw_at = False, 0.0
                    self.say(f"{worker.who} wakes up")
                if not worker.frozen and now >= self._renew_at.get(worker.who, 0.0):
                    self._renew_at[worker.who] = now + self.plan.ttl / 4
                    worker.renew()

    def _wait(self, worker: Worker) -> None:
        """A worker waits for a store that is away."""
        self.advance(self.rng.choice((0.05, 0.2, 0.5)))
        if not worker.alive:
            raise Died(worker.who)

    # Trouble

    def _freeze(self) -> None:
        with self._one() as worker:
            if worker is not None:
                seconds = self.rng.choice((0.5, 1.5, 3.0)) * self.plan.ttl
                worker.frozen, worker.thaw_at = True, self.clock.monotonic() + seconds
                self.say(f"{worker.who} freezes for {seconds:g} s")

    def _crash(self) -> None:
        worker = self.rng.choice(self.living)
        self.say(f"{worker.who} is killed")
        worker.end()
        self.start()

    def _cut_off(self) -> None:
        who = self.rng.choice([None, *(worker.who for worker in self.living)])
        seconds = self.rng.choice((0.2, 0.7, 1.5)) * self.plan.ttl
        self.say(f"{who or 'everybody'} is cut off from the store for {seconds:g} s")
        self.faults.cut_off(who, self.clock.monotonic() + seconds)

    def _called(self, who: str, what: str) -> None:
        """Before a call to the store: other steps may come first, and the caller may die."""
        worker = next(each for each in self.workers if each.who == who)
        if not worker.alive:
            raise Died(who)
        if (
            self._quiet
            or what in _ASIDE
            or self._depth >= _DEEPEST
            or self.rng.random() >= self.plan.interleave
        ):
            return
        self._depth += 1
        frozen = self.rng.random() < 0.3
        self.say(f"… {who} {'is frozen' if frozen else 'waits'} before {what}")
        worker.frozen, before = frozen or worker.frozen, worker.frozen
        try:
            for _ in range(self.rng.randint(1, 5)):
                self.step()
        finally:
            self._depth -= 1
            worker.frozen = before
        if not worker.alive:
            raise Died(who)

    def _no_answer(self, who: str, why: str, keys: Sequence[str]) -> None:
        self.say(f"{who} gets no answer: {why}")

    # The end

    def _settle(self) -> None:
        """No more faults: everything has to be handled or dead, and nothing locked."""
        self._quiet = True
        self.say("no more trouble")
        self.faults.heal()
        for worker in self.living:
            worker.frozen, worker.thaw_at = False, 0.0
        self._finish_open()
        end = self.clock.monotonic() + _PATIENCE
        while left := self.judge.left():
            if self.clock.monotonic() > end:
                raise Broken(f"no rest {_PATIENCE:g} s after the last fault: {left}")
            for worker in self.living:
                worker.tidy()
                for queue in sorted(self.plan.queues):
                    worker.take(queue, 3)
            self._finish_open()
            self.judge.check()
            self.advance(0.5)
        self.judge.check()

    def _finish_open(self) -> None:
        for worker in self.living:
            for job in list(worker.jobs):
                worker.finish(job)
