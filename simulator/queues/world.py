"""The world of one run of queues: workers, time and trouble, one random step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

from pxrs.testing.faults import FaultyStores
from simulator.queues.judge import Judge, ObservedStores
from simulator.queues.plan import Plan
from simulator.queues.worker import Worker
from simulator.stage import Broken, Died, Events, Stage, weighed

_PATIENCE = 60.0
# The hold session's own calls: its thread does not wait for the one that works.
_ASIDE = ("renew", "close the session", "open a session", "reap")


class World(Stage):
    """Everything there is in one run. One thread; all chance comes from the plan's seed."""

    _renewals_per_ttl = 4

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(Random(f"queue run {plan.seed}"), plan.ttl, plan.rates, trace)
        self.plan = plan
        self.judge = Judge(self.stores, plan, self.clock.monotonic)
        self._values = 0
        self.workers: list[Worker] = []
        for name, queue in plan.queues.items():
            self.stores.queues.create(name, fifo=queue.fifo)
        for _ in range(plan.workers):
            self.start()
        self._events = self._weigh()

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

    def _weigh(self) -> Events:
        trouble = self.plan.trouble
        return weighed(
            {
                self._take: 30,
                self._put: 20,
                partial(self._let, Worker.end_one): 20,
                partial(self._let, Worker.extend): 3,
                partial(self._let, Worker.tidy): 6,
                self._pass_time: 10,
                self._freeze: 1.5 * trouble,
                self._crash: 1.5 * trouble,
                self._cut_off: 1.0 * trouble,
            }
        )

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

    def _let(self, act: Callable[[Worker], None]) -> None:
        """Somebody does this."""
        with self._one() as worker:
            if worker is not None:
                act(worker)

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

    # Trouble

    def _freeze(self) -> None:
        with self._one() as worker:
            if worker is not None:
                self._freeze_for(worker, (0.5, 1.5, 3.0))

    def _crash(self) -> None:
        worker = self.rng.choice(self.living)
        self.say(f"{worker.who} is killed")
        worker.end()
        self.start()

    def _cut_off(self) -> None:
        self._cut_off_one(self.rng.choice([None, *(worker.who for worker in self.living)]))

    def _called(self, who: str, what: str) -> None:
        """Before a call to the store: other steps may come first, and the caller may die."""
        worker = next(each for each in self.workers if each.who == who)
        if not worker.alive:
            raise Died(who)
        if what in _ASIDE or self._is_deep or self.rng.random() >= self.plan.interleave:
            return
        frozen = self.rng.random() < 0.3
        with self._waiting(worker, frozen=frozen):
            self.say(f"… {who} {'is frozen' if frozen else 'waits'} before {what}")
            self._meanwhile(self.rng.randint(1, 5))

    # The end

    def _settle(self) -> None:
        """No more faults: everything has to be handled or dead, and nothing locked."""
        self.end_trouble()
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
