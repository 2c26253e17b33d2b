"""`pxrs produce`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pxrs
from pxrs.cli.input import BLOCK, blocks_of_lines
from support.command import Run, Shell, parsed

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture(autouse=True)
def topic(px: pxrs.Pxrs) -> None:
    px.topics.create("t", 4)


def contents(px: pxrs.Pxrs) -> list[pxrs.Message]:
    reader = px.reader("t")
    return [message for number in range(4) for message in reader.read(number, 0, 100_000)]


def test_arguments(run: Run, px: pxrs.Pxrs) -> None:
    result = run(
        "produce", "t", "a", "b", "--key", "k", "--header", "h=1", "--header", "h=2", "-p", "2"
    )
    assert result.stdout.splitlines()[0] == "2 messages to t"
    assert result.stdout.splitlines()[2].split() == ["2", "0", "..", "1", "2"]
    assert [(m.partition, m.key, m.value, m.headers) for m in contents(px)] == [
        (2, b"k", b"a", (("h", b"1"), ("h", b"2"))),
        (2, b"k", b"b", (("h", b"1"), ("h", b"2"))),
    ]
    one = run("produce", "t", "c", "--partition", "2")
    assert one.stdout == "1 message to t: partition 2, offset 2\n"


def test_stdin_lines(shell: Shell, px: pxrs.Pxrs) -> None:
    result = shell.run("produce", "t", "--json", stdin=b"one\n\ntwo \xff\nlast, without newline")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["messages"] == sum(part["messages"] for part in summary["partitions"]) == 4
    values = [message.value for message in contents(px)]
    assert values == [b"one", b"", b"two \xff", b"last, without newline"]


def test_a_dash_is_stdin_and_nothing_is_nothing(run: Run) -> None:
    assert parsed(run("produce", "t", "-", "--json", stdin=b"a\nb\n"))["messages"] == 2
    assert run("produce", "t", stdin=b"").stdout == "0 messages to t\n"


def test_a_file_with_keys(run: Run, px: pxrs.Pxrs, tmp_path: Path) -> None:
    lines = [f"key-{n % 7}:{n}:{'x' * (n % 300)}" for n in range(20_000)]
    file = tmp_path / "lines"
    file.write_text("\n".join(lines) + "\n")
    summary = parsed(
        run(
            "produce", "t", "--file", str(file), "--key-separator", ":", "--compression", "lz4",
            "--json",
        )
    )  # fmt: skip
    assert summary["messages"] == 20_000
    held = {
        part.partition: (part.start, part.end - 1) for part in px.topics.describe("t").partitions
    }
    assert all(held[p["partition"]] == (p["first"], p["last"]) for p in summary["partitions"])
    found = sorted(contents(px), key=lambda message: int(message.value.partition(b":")[0]))
    assert [f"{m.key.decode()}:{m.value.decode()}" for m in found] == lines


def test_a_line_that_is_too_long(run: Run, px: pxrs.Pxrs) -> None:
    result = run("produce", "t", "--json", stdin=b"a\nb\n" + b"x" * 3_000_000 + b"\nafter\n")
    assert result.exit_code == 1
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "MessageTooLarge"
    assert "line 3 " in error["message"]
    assert "the 2 before it were written" in error["message"]
    assert json.loads(result.stdout)["messages"] == 2
    assert [message.value for message in contents(px)] == [b"a", b"b"]


def test_the_limit_counts_key_and_headers(run: Run, px: pxrs.Pxrs) -> None:
    limits = ("--key", "kk", "--header", "h=12", "--max-message-bytes", "10")
    assert run("produce", "t", "12345", *limits).exit_code == 0
    refused = run("produce", "t", "1", "123456", *limits)
    assert (refused.exit_code, "message 2 is too long" in refused.stderr) == (1, True)
    split = ("--key-separator", "::", "--max-message-bytes", "10")
    assert run("produce", "t", "12345::67890", *split).exit_code == 0
    assert run("produce", "t", "12345::678901", *split).exit_code == 1
    assert len(contents(px)) == 3


def test_a_line_without_the_separator(run: Run, px: pxrs.Pxrs) -> None:
    result = run("produce", "t", "-s", ":", stdin=b"a:1\nb:2\nno key\nc:3\n")
    assert result.exit_code == 1
    assert "line 3 has no ':'" in result.stderr
    assert len(contents(px)) == 2


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("nope", "a")),
        (1, ("t", "a", "--partition", "4")),
        (2, ("t", "a", "--file", "no-such-file")),
        (2, ("t", "a", "--key", "k", "--key-separator", ":")),
        (2, ("t", "a", "--key-separator", "")),
        (2, ("t", "a", "--compression", "zip")),
        (2, ("t", "a", "--header", "nothing")),
    ],
)
def test_mistakes_write_nothing(
    run: Run, px: pxrs.Pxrs, code: int, arguments: tuple[str, ...]
) -> None:
    result = run("produce", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert contents(px) == []


class Trickle(io.BytesIO):
    """Reads bring a few bytes at a time, as a pipe may."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read1(self._step)


@given(st.lists(st.binary(max_size=9)).map(b"\n".join), st.integers(1, 30))
def test_lines_are_the_same_however_they_arrive(data: bytes, step: int) -> None:
    found = [line for block in blocks_of_lines(Trickle(data, step), 100) for line in block]
    assert found == data.removesuffix(b"\n").split(b"\n") if data else found == []


def test_an_endless_line_is_cut() -> None:
    endless = io.BytesIO(b"ok\n" + b"x" * (BLOCK * 20))
    first, cut = list(blocks_of_lines(endless, 100))
    assert first == [b"ok"]
    assert 100 < len(cut[0]) <= 2 * BLOCK
