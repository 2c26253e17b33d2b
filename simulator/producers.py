"""A deterministic simulator of producers: the real ones, a log that fails, and a judge.

Rounds carry batches for several partitions, and each batch meets a fate of its own: it is
appended, refused, lost, late or left without an answer, and whoever commits may be interrupted.
`simulate(seed)` raises `Broken` if somebody was told something else than what became of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from pxrs.clock import Clock
from pxrs.codec.batches import decode
from pxrs.config import ProducerSettings
from pxrs.errors import DeliveryFailed, OutcomeUnknown, PxrsError
from pxrs.producing.handles import Sent
from pxrs.producing.producer import Producer
from pxrs.stores.api import LogStore
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyLog, Interrupted, Rates
from pxrs.testing.forwarding import Forwarding
from pxrs.topics import Topics
from pxrs.types import Append, Appended, Fence, LogPartition
from simulator.stage import Broken, draw_rates

_TOPICS = ("t0", "t1")
_ROUNDS = 100


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's size and how much goes wrong. Seconds."""

    seed: int
    producers: int
    partitions: int
    batch_bytes: int
    delivery_timeout: float
    steps: int
    rates: Rates
    trouble: float


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = Random(f"producers {seed}")
    return Plan(
        seed=seed,
        producers=rng.choice((1, 1, 2)),
        partitions=rng.choice((1, 2, 3)),
        batch_bytes=rng.choice((1, 100, 10_000)),
        delivery_timeout=rng.choice((0.5, 5.0)),
        steps=rng.choice((30, 60)),
        rates=msgspec.structs.replace(
            draw_rates(rng),
            full=rng.choice((0.0, 0.05, 0.2)),
            interrupted=rng.choice((0.0, 0.0, 0.1, 0.2)),
        ),
        trouble=rng.choice((0.3, 1.0, 2.0)),
    )


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> None:
    """One run. Raises `Broken`, or whatever the code under test raised that it should not."""
    run(draw(seed), trace)


def run(plan: Plan, trace: Callable[[str], None] | None = None) -> None:
    """One run of a plan that was drawn and, maybe, changed."""
    if trace is not None:
        trace(f"{plan}")
    World(plan, trace).run()


class SteppedProducer(Producer):
    """A producer whose background thread and pauses are steps."""

    def __init__(self, topics: Topics, log: LogStore, clock: Clock, plan: Plan) -> None:
        settings = ProducerSettings(
            batch_bytes=plan.batch_bytes, delivery_timeout=plan.delivery_timeout
        )
        super().__init__(topics, log, clock, settings)
        self._committer._pause = lambda where: None  # type: ignore[method-assign]
        # The judge asks for every result.
        self._undelivered.log = lambda batches: None  # type: ignore[method-assign]

    def _run(self) -> None:
        """Steps stand for the thread."""

    def abandon(self) -> None:
        """Its process is gone: nobody flushes it."""
        self._abandon()

    def commit(self) -> None:
        """One round, by whichever thread it would be."""
        self._committer.run()


class AnsweringLog(Forwarding, seam=LogStore):
    """A log that tells the judge which errors it gave for which partition."""

    def __init__(self, inner: LogStore, judge: Judge) -> None:
        super().__init__(inner)
        self._judge = judge

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        try:
            results: list[Appended | PxrsError] = self._inner.append(appends)
        except PxrsError as error:
            for where, _ in appends:
                self._judge.answered(where, error)
            raise
        for (where, _), result in zip(appends, results, strict=True):
            self._judge.answered(where, result)
        return results


class Judge:
    """Every message that was sent, and what its sender was told of it."""

    def __init__(self, log: LogStore) -> None:
        self._log = log
        self._errors: dict[LogPartition, list[PxrsError]] = {}
        self.sent: list[tuple[str, LogPartition, bytes, Sent]] = []

    def answered(self, where: LogPartition, result: Appended | PxrsError) -> None:
        """The log has said this of a batch for this partition."""
        if not isinstance(result, Appended):
            self._errors.setdefault(where, []).append(result)

    def forget(self) -> None:
        """Let go of what was sent, and of the frames that told of it.

        The garbage collector does not look into a `Sent`: it would keep the whole world.
        """
        for *_, sent in self.sent:
            if (error := sent._pending.error) is not None:
                error.__traceback__ = None
        self.sent.clear()

    def check(self) -> None:
        """Everything is settled, and nothing is on its way: was all of it true?"""
        found = {where: self._read(where) for where in dict.fromkeys(each[1] for each in self.sent)}
        last: dict[tuple[str, LogPartition], int] = {}
        for who, where, value, sent in self.sent:
            offsets = [at for at, each in enumerate(found[where]) if each == value]
            name = f"{value.decode()} of {who}"
            if len(offsets) > 1:
                raise Broken(f"{name} is in the log {len(offsets)} times")
            self._check_told(name, where, sent, offsets)
            if offsets:
                if offsets[0] < last.get((who, where), -1):
                    raise Broken(f"{name} is in the log before what was sent before it")
                last[who, where] = offsets[0]

    def _check_told(self, name: str, where: LogPartition, sent: Sent, offsets: list[int]) -> None:
        try:
            position = sent.result(0)
        except DeliveryFailed as error:
            if offsets:
                raise Broken(f"{name} is in the log, and its sender was told {error}") from error
            self._check_own(name, where, error)
        except OutcomeUnknown as error:
            self._check_own(name, where, error)
        except PxrsError as error:
            raise Broken(f"{name}: its sender was told {type(error).__name__}: {error}") from error
        else:
            if offsets != [position.offset]:
                raise Broken(f"{name} was told to be at {position.offset}, it is at {offsets}")

    def _check_own(self, name: str, where: LogPartition, told: PxrsError) -> None:
        """An error is its own batch's alone."""
        if not any(told.__cause__ is error for error in self._errors.get(where, ())):
            raise Broken(f"{name}: its sender was told of what happened to others: {told}")

    def _read(self, where: LogPartition) -> list[bytes]:
        stored = self._log.fetch(where, 0, 2**30).batches
        fence = Fence(where.topic_id, where.partition, 0)
        return [message.value for batch in stored for message in decode(batch, fence)]


