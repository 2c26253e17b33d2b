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


def test_there_is_an_example() -> None:
    assert _examples()


@pytest.mark.long
@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("number", range(len(_examples())))
def test_the_example_runs_as_printed(number: int, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _examples()[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = re.findall(r"^.*print\(.*#\s*(.+)$", _examples()[number], re.MULTILINE)
    assert result.stdout.splitlines() == expected
