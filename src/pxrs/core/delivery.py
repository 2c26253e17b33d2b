"""How often an item may be handed out, and what becomes of it when its handler fails.

A store counts a delivery before the item is handed out, so the number of times is a true upper
bound, whoever crashes when.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec

from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError

AT_ONCE = Backoff(first=0.0, jitter=0.0, growth="constant")
# No store can be told to wait longer.
_LONGEST_DELAY = 10 * 365 * 24 * 3600.0
_LONGEST_ERROR = 2000


class ConsumeTimes(msgspec.Struct, frozen=True):
    """Hand an item out `times` times at most, then it is dead. Between them `backoff` passes."""

    times: int
    backoff: Backoff = AT_ONCE

    def __post_init__(self) -> None:
        if type(self.times) is not int or self.times < 1:
            raise ConfigError(f"ConsumeTimes({self.times!r}): an item is handed out once at least")
        _refuse_attempts(self.backoff)


class ConsumeOnce(msgspec.Struct, frozen=True):
    """Hand an item out once and never again, whatever happens to who had it."""

    @property
    def times(self) -> int:
        return 1

    @property
    def backoff(self) -> Backoff:
        return AT_ONCE


class Forever(msgspec.Struct, frozen=True):
    """Hand an item out again and again until it is handled."""

    backoff: Backoff = AT_ONCE

    def __post_init__(self) -> None:
        _refuse_attempts(self.backoff)

    @property
    def times(self) -> None:
        return None


Policy = ConsumeTimes | ConsumeOnce | Forever


def check_policy(policy: object) -> None:
    """Refuse what is none."""
    if not isinstance(policy, (ConsumeTimes, ConsumeOnce, Forever)):
        raise ConfigError(f"policy = {policy!r}; there are ConsumeTimes, ConsumeOnce and Forever")


class Again(NamedTuple):
    """Hand it out again after so many seconds."""

    delay: float


class Dead(NamedTuple):
    """It had its last delivery."""


def after_failure(policy: Policy, delivery: int, rng: Random) -> Again | Dead:
    """What becomes of an item whose `delivery`-th delivery failed."""
    if policy.times is not None and delivery >= policy.times:
        return Dead()
    # None is for those who bound attempts: policies refuse it, see `_refuse_attempts`.
    return Again(min(policy.backoff.delay(delivery, rng) or 0.0, _LONGEST_DELAY))


def _refuse_attempts(backoff: Backoff) -> None:
    """How often is said in one place: by the policy."""
    if backoff.attempts is not None:
        raise ConfigError(
            f"attempts = {backoff.attempts} in the back-off of a queue's policy; how often an item "
            "is handed out is said by the policy: ConsumeTimes(n, backoff), or Forever(backoff)"
        )


def describe(error: BaseException) -> str:
    """An error in words that every store can keep, even if it can't put itself into words."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own `__str__` fails
        text = type(error).__name__
    return storable(text)


def storable(text: str) -> str:
    """Text without what some engine refuses: unpaired surrogates and zeros. Cut if it is long."""
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + " …"
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
