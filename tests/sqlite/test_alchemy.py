"""`consumer.transaction` on what callers have: sessions and connections of SQLAlchemy, drivers'."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, exc, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

import pxrs
from support.child import PATIENCE

pytestmark = pytest.mark.engine("sqlite")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders_done"
    number: Mapped[int] = mapped_column(primary_key=True)


class ChangedMindError(Exception):
    """Raised by a handler that wants nothing of its block to be kept."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Has the tables already: to make them takes the file's lock, which others may hold by then."""
    path = tmp_path / "shop.db"
    engine = as_it_comes(path)
    Base.metadata.create_all(engine)
    engine.dispose()
    return path


@pytest.fixture
def px(path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{path}") as px:
        px.topics.create("orders", partitions=1)
        px.topics.create("invoices", partitions=1)
        with px.producer() as producer:
            producer.send_many("orders", [("k", str(n)) for n in range(3)]).result()
        yield px


def as_it_comes(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path}")


def begins_itself(path: Path) -> Engine:
    """As SQLAlchemy's handbook advises: the driver begins nothing, its own begin does."""
    engine = as_it_comes(path)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def keeps_one_open(path: Path) -> Engine:
    """As drivers shall by PEP 249: there is a transaction at all times."""
    return create_engine(f"sqlite:///{path}", connect_args={"autocommit": False})


@pytest.fixture(
    params=[
        as_it_comes,
        begins_itself,
        pytest.param(
            keeps_one_open,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 12), reason="sqlite3 has autocommit=False since Python 3.12"
            ),
        ),
    ]
)
def engine(request: pytest.FixtureRequest, px: pxrs.Pxrs, path: Path) -> Iterator[Engine]:
    engine: Engine = request.param(path)
    yield engine
    engine.dispose()


@pytest.fixture
def consumer(px: pxrs.Pxrs) -> Iterator[pxrs.Consumer]:
    with px.consumer("orders", "billing", auto_commit=False) as consumer:
        yield consumer


Run = Callable[[str], Any]


@contextmanager
def a_session(engine: Engine) -> Iterator[tuple[Any, Run]]:
    with Session(engine) as session:
        yield session, lambda statement: session.execute(text(statement))
        assert not session.in_transaction()


@contextmanager
def a_scoped_session(engine: Engine) -> Iterator[tuple[Any, Run]]:
    registry = scoped_session(sessionmaker(engine))
    yield registry, lambda statement: registry.execute(text(statement))
    registry.remove()


@contextmanager
def a_connection(engine: Engine) -> Iterator[tuple[Any, Run]]:
    with engine.connect() as connection:
        yield connection, lambda statement: connection.execute(text(statement))
        assert not connection.in_transaction()


@contextmanager
def a_pooled_connection(engine: Engine) -> Iterator[tuple[Any, Run]]:
    pooled = engine.raw_connection()
    assert isinstance(pooled.dbapi_connection, sqlite3.Connection)
    pooled.dbapi_connection.isolation_level = ""  # it begins by itself, whatever the engine does
    yield pooled, pooled.dbapi_connection.execute
    pooled.close()


@contextmanager
def a_driver_connection(engine: Engine) -> Iterator[tuple[Any, Run]]:
    assert engine.url.database is not None
    connection = sqlite3.connect(engine.url.database)
    yield connection, connection.execute
    assert not connection.in_transaction
    connection.close()


@pytest.fixture(
    params=[a_session, a_scoped_session, a_connection, a_pooled_connection, a_driver_connection]
)
def lent(request: pytest.FixtureRequest, engine: Engine) -> Iterator[tuple[Any, Run]]:
    """Something to lend, and how its owner runs statements on it."""
    with request.param(engine) as lent:
        yield lent


def numbers(path: Path) -> list[int]:
    other = sqlite3.connect(path)
    found = [row[0] for row in other.execute("SELECT number FROM orders_done ORDER BY 1")]
    other.close()
    return found


def landed(px: pxrs.Pxrs, path: Path) -> tuple[list[int], int, int]:
    """The rows written, the messages sent, and how many of the topic's count as handled."""
    handled = 3 - px.groups.describe("billing").lag
    return numbers(path), px.topics.describe("invoices").messages, handled


def insert(run: Run, messages: list[pxrs.Message]) -> None:
    for message in messages:
        run(f"INSERT INTO orders_done VALUES ({int(message.value)})")


NOTHING: tuple[list[int], int, int] = ([], 0, 0)
ALL = ([0, 1, 2], 1, 3)


