"""When to try again: (attempt, random) → delay."""

from __future__ import annotations

from random import Random

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Exponential, with jitter in its upper half: many who failed together spread out.

    `attempts` counts the first one too; None never gives up.
    """

    first: float = 0.1
    longest: float = 30.0
    factor: float = 2.0
    attempts: int | None = None

    def delay(self, attempt: int, rng: Random) -> float | None:
        """Seconds to wait after the `attempt`-th failure, counted from 1; None to give up."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        ceiling = min(self.longest, self.first * self.factor ** min(max(attempt, 1) - 1, 64))
        return ceiling * (0.5 + 0.5 * rng.random())
