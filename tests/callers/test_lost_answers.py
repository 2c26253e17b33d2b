"""The answer to a COMMIT is lost, and its outcome found out: what was lent is usable again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import pxrs
from pxrs.errors import StoreUnavailable, TransactionConflict
from support.callers import Row, Site, site_of
from support.child import PATIENCE
from support.postgres import query
from support.proxy import Proxy

every_server = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.engine(kind)) for kind in ("postgres", "mariadb")]
)


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    with site_of(kind, tmp_path) as site:
        site.renew()
        yield site


@pytest.fixture
def proxy(site: Site) -> Iterator[Proxy]:
    """On the way of the caller, not of pxrs."""
    with Proxy(site.engine.url.port or 0) as proxy:
        yield proxy


@pytest.fixture
def engine(site: Site, proxy: Proxy) -> Iterator[Engine]:
    engine = sqlalchemy.create_engine(site.engine.url.set(host="127.0.0.1", port=proxy.port))
    yield engine
    engine.dispose()


@contextmanager
def lost_answer_to_the_commit(site: Site, engine: Engine, proxy: Proxy) -> Iterator[None]:
    """The next COMMIT is done, and its connection breaks before the answer comes."""
    losing = Losing(site, proxy)

    @event.listens_for(engine, "commit", once=True)
    def committing(_: Any) -> None:
        losing.start()

    yield
    losing.join(PATIENCE)


class Losing(threading.Thread):
    """From `start` on answers are held back; the connections break once something has landed."""

    def __init__(self, site: Site, proxy: Proxy) -> None:
        super().__init__()
        self._site = site
        self._proxy = proxy
        self._before = site.landed()

    def start(self) -> None:
        self._proxy.hold_answers()
        super().start()

    def run(self) -> None:
        self._proxy.await_request(PATIENCE)
        while self._site.landed() == self._before:
            pass
        self._proxy.reset()
        self._proxy.heal()


@every_server
def test_a_session_goes_on(site: Site, engine: Engine, proxy: Proxy) -> None:
    with Session(engine) as session:
        with (
            lost_answer_to_the_commit(site, engine, proxy),
            site.px.transaction(commits=session) as tx,
        ):
            session.add(Row(n=1))
            tx.put(site.name, "1")
        assert not session.in_transaction()
        with site.px.transaction(commits=session) as tx:
            session.add(Row(n=2))
            tx.put(site.name, "2")
        assert session.get_one(Row, 1).n == 1
    assert site.landed()[:2] == [[1, 2], [1, 2]]


@every_server
def test_a_connection_goes_on(site: Site, engine: Engine, proxy: Proxy) -> None:
    with engine.connect() as connection:
        with (
            lost_answer_to_the_commit(site, engine, proxy),
            site.px.transaction(commits=connection) as tx,
        ):
            connection.execute(text("INSERT INTO callers_rows VALUES (1)"))
            tx.put(site.name, "1")
        assert not connection.in_transaction()
        with site.px.transaction(commits=connection) as tx:
            connection.execute(text("INSERT INTO callers_rows VALUES (2)"))
            tx.put(site.name, "2")
    assert site.landed()[:2] == [[1, 2], [1, 2]]


only_postgres = pytest.mark.parametrize(
    "kind", [pytest.param("postgres", marks=pytest.mark.engine("postgres"))]
)


@only_postgres
def test_a_drivers_connection_is_gone_and_what_it_did_is_there(site: Site, proxy: Proxy) -> None:
    losing = Losing(site, proxy)

    class Committing(psycopg.Connection[Any]):
        def commit(self) -> None:
            losing.start()
            super().commit()

    with Committing.connect(site.url, host="127.0.0.1", port=proxy.port) as connection:
        with site.px.transaction(commits=connection) as tx:
            connection.execute("INSERT INTO callers_rows VALUES (1)")
            tx.put(site.name, "1")
        losing.join(PATIENCE)
        assert connection.closed
    assert site.landed()[:2] == [[1], [1]]


@only_postgres
def test_a_session_of_a_consumer_goes_on(site: Site, engine: Engine, proxy: Proxy) -> None:
    with site.px.producer() as producer:
        producer.send_many(site.name, [("k", "1"), ("k", "2")]).result(PATIENCE)
    with (
        site.px.consumer(site.name, "g", auto_commit=False) as consumer,
        Session(engine) as session,
    ):
        for number, loses in ((1, True), (2, False)):
            (message,) = consumer.poll(1, timeout=PATIENCE)
            assert message.value == str(number).encode()
            if loses:
                with (
                    lost_answer_to_the_commit(site, engine, proxy),
                    consumer.transaction(commits=session),
                ):
                    session.add(Row(n=number))
            else:
                with consumer.transaction(commits=session):
                    session.add(Row(n=number))
        assert not session.in_transaction()
    assert site.landed()[0] == [1, 2]
    assert site.px.groups.describe("g").lag == 0


@every_server
def test_a_connection_that_pxrs_gave_up_is_told_in_our_words(site: Site) -> None:
    """Idle for longer than a session lasts, it is ended by the server, as pxrs has told it to."""
    site.px.put(site.name, "1")
    with pytest.raises(pxrs.PxrsError) as caught, site.px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None
        tx.execute("INSERT INTO callers_rows VALUES (1)")
        with pytest.raises(psycopg.errors.UniqueViolation if site.has_messages else IntegrityError):
            guarded(tx)
        site.cut(driver_under(tx))
        for _ in range(2):
            with pytest.raises((StoreUnavailable, TransactionConflict)) as lost:
                tx.execute("INSERT INTO callers_rows VALUES (2)")
            assert lost.value.retryable
        raise lost.value
    assert caught.value.retryable
    assert site.landed()[:2] == [[], [1]]
    with site.px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None


def guarded(tx: pxrs.UnitOfWork) -> None:
    """A statement that fails by itself: the driver tells it, and the caller handles it."""
    tx.execute("SAVEPOINT guard")
    try:
        tx.execute("INSERT INTO callers_rows VALUES (1)")
    finally:
        tx.execute("ROLLBACK TO SAVEPOINT guard")


def driver_under(tx: pxrs.UnitOfWork) -> Any:
    connection = tx.connection
    return connection if isinstance(connection, psycopg.Connection) else connection.connection


@only_postgres
def test_so_is_one_that_was_idle_for_too_long(site: Site) -> None:
    with site.px.transaction() as tx:
        tx.execute("INSERT INTO callers_rows VALUES (1)")
        tx.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
        pid = driver_under(tx).info.backend_pid
        while query(site.url, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid):
            pass
        # What the server says at last may be lost with the connection.
        with pytest.raises((TransactionConflict, StoreUnavailable)):
            tx.execute("INSERT INTO callers_rows VALUES (2)")
        tx.rollback()
    assert site.landed() == site.both()
