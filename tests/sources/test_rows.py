"""How much memory rows of a source are said to take: what is fetched ahead is bounded by it."""

from __future__ import annotations

from pxrs.sources.rows import size_of
from pxrs.sources.virtual import _within
from pxrs.types import Row, StoredRows

LARGE_KEY = Row(1, 0, b"k" * 10_000, None, ())
LARGE_VALUE = Row(2, 0, None, b"v" * 20_000, ())


def test_keys_and_values_count() -> None:
    assert size_of([]) == 0
    assert 10_000 < size_of([LARGE_KEY]) < 10_200
    assert 20_000 < size_of([LARGE_VALUE]) < 20_200
    assert size_of([LARGE_KEY, LARGE_VALUE]) == size_of([LARGE_KEY]) + size_of([LARGE_VALUE])


def test_as_many_as_fit_are_handed_on_but_one_at_least() -> None:
    rows = [Row(number, 0, b"k" * 1000, b"", ()) for number in range(1, 11)]
    batch = StoredRows(1, 11, rows, size_of(rows))
    few = _within(batch, size_of(rows[:3]))
    assert (few.rows, few.next, few.size) == (rows[:3], 4, size_of(rows[:3]))
    assert _within(batch, 1).rows == rows[:1]
    assert _within(batch, batch.size) is batch
