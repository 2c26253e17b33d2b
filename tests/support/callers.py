"""Transactions of callers, as people write them: who begins, who ends, and on what."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pymysql
import pymysql.cursors
import sqlalchemy
from sqlalchemy import NullPool, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as make_sessions

import pxrs
from support.engine_fixtures import mariadb_database, postgres_database


class ChangedMindError(Exception):
    """Raised by a caller who wants nothing of it to be kept."""


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "callers_rows"
    n: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Site:
    """A store, a table of the caller's in the same database, and what has landed in both."""

    def __init__(self, engine: str, url: str, dialect: str) -> None:
        self.kind = engine
        self.url = url
        self.dialect = dialect
        self.engine = sqlalchemy.create_engine(dialect, poolclass=NullPool)
        with self.engine.begin() as connection:
            Base.metadata.create_all(connection)
        self.px = pxrs.connect(url)
        self.name = ""

    def renew(self) -> None:
        """Empty: for the next test. To make a database takes longer than most of them."""
        with self.engine.begin() as connection:
            connection.execute(text("DELETE FROM callers_rows"))
        self.name = f"n-{secrets.token_hex(6)}"
        if self.has_messages:
            self.px.topics.create(self.name, 1)

    @property
    def has_messages(self) -> bool:
        return self.kind != "mariadb"

    def write(self, caller: Caller, number: int) -> None:
        """What pxrs writes in the caller's transaction."""
        self.px.put(self.name, str(number), connection=caller.connection)
        if self.has_messages:
            self.px.send(self.name, str(number), key="k", connection=caller.connection)

    def landed(self) -> list[list[int]]:
        """The caller's rows, the items and the messages that are there, seen from outside."""
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT n FROM callers_rows ORDER BY n")).scalars()
            found = [list(rows)]
        found.append([int(item.body[1:]) for item in self.px.stores.queues.peek(self.name)])
        if self.has_messages:
            messages = self.px.reader(self.name).read(0, 0, max_records=100)
            found.append([int(message.value or b"") for message in messages])
        return found

    def both(self, *numbers: int) -> list[list[int]]:
        """What `landed` tells when these, and only these, are there everywhere."""
        return [list(numbers)] * (3 if self.has_messages else 2)

    def cut(self, driver: Any) -> None:
        """The caller's connection is lost, and nobody has told the caller."""
        if isinstance(driver, sqlite3.Connection):
            driver.close()  # nothing else can happen to it
        elif isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
            self.say("SELECT pg_terminate_backend(%s)", driver.info.backend_pid)
        else:
            self.say("KILL %s", driver.thread_id())

    def say(self, statement: str, *parameters: object) -> None:
        with self.engine.connect() as connection:
            connection.exec_driver_sql(statement, parameters)

    def close(self) -> None:
        self.px.close()
        self.engine.dispose()


@contextmanager
def site_of(kind: str, folder: Path) -> Iterator[Site]:
    """A site on the engine of this name."""
    if kind == "sqlite":
        url = f"sqlite:///{folder}/shop.db"
        with _closing(Site(kind, url, url)) as site:
            yield site
    elif kind == "postgres":
        with postgres_database() as url:
            dialect = url.replace("postgresql://", "postgresql+psycopg://")
            with _closing(Site(kind, url, dialect)) as site:
                yield site
    else:
        with mariadb_database() as url:
            plain = f"{url}?ssl_disabled=true"
            with _closing(Site(kind, plain, plain)) as site:
                yield site


@contextmanager
def _closing(site: Site) -> Iterator[Site]:
    try:
        yield site
    finally:
        site.close()


class Caller(NamedTuple):
    """Somebody inside of a transaction.

    `connection` is what pxrs is given, `run` how the caller writes, `nested` opens a savepoint,
    `driver` is the driver's connection under it all.
    """

    connection: Any
    run: Callable[[str], object]
    nested: Callable[[], AbstractContextManager[Any]]
    driver: Callable[[], Any]

    def insert(self, number: int) -> None:
        self.run(f"INSERT INTO callers_rows VALUES ({number})")


@contextmanager
def savepoint(run: Callable[[str], object]) -> Iterator[None]:
    """By statements, as those do it whose driver has no better way."""
    run("SAVEPOINT callers_own")
    try:
        yield
    except BaseException:
        run("ROLLBACK TO SAVEPOINT callers_own")
        raise
    finally:
        run("RELEASE SAVEPOINT callers_own")


# SQLAlchemy, on every engine


