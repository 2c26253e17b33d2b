"""Which offsets are done, against a twin that is nothing but a set of them."""

from __future__ import annotations

import itertools
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.progress import MOST_BYTES, Progress
from pxrs.core.records import Ranges
from pxrs.errors import InvalidRequest

SPAN = 40

checkpoints = st.integers(0, SPAN)
finishes = st.lists(
    st.tuples(st.integers(0, SPAN), st.none() | st.integers(1, 8)).map(
        lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
    ),
    max_size=30,
)


class Twin:
    """Offsets in a set; everything is counted anew each time."""

    def __init__(self, checkpoint: int) -> None:
        self.done = set(range(checkpoint))

    def finish(self, start: int, end: int | None) -> None:
        self.done |= set(range(start, start + 1 if end is None else end))

    @property
    def checkpoint(self) -> int:
        return next(offset for offset in range(len(self.done) + 1) if offset not in self.done)

    @property
    def ranges(self) -> Ranges:
        above = {offset for offset in self.done if offset > self.checkpoint}
        starts = sorted(offset for offset in above if offset - 1 not in above)
        ends = sorted(offset + 1 for offset in above if offset + 1 not in above)
        return tuple(zip(starts, ends, strict=True))


def after(checkpoint: int, marks: list[tuple[int, int | None]]) -> tuple[Progress, Twin]:
    progress, twin = Progress(checkpoint), Twin(checkpoint)
    for start, end in marks:
        progress.finish(start, end)
        twin.finish(start, end)
    return progress, twin


def same(one: Progress, other: Progress) -> bool:
    return (one.checkpoint, one.ranges) == (other.checkpoint, other.ranges)


@given(checkpoints, finishes)
def test_progress_is_a_set_of_offsets(checkpoint: int, marks: list[tuple[int, int | None]]) -> None:
    progress, twin = Progress(checkpoint), Twin(checkpoint)
    for start, end in marks:
        progress.finish(start, end)
        twin.finish(start, end)
        assert (progress.checkpoint, progress.ranges) == (twin.checkpoint, twin.ranges)
    for offset in range(2 * SPAN):
        assert progress.is_done(offset) == (offset in twin.done)


@given(checkpoints, finishes)
def test_runs_lie_above_the_checkpoint_and_never_touch(
    checkpoint: int, marks: list[tuple[int, int | None]]
) -> None:
    progress, _ = after(checkpoint, marks)
    edges = [progress.checkpoint, *(edge for run in progress.ranges for edge in run)]
    assert all(before < behind for before, behind in pairwise(edges))


@given(checkpoints, finishes)
def test_neither_order_nor_repetition_matters(
    checkpoint: int, marks: list[tuple[int, int | None]]
) -> None:
    progress, _ = after(checkpoint, marks)
    twice, _ = after(checkpoint, [*reversed(marks), *marks])
    assert same(twice, progress)


@given(checkpoints, finishes)
def test_the_checkpoint_never_goes_back(
    checkpoint: int, marks: list[tuple[int, int | None]]
) -> None:
    progress = Progress(checkpoint)
    for start, end in marks:
        before = progress.checkpoint
        progress.finish(start, end)
        assert progress.checkpoint >= before


@given(checkpoints, finishes, finishes)
def test_a_new_owner_goes_on_where_the_old_one_stopped(
    checkpoint: int,
    marks: list[tuple[int, int | None]],
    more: list[tuple[int, int | None]],
) -> None:
    old, _ = after(checkpoint, marks)
    new = Progress(old.checkpoint, old.ranges)
    assert same(new, old)
    for start, end in more:
        old.finish(start, end)
        new.finish(start, end)
    assert same(new, old)


@given(checkpoints, finishes)
def test_any_runs_are_put_in_order(checkpoint: int, marks: list[tuple[int, int | None]]) -> None:
    """Ranges read from a record that another version wrote need not be as tidy as ours."""
    ranges = tuple((start, start + 1 if end is None else end) for start, end in marks)
    expected, _ = after(checkpoint, marks)
    assert same(Progress(checkpoint, ranges), expected)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (5, 4), (0, 0), (0, -1)])
def test_no_offsets_are_refused_and_change_nothing(start: int, end: int) -> None:
    progress = Progress(3, ((6, 8),))
    with pytest.raises(InvalidRequest):
        progress.finish(start, end)
    assert (progress.checkpoint, progress.ranges) == (3, ((6, 8),))


@pytest.mark.parametrize("base", [0, 95, 10**9 - 300, 10**12, 2**63 - 10_000])
def test_it_is_full_before_the_runs_outgrow_a_claim(base: int) -> None:
    progress = Progress(base)
    offset = base + 1
    while not progress.full:
        progress.finish(offset)
        offset += 2
    size = len(msgspec.json.encode(progress.ranges))
    assert MOST_BYTES * 0.75 < size <= MOST_BYTES


def test_it_has_room_again_once_the_oldest_gap_closes() -> None:
    progress = Progress(0)
    for offset in range(1, 2000, 2):
        progress.finish(offset)
    assert progress.full
    progress.finish(0, 1990)
    assert not progress.full
    progress.finish(0, 2001)
    assert (progress.checkpoint, progress.ranges, progress.full) == (2001, (), False)


@given(
    st.sets(st.integers(0, 60), min_size=1, max_size=20),
    st.integers(0, 2**32),
    st.lists(st.integers(1, 61), max_size=4),
)
def test_gaps_are_done_with_the_message_behind_them(
    offsets: set[int], seed: int, cuts: list[int]
) -> None:
    """Found in pieces, finished in any order: the twin has a message at every offset."""
    messages = sorted(offsets)
    progress, twin = Progress(0), Progress(0)
    edges = sorted({0, 61, *cuts})
    for start, end in itertools.pairwise(edges):
        progress.found(start, [each for each in messages if start <= each < end], end)
    for empty in set(range(61)) - offsets:
        twin.finish(empty)
    order = list(messages)
    Random(seed).shuffle(order)
    for done, offset in enumerate(order):
        is_first = all(each in order[:done] for each in messages if each < offset)
        assert progress.is_first(offset) == is_first
        progress.finish(offset)
        twin.finish(offset)
        left = [each for each in messages if each not in order[: done + 1]]
        # Everything up to the first message that is not done, or the gap before it.
        assert progress.checkpoint <= (left[0] if left else 61) <= twin.checkpoint or not left
        assert all(progress.is_done(each) for each in order[: done + 1])
        assert not any(progress.is_done(each) for each in left)
        assert len(progress.ranges) <= done + len(edges)
        again = Progress(progress.checkpoint, progress.ranges)
        assert [again.is_done(each) for each in messages] == [
            progress.is_done(each) for each in messages
        ]
    assert progress.checkpoint == 61


def test_a_gap_at_the_end_moves_the_checkpoint() -> None:
    progress = Progress(10)
    progress.found(10, [], 500)
    assert progress.checkpoint == 500
    progress.found(500, [700], 1000)
    assert (progress.checkpoint, progress.ranges) == (500, ((701, 1000),))
    copy = progress.copy()
    copy.finish(700)
    assert (copy.checkpoint, progress.checkpoint) == (1000, 500)


def test_a_message_that_is_found_again_keeps_the_gap_before_it() -> None:
    progress = Progress(0)
    progress.found(0, [25], 30)
    progress.found(20, [25], 30)
    progress.finish(25)
    assert progress.checkpoint == 30
