"""`pxrs groups`."""

from __future__ import annotations

import json
import os
import pty
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE
from support.command import Run, Shell, parsed

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture(autouse=True)
def group(px: pxrs.Pxrs) -> None:
    """`billing` has handled three of four messages in partition 0, and none of one in 1."""
    px.topics.create("orders", 2)
    with px.producer() as producer:
        for at, number in enumerate((0, 0, 0, 0, 1)):
            producer.send(
                "orders", b"%d" % at, partition=number, timestamp=1_700_000_000_000 + 1000 * at
            )
    with px.consumer(
        "orders",
        "billing",
        instance="a",
        debounce=0.0,
        auto_commit=False,
        # Its place is not kept for long: others are to have its partitions.
        rejoin_timeout=0.1,
    ) as member:
        while True:
            for message in member.poll(timeout=PATIENCE):
                if (message.partition, message.offset) == (0, 2):
                    member.commit(message)
                    return


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_list(run: Run) -> None:
    assert words(run("groups", "list").stdout) == [
        ["group", "state", "members", "generation"],
        ["billing", "EMPTY", "0", "1"],
    ]
    assert parsed(run("groups", "list", "--json")) == [
        {"name": "billing", "state": "EMPTY", "generation": 1, "members": 0}
    ]


def test_describe_an_empty_group(run: Run) -> None:
    shown = run("groups", "describe", "billing").stdout.splitlines()
    assert shown[0].startswith("billing: EMPTY, 2 messages behind, ")
    assert shown[1].startswith("generation 1, ")
    assert shown[1].endswith(": a joined")
    assert shown[2].split() == [
        "topic", "partition", "owner", "epoch", "checkpoint", "end", "lag", "age",
    ]  # fmt: skip
    assert shown[3].split()[:7] == ["orders", "0", "-", "2", "3", "4", "1"]
    assert shown[4].split()[:7] == ["orders", "1", "-", "2", "none", "1", "1"]
    assert len(shown) == 5


def test_describe_as_json(run: Run) -> None:
    told = parsed(run("groups", "describe", "billing", "--json"))
    assert (told["state"], told["generation"], told["members"]) == ("EMPTY", 1, [])
    assert told["lag"] == 2
    assert told["lag_seconds"] == max(part["lag_seconds"] for part in told["partitions"])
    first = told["partitions"][0]
    assert first.pop("lag_seconds") > 0
    assert first == {
        "topic": "orders", "partition": 0, "owner": None, "epoch": 2, "checkpoint": 3,
        "start": 0, "end": 4, "lag": 1, "lag_is_exact": True, "metadata": "",
    }  # fmt: skip


def test_describe_a_group_with_members(run: Run, px: pxrs.Pxrs) -> None:
    with px.consumer("orders", "billing", instance="a", debounce=0.0) as member:
        while len(member.assignment) < 2:
            member.poll(timeout=0.01)
        shown = run("groups", "describe", "billing").stdout.splitlines()
    assert ": STABLE, " in shown[0]
    assert shown[2].split() == ["member", "client", "joined", "static", "owns"]
    assert shown[3].split()[0] == "a"
    assert shown[3].endswith("yes      orders 0-1")
    assert shown[6].split()[2] == "a"
    with px.consumer("orders", "billing", instance="b", debounce=0.0):
        assert "waits for a: " in run("groups", "describe", "billing").stdout


