"""`pxrs read`."""

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
def topic(px: pxrs.Pxrs) -> None:
    """Partition 0 holds a, b, c (one a second); partition 1 holds bytes that are no text."""
    px.topics.create("t", 2)
    with px.producer() as producer:
        for at, value in enumerate("abc"):
            producer.send("t", value, "k", partition=0, timestamp=1_700_000_000_000 + 1000 * at)
            producer.flush()
        producer.send("t", b"\xff\x1b[31m", headers=[("h", b"\xfe"), ("n", None)], partition=1)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def values(text: str) -> list[str]:
    return [line["value"] for line in lines(text)]


def test_for_people(run: Run) -> None:
    shown = run("read", "t").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["0:0", "0:1", "0:2", "1:0"]
    assert shown[0].split()[3:] == ["k", "a"]
    assert r"\xff\x1b[31m" in shown[3]
    assert "\x1b" not in "".join(shown)


def test_json_lines(run: Run) -> None:
    shown = lines(run("read", "t", "--json").stdout)
    assert shown[0] == {
        "topic": "t", "partition": 0, "offset": 0, "timestamp": 1_700_000_000_000,
        "key": "k", "value": "a", "headers": [],
    }  # fmt: skip
    assert (shown[3]["key"], shown[3]["value"], shown[3]["value_base64"]) == (
        None,
        "/xtbMzFt",
        True,
    )
    assert shown[3]["headers"] == [
        {"name": "h", "value": "/g==", "value_base64": True},
        {"name": "n", "value": None},
    ]


@pytest.mark.long
def test_values_only_are_as_they_were(shell: Shell) -> None:
    assert shell.run("read", "t", "--values-only").stdout == b"a\nb\nc\n\xff\x1b[31m\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--offset", "1"), ["b", "c"]),
        (("--offset", "3"), []),
        (("--offset", "earliest", "--max", "2"), ["a", "b"]),
        (("--offset", "latest"), []),
        (("--timestamp", "1700000000500"), ["b", "c"]),
        (("--timestamp", "2023-11-14T22:13:22Z"), ["c"]),
        (("--timestamp", "2100-01-01"), []),
    ],
)
def test_where_to_start(run: Run, arguments: tuple[str, ...], expected: list[str]) -> None:
    result = run("read", "t", "--partition", "0", "--json", *arguments)
    assert (result.exit_code, values(result.stdout)) == (0, expected)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("nope",)),
        (1, ("t", "--partition", "2")),
        (1, ("t", "--partition", "0", "--offset", "4")),
        (2, ("t", "--offset", "1")),
        (2, ("t", "--offset", "-1", "--partition", "0")),
        (2, ("t", "--offset", "earliest", "--timestamp", "0")),
        (2, ("t", "--timestamp", "yesterday")),
        (2, ("t", "--max", "0")),
        (2, ("t", "--json", "--values-only")),
    ],
)
def test_mistakes(run: Run, code: int, arguments: tuple[str, ...]) -> None:
    result = run("read", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")


def damage(tmp_path: Path, offset: int) -> None:
    """Change the last byte of the batch that starts there in partition 0."""
    connection = sqlite3.connect(tmp_path / "cli.db")
    with connection:
        connection.execute(
            "UPDATE pxrs_log_batches SET data = CAST(substr(data, 1, size - 1) || x'7f' AS BLOB) "
            "WHERE base = ? AND part = (SELECT id FROM pxrs_log_partitions WHERE partition = 0)",
            (offset,),
        )
    connection.close()


def test_damage_is_an_error(run: Run, tmp_path: Path) -> None:
    damage(tmp_path, 1)
    result = run("read", "t", "--json")
    assert (result.exit_code, values(result.stdout)) == (1, ["a"])
    assert json.loads(result.stderr)["error"]["type"] == "DamagedBatch"
    assert "--skip-damaged" in result.stderr


@pytest.mark.parametrize("more", [(), ("--timestamp", "0"), ("--follow", "--offset", "earliest")])
def test_damage_can_be_skipped(run: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    damage(tmp_path, 1)
    result = run("read", "t", "-p", "0", "--skip-damaged", "--json", "--max", "2", *more)
    assert (result.exit_code, values(result.stdout)) == (0, ["a", "c"])
    skipped = {"topic": "t", "partition": 0, "first": 1, "last": 1}
    assert lines(result.stderr) == [{"skipped": skipped}]
    for_people = run("read", "t", "-p", "0", "--skip-damaged", "--max", "2", *more)
    assert for_people.stderr == "skipped 0:1 to 0:1: damaged batch\n"


def test_a_start_in_a_damaged_batch_is_skipped_too(run: Run, tmp_path: Path) -> None:
    damage(tmp_path, 1)
    result = run("read", "t", "-p", "0", "--skip-damaged", "--json", "-t", "1700000000500")
    assert values(result.stdout) == ["c"]
    assert len(lines(result.stderr)) == 1


@pytest.mark.long
def test_follow_sees_what_another_process_sends_until_it_is_interrupted(shell: Shell) -> None:
    follower = shell.start("read", "t", "--follow", "--json", "--offset", "earliest")
    assert follower.stdout is not None
    here = [json.loads(follower.stdout.readline())["value"] for _ in range(4)]
    assert here[:3] == ["a", "b", "c"]
    assert shell.run("produce", "t", "fresh", "--key", "k").returncode == 0
    assert json.loads(follower.stdout.readline())["value"] == "fresh"
    follower.send_signal(signal.SIGINT)
    out, err = follower.communicate(timeout=PATIENCE)
    assert (follower.returncode, out, err) == (130, b"", b"")


@pytest.mark.long
def test_a_closed_pipe_is_quiet(shell: Shell, px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send_many("t", [(b"k", b"x" * 1000)] * 5000)
    reading = shell.start("read", "t")
    head = subprocess.run(["head", "-1"], stdin=reading.stdout, capture_output=True)
    assert head.stdout.startswith(b"0:0")
    assert reading.stdout is not None
    reading.stdout.close()
    assert reading.stderr is not None
    assert reading.stderr.read() == b""
    assert reading.wait(PATIENCE) == 141