def of_session(session: Any) -> Caller:
    return Caller(
        session,
        lambda statement: session.execute(text(statement)),
        session.begin_nested,
        lambda: session.connection().connection.driver_connection,
    )


def of_connection(connection: sqlalchemy.Connection) -> Caller:
    return Caller(
        connection,
        lambda statement: connection.execute(text(statement)),
        connection.begin_nested,
        lambda: connection.connection.driver_connection,
    )


@contextmanager
def session_begin(site: Site) -> Iterator[Caller]:
    with Session(site.engine) as session, session.begin():
        yield of_session(session)


@contextmanager
def sessionmaker_begin(site: Site) -> Iterator[Caller]:
    with make_sessions(site.engine).begin() as session:
        yield of_session(session)


@contextmanager
def session_autobegin(site: Site) -> Iterator[Caller]:
    with Session(site.engine) as session:
        yield of_session(session)
        session.commit()


@contextmanager
def session_unflushed(site: Site) -> Iterator[Caller]:
    """Its rows are sent by its commit, after whatever pxrs wrote."""
    with Session(site.engine, autoflush=False) as session:

        def add(statement: str) -> None:
            session.add(Row(n=int(statement.partition("(")[2].rstrip(")"))))

        yield of_session(session)._replace(run=add)
        session.commit()


@contextmanager
def scoped(site: Site) -> Iterator[Caller]:
    registry = scoped_session(make_sessions(site.engine))
    try:
        yield of_session(registry)
        registry.commit()
    finally:
        registry.remove()


@contextmanager
def engine_begin(site: Site) -> Iterator[Caller]:
    with site.engine.begin() as connection:
        yield of_connection(connection)


@contextmanager
def engine_connect(site: Site) -> Iterator[Caller]:
    with site.engine.connect() as connection:
        yield of_connection(connection)
        connection.commit()


@contextmanager
def session_of_a_connection(site: Site) -> Iterator[Caller]:
    """As test suites have it: whoever has the connection decides."""
    with site.engine.connect() as connection, connection.begin(), Session(connection) as session:
        yield of_session(session)
        session.commit()


