"""How often and how long one call is tried: delays that grow, and one deadline over all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pxrs.chance import CHANCE
from pxrs.client.stats import RetryStats
from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.errors import PxrsError, RetryExhausted


class RetryPolicy:
    """Counts the attempts of all calls. Thread-safe.

    `wait` lets time pass between two attempts: it must be the time that the clock shows.
    """

    def __init__(
        self,
        backoff: Backoff,
        timeout: float,
        clock: Clock,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.backoff = backoff
        self.timeout = timeout
        self.clock = clock
        self.wait = wait or threading.Event().wait
        self._lock = threading.Lock()
        self._retries = self._exhausted = 0

    def begin(self, ends: float | None = None) -> Tries:
        """Begins one call; it has until `ends`, by the policy's clock, or for the whole timeout."""
        return Tries(self, self.clock.monotonic() + self.timeout if ends is None else ends)

    def count(self, *, exhausted: bool = False) -> None:
        """Note another attempt, or that one call is given up."""
        with self._lock:
            self._exhausted += exhausted
            self._retries += not exhausted

    @property
    def stats(self) -> RetryStats:
        """The counts so far."""
        return RetryStats(self._retries, self._exhausted)


class Tries:
    """The attempts of one call."""

    def __init__(self, policy: RetryPolicy, ends: float) -> None:
        self._policy = policy
        self._clock = policy.clock
        self.ends = ends
        # Whether it was the deadline that left no attempt.
        self.is_late = False
        self._failures = 0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.ends - self._clock.monotonic())

    def again(self, error: PxrsError, *, at_once: bool = False) -> None:
        """Waits before another attempt; raises `RetryExhausted` if no attempt is left.

        `at_once`: something has changed, so another attempt need not wait.
        """
        if isinstance(error, RetryExhausted):
            raise error
        self._failures += 1
        delay = self._policy.backoff.delay(self._failures, CHANCE)
        self.is_late = self.left <= (0 if at_once else delay or 0)
        if delay is None or self.is_late:
            self._policy.count(exhausted=True)
            raise RetryExhausted(self._failures, error) from error
        self._policy.count()
        if not at_once:
            self._policy.wait(delay)
