"""What docs/groups.md and docs/queues.md show runs, as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"


def examples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def printed_by(example: str, folder: Path) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.engine("sqlite")
def test_the_example_of_a_session_runs(tmp_path: Path) -> None:
    (example,) = [each for each in examples("groups.md") if "Session" in each]
    assert printed_by(example, tmp_path) == ["42 3"]


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("number", range(len(examples("queues.md"))))
def test_the_examples_of_queues_print_what_they_say(number: int, tmp_path: Path) -> None:
    example = examples("queues.md")[number]
    # Behind the call, or on the line below.
    expected = re.findall(r"print\(.*(?:  |\n +)# (.+)$", example, re.MULTILINE)
    assert len(expected) == example.count("print(")
    assert printed_by(example, tmp_path) == expected
