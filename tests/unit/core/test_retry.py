"""Back-off grows to its limit, and those who failed together do not come back together."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.retry import AT_ONCE, Backoff
from pxrs.errors import ConfigError

backoffs = st.builds(
    Backoff,
    first=st.floats(0.001, 10),
    longest=st.floats(0.001, 100),
    factor=st.floats(1, 10),
)


@given(backoffs, st.integers(1, 10**6), st.integers())
def test_lies_in_the_upper_half_of_what_the_attempt_allows(
    backoff: Backoff, attempt: int, seed: int
) -> None:
    ceiling = backoff.first
    for _ in range(min(attempt, 65) - 1):
        ceiling = min(ceiling * backoff.factor, backoff.longest)
    ceiling = min(ceiling, backoff.longest)
    delay = backoff.delay(attempt, Random(seed))
    assert delay is not None
    assert ceiling / 2 * 0.999 <= delay <= ceiling * 1.001
    assert delay <= backoff.longest


@given(st.integers(1, 100), st.integers(1, 100), st.integers())
def test_gives_up_after_the_last_attempt(attempts: int, attempt: int, seed: int) -> None:
    delay = Backoff(attempts=attempts).delay(attempt, Random(seed))
    assert (delay is None) == (attempt >= attempts)


@given(st.integers())
def test_spreads(seed: int) -> None:
    rng = Random(seed)
    assert len({Backoff().delay(3, rng) for _ in range(20)}) > 10


@given(backoffs, st.integers(1, 100), st.integers())
def test_the_same_chance_gives_the_same_delay(backoff: Backoff, attempt: int, seed: int) -> None:
    assert backoff.delay(attempt, Random(seed)) == backoff.delay(attempt, Random(seed))


@pytest.mark.parametrize("attempts", [0, -1, 1.5, True, "3", math.inf])
def test_the_first_attempt_counts(attempts: object) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Backoff(attempts=attempts)  # type: ignore[arg-type]


def test_at_once_never_gives_up_and_never_waits() -> None:
    assert [AT_ONCE.delay(n, Random(1)) for n in (1, 2, 10**9)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("growth", "delays"),
    [
        ("constant", [2, 2, 2, 2, 2]),
        ("linear", [2, 4, 6, 8, 9]),
        ("exponential", [2, 4, 8, 9, 9]),
    ],
)
def test_back_off_shapes(growth: str, delays: list[float]) -> None:
    retry = Backoff(first=2.0, longest=9.0, growth=growth, jitter=0.0)
    assert [retry.delay(n, Random(1)) for n in (1, 2, 3, 4, 5)] == delays


def test_jitter_spreads_within_its_share() -> None:
    retry = Backoff(first=10.0, growth="constant", jitter=0.3)
    rng = Random(1)
    delays = [retry.delay(1, rng) or 0.0 for _ in range(1000)]
    assert min(delays) >= 7.0
    assert max(delays) <= 10.0
    assert max(delays) - min(delays) > 2.5


def test_no_delay_is_longer_than_a_store_can_keep() -> None:
    """Without a cap an exponential back-off is past the age of the universe some day."""
    retry = Backoff(first=60.0, longest=math.inf, jitter=0.0)
    assert retry.delay(500, Random(1)) == 10 * 365 * 24 * 3600.0
