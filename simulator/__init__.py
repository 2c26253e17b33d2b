"""A deterministic simulator of groups: real members, a store that fails, and a judge.

`simulate(seed)` runs one seed to its end and raises `Broken` if a promise was not kept. One
thread, a virtual clock, all chance from the seed: the same seed is the same run. Queues have
theirs in `simulator.queues`, producers in `simulator.producers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.account import Broken
from simulator.ending import settle
from simulator.plan import Plan, draw
from simulator.world import World

__all__ = ["Broken", "Plan", "draw", "failures", "run", "simulate", "words"]


def simulate(
    seed: int, members: int | None = None, trace: Callable[[str], None] | None = None
) -> None:
    """One run. Raises `Broken`, or whatever the code under test raised that it should not."""
    run(draw(seed, members), trace)


def run(plan: Plan, trace: Callable[[str], None] | None = None) -> None:
    """One run of a plan that was drawn and, maybe, changed."""
    if trace is not None:
        trace(f"{plan}")
    world = World(plan, trace)
    world.run()
    settle(world)


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
