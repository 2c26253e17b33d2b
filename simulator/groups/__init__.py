"""A deterministic simulator of groups: real members, a store that fails, and a judge.

`plan` draws a run, `world` has it happen, one random step after the other. Its processes are
`actor` and `caller`, others meddle from `operator`. `observed` tells `judge` of every commit.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.groups.plan import Plan, draw
from simulator.groups.world import World

__all__ = ["Plan", "draw", "run", "simulate"]


def simulate(
    seed: int, members: int | None = None, trace: Callable[[str], None] | None = None
) -> None:
    """One run. Raises `Broken`, or whatever the code under test raised that it should not."""
    run(draw(seed, members), trace)


def run(plan: Plan, trace: Callable[[str], None] | None = None) -> None:
    """One run of a plan that was drawn and, maybe, changed."""
    if trace is not None:
        trace(f"{plan}")
    World(plan, trace).run()
