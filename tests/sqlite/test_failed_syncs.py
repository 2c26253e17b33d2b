"""A disk that fails or hangs while a commit is synced.

If it fails, what a unit was told holds after a crash. SQLite takes such a commit back, but its
pages may lie in the log, whole. If nothing is written in their place, a crash brings it to light.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import OutcomeUnknown, PxrsError, StoreBusy
from pxrs.stores.sqlite.stores import SqliteStores
from support.child import PATIENCE

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

UNITS = 3
_TESTS = Path(__file__).parents[1]
_WITH_TESTS = {**os.environ, "PYTHONPATH": str(_TESTS)}


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
        traced_by(f"error=EIO:when={nth}", code), env=_WITH_TESTS, capture_output=True, text=True
    )
    if not report.exists():
        _give_up(f"strace can't trace here: {traced.stderr.strip()[-200:]}")
    words = (line.partition(" ") for line in report.read_text().splitlines())
    return {number: word for number, _, word in words}


def traced_by(fault: str, code: str) -> list[str]:
    """The command that runs the code on a disk whose syncs have this fault."""
    if not shutil.which("strace"):
        _give_up("strace is not installed")
    options = ("-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync")
    return ["strace", *options, "-e", f"inject=fdatasync:{fault}", sys.executable, "-c", code]


def _give_up(why: str) -> None:
    """Loud where nobody looks at skipped tests: a CI that could trace has to."""
    if os.environ.get("CI") == "true" and shutil.which("strace"):
        pytest.fail(why)
    pytest.skip(f"the disk did NOT fail: {why}")


@pytest.mark.parametrize("by", ["put", "transaction"])
def test_a_unit_that_was_not_done_does_not_come_to_light(tmp_path: Path, by: str) -> None:
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


def put_while_a_session_lives(path: str) -> None:
    """Say which session this process has and who it is, renew that, and put an item."""
    with pxrs.connect(f"sqlite:///{path}") as px:
        session = px.stores.coord.session(1.0)
        done = threading.Event()

        def renew() -> None:
            while not done.wait(0.1):
                session.renew()

        thread = threading.Thread(target=renew)
        thread.start()
        print(session.id, os.getpid(), flush=True)
        px.put("q", "slow")
        done.set()
        thread.join()


def test_while_a_disk_hangs_others_are_told_whom_they_wait_for(tmp_path: Path) -> None:
    """Its process keeps its sessions, and what it began is done when the disk goes on."""
    path = str(tmp_path / "s.db")
    code = f"from sqlite.test_failed_syncs import put_while_a_session_lives as run; run({path!r})"
    with pxrs.connect(f"sqlite:///{path}?busy_timeout=0.1") as px:
        px.queues.create("q")
        slow = subprocess.Popen(
            traced_by("delay_enter=1500000", code), env=_WITH_TESTS, stdout=subprocess.PIPE
        )
        with slow:
            assert slow.stdout is not None
            line = slow.stdout.readline().split()
            if not line:
                _give_up("strace can't trace here")
            session, pid = line[0].decode(), int(line[1])
            with pytest.raises(StoreBusy, match=rf"held for .* by pid {pid}"):
                while True:
                    px.put("q", "quick")
            assert isinstance(px.stores, SqliteStores)
            assert px.stores.coord._sessions.alive(session)
            assert slow.wait(PATIENCE) == 0
        assert "slow" in [item.value for item in px.queues.peek("q", limit=10_000)]
