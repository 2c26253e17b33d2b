"""What the README shows runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def _run(example: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _printed(example: str) -> list[str]:
    return re.findall(r"^.*print\(.*#\s*(.+)$", example, re.MULTILINE)


def test_there_is_an_example() -> None:
    assert _examples()


@pytest.mark.long
@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("number", range(len(_examples())))
def test_the_example_runs_as_printed(number: int, tmp_path: Path) -> None:
    result = _run(_examples()[number], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == _printed(_examples()[number])


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_the_examples_run_one_after_the_other_in_one_folder(tmp_path: Path) -> None:
    for example in _examples():
        result = _run(example, tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == _printed(example)
