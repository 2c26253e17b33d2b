"""What docs/groups.md shows runs, as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

DOCS = Path(__file__).parents[2] / "docs" / "groups.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.engine("sqlite")
def test_the_example_of_a_session_runs(tmp_path: Path) -> None:
    (example,) = [each for each in EXAMPLES if "Session" in each]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (result.stdout, result.stderr) == ("42 3\n", "")
