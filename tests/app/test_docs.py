"""What the guides in docs/ show runs, as users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

pytestmark = pytest.mark.long

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
    assert result.returncode == 0, result.stderr
    if not any(word in example for word in ("px.run(", "px.listen(", "DeliveryFailed")):
        # Those log what their handlers raise, and what was not delivered.
        assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.engine("sqlite")
def test_the_example_of_a_session_runs(tmp_path: Path) -> None:
    (example,) = [each for each in examples("groups.md") if "Session" in each]
    assert printed_by(example, tmp_path) == ["42 3"]


GUIDES = ("consuming.md", "producing.md", "queues.md", "kv.md", "sources.md")


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in GUIDES for number in range(len(examples(name)))]
)
def test_the_examples_print_what_they_say(name: str, number: int, tmp_path: Path) -> None:
    example = examples(name)[number]
    if "on_assigned" in example:
        assert printed_by(example, tmp_path) == ["got ['orders.eu', 'orders.us']", "leaving 2"]
        return
    # Behind the call, or on the line below.
    expected = re.findall(r"print\(.*(?:  |\n +)# (.+)$", example, re.MULTILINE)
    assert len(expected) == example.count("print(")
    assert printed_by(example, tmp_path) == expected
