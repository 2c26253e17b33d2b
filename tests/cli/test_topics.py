"""`pxrs topics`."""

from __future__ import annotations

import json

import pytest

import pxrs
from support.command import Run, parsed

pytestmark = pytest.mark.engine("sqlite")


def test_create_list_describe_delete(run: Run, px: pxrs.Pxrs) -> None:
    created = run("topics", "create", "orders", "--partitions", "3", "--retention-time", "12h")
    assert created.stdout == "orders: 3 partitions, keeps 12h\n"
    with px.producer() as producer:
        producer.send("orders", b"hello", partition=1)
    assert [line.split() for line in run("topics", "list").stdout.splitlines()] == [
        ["topic", "partitions", "keeps"],
        ["orders", "3", "12h"],
    ]
    described = run("topics", "describe", "orders").stdout.splitlines()
    assert described[0].startswith("orders: 1 message, ")
    assert described[2].split() == ["partition", "start", "end", "messages", "bytes"]
    assert described[4].split()[:4] == ["1", "0", "1", "1"]
    assert run("topics", "delete", "orders", "--yes").stdout == "orders deleted\n"
    empty = run("topics", "list")
    assert (empty.stdout, "no topics" in empty.stderr) == ("", True)


def test_json(run: Run) -> None:
    created = parsed(
        run("--json", "topics", "create", "a", "--partitions", "2", "--retention-bytes", "1MiB")
    )
    assert (created["name"], created["partitions"], created["retention_bytes"]) == ("a", 2, 2**20)
    assert parsed(run("topics", "--json", "list")) == [created]
    described = parsed(run("topics", "describe", "a", "--json"))
    assert described["topic"] == created
    assert described["partitions"][1] == {
        "partition": 1, "start": 0, "end": 0, "messages": 0, "bytes": 0,
    }  # fmt: skip
    assert parsed(run("topics", "delete", "a", "--yes", "--json")) == {"deleted": "a"}


def test_url_can_stand_before_and_after(run: Run, px: pxrs.Pxrs, url: str) -> None:
    other = url.replace("cli.db", "other.db")
    run("topics", "--url", other, "create", "there", "--partitions", "1")
    assert [topic["name"] for topic in parsed(run("topics", "list", "--json", "--url", other))] == [
        "there"
    ]
    assert parsed(run("topics", "list", "--json")) == []


def test_creating_it_again_is_fine_and_otherwise_an_error(run: Run) -> None:
    for _ in range(2):
        assert run("topics", "create", "a", "--partitions", "2").exit_code == 0
    again = run("topics", "create", "a", "--partitions", "3")
    assert again.exit_code == 1
    assert again.stdout == ""
    assert again.stderr.startswith("error: topic 'a' exists with partitions = 2, not 3")


def test_errors_as_json_go_to_stderr(run: Run, px: pxrs.Pxrs) -> None:
    result = run("topics", "describe", "nope", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    error = json.loads(result.stderr)["error"]
    assert (error["type"], error["retryable"]) == ("TopicNotFound", False)
    assert "pxrs topics create nope" in error["message"]


def test_delete_does_not_guess(run: Run) -> None:
    run("topics", "create", "a", "--partitions", "1")
    refused = run("topics", "delete", "a", stdin=b"y\n")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert len(parsed(run("topics", "list", "--json"))) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "a"),
        ("create", "a", "--partitions", "many"),
        ("create", "a", "--partitions", "1", "--retention-time", "7"),
        ("create", "a", "--partitions", "1", "--retention-time", "soon"),
        ("create", "a", "--partitions", "1", "--retention-bytes", "1XB"),
        ("create", "a", "--partitions", "1", "--unknown"),
        ("describe",),
        ("rename", "a", "b"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("topics", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "create", "a b", "--partitions", "1"),
        ("topics", "create", "a", "--partitions", "0"),
        ("topics", "list", "--url", "nowhere"),
        ("topics", "list", "--url", "sqlite:////no/such/folder/a.db"),
        ("topics", "list", "--url", "sqlite:///a.db?colour=red"),
    ],
)
def test_typed_errors_are_one_line(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
