"""Rows of a table become final in spite of ids that are given before they commit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.settling import Settling, following


class Table:
    """A table with a counter and writers that take ids and commit, or roll back, later."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.counter = 0
        self.rows: set[int] = set()
        self.writers: dict[str, set[int]] = {}
        self.begun = 0

    def step(self) -> None:
        move = self.random.choice(("begin", "insert", "insert", "commit", "roll back"))
        if move == "begin" and len(self.writers) < 4:
            self.begun += 1
            self.writers[f"w{self.begun}"] = set()
        elif self.writers:
            name = self.random.choice(sorted(self.writers))
            if move == "insert":
                self.counter += 1
                self.writers[name].add(self.counter)
            elif move in ("commit", "roll back"):
                ids = self.writers.pop(name)
                self.rows |= ids if move == "commit" else set()

    @property
    def top(self) -> int:
        return max(self.rows, default=-1)


Reach = Callable[[Settling, Table, Callable[[], None]], int]


def final(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """What a reader does: the highest id, then the writers, with anything in between."""
    top = table.top
    pause()
    running = frozenset(table.writers)
    pause()
    settling.look(top, running, 0.0)
    return settling.follow(sorted(each for each in table.rows if each > settling.final))


def sees_now_and_then(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """A reader that is not told who writes at every look, and has to wait long where it is not."""
    top = table.top
    pause()
    running = frozenset(table.writers) if table.random.random() < 0.5 else None
    return settling.look(top, running, 0.0, 0.0 if running is not None else 60.0)


def takes_none_for_nobody(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """A reader that takes it for the end of all writers when it is not told who they are."""
    top = table.top
    pause()
    return settling.look(
        top, frozenset(table.writers) if table.random.random() < 0.5 else frozenset(), 0.0
    )


def highest(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """A reader that goes to the highest id it sees."""
    return table.top


def writers_first(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """A reader that looks at the writers before it knows which ids were given."""
    running = frozenset(table.writers)
    pause()
    return settling.look(table.top, running, 0.0)


def forgets(settling: Settling, table: Table, pause: Callable[[], None]) -> int:
    """A reader that forgets whom it waited for when it looks again."""
    settling._waits.clear()
    return settling.look(table.top, frozenset(table.writers) - {min(table.writers, default="")}, 0)


def skipped(seed: int, reach: Reach) -> set[int]:
    """The rows that a reader has passed before they were there."""
    random = Random(seed)
    table, settling = Table(random), Settling()
    read: set[int] = set()
    position = 0

    def pause() -> None:
        for _ in range(random.randrange(9)):
            table.step()

    for _ in range(60):
        pause()
        end = reach(settling, table, pause)
        read |= {each for each in table.rows if position <= each <= end}
        position = max(position, end + 1)
    while table.writers:
        table.step()
    return {each for each in table.rows if each < position} - read


@given(st.integers(0, 2**32))
def test_no_row_appears_below_what_is_final(seed: int) -> None:
    assert skipped(seed, final) == set()


@given(st.integers(0, 2**32))
def test_no_row_appears_below_what_is_final_where_writers_are_hidden_at_times(seed: int) -> None:
    assert skipped(seed, sees_now_and_then) == set()


@pytest.mark.parametrize("broken", [highest, writers_first, forgets, takes_none_for_nobody])
def test_a_broken_reader_skips_rows(broken: Reach) -> None:
    assert any(skipped(seed, broken) for seed in range(200))


@given(st.integers(0, 2**32))
def test_all_is_read_once_nobody_writes(seed: int) -> None:
    random = Random(seed)
    table, settling = Table(random), Settling()
    for _ in range(40):
        table.step()
        final(settling, table, table.step)
    table.writers.clear()
    assert final(settling, table, lambda: None) == table.top


def test_a_writer_of_other_rows_holds_up_nothing_without_a_gap() -> None:
    settling = Settling()
    assert settling.look(3, frozenset(), 0.0) == 3
    assert settling.look(6, frozenset({"long"}), 0.0) == 3
    assert settling.follow([4, 5, 6]) == 6


def test_a_gap_waits_for_those_who_ran_when_it_was_seen_and_no_others() -> None:
    settling = Settling()
    settling.look(3, frozenset(), 0.0)
    assert settling.look(5, frozenset({"a"}), 0.0) == 3
    assert settling.follow([5]) == 3
    assert settling.is_waiting
    assert settling.look(9, frozenset({"b"}), 0.0) == 5
    assert settling.look(9, frozenset(), 0.0) == 9
    assert not settling.is_waiting


def test_where_writers_are_not_seen_time_decides() -> None:
    settling = Settling()
    assert settling.look(5, frozenset(), 100.0, settle=30.0) == -1
    assert settling.look(7, frozenset(), 129.9, settle=30.0) == -1
    assert settling.look(7, frozenset(), 130.0, settle=30.0) == 5
    assert settling.look(7, frozenset(), 160.0, settle=30.0) == 7


def test_writers_that_were_seen_are_waited_for_though_they_are_hidden_later() -> None:
    settling = Settling()
    assert settling.look(6, frozenset({"a"}), 100.0) == -1
    # Nobody can be seen: only time tells, and it runs since the ids were.
    assert settling.look(6, None, 101.0, settle=60.0) == -1
    assert settling.look(6, None, 159.9, settle=60.0) == -1
    assert settling.look(6, None, 160.0, settle=60.0) == 6
    settling = Settling()
    settling.look(6, frozenset({"a"}), 100.0)
    settling.look(6, None, 101.0, settle=60.0)
    assert settling.look(6, frozenset({"a", "b"}), 200.0) == -1
    assert settling.look(6, frozenset({"b"}), 201.0) == 6


def test_writers_that_are_seen_at_last_are_waited_for_and_no_time() -> None:
    settling = Settling()
    assert settling.look(6, None, 100.0, settle=60.0) == -1
    assert settling.look(6, frozenset({"a", "b"}), 100.1) == -1
    assert settling.look(6, frozenset({"b", "c"}), 100.2) == -1
    assert settling.look(6, frozenset({"c"}), 100.3) == 6


def test_many_looks_while_one_writer_stays_are_not_all_remembered() -> None:
    settling = Settling()
    for top in range(1, 10_001, 2):
        settling.look(top, frozenset({"long"}), 0.0)
    assert len(settling._waits) <= 64
    assert settling.look(9_999, frozenset(), 0.0) == 9_999


def test_following() -> None:
    assert following(3, []) == 3
    assert following(3, [4, 5, 7]) == 5
    assert following(-1, [1]) == -1
