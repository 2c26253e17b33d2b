"""`pxrs queues`."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest

import pxrs
from pxrs.cli import show
from support.child import PATIENCE
from support.command import Run, Shell, parsed

pytestmark = pytest.mark.engine("sqlite")


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def values(px: pxrs.Pxrs, queue: str = "inbox") -> list[str | bytes]:
    return [item.value for item in px.queues.peek(queue, 100_000)]


def test_put_list_describe_delete(run: Run, px: pxrs.Pxrs) -> None:
    assert run("queues", "put", "inbox", "a", "b", "--key", "k").stdout == "2 items to inbox\n"
    assert run("queues", "put", "inbox", "later", "--delay", "2h").stdout == "1 item to inbox\n"
    assert run("queues", "create", "strict", "--fifo").stdout == "strict: strictly fifo\n"
    with px.begin() as tx:
        assert tx.take("inbox")
        shown = words(run("queues", "list").stdout)
        described = run("queues", "describe", "inbox").stdout.splitlines()
    assert shown[0] == ["queue", "ready", "delayed", "in", "flight", "waiting", "dead", "oldest"]
    assert shown[1][:6] == ["inbox", "0", "1", "1", "1", "0"]
    assert shown[2] == ["strict", "0", "0", "0", "0", "0", "-"]
    assert described[0].startswith("inbox: 3 items to handle, the oldest ")
    assert described[1].startswith("best-effort order, created ")
    assert described[1].endswith("; 3 put and 0 done since")
    assert words("\n".join(described[2:])) == [
        ["ready", "delayed", "in", "flight", "waiting", "dead"], ["0", "1", "1", "1", "0"],
    ]  # fmt: skip
    assert run("queues", "delete", "inbox", "--yes").stdout == "inbox deleted\n"
    assert run("queues", "delete", "strict", "--yes").exit_code == 0
    empty = run("queues", "list")
    assert (empty.stdout, "no queues" in empty.stderr) == ("", True)


def test_json(run: Run) -> None:
    assert parsed(run("queues", "create", "strict", "--fifo", "--json"))["fifo"] is True
    put = parsed(run("queues", "put", "strict", "a", "b", "--json"))
    assert (put["queue"], put["items"]) == ("strict", 2)
    assert put["last_id"] == parsed(run("queues", "peek", "strict", "--json"))[-1]["id"]
    (listed,) = parsed(run("queues", "list", "--json"))
    assert (listed["name"], listed["ready"], listed["waiting"], listed["depth"]) == (
        "strict", 1, 1, 2,
    )  # fmt: skip
    told = parsed(run("queues", "describe", "strict", "--rates", "--seconds", "0.01", "--json"))
    assert (told["put_per_second"], told["done_per_second"]) == (0.0, 0.0)
    assert "put_per_second" not in parsed(run("queues", "describe", "strict", "--json"))
    assert parsed(run("queues", "purge", "strict", "-y", "--json")) == {
        "queue": "strict", "purged": 2,
    }  # fmt: skip
    assert parsed(run("queues", "delete", "strict", "-y", "--json")) == {"deleted": "strict"}


def test_rates(run: Run, px: pxrs.Pxrs) -> None:
    px.queues.create("inbox")
    shown = run("queues", "describe", "inbox", "--rates", "--seconds", "0.01").stdout
    assert shown.splitlines()[-1] == "0.0/s put, 0.0/s done"


def test_what_is_put(run: Run, px: pxrs.Pxrs) -> None:
    run(
        "queues", "put", "inbox", "ä", "-k", "ada", "-p", "-3", "-d", "90s",
        "-H", "a=1", "-H", "b=",
    )  # fmt: skip
    (item,) = px.queues.peek("inbox")
    assert (item.value, item.key, item.priority, item.state) == ("ä", "ada", -3, "delayed")
    assert item.headers == (("a", b"1"), ("b", b""))
    assert item.visible_ms is not None
    assert item.visible_ms - item.put_ms == 90_000


@pytest.mark.long
def test_stdin_lines(shell: Shell, px: pxrs.Pxrs) -> None:
    result = shell.run("queues", "put", "inbox", "--json", stdin=b"one\n\ntwo \xff\nlast")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["items"] == 4
    assert values(px) == ["one", "", b"two \xff", "last"]
    assert shell.run("queues", "put", "inbox", "-", stdin=b"").stdout == b"0 items to inbox\n"


def test_a_file(run: Run, px: pxrs.Pxrs, tmp_path: Path) -> None:
    lines = [f"{number} {'x' * (number % 300)}" for number in range(5000)]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    px.queues.create("inbox", fifo=True)
    result = run("queues", "put", "inbox", "--file", str(tmp_path / "lines"))
    assert result.stdout.startswith("5,000 items to inbox in ")
    assert values(px) == lines


@pytest.mark.long
def test_a_file_shows_its_progress(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x" * 100 + "\n")
    ours, theirs = pty.openpty()
    putting = shell.start(
        "queues", "put", "inbox", "-f", str(tmp_path / "lines"),
        stderr=theirs, env={**shell.environment, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    assert putting.communicate(timeout=PATIENCE)[0] == b"1 item to inbox\n"
    assert b"101" in os.read(ours, 65536)
    os.close(ours)


def test_dedupe(run: Run, px: pxrs.Pxrs) -> None:
    for _ in range(2):
        shown = run("queues", "put", "inbox", "report", "--dedupe", "daily").stdout
    assert shown == "1 item to inbox, unless one was put as daily within 5m\n"
    assert values(px) == ["report"]
    run("queues", "put", "inbox", "weekly", "--dedupe", "weekly", stdin=b"")
    several = run("queues", "put", "inbox", "--dedupe", "monthly", stdin=b"a\nb\n")
    assert (several.exit_code, several.stdout) == (2, "")
    assert values(px) == ["report", "weekly"]


def test_what_is_too_long_is_named(
    run: Run, px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pxrs.stores.sqlite.queues.store import SqliteQueues

    monkeypatch.setattr(SqliteQueues, "limits", SqliteQueues.limits._replace(body_bytes=100))
    result = run("queues", "put", "inbox", "--json", stdin=b"a\nb\n" + b"x" * 200 + b"\nafter\n")
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["message"] == (
        "line 3 is too long: the limit for an item is 100 bytes; the 2 before it were put"
    )
    assert json.loads(result.stdout)["items"] == 2
    assert values(px) == ["a", "b"]


def test_peek(run: Run, px: pxrs.Pxrs) -> None:
    px.put("inbox", "\x1b[31mred", key="ada", priority=2, headers=[("trace", b"7")])
    px.put("inbox", b"\xff\n", delay=60)
    shown = run("queues", "peek", "inbox").stdout.splitlines()
    assert shown[0].split() == ["id", "state", "age", "tried", "prio", "key", "value"]
    assert shown[1].split()[:2] == ["1", "ready"]
    assert shown[1].split()[-5:] == ["0", "2", "ada", r"\x1b[31mred", "trace=7"]
    assert shown[2].split()[-2:] == ["-", r"\xff\n"]
    first, second = parsed(run("queues", "peek", "inbox", "--json"))
    assert (first["value"], first["headers"]) == ("\x1b[31mred", [{"name": "trace", "value": "7"}])
    assert (second["value"], second["value_base64"], second["state"]) == ("/wo=", True, "delayed")
    assert run("queues", "peek", "inbox", "--values-only").stdout_bytes == b"\x1b[31mred\n\xff\n\n"
    assert len(parsed(run("queues", "peek", "inbox", "--state", "delayed", "--json"))) == 1
    assert len(parsed(run("queues", "peek", "inbox", "--after", "1", "--json"))) == 1
    assert len(parsed(run("queues", "peek", "inbox", "-n", "1", "--json"))) == 1
    nothing = run("queues", "peek", "inbox", "--state", "held")
    assert (nothing.stdout, nothing.stderr) == ("", "no matching items in inbox\n")


@pytest.mark.parametrize("width", [80, 120])
def test_a_row_stays_a_row(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    px.put("inbox", "wide " * 100, key="key" * 20)
    with px.begin() as tx:
        tx.take("inbox", retry=pxrs.Backoff(attempts=1))
        tx.rollback("trouble " * 100)
    show.print_items(px.queues.dead("inbox"))
    show.print_dead(px.queues.dead("inbox"))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4
    assert "…" in shown[1]
    assert "…" in shown[3]
    assert "wide" in shown[3]


def test_purge_spares_what_is_held_and_dead(run: Run, px: pxrs.Pxrs) -> None:
    for value in ("dies", "held", "goes"):
        px.put("inbox", value)
    with px.begin() as tx:
        tx.take("inbox", retry=pxrs.Backoff(attempts=1))
    with px.begin() as tx:
        tx.take("inbox")
        assert run("queues", "purge", "inbox", "--yes").stdout == "1 item of inbox removed\n"
    info = px.queues.describe("inbox")
    assert (info.ready, info.dead) == (1, 1)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("describe", "nope")),
        (1, ("peek", "nope")),
        (1, ("purge", "nope", "--yes")),
        (1, ("delete", "nope", "--yes")),
        (1, ("create", "a/b")),
        (1, ("create", "inbox", "--fifo")),
        (1, ("put", "inbox", "x", "--priority", "99999999999")),
        (1, ("put", "strict", "x", "--priority", "1")),
        (1, ("describe", "inbox", "--rates", "--seconds", "0")),
        (2, ("put", "inbox", "x", "--delay", "-1")),
        (2, ("put", "inbox", "x", "--delay", "soon")),
        (2, ("put", "inbox", "x", "--header", "x")),
        (2, ("put", "inbox", "x", "--file", sys.executable)),
        (2, ("peek", "inbox", "--state", "gone")),
        (2, ("peek", "inbox", "--limit", "0")),
        (2, ("peek", "inbox", "--values-only", "--json")),
        (2, ("purge", "inbox")),
        (2, ("delete", "inbox")),
        (2, ("create",)),
    ],
)
def test_mistakes_change_nothing(
    run: Run, px: pxrs.Pxrs, code: int, arguments: tuple[str, ...]
) -> None:
    px.put("inbox", "one")
    px.queues.create("strict", fifo=True)
    result = run("queues", *arguments, stdin=b"y\n")
    assert (result.exit_code, result.stdout) == (code, "")
    assert [(queue.name, queue.depth) for queue in px.queues.list()] == [
        ("inbox", 1), ("strict", 0),
    ]  # fmt: skip


def test_an_unknown_queue_says_what_to_do(run: Run, px: pxrs.Pxrs) -> None:
    result = run("queues", "describe", "nope", "--json")
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "QueueNotFound"
    assert "pxrs queues create nope" in error["message"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "question"),
    [
        (("queues", "purge", "inbox"), b"Remove 2 items of inbox?"),
        (("queues", "delete", "inbox"), b"Delete inbox and its 2 items and 0 dead?"),
    ],
)
@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_people_are_asked(
    shell: Shell,
    px: pxrs.Pxrs,
    command: tuple[str, ...],
    question: bytes,
    answer: bytes,
    code: int,
) -> None:
    for value in ("one", "two"):
        px.put("inbox", value)
    ours, theirs = pty.openpty()
    asking = shell.start(*command, stdin=theirs)
    os.close(theirs)
    os.write(ours, answer)
    _, asked = asking.communicate(timeout=PATIENCE)
    os.close(ours)
    assert (asking.returncode, question in asked) == (code, True)
    assert sum(queue.depth for queue in px.queues.list()) == (0 if code == 0 else 2)
