"""A database that was dropped and made anew under running programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy

import pxrs
from pxrs.errors import SchemaMismatch, StoreDamaged
from pxrs.stores.mysql.stores import SqlStores
from support.child import PATIENCE
from support.engine_fixtures import server_url
from support.proxy import Proxy
from support.sql import open_sql
from support.wiped import check_told_once

pytestmark = pytest.mark.engine("mariadb")


def drop(url: str) -> None:
    name = url.rpartition("/")[2]
    engine = sqlalchemy.create_engine(server_url("mariadb"), poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"DROP DATABASE {name}"))
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))


def test_who_has_known_it_is_told_once_and_writes_nothing(
    mariadb_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = open_sql(mariadb_url)
    old.coord.session(60.0)

    def make_anew() -> SqlStores:
        drop(mariadb_url)
        return open_sql(mariadb_url)

    new = check_told_once(old, make_anew, caplog)
    assert new.coord.database.read("SELECT count(*) FROM pxrs_sessions") == [(0,)]
    new.close()


def test_until_it_is_made_anew_its_tables_are_missing(mariadb_url: str, tmp_path: Path) -> None:
    with pxrs.connect(mariadb_url, log=f"sqlite:///{tmp_path}/log.db") as px:
        px.topics.create("t", 2)
        consumer = px.consumer("t", "g", session_ttl=1.0)
        consumer.poll(timeout=0.0)
        drop(mariadb_url)
        with pytest.raises(SchemaMismatch, match="has lost tables of pxrs"):
            consumer.poll(timeout=PATIENCE)
        # Its last checkpoint has no place to go.
        with suppress(SchemaMismatch):
            consumer.close()


def test_members_are_told_although_the_topic_was_made_again(
    mariadb_url: str, tmp_path: Path
) -> None:
    log = f"sqlite:///{tmp_path}/log.db"
    server, _, database = mariadb_url.rpartition("/")
    with (
        Proxy(int(server.rpartition(":")[2])) as proxy,
        pxrs.connect(f"mysql://root@{proxy.address}/{database}", log=log) as px,
    ):
        px.topics.create("t", 1)
        with px.producer() as producer:
            producer.send("t", "x").result()
        with px.consumer("t", "g", debounce=0.0, session_ttl=2.0) as consumer:
            assert consumer.poll(timeout=PATIENCE)
            # It must not find its tables missing.
            proxy.cut()
            drop(mariadb_url)
            with pxrs.connect(mariadb_url, log=log) as other:
                other.topics.create("t", 1)
            proxy.heal()
            while consumer.health().state != "failed":
                with suppress(StoreDamaged):
                    consumer.poll(timeout=1.0)
            assert "is another store now" in consumer.health().detail
            with pytest.raises(StoreDamaged, match="topics that are gone must be created again"):
                consumer.poll(timeout=0.0)
    with pxrs.connect(mariadb_url, log=log) as px, px.producer() as producer:
        producer.send("t", "again").result()
        with px.consumer("t", "g", debounce=0.0) as consumer:
            assert [each.value for each in consumer.poll(timeout=PATIENCE)] == [b"again"]