def test_explain(run: Run) -> None:
    assert parsed(run("groups", "reset", "billing", "orders", "--to", "1", "--yes", "--json"))
    shown = run("groups", "explain", "billing").stdout.splitlines()
    assert "generation 1: a joined (computed by a)" in shown[0]
    assert shown[1] == "    orders 0-1: no member → a"
    assert "checkpoints set by " in shown[2]
    assert shown[3:] == ["    orders 0: 3 → 1", "    orders 1: none → 1"]
    told = parsed(run("groups", "explain", "billing", "--json"))
    assert told["rebalances"][0]["moves"][0] == {
        "topic": "orders", "partition": 0, "before": None, "after": "a",
    }  # fmt: skip
    assert told["resets"][0]["changes"][0] == {
        "topic": "orders", "partition": 0, "before": 3, "after": 1,
    }  # fmt: skip
    last = run("groups", "explain", "billing", "--limit", "1").stdout
    assert "checkpoints set" in last
    assert "generation" not in last
    newest = parsed(run("groups", "explain", "billing", "--limit", "1", "--json"))
    assert newest == told | {"rebalances": []}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--to", "earliest"), [(0, 3, 0), (1, None, 0)]),
        (("--to", "latest"), [(0, 3, 4), (1, None, 1)]),
        (("--to", "2", "--partition", "0"), [(0, 3, 2)]),
        (("--timestamp", "2023-11-14T22:13:21Z"), [(0, 3, 1), (1, None, 0)]),
    ],
)
def test_reset(run: Run, arguments: tuple[str, ...], expected: list[Any]) -> None:
    changes = parsed(run("groups", "reset", "billing", "orders", *arguments, "-y", "--json"))
    assert [(c["partition"], c["before"], c["after"]) for c in changes] == expected
    shown = words(run("groups", "reset", "billing", "orders", *arguments, "-y").stdout)
    assert shown[0] == ["topic", "partition", "before", "after"]
    assert shown[1][:2] == ["orders", "0"]


@pytest.mark.parametrize("command", [("reset", "billing", "orders", "--to", "0"), ("delete",)])
def test_members_have_to_leave_first(run: Run, px: pxrs.Pxrs, command: tuple[str, ...]) -> None:
    arguments = command if len(command) > 1 else ("delete", "billing")
    with px.consumer("orders", "billing", instance="b", debounce=0.0) as member:
        refused = run("groups", *arguments, "--yes")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr == (
            "error: group 'billing' has members: b; stop them first, or fence them with --force\n"
        )
        assert run("groups", *arguments, "--yes", "--force").exit_code == 0
        seen = 0
        while seen < 5:
            seen += len(member.poll(timeout=PATIENCE))


def test_delete(run: Run) -> None:
    assert run("groups", "delete", "billing", "--yes").stdout == "billing deleted\n"
    empty = run("groups", "list")
    assert (empty.stdout, "no groups" in empty.stderr) == ("", True)
    again = run("groups", "delete", "billing", "--yes", "--json")
    assert again.exit_code == 1
    assert json.loads(again.stderr)["error"]["type"] == "GroupNotFound"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("describe", "nope")),
        (1, ("explain", "nope")),
        (1, ("reset", "nope", "orders", "--to", "0", "--yes")),
        (1, ("reset", "billing", "nope", "--to", "0", "--yes")),
        (1, ("reset", "billing", "orders", "--to", "5", "--yes")),
        (1, ("reset", "billing", "orders", "--to", "0", "--partition", "2", "--yes")),
        (1, ("describe", "a/b")),
        (2, ("reset", "billing", "orders", "--yes")),
        (2, ("reset", "billing", "orders", "--to", "0", "--timestamp", "0", "--yes")),
        (2, ("reset", "billing", "orders", "--to", "first", "--yes")),
        (2, ("reset", "billing", "orders", "--to", "0")),
        (2, ("delete", "billing")),
        (2, ("explain", "billing", "--limit", "0")),
        (2, ("describe",)),
    ],
)
def test_mistakes_change_nothing(run: Run, code: int, arguments: tuple[str, ...]) -> None:
    before = parsed(run("groups", "explain", "billing", "--json"))
    result = run("groups", *arguments, stdin=b"y\n")
    assert (result.exit_code, result.stdout) == (code, "")
    assert parsed(run("groups", "explain", "billing", "--json")) == before


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_people_are_asked(shell: Shell, px: pxrs.Pxrs, answer: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    asking = shell.start("groups", "reset", "billing", "orders", "--to", "0", stdin=theirs)
    os.close(theirs)
    os.write(ours, answer)
    _, question = asking.communicate(timeout=PATIENCE)
    os.close(ours)
    assert asking.returncode == code
    assert b"Set the checkpoints of billing (EMPTY) in all partitions of orders?" in question
    first = px.groups.describe("billing").partitions[0]
    assert first.checkpoint == (0 if code == 0 else 3)
