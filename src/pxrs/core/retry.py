"""When to try again, and how often: (attempt, random) → delay."""

from __future__ import annotations

from random import Random

import msgspec

from pxrs.errors import ConfigError, quoted

_GROWTHS = ("exponential", "linear", "constant")
# Ten years: stores take no longer delay.
_LONGEST_DELAY = 10 * 365 * 24 * 3600.0


class Backoff(msgspec.Struct, frozen=True):
    """How often something is tried, and the seconds between two attempts.

    Delays grow up to `longest`: `growth` is "exponential" (by `factor`), "linear" (by `first`) or
    "constant". With a `jitter` of 0.5 a delay lies in its upper half, so that many who failed
    together spread out; with 0 it is exact. `attempts` counts the first one too: 1 tries once,
    None never gives up.
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
        if self.attempts is not None and (type(self.attempts) is not int or self.attempts < 1):
            raise ConfigError(
                "attempts must be an integer of at least 1 (the first one counts), or None to "
                f"never give up; got {quoted(self.attempts)}"
            )

    def delay(self, attempt: int, rng: Random) -> float | None:
        """Seconds to wait after the `attempt`-th failure, counted from 1; None to give up."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        ceiling = min(self.longest, _LONGEST_DELAY, self.first * self._multiple(max(attempt, 1)))
        return ceiling * (1 - self.jitter + self.jitter * rng.random())

    def _multiple(self, attempt: int) -> float:
        if self.growth == "linear":
            return attempt
        if self.growth == "constant":
            return 1
        return self.factor ** min(attempt - 1, 64)


# Without limit and without a pause: the item of a rolled-back take goes to the next one.
AT_ONCE = Backoff(first=0.0, jitter=0.0, growth="constant")


def check_retry(retry: object) -> None:
    """Refuses a value that is no `Backoff`: at the first failure of a handler it is too late."""
    if not isinstance(retry, Backoff):
        raise ConfigError(
            f"retry must be a pxrs.Backoff, such as Backoff(attempts=5), got {quoted(retry)}"
        )
