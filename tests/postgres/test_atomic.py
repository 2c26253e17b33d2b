"""Blocks on the caller's own connection: psycopg's, and SQLAlchemy's over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg.rows import dict_row

import pxrs
from pxrs.errors import CommitConflict, InvalidRequest, NotAtomic, StoreError, TransactionConflict
from pxrs.stores.connections import Lent
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import append, batch, put, value_of, values_in
from pxrs.types import Appended, Check, LogPartition, Put
from support.child import PATIENCE
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

HERE = LogPartition("t-1", 0)
OpenStores = Callable[[], PostgresStores]


@pytest.fixture
def stores(lab: Any, postgres_url: str) -> PostgresStores:
    stores: PostgresStores = lab.open()
    stores.log.create("t-1", 1)
    query(postgres_url, "CREATE TABLE effects (n int)")
    return stores


def effects(url: str) -> list[int]:
    return [row[0] for row in query(url, "SELECT n FROM effects ORDER BY n")]


@pytest.fixture(params=["autocommit", "transactional", "dict rows"])
def mine(postgres_url: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    connection: psycopg.Connection[Any] = psycopg.connect(
        postgres_url,
        autocommit=request.param == "autocommit",
        row_factory=dict_row if request.param == "dict rows" else psycopg.rows.tuple_row,
    )
    yield connection
    connection.close()


def test_pxrs_begins_and_commits_on_an_idle_connection(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str
) -> None:
    with stores.atomic(Lent(mine)) as tx:
        assert tx.connection is mine
        mine.execute("INSERT INTO effects VALUES (1)")
        tx.write(Put("k", b"1"))
        tx.append(HERE, batch(b"a"))
    assert mine.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert effects(postgres_url) == [1]
    assert tx.appended == [Appended(0)]
    assert value_of(stores.coord, "k") == b"1"


def test_all_of_it_is_rolled_back(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str
) -> None:
    put(stores.coord, "k", b"old")
    with pytest.raises(CommitConflict), stores.atomic(Lent(mine)) as tx:
        mine.execute("INSERT INTO effects VALUES (1)")
        tx.check(Check("k", 999_999))
        tx.append(HERE, batch(b"a"))
    with pytest.raises(ZeroDivisionError), stores.atomic(Lent(mine)) as tx:
        mine.execute("INSERT INTO effects VALUES (2)")
        tx.write(Put("k", b"new"))
        raise ZeroDivisionError
    assert mine.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert effects(postgres_url) == []
    assert value_of(stores.coord, "k") == b"old"
    assert append(stores.log, HERE, batch(b"b")) == [0]


def test_inside_the_callers_transaction_the_caller_commits(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str
) -> None:
    if mine.autocommit:
        mine.execute("BEGIN")
    mine.execute("INSERT INTO effects VALUES (1)")
    with stores.atomic(mine) as tx:
        mine.execute("INSERT INTO effects VALUES (2)")
        tx.write(Put("k", b"1"))
        tx.append(HERE, batch(b"a"))
    assert tx.appended == [Appended(0)]
    assert (effects(postgres_url), stores.coord.get("k")) == ([], None)
    watch = stores.coord.watch("k")
    mine.commit()
    while stores.coord.get("k") is None:
        assert watch.wait(PATIENCE), "nobody told, and nobody looked"
    assert effects(postgres_url) == [1, 2]
    assert values_in(stores.log, HERE) == {0: b"a"}


def test_a_conflict_inside_the_callers_transaction_undoes_only_what_pxrs_did(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str
) -> None:
    put(stores.coord, "k", b"old")
    if mine.autocommit:
        mine.execute("BEGIN")
    mine.execute("INSERT INTO effects VALUES (1)")
    with pytest.raises(CommitConflict), stores.atomic(mine) as tx:
        tx.append(HERE, batch(b"a"))
        tx.check(Check("k", 999_999))
    mine.execute("INSERT INTO effects VALUES (2)")
    mine.commit()
    assert effects(postgres_url) == [1, 2]
    assert values_in(stores.log, HERE) == {}


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_a_conflict_to_be_run_again(
    stores: PostgresStores, postgres_url: str, level: str
) -> None:
    """Neither an offset that is taken nor a fence that has moved may be seen as it was."""
    version = put(stores.coord, "k", b"old")
    with psycopg.connect(postgres_url, autocommit=True) as mine:
        for spoil, change in (
            (lambda: append(stores.log, HERE, batch(b"other")), "append"),
            (lambda: put(stores.coord, "k", b"new"), "write"),
            (lambda: put(stores.coord, "k", b"newer"), "check"),
        ):
            mine.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
            mine.execute("SELECT 1 FROM effects")
            spoil()
            with pytest.raises(TransactionConflict), stores.atomic(mine) as tx:
                if change == "append":
                    tx.append(HERE, batch(b"mine"))
                elif change == "write":
                    tx.write(Put("k", b"mine"))
                else:
                    tx.check(Check("k", version))
            mine.execute("ROLLBACK")
    assert values_in(stores.log, HERE) == {0: b"other"}
    assert value_of(stores.coord, "k") == b"newer"


def test_a_transaction_ended_inside_the_block_is_told(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str
) -> None:
    with pytest.raises(InvalidRequest, match="ended inside"), stores.atomic(Lent(mine)) as tx:
        mine.execute("INSERT INTO effects VALUES (1)")
        mine.commit()
        tx.write(Put("k", b"1"))
    with pytest.raises(InvalidRequest, match="ended inside"), stores.atomic(Lent(mine)) as tx:
        mine.commit()
        mine.execute("BEGIN" if mine.autocommit else "SELECT 1")
        tx.write(Put("k", b"1"))
    assert stores.coord.get("k") is None


def test_a_failed_statement_is_told(stores: PostgresStores, postgres_url: str) -> None:
    with pytest.raises(InvalidRequest, match="failed"), stores.atomic() as tx:
        with pytest.raises(psycopg.errors.UndefinedTable):
            tx.connection.execute("SELECT 1 FROM nothing")
        tx.write(Put("k", b"1"))
    assert stores.coord.get("k") is None
    put(stores.coord, "k")


def test_other_connections_are_refused(stores: PostgresStores, postgres_url: str) -> None:
    elsewhere = postgres_url.rpartition("/")[0] + "/postgres"
    with psycopg.connect(elsewhere) as other, pytest.raises(NotAtomic, match="schema"):
        stores.atomic(other).__enter__()
    with pytest.raises(NotAtomic, match="psycopg"):
        stores.atomic(object()).__enter__()
    closed = psycopg.connect(postgres_url)
    closed.close()
    with pytest.raises(NotAtomic, match="closed"):
        stores.atomic(closed).__enter__()


class Base(sqlalchemy.orm.DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    n: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)


@pytest.fixture
def engine(postgres_url: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def test_effectively_once_with_a_session(
    stores: PostgresStores, postgres_url: str, engine: sqlalchemy.Engine
) -> None:
    with pxrs.connect(postgres_url) as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send_many("orders", [(b"k", b"1"), (b"k", b"2")]).result()
        with px.consumer("orders", group="g", auto_commit=False) as consumer:
            messages = consumer.poll(timeout=10.0)
            with (
                sqlalchemy.orm.Session(engine) as session,
                pytest.raises(ZeroDivisionError),
                consumer.transaction(commits=session),
            ):
                session.add_all([Effect(n=int(message.value)) for message in messages])
                session.flush()
                raise ZeroDivisionError
            assert effects(postgres_url) == []
            again = consumer.poll(timeout=10.0)
            assert [message.value for message in again] == [b"1", b"2"]
            with (
                sqlalchemy.orm.Session(engine) as session,
                consumer.transaction(commits=session),
            ):
                session.add_all([Effect(n=int(message.value)) for message in again])
        assert effects(postgres_url) == [1, 2]
        assert px.groups.describe("g").partitions[0].checkpoint == 2


def test_a_connection_of_sqlalchemy(
    stores: PostgresStores, postgres_url: str, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection:
        with stores.atomic(Lent(connection)) as tx:
            connection.execute(sqlalchemy.text("INSERT INTO effects VALUES (1)"))
            tx.write(Put("k", b"1"))
        assert not connection.in_transaction()
    assert (effects(postgres_url), value_of(stores.coord, "k")) == ([1], b"1")


@pytest.mark.parametrize("lent", [False, True])
def test_a_deferred_constraint_of_the_callers_is_not_a_conflict(
    stores: PostgresStores, mine: psycopg.Connection[Any], postgres_url: str, lent: bool
) -> None:
    """It would be violated again: to run the transaction once more would never end."""
    query(postgres_url, "CREATE TABLE orders (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    query(postgres_url, "INSERT INTO orders VALUES (1)")
    with pytest.raises(StoreError) as caught, stores.atomic(Lent(mine) if lent else None) as tx:
        tx.connection.execute("INSERT INTO orders VALUES (1)")
        tx.write(Put("k", b"1"))
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, psycopg.errors.UniqueViolation)
    assert value_of(stores.coord, "k") is None
