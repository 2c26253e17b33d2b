"""`pxrs demo`, with scenes as short as they can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import pxrs
from pxrs.cli.demo import play
from pxrs.cli.demo.judge import KEYS, Entry, check
from pxrs.cli.demo.play import Pace, Scene, Stage, perform
from pxrs.cli.demo.processes import DemoFailed
from pxrs.cli.demo.screen import PlainView
from support.child import PATIENCE
from support.command import Run, Shell
from support.node import LocalNode

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

QUICK = ("--pace", "0", "--burst", "3000")
PROOFS = ("shares", "killed", "joined", "fenced", "burst", "left", "complete", "ordered", "forward")


def test_plain(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("demo", "--plain", *QUICK, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = result.stdout.decode()
    assert shown.count("✓") == len(PROOFS)
    assert "✗" not in shown
    assert "refused (Fenced)" in shown
    assert f"All {len(PROOFS)} held." in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_json_on_another_engine(shell: Shell, url: str) -> None:
    result = shell.run("demo", "--json", "--engine", url, *QUICK)
    outcome = json.loads(result.stdout)
    assert (result.returncode, outcome["proved"], outcome["effectively_once"]) == (0, True, True)
    assert tuple(proof["name"] for proof in outcome["proofs"]) == PROOFS
    assert outcome["ledger"]["entries"] == outcome["figures"]["messages"] > 3000
    assert outcome["figures"]["moved_by_join"] == 2
    with pxrs.connect(url) as px:
        assert px.topics.list() == []
        assert px.stores.coord.list("") == []
        with px.stores.atomic() as atomic:
            tables = atomic.connection.execute("SELECT name FROM sqlite_master").fetchall()
        assert not [name for (name,) in tables if "demo" in name]


@pytest.mark.thorough
def test_through_nodes_of_which_one_is_killed(shell: Shell) -> None:
    result = shell.run("demo", "--json", "--nodes", "2", *QUICK, patience=4 * PATIENCE)
    outcome = json.loads(result.stdout)
    assert (result.returncode, outcome["proved"], outcome["effectively_once"]) == (0, True, True)
    names = tuple(proof["name"] for proof in outcome["proofs"])
    assert names == (*PROOFS[:3], "node", *PROOFS[3:])
    assert "0 partitions changed hands" in outcome["proofs"][3]["text"]
    assert outcome["figures"]["node_failover"] > 0


@pytest.mark.thorough
def test_nodes_that_are_there_already(shell: Shell, tmp_path: Path) -> None:
    with LocalNode(f"sqlite:///{tmp_path}/node.db") as node:
        result = shell.run(
            "demo", "--json", "--engine", f"pxrs://{node.address}", *QUICK, patience=4 * PATIENCE
        )
        outcome = json.loads(result.stdout)
        assert (result.returncode, outcome["proved"]) == (0, True), outcome
        assert node.px.topics.list() == []


@pytest.mark.thorough
def test_without_transactions_it_proves_at_least_once(shell: Shell) -> None:
    result = shell.run("demo", "--json", "--at-least-once", *QUICK)
    outcome = json.loads(result.stdout)
    assert (result.returncode, outcome["proved"], outcome["effectively_once"]) == (0, True, False)
    # The frozen consumer had handled its batch, and others did so again.
    assert outcome["ledger"]["repeated"] >= outcome["figures"]["refused"] > 0
    assert outcome["ledger"]["lost"] == 0


def test_consumers_are_no_use_in_one_process(run: Run) -> None:
    result = run("demo", "--engine", "memory://")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "several processes" in result.stderr


def family_of(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The demo's processes, once all of them are there."""
    assert demo.stdout is not None
    for _ in demo.stdout:
        family = psutil.Process(demo.pid).children(recursive=True)
        if len(family) == 4:
            return family
    raise AssertionError("the demo ended before that")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_nobody_outlives_the_parent(shell: Shell, tmp_path: Path, how: signal.Signals) -> None:
    # A parent that is killed can't remove its folder: let it be one that goes by itself.
    environment = {**shell.environment, "TMPDIR": str(tmp_path)}
    demo = shell.start("demo", "--plain", "--pace", "5", env=environment)
    family = family_of(demo)
    # One that stands still can't notice anything by itself.
    family[0].suspend()
    os.kill(demo.pid, how)
    demo.communicate(timeout=PATIENCE)
    gone, alive = psutil.wait_procs(family, PATIENCE)
    assert (len(gone), alive) == (4, [])
    if how == signal.SIGKILL:
        assert demo.returncode == -signal.SIGKILL
    else:
        assert demo.returncode == 128 + how
        assert list(tmp_path.glob("pxrs-demo-*")) == []


def test_what_was_not_shown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: Stage) -> tuple[bool, str]:
        raise DemoFailed("never came")

    scenes = (
        Scene("bad", "a scene", "it comes", fail),
        Scene("later", "another", "it comes too", fail),
    )
    monkeypatch.setattr(play, "SCENES", scenes)
    outcome = perform(PlainView(quiet=True), Pace(0, 1))
    assert not outcome.proved
    assert [proof.holds for proof in outcome.proofs] == [False] * 5
    assert outcome.proofs[0].text == "not proved: it comes (never came)"
    assert outcome.proofs[1].text == "not reached: it comes too"


def test_a_process_that_dies_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplace(stage: Stage) -> tuple[bool, str]:
        stage.start_consumer("A")
        stage.wait("A joins", lambda: bool(stage.member("A")))
        # Its end was not asked for.
        stage.cast.send_signal("A", signal.SIGKILL)
        stage.wait("for ever", lambda: False)
        return True, "never"

    monkeypatch.setattr(play, "SCENES", (Scene("s", "t", "it lives", misplace),))
    outcome = perform(PlainView(quiet=True), Pace(0, 1))
    assert outcome.proofs[0].text.startswith("not proved: it lives (A ended with code -9")


def entered(*numbers: int, epoch: int = 1) -> list[Entry]:
    return [Entry(n % 2, n, n, epoch, turn) for turn, n in enumerate(numbers)]


def test_the_check_is_content_with_a_good_ledger() -> None:
    found = check(entered(*range(3 * KEYS)), 3 * KEYS, once=True)
    assert (found.entries, found.lost, found.repeated) == (3 * KEYS, 0, 0)
    assert (found.unknown, found.out_of_order) == (0, 0)


def test_the_check_finds_what_is_lost() -> None:
    assert check(entered(0, 1, 3), 5, once=True).lost == 2


def test_the_check_finds_what_was_never_sent() -> None:
    assert check(entered(0, 1, 2), 2, once=True).unknown == 1


def test_the_check_finds_what_is_repeated() -> None:
    entries = entered(0, KEYS) + entered(KEYS, epoch=2)
    assert check(entries, KEYS + 1, once=True).repeated == 1
    assert check(entries, KEYS + 1, once=True).out_of_order == 1
    assert check(entries, KEYS + 1, once=False).out_of_order == 0


@pytest.mark.parametrize("once", [True, False])
def test_the_check_finds_what_overtook(once: bool) -> None:
    assert check(entered(KEYS, 0), KEYS + 1, once=once).out_of_order > 0


def test_the_check_orders_by_epoch() -> None:
    assert check(entered(KEYS, epoch=2) + entered(0), KEYS + 1, once=True).out_of_order == 0
