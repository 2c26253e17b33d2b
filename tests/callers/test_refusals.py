"""What can't be joined is refused, and the caller's transaction is as it was."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.orm import Session

import pxrs
from pxrs import aio
from pxrs.errors import InvalidRequest, NotAtomic, StoreUnavailable, TopicNotFound
from support.callers import Caller, Site, engine_begin, of_psycopg, set_up_django, site_of
from support.engine_fixtures import postgres_database

every_engine = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.engine(kind))
        for kind in ("sqlite", "postgres", "mariadb")
    ],
)


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    with site_of(kind, tmp_path) as site:
        site.renew()
        yield site


def commits_by_itself(site: Site) -> Any:
    if site.kind == "sqlite":
        return sqlite3.connect(site.engine.url.database or "", isolation_level=None)
    if site.kind == "postgres":
        return psycopg.connect(site.url, autocommit=True)
    url = site.engine.url
    return pymysql.connect(
        host=url.host,
        port=url.port or 0,
        user=url.username,
        database=url.database,
        ssl_disabled=True,
        autocommit=True,
    )


@every_engine
def test_without_a_transaction_there_is_nothing_to_join(site: Site) -> None:
    driver = commits_by_itself(site)
    with pytest.raises(InvalidRequest, match="open one first"):
        site.px.put(site.name, "1", connection=driver)
    driver.close()
    engine = site.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        with pytest.raises(InvalidRequest, match="open one first"):
            site.px.put(site.name, "1", connection=connection)
        assert not connection.in_transaction()
    with Session(engine) as session, pytest.raises(InvalidRequest, match="open one first"):
        site.px.put(site.name, "1", connection=session)
    assert site.landed() == site.both()


@every_engine
def test_what_is_refused_leaves_the_callers_transaction_as_it_was(site: Site) -> None:
    with engine_begin(site) as caller:
        caller.insert(1)
        with pytest.raises(InvalidRequest):
            site.px.put("no such name/", "1", connection=caller.connection)
        with pytest.raises((TopicNotFound, NotAtomic, pxrs.ConfigError)):
            site.px.send("nowhere", "1", connection=caller.connection)
        with (
            pytest.raises(pxrs.TransactionConflict, match="mine"),
            site.px.transaction(join=caller.connection) as tx,
        ):
            tx.put(site.name, "9")
            raise pxrs.TransactionConflict("mine")
        site.write(caller, 1)
    assert site.landed() == site.both(1)


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("kind", ["postgres"])
def test_another_database_is_refused_and_its_transaction_goes_on(site: Site) -> None:
    with postgres_database() as elsewhere, psycopg.connect(elsewhere) as other:
        for begin in (False, True):
            if begin:
                other.execute("CREATE TABLE callers_rows (n int)")
            with pytest.raises(NotAtomic):
                site.write(of_psycopg(other), 1)
            status = other.info.transaction_status
            assert status == psycopg.pq.TransactionStatus(2 if begin else 0)
        other.execute("INSERT INTO callers_rows VALUES (1)")


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("kind", ["postgres"])
def test_a_lost_connection_is_told_in_our_words(site: Site) -> None:
    with psycopg.connect(site.url) as connection:
        connection.execute("SELECT 1")
        site.cut(connection)
        with pytest.raises(StoreUnavailable):
            site.write(of_psycopg(connection), 1)
        assert connection.closed


@every_engine
def test_a_connection_alone_does_not_say_who_commits(site: Site) -> None:
    px = site.px
    with site.engine.connect() as connection:
        given: Any = connection
        for verb in (px.transaction, px.begin):
            with pytest.raises(InvalidRequest, match=r"join=connection\) if you commit"):
                verb(given)
            with pytest.raises(InvalidRequest, match="either"):
                verb(commits=given, join=given)
        with pytest.raises(InvalidRequest, match=r"px\.producer"):
            px.send(site.name, "1", connection=None)
    if site.has_messages:
        with px.consumer(site.name, "g") as consumer:
            with pytest.raises(InvalidRequest, match="commits="):
                consumer.transaction(given)
            with pytest.raises(InvalidRequest, match="commits="):
                consumer.run_transaction(lambda _: None, connection=given)


@pytest.mark.engine("sqlite")
def test_nor_does_it_on_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        given: Any = sqlite3.connect(":memory:")
        async with aio.connect(f"sqlite:///{tmp_path}/s.db") as px:
            await px.topics.create("t", 1)
            for verb in (px.transaction, px.begin):
                with pytest.raises(InvalidRequest, match="commits="):
                    verb(given)
            with pytest.raises(InvalidRequest, match=r"px\.producer"):
                await px.send("t", "1", connection=None)
            async with px.consumer("t", "g") as consumer:
                with pytest.raises(InvalidRequest, match="commits="):
                    consumer.transaction(given)
                with pytest.raises(InvalidRequest, match="commits="):
                    await consumer.run_transaction(lambda _: None, connection=given)
        given.close()

    asyncio.run(main())


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("kind", ["postgres"])
def test_pxrs_does_not_commit_inside_somebodys_block(site: Site) -> None:
    with psycopg.connect(site.url, autocommit=True) as connection:
        with connection.transaction():
            with (
                pytest.raises(InvalidRequest, match="join="),
                site.px.transaction(commits=connection) as tx,
            ):
                tx.put(site.name, "1")
            connection.execute("INSERT INTO callers_rows VALUES (1)")
        with site.px.transaction(commits=connection) as tx:
            tx.put(site.name, "1")
            tx.send(site.name, "1")
    with Session(site.engine) as session, session.begin():
        with (
            pytest.raises(InvalidRequest, match="join="),
            site.px.transaction(commits=session) as tx,
        ):
            tx.put(site.name, "2")
        session.execute(text("INSERT INTO callers_rows VALUES (2)"))
    assert site.landed() == [[1, 2], [1], [1]]


@every_engine
def test_pxrs_commits_what_it_is_lent(site: Site) -> None:
    """With what was begun before; and an exception rolls all of it back."""
    with site.engine.connect() as connection:
        caller = Caller(
            connection, lambda it: connection.execute(text(it)), connection.begin_nested, object
        )
        for fails in (True, False):
            caller.insert(1)
            try:
                with site.px.transaction(commits=connection) as tx:
                    caller.insert(2)
                    tx.put(site.name, "1")
                    tx.put(site.name, "2")
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert fails
            assert not connection.in_transaction()
            assert site.landed()[:2] == ([[], []] if fails else [[1, 2], [1, 2]])


def test_sqlalchemys_own_pool_is_no_matter(tmp_path: Path) -> None:
    """A connection taken out of a pool by hand is the driver's."""
    with site_of("sqlite", tmp_path) as site:
        site.renew()
        engine = sqlalchemy.create_engine(site.dialect)
        pooled = engine.raw_connection()
        site.px.put(site.name, "1", connection=pooled)
        assert site.landed() == [[], [], []]
        pooled.commit()
        pooled.close()
        engine.dispose()
        assert site.landed() == [[], [1], []]


