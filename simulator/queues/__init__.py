"""A deterministic simulator of work queues: real transactions, a store that fails, and a judge.

`plan` draws a run, `world` has it happen, `worker` is one of its processes, `judge` hears of all
that reached the store.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.queues.plan import Plan, draw
from simulator.queues.world import World

__all__ = ["Plan", "draw", "run", "simulate"]


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> None:
    """One run. Raises `Broken`, or whatever the code under test raised that it should not."""
    run(draw(seed), trace)


def run(plan: Plan, trace: Callable[[str], None] | None = None) -> None:
    """One run of a plan that was drawn and, maybe, changed."""
    if trace is not None:
        trace(f"{plan}")
    World(plan, trace).run()
