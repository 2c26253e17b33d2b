"""Cases of one kind, of which the fast part runs a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_are_fast(cases: Iterable[Any], few: int = 2) -> list[Any]:
    """The cases, all but the first few of them marked as long."""
    return [
        pytest.param(case, marks=[pytest.mark.long] if number >= few else [])
        for number, case in enumerate(cases)
    ]
