"""Scenarios of the embedded suites behind a node; `./run test --remote …` runs any of them so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.child import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.thorough, pytest.mark.engine("memory")]

TESTS = Path(__file__).parents[1]
# Files of a folder that share a process, as its start takes longer than many of their tests.
SCENARIOS = [
    ("groups", "groups", "rebalances"),
    ("producing", "producer", "producer_partitions", "sending_alike"),
    ("producing", "producer_faults", "undelivered"),
    ("consuming", "consumer", "consumer_queues", "consumer_use", "undecodable"),
    ("consuming", "background", "callbacks", "bad_commits", "reader"),
    ("queues", "queue_transactions", "queue_evidence", "put_ids"),
    ("queues", "queue_guarantees"),
    ("running", "runner", "slow_handlers", "dead_letter_topics"),
    ("running", "listener"),
    ("running", "redriving", "bad_consuming"),
]


@pytest.mark.parametrize("scenarios", SCENARIOS, ids="-".join)
def test_run_behind_a_node(scenarios: tuple[str, ...]) -> None:
    folder, *names = scenarios
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--remote", "-k", "memory", "-p", "no:cacheprovider",
         *(str(TESTS / folder / f"test_{name}.py") for name in names)],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=10 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
