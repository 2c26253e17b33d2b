"""What the simulations have in common: processes, time and trouble, and how a promise breaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import TracebackType
from typing import Protocol

from pxrs.clock import Clock
from pxrs.queues.hold_session import HoldSession
from pxrs.stores.api import Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import NOTHING, Faults, Rates

_DEEPEST = 2

Events = tuple[list[Callable[[], None]], list[float]]


class Broken(AssertionError):  # noqa: N818 - what happened to a promise
    """A promise was not kept."""


class Died(Exception):  # noqa: N818 - what happened, not an error
    """The process was killed while it waited for the store."""


class Process(Protocol):
    """A simulated process. `thaw_at`: when it wakes up, if it is frozen for a while."""

    who: str
    alive: bool
    frozen: bool
    thaw_at: float

    def renew(self) -> None:
        """The thread that keeps its session."""
        ...


class Stage(ABC):
    """A store that fails, a virtual clock, and processes. All chance comes from `rng`."""

    _renewals_per_ttl = 3

    def __init__(
        self, rng: Random, ttl: float, rates: Rates, trace: Callable[[str], None] | None
    ) -> None:
        self.rng = rng
        self.clock = VirtualClock()
        self.stores = MemoryStores(clock=self.clock)
        self.faults = Faults(
            rng,
            self.clock,
            rates,
            before_call=self._called,
            no_answer=self._no_answer,
            interruptible=self._interruptible,
        )
        self._ttl = ttl
        self._trace = trace
        self._starts = self._depth = 0
        self._quiet = False
        self._renew_at: dict[str, float] = {}

    @property
    @abstractmethod
    def living(self) -> Sequence[Process]:
        """The processes that are there, frozen ones too."""

    @abstractmethod
    def step(self) -> None:
        """Something happens."""

    @abstractmethod
    def _called(self, who: str, what: str) -> None:
        """Before a call to the store: others may come first, and the caller may die."""

    def _interruptible(self, who: str) -> bool:
        """Whether Ctrl-C would meet the thread in which the process calls."""
        return True

    def _no_answer(self, who: str, why: str, keys: Sequence[str]) -> None:
        self.say(f"{who} gets no answer: {why}")

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.monotonic():9.3f} {'  ' * self._depth}{text}")

    # Time

    def advance(self, seconds: float) -> None:
        """Let time pass; meanwhile the session threads of those who are awake renew."""
        end = self.clock.monotonic() + seconds
        while (now := self.clock.monotonic()) < end:
            self.clock.advance(min(end - now, self._ttl / 6))
            self.faults.arrive()
            now = self.clock.monotonic()
            for process in self.living:
                if process.frozen and 0 < process.thaw_at <= now:
                    self._thaw(process)
                if not process.frozen and now >= self._renew_at.get(process.who, 0.0):
                    self._renew_at[process.who] = now + self._ttl / self._renewals_per_ttl
                    process.renew()

    def _thaw(self, process: Process) -> None:
        process.frozen, process.thaw_at = False, 0.0
        self.say(f"{process.who} wakes up{self._state_of(process)}")

    def _state_of(self, process: Process) -> str:
        """What else the trace says of one that wakes up."""
        return ""

    def _wait(self, process: Process) -> None:
        """A process waits for a store that is away."""
        self.advance(self.rng.choice((0.05, 0.2, 0.5)))
        if not process.alive:
            raise Died(process.who)

    @contextmanager
    def _waiting(self, process: Process, *, frozen: bool) -> Iterator[None]:
        """Other steps happen in the middle of one of the process's; it may be dead by then."""
        process.frozen, before = frozen or process.frozen, process.frozen
        try:
            yield
        finally:
            process.frozen = before
        if not process.alive:
            raise Died(process.who)

    def _meanwhile(self, steps: int) -> None:
        """So many steps in the middle of another one."""
        self._depth += 1
        try:
            for _ in range(steps):
                self.step()
        finally:
            self._depth -= 1

    @property
    def _is_deep(self) -> bool:
        """Whether nothing more may happen in the middle of what happens."""
        return self._quiet or self._depth >= _DEEPEST

    # Trouble

    def _freeze_for(self, process: Process, times: Sequence[float]) -> None:
        seconds = self.rng.choice(times) * self._ttl
        process.frozen, process.thaw_at = True, self.clock.monotonic() + seconds
        self.say(f"{process.who} freezes for {seconds:g} s")

    def _cut_off_one(self, who: str | None) -> None:
        """One process, or everybody: then the store itself may have crashed."""
        seconds = self.rng.choice((0.2, 0.7, 1.5)) * self._ttl
        until = self.clock.monotonic() + seconds
        if who is None and self.rng.random() < 0.5:
            self.say(f"the store crashes, and is back in {seconds:g} s")
            self.faults.crash(until)
        else:
            self.say(f"{who or 'everybody'} is cut off from the store for {seconds:g} s")
            self.faults.cut_off(who, until)

    def end_trouble(self) -> None:
        """No more faults, and everybody awake."""
        self._quiet = True
        self.say("no more trouble")
        self.faults.heal()
        for process in self.living:
            process.frozen, process.thaw_at = False, 0.0


def weighed(events: dict[Callable[[], None], float]) -> Events:
    """What may happen and how likely, as `Random.choices` takes it."""
    return list(events), list(events.values())


def draw_rates(rng: Random) -> Rates:
    """How much goes wrong in one run."""
    if rng.random() < 0.125:
        return NOTHING
    much = rng.choice((0.01, 0.05, 0.05, 0.2))

    def rate() -> float:
        return rng.choice((0.0, much, much * rng.random()))

    return Rates(
        unknown_applied=rate(),
        unknown_lost=rate(),
        unknown_late=rate(),
        unlocked=0.5,
        unavailable=rate(),
        busy=rate(),
        reads=rate(),
        renewals=rate(),
        wake_lost=rng.choice((0.0, 0.3, 1.0)),
        wake_late=rng.choice((0.0, 0.3)),
        longest_delay=rng.choice((0.5, 5.0)),
    )


class Blocked(Exception):  # noqa: N818 - what happened, not an error
    """A thread would wait for another one of its process: its step is taken again later."""


class StepLock:
    """Held by one kind of steps at a time, as often as they like.

    `before` is called by whoever is about to take it: other threads may be faster.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        # Which kinds of steps are under way, each inside a store call of the one before.
        self.steps: list[str] = []
        self._holder: str | None = None
        self._depth = 0

    def acquire(self) -> None:
        if not self._depth:
            self._before()
        current = self.steps[-1] if self.steps else ""
        if self._depth and self._holder != current:
            raise Blocked(f"{current} waits for {self._holder}")
        self._holder = current
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1

    def __enter__(self) -> StepLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SteppedKeeper(HoldSession):
    """A hold session whose loops are steps, and whose pauses let the world go on."""

    def __init__(self, stores: Stores, clock: Clock, ttl: float, wait: Callable[[], None]) -> None:
        super().__init__(stores, clock, ttl, threads=False)
        self._wait = wait

    def pause(self, failures: int) -> None:
        self._wait()