@contextmanager
def begun_by_sqlalchemy(site: Site) -> Iterator[Caller]:
    """SQLite as SQLAlchemy's handbook advises: the driver begins nothing, its own begin does."""
    engine = sqlalchemy.create_engine(site.dialect, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    with Session(engine) as session, session.begin():
        yield of_session(session)
    engine.dispose()


# Drivers


@contextmanager
def _driven(connection: Any, run: Callable[[str], object], nested: Any = None) -> Iterator[Caller]:
    """Ends as a `with` of the drivers does: commits, or rolls back after an exception."""
    nested = nested or (lambda: savepoint(run))
    try:
        yield Caller(connection, run, nested, lambda: connection)
        connection.commit()
    except ChangedMindError:
        connection.rollback()
        raise
    finally:
        connection.close()


@contextmanager
def sqlite_legacy(site: Site) -> Iterator[Caller]:
    connection = sqlite3.connect(site.engine.url.database or "")
    with _driven(connection, connection.execute) as caller:
        yield caller


@contextmanager
def sqlite_immediate(site: Site) -> Iterator[Caller]:
    connection = sqlite3.connect(site.engine.url.database or "", isolation_level="IMMEDIATE")
    with _driven(connection, connection.execute) as caller:
        yield caller


@contextmanager
def sqlite_begun(site: Site) -> Iterator[Caller]:
    """The driver begins nothing; the caller does."""
    connection = sqlite3.connect(site.engine.url.database or "", isolation_level=None)
    connection.execute("BEGIN")
    with _driven(connection, connection.execute) as caller:
        yield caller


@contextmanager
def sqlite_autocommit_off(site: Site) -> Iterator[Caller]:
    """Python 3.12: as PEP 249 has it, there is a transaction at all times."""
    connection = sqlite3.connect(site.engine.url.database or "", autocommit=False)  # type: ignore[call-overload,unused-ignore]
    with _driven(connection, connection.execute) as caller:
        yield caller


@contextmanager
def sqlite_autocommit_on(site: Site) -> Iterator[Caller]:
    """Python 3.12, and a transaction that the caller begins by a statement."""
    connection = sqlite3.connect(site.engine.url.database or "", autocommit=True)  # type: ignore[call-overload,unused-ignore]
    connection.execute("BEGIN")
    try:
        run = connection.execute
        yield Caller(connection, run, lambda: savepoint(run), lambda: connection)
        connection.execute("COMMIT")
    finally:
        connection.close()


@contextmanager
def psycopg_plain(site: Site) -> Iterator[Caller]:
    with psycopg.connect(site.url) as connection:
        yield of_psycopg(connection)


@contextmanager
def psycopg_transaction(site: Site) -> Iterator[Caller]:
    with psycopg.connect(site.url, autocommit=True) as connection, connection.transaction():
        yield of_psycopg(connection)


@contextmanager
def psycopg_begun(site: Site) -> Iterator[Caller]:
    connection = psycopg.connect(site.url, autocommit=True)
    connection.execute("BEGIN")
    with _driven(connection, lambda statement: connection.execute(statement.encode())) as caller:
        yield caller


def of_psycopg(connection: psycopg.Connection[Any]) -> Caller:
    return Caller(
        connection,
        lambda statement: connection.execute(statement.encode()),
        connection.transaction,
        lambda: connection,
    )


def _pymysql(site: Site, **options: Any) -> Any:
    url = site.engine.url
    return pymysql.connect(
        host=url.host,
        port=url.port or 0,
        user=url.username,
        database=url.database,
        ssl_disabled=True,
        **options,
    )


def _run_by(connection: Any) -> Callable[[str], object]:
    def run(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    return run


@contextmanager
def pymysql_plain(site: Site) -> Iterator[Caller]:
    connection = _pymysql(site)
    with _driven(connection, _run_by(connection)) as caller:
        yield caller


@contextmanager
def pymysql_dicts(site: Site) -> Iterator[Caller]:
    connection = _pymysql(site, cursorclass=pymysql.cursors.DictCursor)
    with _driven(connection, _run_by(connection)) as caller:
        yield caller


@contextmanager
def pymysql_begun(site: Site) -> Iterator[Caller]:
    connection = _pymysql(site, autocommit=True)
    connection.begin()
    with _driven(connection, _run_by(connection)) as caller:
        yield caller


# Django, on every engine


def set_up_django(site: Site) -> None:
    """Make the site its default database. Each engine has its backend; MariaDB's is PyMySQL's."""
    import django.conf
    from django.db import connections

    if not django.conf.settings.configured:
        pymysql.install_as_MySQLdb()
        django.conf.settings.configure()
        django.setup()
    url = site.engine.url
    backend = {"sqlite": "sqlite3", "postgres": "postgresql", "mariadb": "mysql"}[site.kind]
    there: dict[str, Any] = {
        "ENGINE": f"django.db.backends.{backend}",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or "",
        "PORT": str(url.port or ""),
    }
    connections.settings = connections.configure_settings({"default": there})
    connections["default"] = connections.create_connection("default")


@contextmanager
def django_atomic(site: Site) -> Iterator[Caller]:
    set_up_django(site)
    from django.db import connection, transaction

    def run(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    try:
        with transaction.atomic():
            yield Caller(connection, run, transaction.atomic, lambda: connection.connection)
    finally:
        connection.close()


@contextmanager
def django_without_autocommit(site: Site) -> Iterator[Caller]:
    """Whoever turns it off ends transactions by hand."""
    set_up_django(site)
    from django.db import connection, transaction

    def run(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    transaction.set_autocommit(False)
    try:
        yield Caller(connection, run, transaction.atomic, lambda: connection.connection)
        transaction.commit()
    except ChangedMindError:
        transaction.rollback()
        raise
    finally:
        connection.close()


Idiom = Callable[[Site], AbstractContextManager[Caller]]

EVERYWHERE: tuple[Idiom, ...] = (
    session_begin,
    sessionmaker_begin,
    session_autobegin,
    session_unflushed,
    scoped,
    engine_begin,
    engine_connect,
    session_of_a_connection,
    django_atomic,
    django_without_autocommit,
)
IDIOMS: dict[str, tuple[Idiom, ...]] = {
    "sqlite": (*EVERYWHERE, begun_by_sqlalchemy, sqlite_legacy, sqlite_immediate, sqlite_begun),
    "postgres": (*EVERYWHERE, psycopg_plain, psycopg_transaction, psycopg_begun),
    "mariadb": (*EVERYWHERE, pymysql_plain, pymysql_dicts, pymysql_begun),
}
# From Python 3.12 on.
SQLITE_AUTOCOMMIT: tuple[Idiom, ...] = (sqlite_autocommit_off, sqlite_autocommit_on)
