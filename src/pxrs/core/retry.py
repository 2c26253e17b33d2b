"""The wait between two attempts: (attempt, random) → delay."""

from __future__ import annotations

from random import Random

import msgspec

from pxrs.errors import ConfigError, quoted

_GROWTHS = ("exponential", "linear", "constant")


class Backoff(msgspec.Struct, frozen=True):
    """Delays that grow up to `longest`, with jitter so that failures spread out.

    `growth` is "exponential" (by `factor`), "linear" (by `first`) or "constant". With a `jitter`
    of 0.5 a delay lies in its upper half, with 0 it is exact. `attempts` counts the first one
    too; None never gives up.
    """

    first: float = 0.1
    longest: float = 30.0
    factor: float = 2.0
    attempts: int | None = None
    growth: str = "exponential"
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.growth not in _GROWTHS:
            raise ConfigError(
                f"growth must be one of {', '.join(_GROWTHS)}; got {quoted(self.growth)}"
            )
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter must be from 0 to 1, got {self.jitter}")
        if not self.first >= 0 or not self.longest >= 0 or not self.factor >= 1:
            raise ConfigError(
                "first and longest must be at least 0 seconds, and factor at least 1; "
                f"got first={self.first}, longest={self.longest}, factor={self.factor}"
            )
        if self.attempts is not None and self.attempts < 1:
            raise ConfigError(
                f"attempts must be at least 1 (the first one counts), got {self.attempts}"
            )

    def delay(self, attempt: int, rng: Random) -> float | None:
        """Seconds to wait after the `attempt`-th failure, counted from 1; None to give up."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        ceiling = min(self.longest, self.first * self._multiple(max(attempt, 1)))
        return ceiling * (1 - self.jitter + self.jitter * rng.random())

    def _multiple(self, attempt: int) -> float:
        if self.growth == "linear":
            return attempt
        if self.growth == "constant":
            return 1
        return self.factor ** min(attempt - 1, 64)
