"""What docs/cli.md shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.thorough]

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
EXAMPLES = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs(example: str, tmp_path: Path) -> None:
    here = f'pxrs() {{ "{sys.executable}" -m pxrs.cli.main "$@"; }}\n'
    environment = {name: text for name, text in os.environ.items() if name != "PXRS_URL"}
    result = subprocess.run(
        ["sh", "-e", "-c", here + example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        # Up to a dozen commands, each an interpreter that loads pxrs.
        timeout=4 * PATIENCE,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout
