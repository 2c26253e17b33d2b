"""`pxrs kv`."""

from __future__ import annotations

import pytest

import pxrs
from support.command import Run, parsed

pytestmark = pytest.mark.engine("sqlite")


def test_put_get_delete(run: Run) -> None:
    assert run("kv", "put", "user:1", "Ada").stdout == "1.1\n"
    assert run("kv", "get", "user:1").stdout == "Ada"
    assert run("kv", "put", "user:1", "-", stdin=b"\x00Eve").stdout == "1.2\n"
    assert parsed(run("kv", "get", "user:1", "--json")) == {
        "key": "user:1",
        "value": "\x00Eve",
        "version": "1.2",
    }
    assert run("kv", "delete", "user:1").stdout == "user:1 deleted\n"
    assert run("kv", "delete", "user:1").stdout == "there was no user:1\n"
    missing = run("kv", "get", "user:1")
    assert missing.exit_code == 1
    assert "key 'user:1' does not exist" in missing.stderr


def test_conditions(run: Run) -> None:
    assert run("kv", "put", "k", "1", "--create").stdout == "1.1\n"
    again = run("kv", "put", "k", "2", "--create")
    assert (again.exit_code, "already exists with version 1.1" in again.stderr) == (1, True)
    assert run("kv", "put", "k", "2", "--if-match", "1.1", "--ttl", "1h").stdout == "1.2\n"
    late = run("kv", "put", "k", "3", "--if-match", "1.1")
    assert (late.exit_code, "has version 1.2, not 1.1" in late.stderr) == (1, True)
    assert run("kv", "put", "k", "4", "--idempotency-key", "a").stdout == "1.3\n"
    assert run("kv", "put", "k", "4", "--idempotency-key", "a").stdout == "1.3\n"
    wrong = run("kv", "put", "k", "3", "--if-match", "one")
    assert (wrong.exit_code, "term.index" in wrong.stderr) == (2, True)


def test_scan_and_watch(run: Run, px: pxrs.Pxrs) -> None:
    for key in ("a:1", "a:2", "b:1"):
        px.kv.put(key, key.upper())
    shown = [line.split() for line in run("kv", "scan", "a:").stdout.splitlines()]
    assert shown == [["key", "version", "value"], ["a:1", "1.1", "A:1"], ["a:2", "1.1", "A:2"]]
    found = parsed(run("kv", "scan", "--after", "a:1", "--limit", "1", "--json"))
    assert [entry["key"] for entry in found] == ["a:2"]
    assert run("kv", "watch", "a:", "--timeout", "0.01s").stdout == "a:1 1.1 A:1\na:2 1.1 A:2\n"
