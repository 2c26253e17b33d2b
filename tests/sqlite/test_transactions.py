"""What callers do to a connection inside `atomic`, and what it may not do to pxrs."""

from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pxrs.codec.batches import encode
from pxrs.errors import (
    CommitConflict,
    InsideTransaction,
    InvalidRequest,
    NotAtomic,
    PxrsError,
    StoreFull,
    TransactionConflict,
)
from pxrs.stores.connections import Lent
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Append, Batch, Check, LogPartition, Put

pytestmark = pytest.mark.engine("sqlite")

WHERE = LogPartition("t", 0)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.3)
    stores.log.create("t", 1)
    yield stores
    stores.close()


@pytest.fixture
def mine(stores: SqliteStores, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None, timeout=0.3)
    mine.execute("CREATE TABLE orders (id)")
    yield mine
    mine.close()


def _batch(size: int = 1) -> Batch:
    return encode([(None, bytes(size), [], 0)])


def _dicts(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


ENDINGS: list[Callable[[sqlite3.Connection], object]] = [
    lambda connection: connection.execute("COMMIT"),
    lambda connection: connection.commit(),
    lambda connection: connection.rollback(),
    lambda connection: connection.executescript("SELECT 1"),
    lambda connection: connection.__exit__(None, None, None),
]


@pytest.mark.parametrize("whose", ["ours", "given", "joined"])
@pytest.mark.parametrize("end", ENDINGS, ids=["COMMIT", "commit", "rollback", "script", "with"])
@pytest.mark.parametrize("then", ["nothing", "another"])
def test_a_transaction_that_the_caller_has_ended_applies_nothing(
    stores: SqliteStores,
    mine: sqlite3.Connection,
    end: Callable[[sqlite3.Connection], object],
    whose: str,
    then: str,
) -> None:
    """Not even if another has begun since: the effects before it are gone, or were committed."""
    if whose == "joined":
        mine.execute("BEGIN")
    given = {"ours": None, "given": Lent(mine), "joined": mine}
    with pytest.raises(InvalidRequest, match="ended inside"), stores.atomic(given[whose]) as tx:
        tx.write(Put("k", b""))
        tx.append(WHERE, _batch())
        end(tx.connection)
        if then == "another":
            tx.connection.execute("BEGIN")
            tx.connection.execute("INSERT INTO orders VALUES (7)")
    if whose == "joined" and then == "another":
        mine.execute("COMMIT")
    assert stores.coord.get("k") is None
    assert stores.log.bounds("t")[0].end == 0
    stores.coord.commit((), (Put("k", b""),))


@pytest.mark.parametrize("joined", [False, True])
def test_rows_and_texts_of_the_callers_own_making(
    stores: SqliteStores, mine: sqlite3.Connection, joined: bool
) -> None:
    mine.row_factory = _dicts
    mine.text_factory = bytes
    stores.coord.commit((), (Put("k", b"1"),))
    record = stores.coord.get("k")
    assert record is not None
    if joined:
        mine.execute("BEGIN IMMEDIATE")
    with stores.atomic(mine if joined else Lent(mine)) as tx:
        tx.check(Check("k", record.version))
        tx.write(Put("k", b"2"))
        tx.append(WHERE, _batch())
        assert mine.execute("SELECT 1 AS one").fetchone() == {"one": 1}
    if joined:
        mine.execute("COMMIT")
    assert mine.execute("SELECT 1 AS one").fetchone() == {"one": 1}
    assert stores.log.bounds("t")[0].end == 1


def test_what_a_block_did_to_our_connection_is_over_after_it(stores: SqliteStores) -> None:
    with stores.atomic() as tx:
        tx.connection.row_factory = _dicts
    stores.coord.commit((), (Put("k", b""),))
    with pytest.raises(PxrsError), stores.atomic() as tx:
        tx.connection.close()
    stores.coord.commit((), (Put("k", b""),))


def test_a_cursor_left_open_stops_nobody(stores: SqliteStores, tmp_path: Path) -> None:
    other = SqliteStores(str(tmp_path / "s.db"))
    with stores.atomic() as tx:
        tx.write(Put("a", b""), Put("b", b""))
    with stores.atomic() as tx:
        left_open = tx.connection.execute("SELECT key FROM pxrs_coord")
        left_open.fetchone()
    other.coord.commit((), (Put("c", b""),))
    stores.coord.commit((), (Put("d", b""),))
    assert [record.key for record in stores.coord.list("")] == ["a", "b", "c", "d"]
    other.close()


def test_an_old_snapshot_is_a_conflict_to_run_again(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    """The check passed on what the transaction saw; the write finds out that it was old."""
    mine.execute("BEGIN")
    assert mine.execute("SELECT count(*) FROM pxrs_coord").fetchone() == (0,)
    stores.coord.commit((), (Put("k", b"theirs"),))
    with pytest.raises(TransactionConflict) as caught, stores.atomic(mine) as tx:
        tx.check(Check("k", 0))
        tx.write(Put("k", b"mine"))
    assert caught.value.retryable
    mine.execute("ROLLBACK")
    with pytest.raises(CommitConflict), stores.atomic(Lent(mine)) as tx:
        tx.check(Check("k", 0))
        tx.write(Put("k", b"mine"))


def test_inside_the_callers_transaction_nobody_waits_for_itself(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    mine.execute("BEGIN IMMEDIATE")
    with stores.atomic(mine) as tx:
        tx.write(Put("k", b""))
        with pytest.raises(InsideTransaction):
            stores.coord.commit((), (Put("k", b""),))
        with pytest.raises(InsideTransaction), stores.atomic():
            pass
    mine.execute("COMMIT")
    stores.coord.commit((), (Put("k", b""),))


def test_a_file_that_is_full_inside_the_callers_transaction(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    """SQLite may end the whole transaction then, savepoints included."""
    pages = mine.execute("PRAGMA page_count").fetchone()[0]
    mine.execute(f"PRAGMA max_page_count={pages + 2}")
    mine.execute("BEGIN IMMEDIATE")
    mine.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(StoreFull), stores.atomic(mine) as tx:
        tx.write(Put("k", b""))
        tx.append(WHERE, _batch(2**20))
    if mine.in_transaction:
        mine.execute("COMMIT")
    assert stores.coord.get("k") is None
    assert stores.log.bounds("t")[0].end == 0
    assert mine.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_block_can_be_used_once(stores: SqliteStores) -> None:
    block = stores.atomic()
    with block as tx:
        tx.append(WHERE, _batch())
    with pytest.raises(InvalidRequest, match="once"), block:
        pass
    assert stores.log.bounds("t")[0].end == 1


def test_a_closed_connection_is_refused(stores: SqliteStores, tmp_path: Path) -> None:
    closed = sqlite3.connect(tmp_path / "s.db")
    closed.close()
    with pytest.raises(NotAtomic), stores.atomic(closed):
        pass


def test_a_connection_of_another_thread_is_refused(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with stores.atomic(mine):
                pass
        except PxrsError as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert isinstance(failures[0], NotAtomic)
    assert "thread" in str(failures[0])


def test_a_transaction_begun_without_a_word(stores: SqliteStores, tmp_path: Path) -> None:
    """As connections come: statements that write begin one by themselves."""
    usual = sqlite3.connect(tmp_path / "s.db")
    usual.execute("CREATE TABLE more (id)")
    usual.execute("INSERT INTO more VALUES (1)")
    with stores.atomic(usual) as tx:
        tx.append(WHERE, _batch())
    assert stores.log.bounds("t")[0].end == 0
    usual.commit()
    assert stores.log.bounds("t")[0].end == 1
    usual.close()


def test_a_block_left_in_another_thread_frees_the_writer(stores: SqliteStores) -> None:
    block = stores.atomic()
    block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    stores.log.append([Append(WHERE, _batch())])


class SlowToReturn(sqlite3.Connection):
    """Has committed, but its caller does not know yet."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.committed, self.go_on = threading.Event(), threading.Event()

    def commit(self) -> None:
        super().commit()
        self.committed.set()
        self.go_on.wait()


def test_a_store_closed_beside_a_commit_writes_into_no_other_file(
    stores: SqliteStores, tmp_path: Path
) -> None:
    """Files opened afterwards get the numbers of those that the store has closed."""
    watch = stores.coord.watch("k")
    mine = sqlite3.connect(
        tmp_path / "s.db", isolation_level=None, check_same_thread=False, factory=SlowToReturn
    )
    mine.execute("BEGIN")

    def commit() -> None:
        with stores.atomic(Lent(mine)) as tx:
            tx.write(Put("k", b""))

    thread = threading.Thread(target=commit)
    thread.start()
    mine.committed.wait()
    stores.close()
    paths = [tmp_path / f"foreign {number}" for number in range(64)]
    for path in paths:
        path.write_bytes(b"SQLite format 3")
    with ExitStack() as opened:
        for path in paths:
            opened.enter_context(path.open("r+b"))
        mine.go_on.set()
        thread.join()
    assert {path.read_bytes() for path in paths} == {b"SQLite format 3"}
    watch.close()
    mine.close()


def test_a_joined_block_that_is_dropped_stops_no_later_write(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    mine.execute("BEGIN")
    tx = stores.atomic(mine)
    tx.__enter__()
    tx.write(Put("k", b""))
    del tx
    gc.collect()
    mine.execute("ROLLBACK")
    stores.coord.commit((), (Put("k", b""),))
    assert stores.coord.get("k") is not None


def test_a_joined_block_that_another_thread_ends_stops_no_later_write(
    stores: SqliteStores, tmp_path: Path
) -> None:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    mine.execute("BEGIN")
    tx = stores.atomic(mine)
    tx.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tx.__exit__, None, None, None).result()
        mine.execute("ROLLBACK")
        # Where the block began, and where it ended.
        stores.coord.commit((), (Put("k", b"1"),))
        pool.submit(stores.coord.commit, (), (Put("k", b"2"),)).result()
    mine.close()


def test_a_joined_block_stops_no_thread_but_its_own(stores: SqliteStores, tmp_path: Path) -> None:
    """A thread begins it and ends; the system may give its number to the next one."""
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    mine.execute("BEGIN")
    tx = stores.atomic(mine)

    def begin() -> None:
        tx.__enter__()

    def write() -> None:
        stores.coord.commit((), (Put("k", b""),))

    for work in (begin, write):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert stores.coord.get("k") is not None
    tx.__exit__(None, None, None)
    mine.close()
