"""Scenarios of a group, as text that reads like documentation.

Each file under `scenarios/` holds commands and what they print. After a change that is meant to
be, `PXRS_REWRITE=1 ./run test tests/unit/core/test_scenarios.py` writes them anew: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.scenario import rewritten

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def test_there_are_scenarios() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    now = rewritten(text)
    if os.environ.get("PXRS_REWRITE"):
        path.write_text(now)
    else:
        assert now.splitlines() == text.splitlines()
