"""A database that was dropped, or whose schema was, and made anew under running programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest
from psycopg import sql

import pxrs
from pxrs.errors import OutcomeUnknown, SchemaMismatch, StoreDamaged, StoreUnavailable
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.types import Check, Committed, Put
from support.child import PATIENCE
from support.engine_fixtures import NewEngine, server_url
from support.postgres import query
from support.proxy import Proxy
from support.wiped import AGAIN, check_told_once

pytestmark = pytest.mark.engine("postgres")


def drop_database(url: str) -> None:
    name = sql.Identifier(url.rpartition("/")[2])
    with psycopg.connect(server_url("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
        connection.execute(sql.SQL("CREATE DATABASE {}").format(name))


def drop_schema(url: str) -> None:
    # Members that are at work lock the tables in another order.
    dropped = False
    while not dropped:
        with suppress(psycopg.errors.DeadlockDetected):
            query(url, "DROP SCHEMA pxrs CASCADE")
            dropped = True


@pytest.fixture(params=[drop_database, drop_schema])
def drop(request: pytest.FixtureRequest) -> Callable[[str], None]:
    found: Callable[[str], None] = request.param
    return found


def test_who_has_known_it_is_told_once_and_writes_nothing(
    postgres_url: str, drop: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    old = PostgresStores(postgres_url)

    def make_anew() -> PostgresStores:
        drop(postgres_url)
        return PostgresStores(postgres_url)

    new = check_told_once(old, make_anew, caplog)
    assert query(postgres_url, "SELECT count(*) FROM pxrs.pxrs_sessions") == [(0,)]
    new.close()


def test_who_has_known_it_through_a_pooler_is_told_by_its_next_session(
    postgres_url: str, new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The pooler's connections live on."""
    pooler = new_engine("pgbouncer", server=server_url("postgres"))
    old = PostgresStores(f"{pooler.url}/{postgres_url.rpartition('/')[2]}")

    def make_anew() -> PostgresStores:
        drop_schema(postgres_url)
        return PostgresStores(postgres_url)

    check_told_once(old, make_anew, caplog).close()


def test_who_has_no_session_is_told_by_its_next_connection(postgres_url: str) -> None:
    old = PostgresStores(postgres_url)
    made = old.coord.commit([], [Put("k", b"old")])
    assert isinstance(made, Committed)
    drop_database(postgres_url)
    new = PostgresStores(postgres_url)
    new.coord.commit([], [Put("k", b"new")])
    with pytest.raises(StoreDamaged, match=AGAIN):
        while True:
            with suppress(StoreUnavailable, OutcomeUnknown):
                old.coord.commit([Check("k", made.versions["k"])], [Put("k", b"stale")])
                break
    old.close()
    new.close()


def test_until_it_is_made_anew_its_tables_are_missing(
    postgres_url: str, drop: Callable[[str], None]
) -> None:
    with pxrs.connect(postgres_url) as px:
        px.topics.create("t", 2)
        with px.consumer("t", "g", session_ttl=1.0) as consumer:
            consumer.poll(timeout=0.0)
            drop(postgres_url)
            with pytest.raises(SchemaMismatch, match="has lost tables of pxrs"):
                consumer.poll(timeout=PATIENCE)
            # Its last checkpoint has no place to go.
            with suppress(SchemaMismatch):
                consumer.close()


def test_members_are_told_although_the_topic_was_made_again(
    postgres_url: str, drop: Callable[[str], None]
) -> None:
    server, _, database = postgres_url.rpartition("/")
    with (
        Proxy(int(server.rpartition(":")[2])) as proxy,
        pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as px,
    ):
        px.topics.create("t", 1)
        with px.producer() as producer:
            producer.send("t", "x").result()
        with px.consumer("t", "g", debounce=0.0, session_ttl=2.0) as consumer:
            assert consumer.poll(timeout=PATIENCE)
            # It must not find its tables missing.
            proxy.cut()
            drop(postgres_url)
            with pxrs.connect(postgres_url) as other:
                other.topics.create("t", 1)
            proxy.heal()
            while consumer.health().state != "failed":
                with suppress(StoreDamaged):
                    consumer.poll(timeout=1.0)
            assert "is another store now" in consumer.health().detail
            with pytest.raises(StoreDamaged, match="topics that are gone must be created again"):
                consumer.poll(timeout=0.0)
    with pxrs.connect(postgres_url) as px, px.producer() as producer:
        producer.send("t", "again").result()
        with px.consumer("t", "g", debounce=0.0) as consumer:
            assert [each.value for each in consumer.poll(timeout=PATIENCE)] == [b"again"]
