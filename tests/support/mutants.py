"""Code that is broken in one place, and a simulation of groups that has to notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from pxrs.testing.faults import Rates
from simulator import Broken, draw, run

SEEDS = 300
# A commit is sent three times before its outcome counts as unknown.
NO_ANSWERS = Rates(unknown_applied=0.3, unknown_lost=0.3, unknown_late=0.3, longest_delay=1.0)
INTERRUPTED = Rates(interrupted=0.3, unlocked=0.5, longest_delay=5.0)

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """How to break it, what the simulator shall say, and what a run has to have in it for that.

    `first`: the seed to begin with, where those before are known to show nothing; a few before the
    one that shows it, for what a seed does changes with the code.
    """

    apply: Callable[[Patch], None]
    words: str
    plan: Mapping[str, Any] = MappingProxyType({})
    first: int = 0

    def __str__(self) -> str:
        return self.apply.__name__


def catch(mutant: Mutant, patch: Patch) -> None:
    """Break it; one of the seeds has to show it, in these words. Others may see other signs.

    It is the mutant that breaks that run: without it the same run is fine.
    """
    mutant.apply(patch)
    heard: list[str] = []
    for seed in range(mutant.first, mutant.first + SEEDS):
        plan = msgspec.structs.replace(draw(seed), **{"sources": False, **mutant.plan})
        try:
            run(plan)
        except Broken as broken:
            if re.search(mutant.words, str(broken)):
                break
            heard.append(str(broken))
    else:
        pytest.fail(f"not caught in {SEEDS} seeds; what was said: {heard[:5]}")
    patch.undo()
    run(plan)
