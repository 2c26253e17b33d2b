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


class ConsumeTimes(msgspec.Struct, frozen=True):
    """Hand an item out `times` times at most, then it is dead. Between them `backoff` passes."""

    times: int
    backoff: Backoff = AT_ONCE

    def __post_init__(self) -> None:
        if type(self.times) is not int or self.times < 1:
            raise ConfigError(f"ConsumeTimes({self.times!r}): an item is handed out once at least")


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

    @property
    def times(self) -> None:
        return None


Policy = ConsumeTimes | ConsumeOnce | Forever


class Again(NamedTuple):
    """Hand it out again after so many seconds."""

    delay: float


class Dead(NamedTuple):
    """It had its last delivery."""


def after_failure(policy: Policy, delivery: int, rng: Random) -> Again | Dead:
    """What becomes of an item whose `delivery`-th delivery failed."""
    if policy.times is not None and delivery >= policy.times:
        return Dead()
    delay = policy.backoff.delay(delivery, rng)
    return Dead() if delay is None else Again(delay)
