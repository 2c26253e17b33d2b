"""Deterministic simulators: the real code, a store that fails, and a judge.

`groups`, `queues` and `producers` each have a `simulate(seed)`, which runs one seed to its end and
raises `Broken` if a promise was not kept. One thread, a virtual clock, all chance from the seed:
the same seed is the same run. Each draws a plan, makes a world of it (`stage` has what worlds have
in common), lets its processes take their steps, and has a judge hear of all that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.groups import Plan, draw, run, simulate
from simulator.stage import Broken

__all__ = ["Broken", "Plan", "draw", "failures", "run", "simulate", "words"]


def failures(
    seeds: Iterable[int], simulation: Callable[[int], None] = simulate
) -> list[tuple[int, str]]:
    """Run these seeds; those that failed, and why."""
    failed = []
    for seed in seeds:
        try:
            simulation(seed)
        except Exception as error:  # noqa: BLE001 - a crash of the code under test is a finding
            failed.append((seed, words(error)))
    return failed


def words(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"
