"""Real engines for tests.

One engine of each kind is shared by all workers of a run and started when the first test asks
for it; each test gets a place of its own in it. Tests that stop or kill an engine start their
own with `new_engine`. An engine that can't be had is skipped with the reason, or fails in CI.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from engines.shared import ADDRESS, Host, HostProcess, shared_url

import engines

if TYPE_CHECKING:
    import psycopg

NewEngine = Callable[..., engines.Engine]
_host = pytest.StashKey[Host | HostProcess]()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        return  # no test asks for one
    if not hasattr(config, "workerinput") and ADDRESS not in os.environ:
        config.stash[_host] = HostProcess() if config.getoption("--forks") else Host()


def pytest_unconfigure(config: pytest.Config) -> None:
    if host := config.stash.get(_host, None):
        host.close()


def unavailable(why: engines.Missing) -> None:
    """Skip, loudly; where everything has to be there, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"an engine is missing: {why}")
    pytest.skip(f"an engine is missing: {why}")


def server_url(name: str) -> str:
    """The shared engine of this name."""
    try:
        return shared_url(name)
    except engines.Missing as why:
        unavailable(why)
        raise


def place_in(name: str) -> str:
    """A place of its own in the shared etcd or ZooKeeper."""
    return f"{server_url(name)}/t-{secrets.token_hex(6)}"


@contextmanager
def started(
    name: str, before: Callable[[engines.Engine], None] = lambda engine: None, **options: Any
) -> Iterator[engines.Engine]:
    """An engine of one's own, for as long as the block lasts. `before`: called before it starts."""
    try:
        engine = engines.build(name, **options)
    except engines.Missing as why:
        unavailable(why)
        raise
    with engine:
        before(engine)
        engine.start()
        yield engine


@pytest.fixture
def new_engine() -> Iterator[NewEngine]:
    """Starts an engine for this test alone, which may stop, kill and restart it."""
    with ExitStack() as stack:
        yield lambda name, **options: stack.enter_context(started(name, **options))


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A database of its own in the shared PostgreSQL, with pxrs' schema and nothing in it.

    It is a copy: to make the schema takes longer than most tests.
    """
    import psycopg

    with postgres_database(_postgres_template()) as url:
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE pxrs.pxrs_meta SET value = %s WHERE name = 'id'", (url,))
        yield url


@pytest.fixture
def bare_postgres_url() -> Iterator[str]:
    """A database of its own in the shared PostgreSQL, without pxrs' schema."""
    with postgres_database() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_of_many() -> Iterator[str]:
    """A database of the shared PostgreSQL for all tests of a worker that leave it empty."""
    with postgres_database() as url:
        yield url


@pytest.fixture(scope="session")
def broom(postgres_of_many: str) -> Iterator[psycopg.Connection[Any]]:
    """The connection that empties `postgres_of_many`."""
    import psycopg

    with psycopg.connect(postgres_of_many, autocommit=True) as connection:
        yield connection


@contextmanager
def postgres_database(template: str = "template1") -> Iterator[str]:
    """A new database, gone with the block."""
    import psycopg

    server = server_url("postgres")
    name = f"t_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as connection:
        # Since PostgreSQL 15 a copy goes through its write-ahead log, unless it is told not to.
        how = "STRATEGY FILE_COPY" if connection.info.server_version >= 150000 else ""
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} {how}".encode())
    yield server.rpartition("/")[0] + f"/{name}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@cache
def _postgres_template() -> str:
    """The database that others are copies of; the first of all workers makes it."""
    import psycopg

    from pxrs.stores.postgres.stores import PostgresStores

    server, name = server_url("postgres"), "pxrs_template"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        if not connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).rowcount:
            connection.execute(f"CREATE DATABASE {name}".encode())
            PostgresStores(server.rpartition("/")[0] + f"/{name}").close()
    return name


@pytest.fixture
def mariadb_url() -> Iterator[str]:
    """An empty database of the shared MariaDB."""
    with mariadb_database() as url:
        yield url


@contextmanager
def mariadb_database(server: str = "mariadb") -> Iterator[str]:
    """An empty database of a shared MariaDB, for as long as the block lasts.

    It can't be dropped while a transaction has used it: a test that leaves one open fails.
    """
    import sqlalchemy

    url = server_url(server)
    name = f"t_{secrets.token_hex(6)}"
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
    yield url.rpartition("/")[0] + f"/{name}"
    with engine.connect() as connection:
        # pytest shows it if the test has failed: rows of tables wait for all who write.
        for statement in ("SHOW FULL PROCESSLIST", "SHOW ENGINE INNODB STATUS"):
            for row in connection.execute(sqlalchemy.text(statement)):
                print(*row)
        connection.execute(sqlalchemy.text("SET lock_wait_timeout = 10"))
        connection.execute(sqlalchemy.text(f"DROP DATABASE {name}"))


@pytest.fixture
def etcd_url() -> str:
    """A prefix of its own in the shared etcd."""
    return place_in("etcd")


@pytest.fixture
def zookeeper_url() -> str:
    """A folder of its own in the shared ZooKeeper."""
    return place_in("zookeeper")


@pytest.fixture
def nats_url() -> str:
    """The shared NATS server; JetStream has no folders, name your streams apart."""
    return server_url("nats")


@pytest.fixture
def valkey_url() -> str:
    """The shared Valkey."""
    return server_url("valkey")


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.engine("postgres")),
        pytest.param("etcd+jetstream", marks=pytest.mark.engine("etcd")),
    ]
)
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A place of its own in each store that nodes of several hosts share."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"{place_in('etcd')} log={server_url('nats')}/t-{secrets.token_hex(6)}"
