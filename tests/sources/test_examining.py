"""What the doctor says of tables that topics lie over."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

import pxrs
from pxrs.operations.doctor import examine
from pxrs.sources import Table
from pxrs.stores.findings import Finding


def attach(store: str, **more: Any) -> None:
    given: dict[str, Any] = {"key": "account", "value": "payload", "timestamp": "created_at"}
    with pxrs.connect(store) as px:
        px.attach("events", Table(**{"name": "events", **given, **more}), partitions=4)


def about(store: str) -> list[Finding]:
    """What is said of the topic, the worst last."""
    diagnosis = examine(store, create=False)
    found = [each for place in diagnosis.places for each in place.findings]
    return [each for each in found if each.check == "source events"]


def said(store: str) -> dict[str, str]:
    """The first words of each finding, and how bad it is."""
    return {" ".join(each.says.split()[:4]): each.level.value for each in about(store)}


def sqlite_store(tmp_path: Path, column: str) -> str:
    with closing(sqlite3.connect(tmp_path / "app.db")) as db:
        db.execute(f"CREATE TABLE events ({column}, account TEXT, payload TEXT, created_at TEXT)")
        db.execute("INSERT INTO events (payload) VALUES ('x')")
        db.commit()
    return f"sqlite:///{tmp_path}/app.db"


@pytest.mark.engine("sqlite")
def test_a_table_in_sqlite(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path, "id INTEGER PRIMARY KEY")
    attach(store)
    assert said(store) == {
        "can be read up": "ok",
        "the table has no": "warning",
        "there is no index": "note",
    }
    assert all(each.mend for each in about(store) if each.level != "ok")


@pytest.mark.engine("sqlite")
def test_a_table_in_sqlite_with_nothing_to_say(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path, "id INTEGER PRIMARY KEY AUTOINCREMENT")
    with closing(sqlite3.connect(tmp_path / "app.db")) as db:
        db.execute("CREATE INDEX times ON events (created_at)")
    attach(store)
    assert said(store) == {"can be read up": "ok"}
    with closing(sqlite3.connect(tmp_path / "app.db")) as db:
        db.execute("DROP TABLE events")
    assert [each.level for each in about(store)] == ["problem"]


@pytest.mark.engine("postgres")
def test_a_table_in_postgresql(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(
            """CREATE TABLE events (id serial PRIMARY KEY, account date, payload text,
                created_at timestamptz)"""
        )
        attach(postgres_url)
        assert said(postgres_url) == {
            "can be read up": "ok",
            "there is no index": "note",
            "the text of the": "warning",
        }
        db.execute("ALTER TABLE events ALTER account TYPE text")
        db.execute("CREATE INDEX ON events (created_at)")
        assert said(postgres_url) == {"can be read up": "ok", "it is not prepared:": "note"}
        with pxrs.connect(postgres_url) as px:
            px.sources.prepare("events", apply=True)
        assert said(postgres_url) == {"can be read up": "ok"}
        db.execute("DROP TRIGGER pxrs_notify ON events")
        db.execute("ALTER SEQUENCE events_id_seq RESTART WITH 2000000000")
        db.execute("INSERT INTO events DEFAULT VALUES")
        assert said(postgres_url) == {
            "can be read up": "ok",
            "'id' is int4 and": "warning",
            "it was prepared, and": "warning",
        }
        db.execute("ALTER SEQUENCE events_id_seq CACHE 50")
        (found,) = about(postgres_url)
        assert found.level == "problem"
        assert "CACHE 1" in found.says


@pytest.mark.engine("postgres")
def test_a_sequence_that_may_not_be_read(postgres_url: str, tmp_path: Path) -> None:
    name = urlsplit(postgres_url).path[1:]
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text)")
        db.execute(f"CREATE ROLE {name} LOGIN".encode())
        try:
            db.execute(f"GRANT SELECT ON events TO {name}".encode())
            parts = urlsplit(postgres_url)
            url = f"postgresql://{name}@{parts.hostname}:{parts.port}/{name}"
            store = f"sqlite:///{tmp_path}/checkpoints.db"
            attach(store, url=url, timestamp=None)
            assert said(store)["this role may not"] == "warning"
        finally:
            db.execute(f"DROP OWNED BY {name}".encode())
            db.execute(f"DROP ROLE {name}".encode())


@pytest.mark.engine("mariadb")
def test_a_table_in_mariadb_without_the_right_to_see_others(
    mariadb_url: str, tmp_path: Path
) -> None:
    parts = urlsplit(mariadb_url)
    name = parts.path[1:]
    with pymysql.connect(
        host=parts.hostname,
        port=parts.port or 0,
        user=parts.username,
        database=name,
        autocommit=True,
        ssl_disabled=True,
    ) as db:
        cursor = db.cursor()
        cursor.execute(
            """CREATE TABLE events (id int AUTO_INCREMENT PRIMARY KEY, account datetime,
                payload text, created_at datetime)"""
        )
        cursor.execute(f"CREATE USER {name}@'%'")
        cursor.execute(f"GRANT SELECT ON {name}.* TO {name}@'%'")
        try:
            url = f"mysql://{name}@{parts.hostname}:{parts.port}/{name}?ssl_disabled=true"
            store = f"sqlite:///{tmp_path}/checkpoints.db"
            attach(store, url=url, settle=5)
            assert said(store) == {
                "can be read up": "ok",
                "the database does not": "note",
                "there is no index": "note",
                "the text of the": "warning",
            }
            cursor.execute("ALTER TABLE events ENGINE = Aria")
            (found,) = about(store)
            assert "InnoDB" in found.says
        finally:
            cursor.execute(f"DROP USER {name}@'%'")


def test_a_source_of_a_program_is_left_alone(tmp_path: Path) -> None:
    class Other:
        streams = 1
        read = bounds = final = watch = offset_at = None

        def close(self) -> None:
            pass

    store = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(store) as px:
        source: Any = Other()
        px.attach("events", source, partitions=1)
    assert [each.level for each in about(store)] == ["note"]
