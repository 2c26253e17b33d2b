"""`--forks`: tests run in forks of the process that has collected them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each starts pytest anew.
pytestmark = pytest.mark.long

_TESTS = Path(__file__).parents[1]
_MODULE = """
import os, signal, warnings, pytest

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.parametrize("number", range(40))
def test_passes(number, shared, tmp_path):
    shared.append(number)
    assert shared == sorted(shared)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()

def test_fails(capfd):
    print("printed by one that fails")
    assert os.getppid() == int(os.environ["FIRST"]), "runs in a fork"
    assert "seen" == capfd.readouterr().out

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_warns():
    warnings.warn("a warning of a worker")

def test_is_skipped():
    pytest.skip("a reason")
"""
_START = "import os, pytest, sys; os.environ['FIRST'] = str(os.getpid()); sys.exit(pytest.main())"


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(_MODULE)
    return subprocess.run(
        [
            *(sys.executable, "-c", _START, "-p", "support.forked_workers", "--forks", "2"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis", "-ra"),
            *("-p", "no:hypothesispytest", "--basetemp", str(folder / "base"), *arguments),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        capture_output=True,
        text=True,
    )


def test_all_is_reported_and_a_worker_that_dies_costs_one_test(tmp_path: Path) -> None:
    ran = _run(tmp_path)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert "2 failed, 41 passed, 1 skipped, " in ran.stdout
    assert "assert 'seen' == 'printed by one that fails\\n'" in ran.stdout
    assert "the worker ended while it ran this test: exit code -9" in ran.stdout
    assert "a warning of a worker" in ran.stdout
    assert "a reason" in ran.stdout


def test_the_first_failure_can_end_it(tmp_path: Path) -> None:
    ran = _run(tmp_path, "-x", "-k", "fails")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert "stopping after 1 failures" in ran.stdout
