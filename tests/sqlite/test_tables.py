"""The log and the records: stale knowledge, holes, more rows than a statement takes."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pxrs.codec.batches import encode
from pxrs.errors import (
    DamagedBatch,
    InvalidRequest,
    OffsetOutOfRange,
    PxrsError,
    TopicNotFound,
)
from pxrs.stores.sqlite.database import Database
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Append, Appended, Batch, Bounds, Check, Committed, Delete, LogPartition, Put
from support.child import Child
from support.inside import say

pytestmark = pytest.mark.engine("sqlite")

WHERE = LogPartition("t", 0)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteStores]:
    """With the number of variables that SQLite comes with; distributions often raise it."""
    connect = Database.connect

    def connect_strictly(self: Database) -> sqlite3.Connection:
        connection = connect(self)
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
        return connection

    monkeypatch.setattr(Database, "connect", connect_strictly)
    stores = SqliteStores(str(tmp_path / "s.db"))
    stores.log.create("t", 1)
    yield stores
    stores.close()


def _batch(size: int = 1, producer: int = -1, sequence: int = -1) -> Batch:
    return encode(
        [(None, bytes(size), [], 0)],
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        base_sequence=sequence,
    )


def _append(stores: SqliteStores, times: int = 1) -> None:
    for _ in range(times):
        assert isinstance(stores.log.append([Append(WHERE, _batch())])[0], Appended)


def _run_sql(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def test_a_commit_of_as_many_operations_as_the_limit_says(stores: SqliteStores) -> None:
    most = stores.coord.limits.operations
    keys = [f"k/{number:05}" for number in range(most)]
    done = stores.coord.commit((), [Put(key, b"") for key in keys])
    assert isinstance(done, Committed)
    half = keys[: most // 2]
    checks = [Check(key, done.versions[key]) for key in half]
    assert isinstance(stores.coord.commit(checks, [Delete(key) for key in half]), Committed)
    assert [record.key for record in stores.coord.list("k/")] == keys[most // 2 :]


@pytest.mark.long
def test_an_append_of_very_many_batches(stores: SqliteStores) -> None:
    stores.log.create("wide", 40_000)
    appends = [
        Append(LogPartition("wide", number), _batch(producer=7, sequence=0))
        for number in range(40_000)
    ]
    assert all(isinstance(result, Appended) for result in stores.log.append(appends))
    again = stores.log.append(appends)
    assert all(isinstance(result, Appended) and result.duplicate for result in again)
    assert set(stores.log.bounds("wide").values()) == {Bounds(0, 1)}


@pytest.mark.parametrize("hole", ["base = 2", "base >= 1 AND base < 3", "base = 0"])
def test_a_hole_in_the_log_is_damage_and_not_an_endless_loop(
    stores: SqliteStores, tmp_path: Path, hole: str
) -> None:
    _append(stores, 5)
    _run_sql(tmp_path / "s.db", f"DELETE FROM pxrs_log_batches WHERE {hole}")
    outcome: list[object] = []

    def read() -> None:
        try:
            offset = 0
            while batches := stores.log.fetch(WHERE, offset, 10).batches:
                offset = batches[-1].next
        except PxrsError as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30.0)
    assert [type(error) for error in outcome] == [DamagedBatch]


def test_a_hole_inside_a_page_is_not_skipped_silently(stores: SqliteStores, tmp_path: Path) -> None:
    _append(stores, 5)
    _run_sql(tmp_path / "s.db", "DELETE FROM pxrs_log_batches WHERE base = 2")
    with pytest.raises(DamagedBatch, match=r"offset 2 .* read from offset 3"):
        offset = 0
        while batches := stores.log.fetch(WHERE, offset, 2**20).batches:
            assert batches[0].base <= offset
            offset = batches[-1].next


def test_fetching_while_retention_removes_what_is_read(
    stores: SqliteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding the batch and reading it, it goes."""
    _append(stores, 5)
    other = SqliteStores(stores.database.path)
    reading = stores.database.reading
    trimmed: list[int] = []

    class Spied:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection

        def execute(self, statement: str, values: object = ()) -> sqlite3.Cursor:
            if "SELECT base, next, data" in statement and not trimmed:
                trimmed.append(other.log.trim(WHERE, 3))
            return self._connection.execute(statement, values)  # type: ignore[arg-type]

    @contextmanager
    def spying() -> Iterator[Spied]:
        with reading() as connection:
            yield Spied(connection)

    monkeypatch.setattr(stores.database, "reading", spying)
    with pytest.raises(OffsetOutOfRange) as caught:
        stores.log.fetch(WHERE, 1, 2**20)
    assert caught.value.start == 3
    other.close()


