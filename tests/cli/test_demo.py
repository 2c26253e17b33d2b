"""`pxrs demo`, with fewer messages."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import pxrs
from pxrs.cli.demo.check import check
from pxrs.cli.demo.script import KEYS, PRODUCERS, key_of, number_in, value_of
from support.child import PATIENCE
from support.command import Run, Shell

pytestmark = pytest.mark.engine("sqlite")

SMALL = ("--messages", "3000")


def test_plain(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("demo", "--plain", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = result.stdout.decode()
    assert "producer 2 killed (SIGKILL) after" in shown
    assert shown.count("✓") == 4
    assert "✗" not in shown
    assert list(tmp_path.iterdir()) == []


def test_json_on_another_engine(shell: Shell, url: str) -> None:
    result = shell.run("demo", "--json", "--engine", url, *SMALL)
    outcome = json.loads(result.stdout)
    assert outcome["proved"]
    assert outcome["follower_saw"] == outcome["in_log"] >= outcome["acknowledged"] >= 6000
    with pxrs.connect(url) as px:
        assert px.topics() == []


def test_the_follower_and_producers_are_no_use_in_one_process(run: Run) -> None:
    result = run("demo", "--engine", "memory://")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "several processes" in result.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nobody_outlives_the_parent(shell: Shell, tmp_path: Path, how: signal.Signals) -> None:
    # A parent that is killed can't remove its folder: let it be one that goes by itself.
    environment = {**shell.environment, "TMPDIR": str(tmp_path)}
    demo = shell.start(
        "demo", "--plain", "--seconds", "30", "--messages", "100000000", env=environment
    )
    assert demo.stdout is not None
    family: list[psutil.Process] = []
    for line in demo.stdout:
        if b"msg/s" in line and (family := psutil.Process(demo.pid).children(recursive=True)):
            break
    assert len(family) == 1 + PRODUCERS
    os.kill(demo.pid, how)
    demo.communicate(timeout=PATIENCE)
    gone, alive = psutil.wait_procs(family, PATIENCE)
    assert (len(gone), alive) == (1 + PRODUCERS, [])
    assert demo.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)


def write(px: pxrs.Pxrs, numbers: list[int], *, torn: bytes = b"") -> pxrs.Reader:
    px.create_topic("t", 2)
    with px.producer() as producer:
        for number in numbers:
            producer.send("t", value_of(number), key_of(0, number))
        if torn:
            producer.send("t", torn, key_of(0, 0))
    return px.reader("t")


def test_the_check_is_content_with_a_good_log(px: pxrs.Pxrs) -> None:
    found = check(write(px, list(range(100))), [90])
    assert (found.messages, found.lost, found.repeated) == (100, 0, 0)
    assert (found.out_of_order, found.torn) == (0, 0)


def test_the_check_finds_what_is_lost(px: pxrs.Pxrs) -> None:
    assert check(write(px, list(range(100))), [103]).lost == 3


def test_the_check_finds_a_hole(px: pxrs.Pxrs) -> None:
    assert check(write(px, [n for n in range(100) if n != KEYS]), [100]).out_of_order == 1


def test_the_check_finds_what_is_repeated(px: pxrs.Pxrs) -> None:
    assert check(write(px, [*range(100), 7]), [100]).repeated == 1


def test_the_check_finds_what_is_torn(px: pxrs.Pxrs) -> None:
    assert check(write(px, [0], torn=value_of(KEYS)[:-1]), [1]).torn == 1


def test_a_value_is_whole_or_nothing() -> None:
    assert number_in(value_of(12345)) == 12345
    assert number_in(value_of(12345)[:-1]) is None
    assert number_in(value_of(12345)[:-1] + b"x") is None
    assert number_in(b"") is None
