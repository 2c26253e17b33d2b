"""How many inputs a test of bad input tries: a few, always the same, or `--fuzz N` others.

The fast part tries a fifth of them.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings


def limits(config: pytest.Config, few: int) -> settings:
    wanted: int = config.getoption("--fuzz")
    if config.getoption("--fast"):
        few = max(10, few // 5)
    return settings(
        max_examples=wanted or few,
        deadline=None,
        database=None,
        derandomize=not wanted,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
