"""A transaction that ended in the middle of its block: nothing is done without its first half."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import pxrs
from pxrs.errors import InvalidRequest
from support.callers import Site, site_of
from support.child import PATIENCE

INSERT = "INSERT INTO callers_rows VALUES ({})"


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=pytest.mark.engine(kind)) for kind in kinds]
    )


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    with site_of(kind, tmp_path) as site:
        site.renew()
        yield site


def driver_of(site: Site) -> Any:
    if site.kind == "sqlite":
        return sqlite3.connect(site.engine.url.database or "")
    return psycopg.connect(site.url)


@on("sqlite", "postgres")
@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_a_checkpoint_does_not_move_without_the_effects_before_it(site: Site, end: str) -> None:
    px = site.px
    with px.producer() as producer:
        producer.send(site.name, "1").result(PATIENCE)
    with (
        px.consumer(site.name, "g", auto_commit=False) as consumer,
        closing(driver_of(site)) as connection,
    ):
        assert len(consumer.poll(timeout=PATIENCE)) == 1
        with (
            pytest.raises(InvalidRequest, match="ended inside"),
            consumer.transaction(commits=connection),
        ):
            connection.execute(INSERT.format(1))
            getattr(connection, end)()
            connection.execute(INSERT.format(2))
        assert site.landed()[0] == ([1] if end == "commit" else [])
        assert px.groups.describe("g").lag == 1
        assert len(consumer.poll(timeout=PATIENCE)) == 1


@on("sqlite", "postgres", "mariadb")
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
def test_an_item_is_not_removed_without_the_effects_before_it(site: Site, end: str) -> None:
    site.px.put(site.name, "1")
    with pytest.raises(InvalidRequest, match="ended inside"), site.px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None
        tx.execute(INSERT.format(1))
        tx.execute(end)
        tx.execute("BEGIN")
        tx.execute(INSERT.format(2))
    assert site.landed()[:2] == [[1] if end == "COMMIT" else [], [1]]
    with site.px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None


@on("sqlite", "postgres", "mariadb")
def test_a_savepoint_around_the_block_that_ends_inside_of_it_is_told(site: Site) -> None:
    with Session(site.engine) as session, session.begin():
        session.execute(text(INSERT.format(1)))
        nested = session.begin_nested()
        with (
            pytest.raises(InvalidRequest, match="ended inside"),
            site.px.transaction(join=session) as tx,
        ):
            tx.execute(INSERT.format(2))
            nested.rollback()
            tx.put(site.name, "2")
    assert site.landed()[:2] == [[1], []]


def lose_a_deadlock(site: Site, run: Any) -> None:
    """Be the victim of a deadlock, and go on as if nothing was."""
    with site.engine.connect() as other, ThreadPoolExecutor(1) as pool:
        # The one who has changed more is spared.
        other.execute(text("UPDATE callers_others SET m = 1 WHERE n > 1"))
        run("UPDATE callers_others SET m = 2 WHERE n = 1")
        job = pool.submit(other.execute, text("UPDATE callers_others SET m = 1 WHERE n = 1"))
        with pytest.raises(OperationalError, match="1213"):
            run("UPDATE callers_others SET m = 2 WHERE n = 2")
        job.result(PATIENCE)
        other.commit()


@pytest.fixture
def others(site: Site) -> None:
    site.say("CREATE TABLE callers_others (n INT PRIMARY KEY, m INT) ENGINE=InnoDB")
    with site.engine.begin() as connection:
        rows = ",".join(f"({n}, 0)" for n in range(1, 101))
        connection.execute(text(f"INSERT INTO callers_others VALUES {rows}"))


@on("mariadb")
@pytest.mark.usefixtures("others")
def test_a_deadlock_that_was_caught_undoes_all_of_it(site: Site) -> None:
    """The server has rolled back what came before, and goes on with a transaction of its own."""
    px = site.px
    px.put(site.name, "1")
    with pytest.raises(InvalidRequest, match="1213"), px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None
        tx.execute(INSERT.format(1))
        lose_a_deadlock(site, tx.execute)
        tx.execute(INSERT.format(2))
    assert site.landed() == [[], [1]]
    with px.transaction() as tx:
        assert tx.take(site.name, PATIENCE) is not None


@on("mariadb")
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("who", ["lent", "joined"])
def test_so_it_does_on_a_session_of_the_callers(site: Site, who: str) -> None:
    def as_it_is(session: Session) -> pxrs.UnitOfWork:
        if who == "lent":
            return site.px.transaction(commits=session)
        return site.px.transaction(join=session)

    with Session(site.engine) as session:
        with pytest.raises(InvalidRequest, match="1213"), as_it_is(session) as tx:
            tx.execute(INSERT.format(1))
            lose_a_deadlock(site, lambda statement: session.execute(text(statement)))
            session.execute(text(INSERT.format(2)))
            tx.put(site.name, "1")
        session.rollback()
    assert site.landed() == site.both()
