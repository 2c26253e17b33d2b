"""A file of JSON lines that programs append to and rotate, consumed by groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import (
    ConfigError,
    DamagedBatch,
    InvalidRequest,
    OffsetOutOfRange,
    SourceChanged,
    StoreDamaged,
)
from pxrs.sources import JsonLines, Row
from pxrs.sources.json_lines import OpenJsonLines

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    path = tmp_path / "log" / "app.log"
    path.touch()
    return path


@pytest.fixture
def source(path: Path) -> Iterator[OpenJsonLines]:
    source = JsonLines(str(path), key="key", value="value").open("")
    yield source
    source.close()


def write(path: Path, *values: object) -> None:
    with path.open("a") as file:
        for value in values:
            file.write(json.dumps({"key": "k", "value": value}) + "\n")


def read(source: OpenJsonLines) -> list[Row]:
    found: list[Row] = []
    place = source.bounds(0).start
    while True:
        rows, following = source.read(0, place, 3)[:2]
        found += rows
        if following == place:
            return found
        place = following


def values(source: OpenJsonLines) -> list[str]:
    return [row.value.decode() for row in read(source)]


def test_a_group_consumes_it_over_rotations(path: Path, tmp_path: Path) -> None:
    lines = JsonLines(str(path), key="key", timestamp="at")
    with path.open("a") as file:
        for number in range(50):
            file.write(
                f'{{"key": "k{number % 3}", "n": {number}, "at": {1_700_000_000 + number}}}\n'
            )
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        px.attach("events", lines, partitions=4)
        with px.consumer("events", group="billing", serde=pxrs.JSON()) as consumer:
            found = consumer.poll(max_records=30, timeout=5)
            path.rename(path.with_name("app.log.1"))
            path.write_text('{"key": "k0", "n": 50, "at": "2026-01-31T12:00:00Z"}\n')
            while len(found) < 51:
                more = consumer.poll(timeout=10)
                assert more
                found += more
        for key in range(3):
            own = [m.value["n"] for m in found if m.key == f"k{key}".encode()]
            assert own == sorted(own)
        assert sorted(m.value["n"] for m in found) == list(range(51))
        assert found[-1].timestamp == 1_769_860_800_000
        assert px.sources.describe("events").settings["path"] == str(path)


def test_other_processes_see_the_same_offsets(path: Path, source: OpenJsonLines) -> None:
    program = (
        "import sys; from pxrs.sources import JsonLines\n"
        "source = JsonLines(sys.argv[1], key='key', value='value').open('')\n"
        "place, found = source.bounds(0).start, []\n"
        "while (read := source.read(0, place, 100)).next > place:\n"
        "    place = read.next; found += [row.offset for row in read.rows]\n"
        "print(found)"
    )

    def elsewhere() -> list[int]:
        run = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
        )
        found: list[int] = json.loads(run.stdout)
        return found

    for number in range(3):
        write(path, *range(3))
        if number % 2:
            first = elsewhere()
            assert [row.offset for row in read(source)] == first
        else:
            expected = [row.offset for row in read(source)]
            assert elsewhere() == expected
        for old in sorted(path.parent.glob("app.log.[0-9]"), reverse=True):
            old.rename(old.with_suffix(f".{int(old.suffix[1:]) + 1}"))
        path.rename(path.with_name("app.log.1"))
    assert elsewhere() == [row.offset for row in read(source)]
    assert len(elsewhere()) == 9


def test_a_last_line_waits_for_its_newline(path: Path, source: OpenJsonLines) -> None:
    write(path, "a")
    with path.open("a") as file:
        file.write('{"value": "b')
        file.flush()
        assert values(source) == ["a"]
        end = source.bounds(0).end
        watch = source.watch()
        file.write('"}\n')
        file.flush()
        assert watch.wait(10)
        watch.close()
        assert values(source) == ["a", "b"]
        assert read(source)[1].offset == end


def test_a_rotated_file_is_waited_for_while_it_is_open(path: Path, source: OpenJsonLines) -> None:
    """A program may write to it for a while, under its new name."""
    with path.open("a") as slow:
        slow.write('{"value": "a"}\n')
        slow.flush()
        assert values(source) == ["a"]
        path.rename(path.with_name("app.log.1"))
        write(path, "c")
        assert values(source) == ["a"]
        final = source.final(0)
        assert final is not None
        assert final < source.bounds(0).end
        watch = source.watch()
        slow.write('{"value": "b"}\n{"value": "never ended"}')
    assert watch.wait(10)
    watch.close()
    # No newline will come any more.
    assert values(source) == ["a", "b", "never ended", "c"]
    assert source.final(0) == source.bounds(0).end


def test_several_rotations_between_two_looks(path: Path, source: OpenJsonLines) -> None:
    for number in range(12):
        write(path, number)
        for old in range(number, 0, -1):
            path.with_name(f"app.log.{old}").rename(path.with_name(f"app.log.{old + 1}"))
        path.rename(path.with_name("app.log.1"))
    write(path, 12)
    assert values(source) == [str(number) for number in range(13)]


def test_dates_and_strange_files(path: Path, source: OpenJsonLines) -> None:
    for day in ("20260103", "20260101", "20260102"):
        write(path.with_name(f"app.log-{day}"), day)
    for name in ("app.log.bak", "app.log.1.gz", "app.log~", "app.logger.1", "xapp.log.1"):
        path.with_name(name).write_text("no JSON")
    path.with_name("app.log.7").mkdir()
    write(path, "today")
    assert values(source) == ["20260101", "20260102", "20260103", "today"]


def test_deleted_files_are_out_of_range(path: Path, source: OpenJsonLines) -> None:
    write(path, "a")
    assert values(source) == ["a"]
    path.rename(path.with_name("app.log.1"))
    write(path, "b")
    assert values(source) == ["a", "b"]
    path.with_name("app.log.1").unlink()
    with pytest.raises(OffsetOutOfRange):
        source.read(0, 0, 10)
    assert values(source) == ["b"]
    path.unlink()
    start, end = source.bounds(0)
    assert start == end
    write(path, "c")
    assert values(source) == ["c"]


def test_a_file_that_is_missing_in_the_middle_is_not_passed_over(
    path: Path, source: OpenJsonLines
) -> None:
    for name in ("app.log.3", "app.log.2", "app.log.1", "app.log"):
        write(path.with_name(name), name)
    assert len(values(source)) == 4
    path.with_name("app.log.2").unlink()
    with pytest.raises(OffsetOutOfRange):
        source.read(0, 0, 10)
    assert values(source) == ["app.log.1", "app.log"]


def test_an_inode_that_is_used_again_is_another_file(path: Path, source: OpenJsonLines) -> None:
    """As far as the index knows: it is told that an old file had the inode of the new one."""
    write(path, "a")
    path.rename(path.with_name("app.log.1"))
    write(path, "b")
    assert values(source) == ["a", "b"]
    index = path.with_name("app.log.pxrs-index")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    path.with_name("app.log.1").unlink()
    write(path.with_name("new"), "c, which is another")
    status = path.with_name("new").stat()
    for line in lines:
        if line["number"] == 0:
            line["inode"], line["device"] = status.st_ino, status.st_dev
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.rename(path.with_name("app.log.1"))
    path.with_name("new").rename(path)
    with_index = JsonLines(str(path), value="value").open("")
    assert values(with_index) == ["b", "c, which is another"]
    assert read(with_index)[1].offset == 2 << 40
    with_index.close()


@pytest.mark.parametrize("again", [False, True], ids=["empty", "written"])
def test_a_file_that_is_truncated_in_place_is_refused(
    path: Path, source: OpenJsonLines, again: bool
) -> None:
    write(path, *range(20))
    assert len(values(source)) == 20
    os.truncate(path, 0)
    if again:
        write(path, *range(100, 200))
    for other in (source, JsonLines(str(path), value="value").open("")):
        with pytest.raises(SourceChanged, match="rename"):
            values(other)
    path.rename(path.with_name("app.log.1"))
    write(path, "new")
    fresh = JsonLines(str(path), value="value").open("")
    expected = [*map(str, range(100, 200)), "new"] if again else ["new"]
    assert values(fresh) == expected
    fresh.close()


def test_bad_lines_stop_or_are_skipped(path: Path, source: OpenJsonLines) -> None:
    write(path, "a")
    with path.open("ab") as file:
        file.write(b"\n  \nnot JSON\n[1, 2]\n\xff\xfe\n")
    write(path, "b")
    place = 0
    found: list[bytes] = []
    while len(found) < 2:
        try:
            rows, place = source.read(0, place, 10)[:2]
            found += [row.value for row in rows]
        except DamagedBatch as error:
            # All before it came first.
            assert found == [b"a"]
            place = error.next_offset
    assert found == [b"a", b"b"]
    skips = JsonLines(str(path), value="value", on_bad="skip").open("")
    assert values(skips) == ["a", "b"]
    skips.close()


def test_fields(path: Path) -> None:
    path.write_text('{"a": {"b": 1.50}, "n": null, "t": "é", "at": 1700000000.5}\n{"at": null}\n')
    cases: list[tuple[Any, list[bytes | None]]] = [
        (None, [b'{"a": {"b": 1.50}, "n": null, "t": "\xc3\xa9", "at": 1700000000.5}']),
        ("a", [b'{"b": 1.50}', None]),
        ("n", [None, None]),
        ("t", ["é".encode(), None]),
        (["t", "a"], [b'{"t":"\xc3\xa9","a":{"b": 1.50}}', b'{"t":null,"a":null}']),
    ]
    for value, expected in cases:
        source = JsonLines(str(path), key="t", value=value, timestamp="at").open("")
        rows = read(source)
        assert [row.value for row in rows][: len(expected)] == expected
        assert [row.key for row in rows] == ["é".encode(), None]
        assert [row.timestamp for row in rows] == [1_700_000_000_500, 0]
        source.close()


def test_an_offset_in_a_line_leads_to_the_next(path: Path, source: OpenJsonLines) -> None:
    write(path, "a", "b", "c")
    first, second, third = read(source)
    for offset in range(first.offset + 1, second.offset + 1):
        assert source.read(0, offset, 10).rows == [second, third]
    assert source.read(0, third.offset + 1, 10).rows == []


def test_the_index_is_opened_with_care(path: Path, tmp_path: Path) -> None:
    write(path, "a")
    index = path.with_name("app.log.pxrs-index")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    index.symlink_to(victim)
    source = JsonLines(str(path), value="value").open("")
    with pytest.raises(ConfigError, match="index="):
        source.read(0, 0, 10)
    assert victim.read_text() == "mine"
    index.unlink()
    victim.write_text("")
    index.hardlink_to(victim)
    with pytest.raises(ConfigError, match="index="):
        source.read(0, 0, 10)
    assert victim.read_text() == ""
    index.unlink()
    index.mkdir()
    with pytest.raises(ConfigError, match="index="):
        source.read(0, 0, 10)
    index.rmdir()
    index.write_text("nonsense\n")
    with pytest.raises(StoreDamaged, match="move it away"):
        source.read(0, 0, 10)
    source.close()
    elsewhere = JsonLines(str(path), value="value", index=str(tmp_path / "index")).open("")
    assert values(elsewhere) == ["a"]
    elsewhere.close()


def test_a_torn_index_is_mended(path: Path) -> None:
    write(path, "a")
    for _ in range(2):
        source = JsonLines(str(path), value="value").open("")
        assert read(source)[0].offset == 0
        source.close()
        with path.with_name("app.log.pxrs-index").open("a") as index:
            index.write('{"number": 5, "dev')
        path.rename(path.with_name("app.log.1"))
        write(path, "b")
    source = JsonLines(str(path), value="value").open("")
    assert [row.offset >> 40 for row in read(source)][-1] == 2
    source.close()


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    for arguments in (
        {"path": ""},
        {"path": 5},
        {"on_bad": "hope"},
        {"settle": -1},
        {"key": 5},
        {"value": [""]},
        {"index": "\0"},
    ):
        with pytest.raises(InvalidRequest):
            JsonLines(**{"path": "app.log", **arguments})  # type: ignore[arg-type]
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        with pytest.raises(ConfigError, match="is the path right"):
            px.attach("events", JsonLines(str(tmp_path / "nothing.log")), partitions=2)
        assert px.sources.list() == []


def test_where_nobody_tells_who_writes_it_waits_for_quiet(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.sources.rotation.is_open_for_writing", lambda handle: None)
    with pytest.raises(ConfigError, match="settle="):
        JsonLines(str(path)).open("").check()
    write(path, "a")
    path.rename(path.with_name("app.log.1"))
    write(path, "b")
    source = JsonLines(str(path), value="value", settle=60).open("")
    source.check()
    assert values(source) == ["a"]
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path.with_name("app.log.1"), (an_hour_ago, an_hour_ago))
    assert values(source) == ["a", "b"]
    source.close()