def test_a_topic_made_again_elsewhere_is_found(stores: SqliteStores) -> None:
    _append(stores, 3)
    other = SqliteStores(stores.database.path)
    other.log.drop("t")
    with pytest.raises(TopicNotFound):
        stores.log.trim(WHERE, 1)
    with pytest.raises(TopicNotFound):
        stores.log.size(WHERE)
    with pytest.raises(TopicNotFound):
        stores.log.batch_at(WHERE, 0)
    with pytest.raises(TopicNotFound):
        stores.log.expire(WHERE, None, 0)
    assert isinstance(stores.log.append([Append(WHERE, _batch())])[0], TopicNotFound)
    other.log.create("t", 1)
    _append(stores)
    assert stores.log.bounds("t") == {0: Bounds(0, 1)}
    other.log.drop("t")
    other.log.create("t", 1)
    assert stores.log.fetch(WHERE, 0, 100).batches == []
    other.close()


def test_a_topic_id_that_looks_dropped_is_refused(stores: SqliteStores) -> None:
    with pytest.raises(InvalidRequest):
        stores.log.create("!t", 1)
    with pytest.raises(TopicNotFound):
        stores.log.bounds("!t")


def test_dropping_while_an_earlier_drop_of_the_same_id_is_not_done(
    stores: SqliteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one was killed before it had given the space back."""
    _append(stores)
    for _ in range(2):
        monkeypatch.setattr(stores.log, "_sweep_deleted", lambda: None)
        stores.log.drop("t")
        stores.log.create("t", 1)
        _append(stores)
        monkeypatch.undo()
    stores.log.drop("t")
    connection = sqlite3.connect(stores.database.path)
    for table in ("partitions", "batches", "producers"):
        assert connection.execute(f"SELECT count(*) FROM pxrs_log_{table}").fetchone() == (0,)
    connection.close()


def drop_and_die(path: str) -> None:
    log = SqliteStores(path).log
    log._sweep_deleted = lambda: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    say("ready")
    log.drop("t")


@pytest.mark.long
def test_a_drop_that_was_killed_is_finished_by_the_next(
    stores: SqliteStores, tmp_path: Path
) -> None:
    stores.log.append([Append(WHERE, _batch())] * 1200)
    with Child(drop_and_die, str(tmp_path / "s.db")) as child:
        assert child.rest() == ["ready"]
    with pytest.raises(TopicNotFound):
        stores.log.fetch(WHERE, 0, 100)
    stores.log.create("u", 1)
    connection = sqlite3.connect(tmp_path / "s.db")
    assert connection.execute("SELECT count(*) FROM pxrs_log_batches").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**70)])
def test_numbers_that_no_table_holds(stores: SqliteStores, number: int) -> None:
    _append(stores)
    with pytest.raises(OffsetOutOfRange):
        stores.log.fetch(WHERE, number, 100)
    assert stores.log.trim(WHERE, number) == (1 if number > 0 else 0)
    assert stores.log.batch_at(WHERE, 2**70) is None


@pytest.mark.parametrize("key", ["\ud800", "a\udfff"])
def test_keys_that_are_no_text(stores: SqliteStores, key: str) -> None:
    for use in (
        lambda: stores.coord.get(key),
        lambda: stores.coord.list(key),
        lambda: stores.coord.commit((Check(key, 1),), (Put("k", b""),)),
    ):
        with pytest.raises(InvalidRequest):
            use()
    stores.coord.watch(key).close()
    with pytest.raises(InvalidRequest):
        stores.coord.commit((), (Put(key, b""),))
    assert stores.coord.list("") == []
