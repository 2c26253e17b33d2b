"""When to try again: (attempt, random) → delay."""

from __future__ import annotations

from random import Random

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Exponential, with full jitter in its upper half: many who failed together spread out."""

    first: float = 0.1
    longest: float = 30.0
    factor: float = 2.0

    def delay(self, attempt: int, rng: Random) -> float:
        """Seconds to wait before trying again after the `attempt`-th failure, counted from 1."""
        if attempt < 1:
            return 0.0
        ceiling = min(self.longest, self.first * self.factor ** min(attempt - 1, 64))
        return ceiling * (0.5 + 0.5 * rng.random())
