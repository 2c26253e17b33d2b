"""How often an item is handed out, and what becomes of it in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from pxrs.core.delivery import (
    Again,
    ConsumeOnce,
    ConsumeTimes,
    Dead,
    Forever,
    Policy,
    after_failure,
    describe,
    storable,
)
from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError


@pytest.mark.parametrize("times", [0, -1, 1.5, True, "3", None, math.inf])
def test_a_policy_hands_out_once_at_least(times: object) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ConsumeTimes(times)  # type: ignore[arg-type]


def test_an_item_is_dead_after_its_last_delivery() -> None:
    rng = Random(1)
    assert after_failure(ConsumeOnce(), 1, rng) == Dead()
    policy = ConsumeTimes(3)
    assert [after_failure(policy, n, rng) for n in (1, 2, 3, 4)] == [
        Again(0.0),
        Again(0.0),
        Dead(),
        Dead(),
    ]
    assert after_failure(Forever(), 10**9, rng) == Again(0.0)


@pytest.mark.parametrize(
    ("growth", "delays"),
    [
        ("constant", [2, 2, 2, 2, 2]),
        ("linear", [2, 4, 6, 8, 9]),
        ("exponential", [2, 4, 8, 9, 9]),
    ],
)
def test_back_off_shapes(growth: str, delays: list[float]) -> None:
    policy = Forever(Backoff(first=2.0, longest=9.0, growth=growth, jitter=0.0))
    assert [after_failure(policy, n, Random(1)) for n in (1, 2, 3, 4, 5)] == [
        Again(delay) for delay in delays
    ]


def test_jitter_spreads_within_its_share() -> None:
    policy = Forever(Backoff(first=10.0, growth="constant", jitter=0.3))
    rng = Random(1)
    verdicts = [after_failure(policy, 1, rng) for _ in range(1000)]
    delays = [verdict.delay for verdict in verdicts if isinstance(verdict, Again)]
    assert len(delays) == 1000
    assert min(delays) >= 7.0
    assert max(delays) <= 10.0
    assert max(delays) - min(delays) > 2.5


@pytest.mark.parametrize("policy", [partial(ConsumeTimes, 5), Forever])
def test_how_often_is_said_in_one_place(policy: Callable[[Backoff], Policy]) -> None:
    with pytest.raises(ConfigError, match="policy bounds deliveries"):
        policy(Backoff(attempts=2))


def test_no_delay_is_longer_than_a_store_can_keep() -> None:
    """Without a cap an exponential back-off is past the age of the universe some day."""
    policy = Forever(Backoff(first=60.0, longest=math.inf, jitter=0.0))
    assert after_failure(policy, 500, Random(1)) == Again(10 * 365 * 24 * 3600.0)


class Speechless(Exception):  # noqa: N818 - that is what it is
    def __str__(self) -> str:
        raise ValueError("no words")


def test_errors_become_words_that_can_be_stored() -> None:
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(Speechless()) == "Speechless"
    assert describe(ValueError("a\0b \udc80")) == "ValueError: a\\x00b \\udc80"
    assert len(storable("x" * 10**6)) < 3000
