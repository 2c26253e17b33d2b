"""An acknowledged append is on the disk. kill -9 can't show that: count what is asked of it."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.codec.batches import encode
from pxrs.stores.open import open_stores
from pxrs.stores.sqlite.database import Database
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.types import Append, LogPartition, Put

pytestmark = pytest.mark.engine("sqlite")

WHERE = LogPartition("t", 0)
APPENDS = 40


@pytest.mark.parametrize(
    ("options", "level"), [("", 2), ("?durability=full", 2), ("?durability=relaxed", 1)]
)
def test_every_connection_syncs_as_the_url_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, level: int
) -> None:
    opened: list[sqlite3.Connection] = []
    connect = Database.connect

    def note(self: Database) -> sqlite3.Connection:
        connection = connect(self)
        opened.append(connection)
        return connection

    monkeypatch.setattr(Database, "connect", note)
    stores = open_stores(f"sqlite:///{tmp_path / 's.db'}{options}")
    stores.log.create("t", 1)
    stores.log.append([Append(WHERE, encode([(None, b"", [], 0)]))])
    stores.log.fetch(WHERE, 0, 100)
    watch = stores.coord.watch("k")
    with stores.atomic() as tx:
        tx.write(Put("k", b""))
        assert tx.connection in opened
    watch.wait(5.0)
    # The writer, a reader and what listens to the file.
    while len(opened) < 3:
        watch.wait(5.0)
    assert {each.execute("PRAGMA synchronous").fetchone() for each in opened} == {(level,)}
    assert {each.execute("PRAGMA wal_autocheckpoint").fetchone() for each in opened} == {(0,)}
    stores.close()


def append_durably(path: str, durability: str) -> None:
    """`APPENDS` single appends, each acknowledged before the next."""
    stores = SqliteStores(path, durability=durability)
    stores.log.create("t", 1)
    for _ in range(APPENDS):
        stores.log.append([Append(WHERE, encode([(None, b"v", [], 0)]))])
    # Not closed: the checkpoint at the end is none of theirs.
    os._exit(0)


def take_all(path: str, most: int, times: int) -> None:
    """Take `APPENDS` items, one at a time, and give each back but for the last time."""
    stores = SqliteStores(path, durability="full")
    worker = Worker(stores)
    worker.put(*[b"x"] * APPENDS)
    for _ in range(times - 1):
        worker.release(*worker.take(APPENDS, most=most))
    for _ in range(APPENDS):
        worker.take_one(most=most)
    os._exit(0)


def _syncs(folder: Path, run: Callable[..., None], *arguments: object) -> int:
    """How often `run` asks the disk to make something durable."""
    report = folder / "calls"
    passed = ", ".join(map(repr, (str(folder / "s.db"), *arguments)))
    code = f"from sqlite.test_durability import {run.__name__} as run; run({passed})"
    tests = Path(__file__).parents[1]
    traced = subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=fsync,fdatasync",
            "-o",
            report,
            sys.executable,
            "-c",
            code,
        ],
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
    )
    if traced.returncode != 0:
        _give_up(f"strace can't trace here: {traced.stderr.strip()[-200:]}")
    return len(re.findall(r"\b(?:fsync|fdatasync)\(", report.read_text()))


def _give_up(why: str) -> None:
    """Loud where nobody looks at skipped tests: a CI that could count has to count."""
    if os.environ.get("CI") == "true" and shutil.which("strace"):
        pytest.fail(why)
    pytest.skip(f"syncs were NOT counted: {why}")


@pytest.mark.long
def test_every_acknowledged_append_was_synced(tmp_path: Path) -> None:
    if not shutil.which("strace"):
        _give_up("strace is not installed")
    counted = {}
    for durability in ("full", "relaxed"):
        (tmp_path / durability).mkdir()
        counted[durability] = _syncs(tmp_path / durability, append_durably, durability)
    assert counted["full"] >= APPENDS
    assert counted["relaxed"] < APPENDS / 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("most", "times", "synced"),
    [(5, 1, False), (1, 1, True), (2, 2, True)],
    ids=["one of five", "the only one", "the second of two"],
)
def test_the_last_delivery_of_an_item_is_synced_before_it_is_handed_out(
    tmp_path: Path, most: int, times: int, synced: bool
) -> None:
    """Any other may be forgotten in a power cut, which ends its holder, too."""
    if not shutil.which("strace"):
        _give_up("strace is not installed")
    counted = _syncs(tmp_path, take_all, most, times)
    assert counted >= APPENDS if synced else counted < APPENDS / 4
