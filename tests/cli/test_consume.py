"""`pxrs consume`."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE
from support.command import Run, Shell

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture(autouse=True)
def topics(px: pxrs.Pxrs) -> None:
    """`t` holds a, b, c in one partition; `u` is empty."""
    px.topics.create("t", 1)
    px.topics.create("u", 2)
    with px.producer() as producer:
        for value in "abc":
            producer.send("t", value, "k")


def values(text: str) -> list[str]:
    return [json.loads(line)["value"] for line in text.splitlines()]


def checkpoint(px: pxrs.Pxrs, group: str = "g") -> int | None:
    return px.groups.describe(group).partitions[0].checkpoint


def test_what_was_printed_is_committed(run: Run, px: pxrs.Pxrs) -> None:
    first = run("consume", "t", "--group", "g", "--max", "2", "--json")
    assert (first.exit_code, values(first.stdout)) == (0, ["a", "b"])
    assert checkpoint(px) == 2
    second = run("consume", "t", "--group", "g", "--timeout", "0.5", "--json")
    assert (second.exit_code, values(second.stdout)) == (0, ["c"])
    assert checkpoint(px) == 3
    assert px.groups.describe("g").state == "EMPTY"


def test_for_people_and_as_values(run: Run) -> None:
    shown = run("consume", "t", "--group", "g", "--max", "3").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["0:0", "0:1", "0:2"]
    assert shown[0].split()[3:] == ["k", "a"]
    assert run("consume", "t", "-g", "h", "-n", "3", "--values-only").stdout == "a\nb\nc\n"


def test_several_topics_are_named(run: Run) -> None:
    shown = run("consume", "t", "u", "--group", "g", "--max", "1").stdout
    assert shown.split()[0] == "t:0:0"


def test_where_to_begin_without_a_checkpoint(run: Run) -> None:
    late = run("consume", "t", "--group", "g", "--from", "latest", "--timeout", "0.5")
    assert (late.exit_code, late.stdout) == (0, "")
    again = run("consume", "t", "--group", "g", "--from", "earliest", "--timeout", "0.5")
    assert again.stdout == ""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("nope", "--group", "g")),
        (1, ("t", "--group", "a/b")),
        (1, ("t", "--group", "g", "--instance", "a b")),
        (2, ("t",)),
        (2, ("--group", "g")),
        (2, ("t", "--group", "g", "--from", "1")),
        (2, ("t", "--group", "g", "--max", "0")),
        (2, ("t", "--group", "g", "--timeout", "-1")),
        (2, ("t", "--group", "g", "--json", "--values-only")),
    ],
)
def test_mistakes(run: Run, px: pxrs.Pxrs, code: int, arguments: tuple[str, ...]) -> None:
    result = run("consume", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert px.groups.list() == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_commits_and_leaves(shell: Shell, px: pxrs.Pxrs, number: int, code: int) -> None:
    consuming = shell.start("consume", "t", "--group", "g", "--instance", "i", "--json")
    assert consuming.stdout is not None
    assert [json.loads(consuming.stdout.readline())["value"] for _ in range(3)] == ["a", "b", "c"]
    consuming.send_signal(number)
    out, err = consuming.communicate(timeout=PATIENCE)
    assert (consuming.returncode, out, err) == (code, b"", b"")
    info = px.groups.describe("g")
    assert (info.state, checkpoint(px)) == ("EMPTY", 3)


@pytest.mark.long
def test_what_comes_later_is_shown_at_once(shell: Shell) -> None:
    consuming = shell.start("consume", "t", "--group", "g", "--json", "--max", "4")
    assert consuming.stdout is not None
    for _ in range(3):
        consuming.stdout.readline()
    assert shell.run("produce", "t", "fresh").returncode == 0
    assert json.loads(consuming.stdout.readline())["value"] == "fresh"
    assert consuming.wait(PATIENCE) == 0


@pytest.mark.long
def test_what_could_not_be_printed_is_not_committed(shell: Shell, px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send_many("t", [(b"k", b"x" * 1000)] * 5000)
    consuming = shell.start("consume", "t", "--group", "g", "--json")
    head = subprocess.run(["head", "-2"], stdin=consuming.stdout, capture_output=True)
    assert len(head.stdout.splitlines()) == 2
    assert consuming.stdout is not None
    consuming.stdout.close()
    assert consuming.stderr is not None
    assert consuming.stderr.read() == b""
    assert consuming.wait(PATIENCE) == 141
    assert px.groups.describe("g").state == "EMPTY"
    committed = checkpoint(px)
    # What head and the pipe took is out of this process; what came after is not committed.
    assert committed is not None
    assert 2 <= committed < 500


@pytest.mark.long
def test_a_pipe_that_nobody_reads_takes_nothing(shell: Shell, px: pxrs.Pxrs) -> None:
    consuming = shell.start("consume", "u", "--group", "g")
    assert consuming.stdout is not None
    consuming.stdout.close()
    with px.producer() as producer:
        producer.send("u", b"x", partition=0)
    assert consuming.wait(PATIENCE) == 141
    assert checkpoint(px) in (None, 0)


@pytest.mark.long
def test_two_members_share_and_take_over(shell: Shell, px: pxrs.Pxrs) -> None:
    members = [shell.start("consume", "u", "--group", "g", "--json") for _ in range(2)]
    watch = px.stores.coord.watch("claims/g/")
    while len({part.owner for part in _parts(px)} - {None}) < 2:
        watch.wait(1.0)
    watch.close()
    with px.producer() as producer:
        for number in range(2):
            producer.send("u", b"%d" % number, partition=number)
    shown = [json.loads(_line(member)) for member in members]
    assert {line["partition"] for line in shown} == {0, 1}
    members[0].kill()
    with px.producer() as producer:
        for number in range(2):
            producer.send("u", b"later", partition=number)
    late = [json.loads(_line(members[1])) for _ in range(2)]
    assert {"later"} <= {line["value"] for line in late}


def _parts(px: pxrs.Pxrs) -> tuple[Any, ...]:
    try:
        return px.groups.describe("g").partitions
    except pxrs.GroupNotFound:
        return ()


def _line(member: subprocess.Popen[bytes]) -> bytes:
    assert member.stdout is not None
    return member.stdout.readline()


def test_a_damaged_batch_names_the_way_past_it(run: Run, px: pxrs.Pxrs, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "cli.db")
    with connection:
        connection.execute(
            "UPDATE pxrs_log_batches SET data = CAST(substr(data, 1, size - 1) || x'7f' AS BLOB)"
        )
    connection.close()
    result = run("consume", "t", "--group", "g")
    assert result.exit_code == 1
    way = result.stderr.rpartition("pxrs ")[2].split()
    assert run(*way, "--yes").exit_code == 0
    assert run("consume", "t", "--group", "g", "--timeout", "0.5").exit_code == 0
