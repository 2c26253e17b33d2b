"""Ctrl-C on the way into a unit's commit, in it, and on the way out: nothing is left open."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import psycopg
import pytest

import pxrs
from pxrs import Pxrs
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Put
from support.child import PATIENCE
from support.interrupts import ROOMS, interrupted_at
from support.postgres import query

pytestmark = pytest.mark.thorough

ON_SQLITE = re.compile("pxrs/stores/(sqlite/atomic|block)")
ON_POSTGRES = re.compile("pxrs/stores/(postgres/atomic|block)")


def strike() -> None:
    raise KeyboardInterrupt


def by_block(px: Pxrs) -> None:
    with px.transaction() as tx:
        fill(tx)


def by_hand(px: Pxrs) -> None:
    with px.begin() as tx:
        fill(tx)
        tx.commit()


def at_the_end(px: Pxrs) -> None:
    """The transaction of the database begins and ends in the commit itself."""
    with px.transaction() as tx:
        tx.send("orders", b"x")
        tx.put("q", "x")


def rolled_back(px: Pxrs) -> None:
    with suppress(ZeroDivisionError), px.transaction() as tx:
        fill(tx)
        raise ZeroDivisionError


def fill(tx: UnitOfWork) -> None:
    tx.execute("INSERT INTO rows_of_mine VALUES (1)")
    tx.send("orders", b"x")
    tx.put("q", "x")


WORKS = [by_block, by_hand, at_the_end, rolled_back]


def each_point(px: Pxrs, files: re.Pattern[str], work: Callable[[Pxrs], None]) -> Iterator[int]:
    """The work, interrupted at one point after the other, and dropped."""
    px.topics.create("orders", partitions=1)
    work(px)
    # What other tests have left need not be looked through at every point.
    gc.collect()
    gc.freeze()
    for point in count():
        try:
            struck = interrupted_at(point, lambda: work(px), strike, files)
        except KeyboardInterrupt:
            struck = True
        # The trace function and the frames it saw hold each other, and the transaction.
        gc.collect()
        yield point
        if not struck:
            assert point > 8
            return


def each_commit(px: Pxrs, files: re.Pattern[str]) -> Iterator[int]:
    """A commit, interrupted at one point after the other, and rolled back then.

    The error is kept, as an interactive session keeps it: with its frames it holds on to whatever
    only they know of, so nothing is tidied up by being dropped.
    """
    px.topics.create("orders", partitions=1)
    for point in count():
        kept: list[BaseException] = []
        tx = px.begin()
        fill(tx)
        try:
            struck = interrupted_at(point, tx.commit, strike, files)
        except KeyboardInterrupt as error:
            kept.append(error)
            struck = True
        tx.rollback()
        yield point
        if not struck:
            assert point > 8
            return


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/s.db") as px:
        with px.transaction() as tx:
            tx.execute("CREATE TABLE rows_of_mine (n)")
        yield px


@pytest.fixture
def other(on_sqlite: Pxrs, tmp_path: Path) -> Iterator[SqliteStores]:
    other = SqliteStores(str(tmp_path / "s.db"), busy_timeout=1.0)
    yield other
    other.close()


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Pxrs]:
    query(postgres_url, "CREATE TABLE rows_of_mine (n int)")
    with pxrs.connect(postgres_url) as px:
        yield px


@pytest.fixture
def beside(on_postgres: Pxrs, postgres_url: str) -> Iterator[psycopg.Connection]:
    """One connection for all looks: to make one takes longer than the work that is looked at."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("files", [ROOMS, ON_SQLITE], ids=["rooms", "store"])
@pytest.mark.parametrize("work", WORKS)
def test_an_interrupted_transaction_leaves_sqlites_writer_to_others(
    on_sqlite: Pxrs, other: SqliteStores, work: Callable[[Pxrs], None], files: re.Pattern[str]
) -> None:
    for _ in each_point(on_sqlite, files, work):
        other.coord.commit((), (Put("k", b""),))


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("files", [ROOMS, ON_SQLITE], ids=["rooms", "store"])
def test_an_interrupted_commit_leaves_sqlites_writer_to_others(
    on_sqlite: Pxrs, other: SqliteStores, files: re.Pattern[str]
) -> None:
    for _ in each_commit(on_sqlite, files):
        other.coord.commit((), (Put("k", b""),))


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("files", [ROOMS, ON_POSTGRES], ids=["rooms", "store"])
@pytest.mark.parametrize("work", WORKS)
def test_an_interrupted_transaction_leaves_no_connection_in_it(
    on_postgres: Pxrs,
    beside: psycopg.Connection,
    work: Callable[[Pxrs], None],
    files: re.Pattern[str],
) -> None:
    for point in each_point(on_postgres, files, work):
        assert_all_is_back(on_postgres, beside, point)


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("files", [ROOMS, ON_POSTGRES], ids=["rooms", "store"])
def test_an_interrupted_commit_leaves_no_connection_in_its_transaction(
    on_postgres: Pxrs, beside: psycopg.Connection, files: re.Pattern[str]
) -> None:
    for point in each_commit(on_postgres, files):
        assert_all_is_back(on_postgres, beside, point)


def assert_all_is_back(px: Pxrs, beside: psycopg.Connection, point: int) -> None:
    assert isinstance(px.stores, PostgresStores)
    database = px.stores.database
    deadline = time.monotonic() + PATIENCE
    while found := beside.execute(OPEN).fetchall():
        # A sweep of its own, or one that was closed this moment.
        assert time.monotonic() < deadline, (point, found)
    with px.transaction() as tx:
        tx.execute("SELECT 1")
    assert not database._in_blocks, point
    assert database._room_for_blocks._value == 8, point


OPEN = """SELECT pid, state, query FROM pg_stat_activity
    WHERE datname = current_database() AND state LIKE 'idle in transaction%'"""
