"""Back-off grows to its limit, and those who failed together do not come back together."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.retry import Backoff

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
