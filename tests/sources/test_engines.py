"""A table that is read on the connections of a SQLAlchemy engine of the user's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

import pxrs
from pxrs import StoreUnavailable
from pxrs.errors import ConfigError, InvalidRequest, TopicExists
from pxrs.sources import Table

_IDS = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgresql": "bigserial PRIMARY KEY",
    "mysql": "bigint AUTO_INCREMENT PRIMARY KEY",
}


class Counting:
    """Makes the connections of an engine: only it knows the way in."""

    def __init__(self, engine: str, url: str) -> None:
        self._engine = engine
        self._url = url
        self.made = 0

    def __call__(self) -> Any:
        self.made += 1
        if self._engine == "sqlite":
            return sqlite3.connect(self._url.removeprefix("sqlite:///"), check_same_thread=False)
        if self._engine == "postgres":
            return psycopg.connect(self._url)
        parts = urlsplit(self._url)
        return pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            database=parts.path[1:],
            ssl_disabled=True,
        )


_DIALECTS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "mariadb": "mysql+pymysql",
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.engine(name))
        for name in ("sqlite", "postgres", "mariadb")
    ]
)
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Counting]]:
    """An engine whose URL has no host or password, with a table of 20 rows."""
    if request.param == "sqlite":
        url = shown = f"sqlite:///{tmp_path}/app.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        shown = f"{_DIALECTS[request.param]}://"
    counting = Counting(request.param, url)
    engine = create_engine(shown, creator=counting)
    with engine.begin() as db:
        number = _IDS[engine.dialect.name]
        db.execute(text(f"CREATE TABLE events (id {number}, account varchar(50))"))
        insert(engine=engine, count=20, db=db)
    yield engine, counting
    engine.dispose()


def insert(engine: Engine, count: int, db: sqlalchemy.Connection | None = None) -> None:
    statement = text("INSERT INTO events (account) VALUES (:account)")
    rows = [{"account": f"account-{number % 5}"} for number in range(count)]
    if db is not None:
        db.execute(statement, rows)
        return
    with engine.begin() as own:
        own.execute(statement, rows)


def test_rows_are_read_on_its_connections(given: tuple[Engine, Counting], tmp_path: Path) -> None:
    engine, counting = given
    with pxrs.connect(f"sqlite:///{tmp_path}/checkpoints.db") as px:
        made = counting.made
        table = Table("events", key="account", value="account", engine=engine)
        px.attach("events", table, partitions=4)
        assert counting.made <= made + 1
        with px.consumer("events", group="billing") as consumer:
            found: list[pxrs.Message] = []
            while len(found) < 20 and (more := consumer.poll(timeout=10)):
                found += more
            insert(engine, 5)
            while len(found) < 25 and (more := consumer.poll(timeout=10)):
                found += more
        assert sorted(message.offset for message in found) == list(range(1, 26))
        # It is not in the pool: the program has all of that for itself.
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.engine("postgres")
def test_others_find_it_by_its_url(postgres_url: str, tmp_path: Path) -> None:
    parts = urlsplit(postgres_url)
    engine = create_engine(parts._replace(scheme="postgresql+psycopg").geturl())
    with engine.begin() as db:
        db.execute(text("CREATE TABLE events (id bigserial PRIMARY KEY, account text)"))
        insert(engine, 3, db)
    store = f"sqlite:///{tmp_path}/checkpoints.db"
    table = Table("events", value="account", engine=engine)
    with pxrs.connect(store) as px:
        kept = px.attach("events", table, partitions=1).source or {}
        assert kept["url"] == parts.geturl()
    with pxrs.connect(store) as px:
        assert [m.offset for m in px.reader("events").read(0, 0)] == [1, 2, 3]
        # The same place, said otherwise, is the same topic; another is not.
        px.attach("events", Table("events", value="account", url=parts.geturl()), partitions=1)
        with pytest.raises(TopicExists):
            other = Table("events", value="account", url=f"{parts.geturl()}?connect_timeout=9")
            px.attach("events", other, partitions=1)
    engine.dispose()


def test_no_password_is_kept() -> None:
    engine = create_engine("postgresql+psycopg://ann:secret@host:5433/shop")
    kept = Table("events", value="account", engine=engine).settings()
    assert kept["url"] == "postgresql://ann@host:5433/shop"
    assert "secret" not in str(Table("events", value="account", engine=engine))


def stranger() -> SimpleNamespace:
    """What pxrs sees of an engine of Oracle, whose driver is not installed here."""
    dialect = SimpleNamespace(name="oracle", driver="oracledb")
    return SimpleNamespace(dialect=dialect, url=None, raw_connection=None)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: "sqlite:///app.db", "must be a sqlalchemy.Engine, .* got str"),
        (lambda: create_async_engine("postgresql+psycopg://h/d"), "must be a sqlalchemy.Engine"),
        (
            lambda: create_engine("mysql+mysqldb://h/d", module=pymysql),
            "must use the driver pymysql",
        ),
        (
            stranger,
            "must be one of .*, got oracle",
        ),
    ],
    ids=["text", "async", "driver", "database"],
)
def test_engines_that_can_not_be_used(make: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Table("events", value="account", engine=make())


def test_one_of_two() -> None:
    engine = create_engine("sqlite:///app.db")
    with pytest.raises(InvalidRequest, match="url= or engine=, not both"):
        Table("events", value="account", url="sqlite:///app.db", engine=engine)


def test_what_is_in_memory_is_refused() -> None:
    with pxrs.connect("memory://") as px:
        table = Table("events", value="account", engine=create_engine("sqlite://"))
        with pytest.raises(ConfigError, match="must be a file"):
            px.attach("events", table, partitions=1)


@pytest.mark.engine("postgres")
def test_a_database_that_is_away(unused_port: int) -> None:
    engine = create_engine(f"postgresql+psycopg://u@127.0.0.1:{unused_port}/d")
    with pxrs.connect("memory://") as px:
        table = Table("events", value="account", engine=engine)
        with pytest.raises(StoreUnavailable):
            px.attach("events", table, partitions=1)


@pytest.fixture
def unused_port() -> int:
    import socket

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])
