"""Groups, queues and producers under crashes, freezes and faults: every promise, at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from simulator import failures, producers, queues, simulate

# Thousands of them belong to `./run sim`.
CHUNK = 50
SIMULATIONS = pytest.mark.parametrize(
    "simulation",
    [simulate, queues.simulate, producers.simulate],
    ids=["groups", "queues", "producers"],
)


@pytest.mark.engine("memory")
@pytest.mark.parametrize("start", range(0, 150, CHUNK))
@SIMULATIONS
def test_seeds(simulation: Callable[..., None], start: int) -> None:
    assert failures(range(start, start + CHUNK), simulation) == []


@SIMULATIONS
def test_same_seed_is_the_same_run(simulation: Callable[..., None]) -> None:
    first: list[str] = []
    second: list[str] = []
    simulation(13, trace=first.append)
    simulation(13, trace=second.append)
    assert len(first) > 50
    assert first == second


def test_same_seed_in_another_process() -> None:
    """Python orders sets by a number that differs from process to process."""
    traces = [
        subprocess.run(
            [sys.executable, "-m", "simulator", "--seed", "13", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": number},
            check=True,
            capture_output=True,
        ).stdout
        for number in ("1", "2")
    ]
    assert len(traces[0].splitlines()) > 150
    assert b"queues, seed 13: fine" in traces[0]
    assert b"producers, seed 13: fine" in traces[0]
    assert traces[0] == traces[1]


def test_a_failure_says_how_to_see_it() -> None:
    """One seed, replayed with all that happened, and the code that scripts look at."""
    fine = subprocess.run(
        [sys.executable, "-m", "simulator", "--seeds", "4", "--jobs", "2"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert "groups: 4 seeds from 0 on, 0 failed" in fine.stdout
    assert "queues: 4 seeds from 0 on, 0 failed" in fine.stdout
    assert "producers: 4 seeds from 0 on, 0 failed" in fine.stdout