@every_engine
def test_django_is_joined_inside_atomic_only(site: Site) -> None:
    set_up_django(site)
    from django.db import connection, transaction

    with pytest.raises(InvalidRequest, match=r"transaction\.atomic"):
        site.px.put(site.name, "1", connection=connection)
    with (
        pytest.raises(InvalidRequest, match="join="),
        site.px.transaction(commits=connection) as tx,
    ):
        tx.put(site.name, "1")
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(InvalidRequest, match="rolled back"):
            site.px.put(site.name, "1", connection=connection)
    connection.close()
    assert site.landed() == site.both()


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("kind", ["sqlite"])
def test_an_interrupt_asks_nobody_what_became_of_the_callers_transaction(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask would wait for that transaction, in the thread that is to end it."""

    class Interrupted(sqlite3.Connection):
        def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
            if "pxrs_queue" in statement:
                raise KeyboardInterrupt
            return super().execute(statement, *parameters)

    connection = sqlite3.connect(site.engine.url.database or "", factory=Interrupted)
    connection.execute("INSERT INTO callers_rows VALUES (1)")
    asked: list[object] = []
    monkeypatch.setattr(site.px.stores.queues, "outcome", lambda *unit: asked.append(unit))
    with pytest.raises(KeyboardInterrupt):
        site.px.put(site.name, "1", connection=connection)
    assert not asked
    connection.rollback()
    connection.close()
    assert site.landed() == site.both()