def test_rows_messages_and_checkpoint_land_together(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, lent: tuple[Any, Run], path: Path
) -> None:
    connection, run = lent
    messages = consumer.poll(timeout=PATIENCE)
    with consumer.transaction(commits=connection) as tx:
        insert(run, messages)
        tx.send("invoices", "for all")
        assert landed(px, path) == NOTHING
    assert landed(px, path) == ALL
    # Usable again, and not stuck in an old transaction.
    with px.producer() as producer:
        producer.send("orders", "3").result()
    messages = consumer.poll(timeout=PATIENCE)
    with consumer.transaction(commits=connection):
        insert(run, messages)
    assert numbers(path) == [0, 1, 2, 3]


def test_a_block_left_by_an_exception_leaves_nothing(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, lent: tuple[Any, Run], path: Path
) -> None:
    connection, run = lent
    messages = consumer.poll(timeout=PATIENCE)
    with pytest.raises(ChangedMindError), consumer.transaction(commits=connection) as tx:
        insert(run, messages)
        tx.send("invoices", "for all")
        raise ChangedMindError
    assert landed(px, path) == NOTHING
    again = consumer.poll(timeout=PATIENCE)
    with consumer.transaction(commits=connection) as tx:
        insert(run, again)
        tx.send("invoices", "for all")
    assert landed(px, path) == ALL


def test_a_fenced_owner_is_rolled_back_and_told(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, lent: tuple[Any, Run], path: Path
) -> None:
    connection, run = lent
    messages = consumer.poll(timeout=PATIENCE)
    # Under the lock the consumer's own threads can't notice first.
    with consumer._steps.owned_claims.lock:
        px.groups.reset("billing", "orders", to="earliest", force=True)
        with pytest.raises(pxrs.Fenced), consumer.transaction(commits=connection) as tx:
            insert(run, messages)
            tx.send("invoices", "for all")
    assert landed(px, path) == NOTHING
    messages = consumer.poll(timeout=PATIENCE)
    with consumer.transaction(commits=connection) as tx:
        insert(run, messages)
        tx.send("invoices", "for all")
    assert landed(px, path) == ALL


def test_what_had_been_begun_before_becomes_part_of_it(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, lent: tuple[Any, Run], path: Path
) -> None:
    connection, run = lent
    messages = consumer.poll(timeout=PATIENCE)
    insert(run, messages[:1])
    with pytest.raises(ChangedMindError), consumer.transaction(commits=connection):
        raise ChangedMindError
    assert landed(px, path) == NOTHING
    messages = consumer.poll(timeout=PATIENCE)
    insert(run, messages[:1])
    with consumer.transaction(commits=connection) as tx:
        insert(run, messages[1:])
        tx.send("invoices", "for all")
    assert landed(px, path) == ALL


def test_what_was_read_before_is_no_obstacle(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, lent: tuple[Any, Run], path: Path
) -> None:
    connection, run = lent
    messages = consumer.poll(timeout=PATIENCE)
    run("SELECT count(*) FROM orders_done").fetchall()
    with consumer.transaction(commits=connection) as tx:
        insert(run, messages)
        tx.send("invoices", "for all")
    assert landed(px, path) == ALL


def test_an_old_snapshot_is_run_again(px: pxrs.Pxrs, consumer: pxrs.Consumer, path: Path) -> None:
    engine = begins_itself(path)
    Base.metadata.create_all(engine)
    tries = []
    with Session(engine) as session:
        messages = consumer.poll(timeout=PATIENCE)
        session.execute(text("SELECT count(*) FROM pxrs_coord")).fetchall()
        with px.producer() as producer:
            producer.send("invoices", "meanwhile").result()

        def work(tx: pxrs.Transaction) -> str:
            tries.append(1)
            session.add_all([Order(number=int(message.value)) for message in messages])
            return "done"

        assert consumer.run_transaction(work, commits=session) == "done"
    assert len(tries) == 2
    assert landed(px, path) == ([0, 1, 2], 1, 3)
    engine.dispose()


def test_objects_not_flushed_yet_are_part_of_it(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path
) -> None:
    with Session(engine, autoflush=False) as session:
        early = Order(number=0)
        session.add(early)
        messages = consumer.poll(timeout=PATIENCE)
        with consumer.transaction(commits=session) as tx:
            session.add_all([Order(number=int(message.value)) for message in messages[1:]])
            tx.send("invoices", "for all")
        assert landed(px, path) == ALL
        assert early.number == 0


def test_a_flush_that_fails_undoes_the_rest(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path
) -> None:
    with Session(engine) as session:
        session.add(Order(number=2))
        session.commit()
        messages = consumer.poll(timeout=PATIENCE)
        with pytest.raises(exc.IntegrityError), consumer.transaction(commits=session) as tx:
            session.add_all([Order(number=int(message.value)) for message in messages])
            tx.send("invoices", "for all")
        assert landed(px, path) == ([2], 0, 0)
        messages = consumer.poll(timeout=PATIENCE)
        with consumer.transaction(commits=session) as tx:
            session.add_all([Order(number=int(message.value)) for message in messages[:2]])
            tx.send("invoices", "for all")
        assert landed(px, path) == ALL


