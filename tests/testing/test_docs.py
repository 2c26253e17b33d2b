"""What docs/testing.md shows runs, as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)

# What the examples do not need, and what is loaded for half a second.
WITHOUT = [
    *("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:anyio", "-p", "no:valkey"),
    *("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:xdist.looponfail"),
]

pytestmark = [pytest.mark.engine("memory"), pytest.mark.long]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_example_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(EXAMPLES[number])
    is_test = "def test_" in EXAMPLES[number]
    how = ["-m", "pytest", "-q", *WITHOUT] if is_test else []
    result = subprocess.run(
        [sys.executable, "-W", "error", *how, "test_example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("1 passed" in result.stdout) == is_test


def test_the_first_example_has_about_15_lines() -> None:
    body = EXAMPLES[0].splitlines()[1:]
    assert len([line for line in body if line.strip()]) <= 16


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    code = (
        "import sys, pytest_pxrs; "
        "print([name for name in sys.modules if name.partition('.')[0] == 'pxrs'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.stdout == "[]\n", result.stderr


def test_the_store_of_the_fixture_is_empty_and_open(
    px_memory: object, request: pytest.FixtureRequest
) -> None:
    import pxrs

    assert isinstance(px_memory, pxrs.Pxrs)
    assert px_memory.topics.list() == []
