"""Rows that wait, where offsets have gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.lag import count_rows, length, pending, share
from pxrs.types import Counted

OFFSETS = st.integers(0, 40)


@st.composite
def done_ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    cuts = sorted(draw(st.sets(OFFSETS, max_size=8)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@given(OFFSETS, OFFSETS, done_ranges())
def test_pending_is_all_that_is_not_done(
    first: int, end: int, done: tuple[tuple[int, int], ...]
) -> None:
    expected = {
        offset
        for offset in range(first, end)
        if not any(start <= offset < stop for start, stop in done)
    }
    found = pending(first, end, done)
    assert {offset for start, stop in found for offset in range(start, stop)} == expected
    assert length(found) == len(expected)


@given(st.sets(OFFSETS), OFFSETS, done_ranges())
def test_rows_that_were_all_seen_are_counted(
    rows: set[int], first: int, done: tuple[tuple[int, int], ...]
) -> None:
    waiting = pending(first, 41, done)
    expected = sum(any(start <= row < stop for start, stop in waiting) for row in rows)
    assert count_rows(waiting, sorted(rows), 0, 41) == Counted(expected, exact=True)


def test_what_was_not_seen_is_estimated_by_what_was() -> None:
    # Every second offset has a row.
    assert count_rows(((0, 1000),), range(900, 1000, 2), 900, 1000) == Counted(500, exact=False)
    # Nothing of it was seen: there is one, as far as is known.
    assert count_rows(((0, 1000),), [], 900, 1000) == Counted(1, exact=False)
    # It is far behind elsewhere only.
    assert count_rows(((950, 1000),), range(900, 1000, 2), 900, 1000) == Counted(25, exact=True)


def test_an_even_share_is_zero_only_if_nothing_waits() -> None:
    assert share(((0, 17),), 8) == Counted(3, exact=False)
    assert share((), 8) == Counted(0, exact=False)