def test_an_error_after_the_commit_does_not_hand_out_again(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path
) -> None:
    """What a session calls after its commit may fail: the commit stands, and is known to."""
    with Session(engine) as session:

        @event.listens_for(session, "after_commit", once=True)
        def fail(_: Session) -> None:
            raise ChangedMindError

        messages = consumer.poll(timeout=PATIENCE)
        with pytest.raises(ChangedMindError), consumer.transaction(commits=session) as tx:
            session.add_all([Order(number=int(message.value)) for message in messages])
            tx.send("invoices", "for all")
        assert landed(px, path) == ALL
        with px.producer() as producer:
            producer.send("orders", "3").result()
        (later,) = consumer.poll(timeout=PATIENCE)
        with consumer.transaction(commits=session):
            session.add(Order(number=int(later.value)))
        assert numbers(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("then", ["nothing", "more"])
def test_a_session_that_commits_inside_is_told(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path, then: str
) -> None:
    with Session(engine) as session:
        consumer.poll(timeout=PATIENCE)
        with (
            pytest.raises(pxrs.InvalidRequest, match="ended inside"),
            consumer.transaction(commits=session) as tx,
        ):
            tx.send("invoices", "for all")
            session.commit()
            if then == "more":
                session.add(Order(number=7))
                session.flush()
        assert landed(px, path) == NOTHING
        assert len(consumer.poll(timeout=PATIENCE)) == 3


def test_begin_blocks_are_refused(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path
) -> None:
    """They commit by themselves, later: until then nobody knows whether the messages count."""
    consumer.poll(timeout=PATIENCE)
    with Session(engine) as session, session.begin():
        with (
            pytest.raises(pxrs.InvalidRequest, match="begin"),
            consumer.transaction(commits=session),
        ):
            pass
        session.add(Order(number=7))
    consumer.poll(timeout=PATIENCE)
    with engine.begin() as connection:
        block = consumer.transaction(commits=connection)
        with pytest.raises(pxrs.InvalidRequest, match="begin"):
            block.__enter__()
        connection.execute(text("INSERT INTO orders_done VALUES (8)"))
    consumer.poll(timeout=PATIENCE)
    with Session(engine) as session:
        session.begin_nested()
        with (
            pytest.raises(pxrs.InvalidRequest, match="begin"),
            consumer.transaction(commits=session),
        ):
            pass
    assert landed(px, path) == ([7, 8], 0, 0)


def test_a_session_that_can_not_commit_is_told(
    px: pxrs.Pxrs, consumer: pxrs.Consumer, engine: Engine, path: Path
) -> None:
    """Bound to a connection in a transaction, as in test suites, its commit commits nothing."""
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            messages = consumer.poll(timeout=PATIENCE)
            with (
                pytest.raises(pxrs.NotAtomic, match="bound"),
                consumer.transaction(commits=session) as tx,
            ):
                session.add_all([Order(number=int(message.value)) for message in messages])
                tx.send("invoices", "for all")
        outer.close()
    assert landed(px, path) == NOTHING
    assert len(consumer.poll(timeout=PATIENCE)) == 3


def test_other_databases_are_refused(consumer: pxrs.Consumer, tmp_path: Path) -> None:
    consumer.poll(timeout=PATIENCE)
    other = as_it_comes(tmp_path / "other.db")
    with Session(other) as session:
        with pytest.raises(pxrs.NotAtomic), consumer.transaction(commits=session):
            pass
        assert not session.in_transaction()
    consumer.poll(timeout=PATIENCE)
    with Session() as unbound, pytest.raises(pxrs.NotAtomic), consumer.transaction(commits=unbound):
        pass
    other.dispose()
    with pxrs.connect("memory://") as memory:
        memory.topics.create("orders", partitions=1)
        with (
            memory.consumer("orders", "billing") as elsewhere,
            Session(other) as session,
            pytest.raises(pxrs.NotAtomic),
            elsewhere.transaction(commits=session),
        ):
            pass


def test_sqlalchemy_is_loaded_by_nobody_else(path: Path, px: pxrs.Pxrs) -> None:
    code = (
        "import sqlite3, sys, pxrs\n"
        f"with pxrs.connect('sqlite:///{path}') as px, px.consumer('orders', 'g') as consumer:\n"
        f"    with consumer.transaction(commits=sqlite3.connect({str(path)!r})): pass\n"
        "print('sqlalchemy' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (result.stdout, result.stderr) == ("False\n", "")
