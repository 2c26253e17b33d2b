"""Scenarios of the embedded suites behind a node; `./run test --remote …` runs any of them so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.thorough, pytest.mark.engine("memory")]

TESTS = Path(__file__).parents[1]
SCENARIOS = (
    "groups/test_groups.py",
    "producing/test_producer.py",
    "consuming/test_consumer.py",
    "queues/test_queue_transactions.py",
    "running/test_runner.py",
)


@pytest.mark.parametrize("scenarios", SCENARIOS)
def test_run_behind_a_node(scenarios: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--remote", "-k", "memory", "-p", "no:cacheprovider",
         str(TESTS / scenarios)],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=10 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