class World:
    """Producers and a log that fails, one random step after the other."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None) -> None:
        self._plan = plan
        self._trace = trace
        self._rng = Random(f"producer run {plan.seed}")
        self._clock = VirtualClock()
        stores = MemoryStores(clock=self._clock)
        self._faults = Faults(
            self._rng, self._clock, plan.rates, no_answer=lambda who, why, keys: self._say(why)
        )
        self._topics = Topics(stores.coord, stores.log, self._clock)
        self._ids = {name: self._topics.create(name, plan.partitions).id for name in _TOPICS}
        self._judge = Judge(stores.log)
        self._producers = {
            f"p{number}": self._start(f"p{number}", stores.log) for number in range(plan.producers)
        }

    def _start(self, who: str, log: LogStore) -> SteppedProducer:
        faulty = AnsweringLog(FaultyLog(log, self._faults, who), self._judge)
        return SteppedProducer(self._topics, faulty, self._clock, self._plan)

    def run(self) -> None:
        """All random steps; then everything has to be settled, and as it was told."""
        try:
            for _ in range(self._plan.steps):
                self._step()
            self._settle()
        finally:
            for producer in self._producers.values():
                producer.abandon()
            self._judge.forget()

    def _step(self) -> None:
        who = self._rng.choice(sorted(self._producers))
        trouble = self._plan.trouble
        step = self._rng.choices(
            (self._send, self._commit, self._wait, self._cut_off), (30, 40, 15, trouble)
        )[0]
        step(who)

    def _send(self, who: str) -> None:
        for _ in range(self._rng.randint(1, 6)):
            self._send_to(
                who, self._rng.choice(_TOPICS), self._rng.randrange(self._plan.partitions)
            )

    def _send_to(self, who: str, topic: str, partition: int) -> None:
        value = b"v%d" % len(self._judge.sent)
        self._say(f"{who} sends {value.decode()} to {topic}/{partition}")
        sent = self._producers[who].send(topic, value, partition=partition)
        where = LogPartition(self._ids[topic], partition)
        self._judge.sent.append((who, where, value, sent))

    def _commit(self, who: str) -> None:
        self._say(f"{who} commits")
        try:
            self._producers[who].commit()
        except Interrupted:
            self._say(f"{who} is interrupted")

    def _wait(self, who: str) -> None:
        self._clock.advance(self._rng.choice((0.01, 0.1, 1.0)))
        self._faults.arrive()

    def _cut_off(self, who: str) -> None:
        seconds = self._rng.choice((0.2, 2.0))
        until = self._clock.monotonic() + seconds
        if self._rng.random() < 0.5:
            self._say(f"the store crashes, and is back in {seconds:g} s")
            self._faults.crash(until)
        else:
            self._say(f"{who} is cut off for {seconds:g} s")
            self._faults.cut_off(who, until)

    def _settle(self) -> None:
        self._say("no more trouble")
        self._faults.heal()
        last = len(self._judge.sent)
        for who in self._producers:
            for topic in _TOPICS:
                for partition in range(self._plan.partitions):
                    self._send_to(who, topic, partition)
        for _ in range(_ROUNDS):
            left = [each for each in self._judge.sent if not each[3].done()]
            for who in dict.fromkeys(each[0] for each in left):
                self._commit(who)
        if left:
            who, where, value, _ = left[0]
            raise Broken(f"{value.decode()} of {who} to {where} is not settled after all")
        for who, where, value, sent in self._judge.sent[last:]:
            if sent._pending.error is not None:
                raise Broken(f"{who} can't send {value.decode()} to {where}: {sent._pending.error}")
        self._judge.check()

    def _say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self._clock.monotonic():9.3f} {text}")
