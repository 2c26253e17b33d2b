"""The checker of histories: exact, whatever order operations came in, and quick on long ones."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.linearizable import GONE, Op, find_violation, is_linearizable


def by_trying_everything(ops: list[Op]) -> bool:
    """The definition: some order of all that returned, and some of the others, explains it."""
    certain = [op for op in ops if op.returned < math.inf]
    lost = [op for op in ops if op.returned == math.inf]
    return any(
        explains(order)
        for number in range(len(lost) + 1)
        for some in combinations(lost, number)
        for order in permutations([*certain, *some])
    )


def explains(order: tuple[Op, ...]) -> bool:
    state: Any = GONE
    for index, op in enumerate(order):
        if any(later.returned < op.called for later in order[index + 1 :]):
            return False
        fits, state_after = op.step(state)
        if not fits:
            return False
        state = state_after if op.is_change else state
    return True


@st.composite
def histories(draw: st.DrawFn) -> list[Op]:
    """Up to six operations, of which most agree with each other."""
    size = draw(st.integers(1, 6))
    values: list[Any] = [GONE, *range(size)]
    ops = []
    for number in range(size):
        kind = draw(st.sampled_from(["read", "write", "cas", "delete"]))
        called = draw(st.integers(0, 8))
        lost = kind != "read" and draw(st.integers(0, 3)) == 0
        returned = math.inf if lost else called + draw(st.integers(0, 4))
        done = None if lost else kind in ("read", "write") or draw(st.booleans())
        seen = draw(st.sampled_from(values))
        value = {"read": seen, "delete": GONE}.get(kind, number)
        rank = draw(st.sampled_from([math.inf, 1.0, 2.0]))
        ops.append(Op("k", kind, value, called, returned, seen, done, rank))
    return ops


@given(histories())
def test_it_finds_an_order_exactly_if_there_is_one(ops: list[Op]) -> None:
    assert is_linearizable(ops) == by_trying_everything(ops)


def played(seed: int, length: int, clients: int = 8) -> list[Op]:
    """A long history of clients that overlap all the time; some of their answers are lost."""
    rng = Random(seed)
    free = [0.0] * clients
    state: Any = GONE
    ops: list[Op] = []
    for number in range(length):
        client = min(range(clients), key=free.__getitem__)
        called = free[client]
        happens = max(called, free[client]) + rng.random()
        # Operations happen in the order of their numbers.
        happens = max(happens, ops[-1].rank if ops else 0.0)
        returned = happens + rng.random() * 4
        free[client] = returned
        kind = rng.choice(["read", "read", "write", "cas", "delete"])
        expected = state if rng.random() < 0.7 else f"not {number}"
        done: bool | None = True
        value: Any = {"read": state, "delete": GONE}.get(kind, number)
        if kind == "cas":
            done = expected == state
        elif kind == "delete":
            done = state is not GONE
        is_lost = kind != "read" and rng.random() < 0.05
        op = Op("k", kind, value, called, returned, expected, done, happens)
        if op.is_change:
            state = value
        ops.append(op._replace(returned=math.inf, done=None) if is_lost and op.is_change else op)
    return ops


@pytest.mark.parametrize("with_ranks", [True, False])
def test_long_histories(with_ranks: bool) -> None:
    for seed in range(5):
        ops = played(seed, 600)
        if not with_ranks:
            ops = [op._replace(rank=math.inf) for op in ops]
        assert is_linearizable(ops)
        # One read sees what was overwritten long before.
        reads = [index for index, op in enumerate(ops) if op.kind == "read" and op.value != GONE]
        early, late = reads[10], reads[-10]
        ops[late] = ops[late]._replace(value=ops[early].value)
        assert not is_linearizable(ops)


def test_a_violation_is_told_by_its_key() -> None:
    fine = [Op("a", "write", 1, 0, 1), Op("a", "read", 1, 2, 3)]
    wrong = [Op("b", "write", 1, 0, 1), Op("b", "read", GONE, 2, 3)]
    assert find_violation(fine) is None
    found = find_violation([*wrong, *fine])
    assert found == wrong
    assert all(first.called <= second.called for first, second in pairwise(found))
