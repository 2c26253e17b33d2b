"""Policies: how often an item may be handed out, and what follows a failure.

A store counts a delivery before the item is handed out, so the number of times is a true upper
bound, even if a process crashes.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec

from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError, quoted

AT_ONCE = Backoff(first=0.0, jitter=0.0, growth="constant")
# The longest delay that every store takes.
_LONGEST_DELAY = 10 * 365 * 24 * 3600.0
_LONGEST_ERROR = 2000


class ConsumeTimes(msgspec.Struct, frozen=True):
    """Hand an item out `times` times at most, with the waits of `backoff`; then it is dead."""

    times: int
    backoff: Backoff = AT_ONCE

    def __post_init__(self) -> None:
        if type(self.times) is not int or self.times < 1:
            raise ConfigError(f"times must be an integer of at least 1, got {quoted(self.times)}")
        _refuse_attempts(self.backoff)


class ConsumeOnce(msgspec.Struct, frozen=True):
    """Hand an item out once and never again, whatever happens to its holder."""

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
    """Rejects values that are not policies."""
    if not isinstance(policy, (ConsumeTimes, ConsumeOnce, Forever)):
        raise ConfigError(
            f"policy must be a ConsumeTimes, ConsumeOnce or Forever, got {quoted(policy)}"
        )


class Again(NamedTuple):
    """Hand it out again after so many seconds."""

    delay: float


class Dead(NamedTuple):
    """The item had its last delivery."""


def after_failure(policy: Policy, delivery: int, rng: Random) -> Again | Dead:
    """Decides what follows when an item's `delivery`-th delivery failed."""
    if policy.times is not None and delivery >= policy.times:
        return Dead()
    # None is for those who bound attempts: policies refuse it, see `_refuse_attempts`.
    return Again(min(policy.backoff.delay(delivery, rng) or 0.0, _LONGEST_DELAY))


def _refuse_attempts(backoff: Backoff) -> None:
    """Rejects back-offs with attempts: only the policy bounds deliveries."""
    if backoff.attempts is not None:
        raise ConfigError(
            f"the back-off of a queue's policy must not have attempts, got {backoff.attempts}; the "
            "policy bounds deliveries: ConsumeTimes(n, backoff), or Forever(backoff)"
        )


def describe(error: BaseException) -> str:
    """Describes an error in text that every store can keep, even if its `__str__` fails."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own `__str__` fails
        text = type(error).__name__
    return storable(text)


def storable(text: str) -> str:
    """Escapes what some engine refuses (unpaired surrogates, NUL), and cuts long text."""
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + " …"
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
