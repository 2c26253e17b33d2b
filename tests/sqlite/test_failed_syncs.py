"""A disk that fails while a commit is synced: what a unit was told holds after a crash.

SQLite takes such a commit back, but its pages may lie in the log, whole. If nothing is written in
their place, a crash brings it to light.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import OutcomeUnknown, PxrsError

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

UNITS = 3
_TESTS = Path(__file__).parents[1]


def put_until_it_fails(path: str, report: str, by: str) -> None:
    """Put items one by one, note what each was told, and die at the first that was not done."""
    with open(report, "w") as told:
        px = pxrs.connect(f"sqlite:///{path}")
        for number in range(UNITS):
            try:
                if by == "put":
                    px.put("q", str(number))
                else:
                    with px.transaction() as tx:
                        tx.execute("CREATE TABLE IF NOT EXISTS rows_of_ours (n)")
                        tx.put("q", str(number))
                word = "done"
            except OutcomeUnknown:
                word = "unknown"
            except PxrsError:
                word = "not done"
            told.write(f"{number} {word}\n")
            told.flush()
            if word != "done":
                break
    os.kill(os.getpid(), signal.SIGKILL)


def attacked(folder: Path, by: str, nth: int) -> dict[str, str]:
    """What the units were told, where the nth sync fails."""
    report = folder / "told"
    code = (
        "from sqlite.test_failed_syncs import put_until_it_fails as run;"
        f"run({str(folder / 's.db')!r}, {str(report)!r}, {by!r})"
    )
    traced = subprocess.run(
        [
            "strace",
            *("-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync"),
            *("-e", f"inject=fdatasync:error=EIO:when={nth}"),
            *(sys.executable, "-c", code),
        ],
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        capture_output=True,
        text=True,
    )
    if not report.exists():
        _give_up(f"strace can't trace here: {traced.stderr.strip()[-200:]}")
    words = (line.partition(" ") for line in report.read_text().splitlines())
    return {number: word for number, _, word in words}


def _give_up(why: str) -> None:
    """Loud where nobody looks at skipped tests: a CI that could trace has to."""
    if os.environ.get("CI") == "true" and shutil.which("strace"):
        pytest.fail(why)
    pytest.skip(f"the disk did NOT fail: {why}")


@pytest.mark.parametrize("by", ["put", "transaction"])
def test_a_unit_that_was_not_done_does_not_come_to_light(tmp_path: Path, by: str) -> None:
    if not shutil.which("strace"):
        _give_up("strace is not installed")
    failed = 0
    for nth in range(1, UNITS + 4):
        folder = tmp_path / str(nth)
        folder.mkdir()
        with pxrs.connect(f"sqlite:///{folder / 's.db'}") as px:
            px.queues.create("q")
        told = attacked(folder, by, nth)
        with pxrs.connect(f"sqlite:///{folder / 's.db'}") as px:
            there = {item.value for item in px.queues.peek("q", limit=100)}
        assert there >= {number for number, word in told.items() if word == "done"}
        refused = {number for number, word in told.items() if word == "not done"}
        assert there.isdisjoint(refused), f"sync {nth}: {told}, but there are {there}"
        failed += len(refused)
    assert failed, "no sync failed in a commit"
