"""The doctor on every engine: what is well is called well, what is wrong is found."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import engines
from pxrs.operations.doctor import Diagnosis, examine
from pxrs.stores.findings import Finding, Level, judge_clock
from pxrs.stores.open import open_stores
from pxrs.stores.postgres import doctor as postgres_doctor
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.stores.sqlite import doctor as sqlite_doctor
from pxrs.stores.sqlite.stores import SqliteStores
from support.child import Child
from support.engine_fixtures import NewEngine, server_url
from support.inside import say, wait_for_parent


def by_check(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.check: finding for place in diagnosis.places for finding in place.findings}


def found(diagnosis: Diagnosis, level: Level) -> dict[str, str]:
    return {check: f.says for check, f in by_check(diagnosis).items() if f.level is level}


def healthy(diagnosis: Diagnosis, *, but: str = "") -> None:
    assert found(diagnosis, Level.PROBLEM).keys() <= {but}
    checks = by_check(diagnosis)
    assert {"connect", "version", "durability"} <= checks.keys()
    assert all(f.mend for f in checks.values() if f.level is Level.WARNING)


@pytest.mark.engine("sqlite")
def test_a_healthy_file_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    diagnosis = examine(url)
    healthy(diagnosis)
    assert found(diagnosis, Level.WARNING) == {}
    checks = by_check(diagnosis)
    for check in ("permissions", "sessions", "watch", "append", "queues", "wake-ups"):
        assert checks[check].level is Level.OK
    with closing(open_stores(url)) as stores, stores.atomic() as block:
        assert stores.coord.list("") == []
        assert stores.queues.all() == []
        rows = block.connection.execute("SELECT count(*) FROM pxrs_log_partitions").fetchone()
    assert rows == (0,)


@pytest.mark.engine("sqlite")
def test_relaxed_durability_is_a_warning(tmp_path: Path) -> None:
    diagnosis = examine(f"sqlite:///{tmp_path}/a.db?durability=relaxed")
    assert diagnosis.worst is Level.WARNING
    assert "power cut" in found(diagnosis, Level.WARNING)["durability"]


def hold_the_writer(path: str) -> None:
    with closing(SqliteStores(path)) as stores, stores.atomic() as block:
        block.connection.execute("CREATE TABLE mine (a)")
        say("held")
        wait_for_parent()


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_who_holds_the_writer_is_named(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.db"
    SqliteStores(path).close()
    with Child(hold_the_writer, path) as child:
        assert child.read() == "held"
        diagnosis = examine(f"sqlite:///{path}?busy_timeout=0.2")
        assert f"pid {child.pid}" in found(diagnosis, Level.PROBLEM)["permissions"]
        child.tell()


@pytest.mark.engine("sqlite")
def test_a_journal_that_somebody_changed(tmp_path: Path) -> None:
    with closing(SqliteStores(f"{tmp_path}/a.db")) as stores:
        broken = sqlite_doctor._durability("delete", 2, "full")
        assert broken.level is Level.PROBLEM
        assert all(f.level is not Level.PROBLEM for f in stores.findings())


@pytest.mark.engine("memory")
def test_memory_is_not_durable() -> None:
    assert "durability" in found(examine("memory://"), Level.WARNING)


def test_what_can_not_be_reached_is_a_problem() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    diagnosis = examine(f"postgresql://postgres@127.0.0.1:{port}/a?connect_timeout=2")
    assert "can't be reached" in found(diagnosis, Level.PROBLEM)["connect"]
    assert examine("nonsense").worst is Level.PROBLEM


def test_clocks_that_differ() -> None:
    assert judge_clock(0.2).level is Level.OK
    assert judge_clock(-30.0).level is Level.WARNING


@pytest.mark.engine("postgres")
def test_postgres(postgres_url: str) -> None:
    diagnosis = examine(postgres_url)
    healthy(diagnosis)
    checks = by_check(diagnosis)
    for check in ("clock", "wake-ups", "server", "watch", "append", "long transactions"):
        assert checks[check].level is Level.OK, checks[check]


@pytest.mark.engine("postgres")
def test_postgres_that_does_not_sync_commits(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    for url, says in (
        (postgres_url, "pxrs waits for the disk all the same"),
        (f"{postgres_url}?options=-csynchronous_commit%3Doff", "may take acknowledged messages"),
    ):
        findings = [f for place in examine(url).places for f in place.findings]
        (found,) = [f for f in findings if "synchronous_commit=off" in f.says]
        assert (found.level, says in found.says) == (Level.WARNING, True)


@pytest.mark.engine("postgres")
def test_a_long_transaction_is_named(postgres_url: str) -> None:
    with (
        closing(PostgresStores(postgres_url)) as stores,
        psycopg.connect(postgres_url, application_name="report") as other,
    ):
        other.execute("SELECT 1")
        found = postgres_doctor.findings(stores.database, long_after=0.0)
        (long,) = [f for f in found if "report" in f.says]
        assert (long.check, long.level) == ("long transactions", Level.WARNING)
        assert f"pg_terminate_backend({other.info.backend_pid})" in long.mend


@pytest.mark.engine("postgres")
def test_a_role_that_may_not(postgres_url: str) -> None:
    role = f"r_{postgres_url.rpartition('_')[2]}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            host = postgres_url.rpartition("@")[2] if "@" in postgres_url else ""
            diagnosis = examine(f"postgresql://{role}@{host}")
            assert diagnosis.worst is Level.PROBLEM
        finally:
            connection.execute(f"DROP ROLE {role}".encode())


@pytest.mark.engine("postgres")
def test_a_pooler_is_a_warning(postgres_url: str, new_engine: NewEngine) -> None:
    pooler: engines.Engine = new_engine("pgbouncer", server=server_url("postgres"))
    diagnosis = examine(f"{pooler.url}/{postgres_url.rpartition('/')[2]}")
    assert "pooler" in found(diagnosis, Level.WARNING)["wake-ups"]
    assert found(diagnosis, Level.PROBLEM) == {}


@pytest.mark.engine("etcd")
def test_one_etcd_and_nats_beside_it(etcd_url: str, nats_url: str) -> None:
    diagnosis = examine(f"{etcd_url} log={nats_url}")
    healthy(diagnosis, but="version")
    etcd, nats = diagnosis.places
    assert {f.check for f in etcd.findings if f.level is Level.WARNING} == {"cluster"}
    assert {f.check for f in nats.findings if f.level is Level.WARNING} == {"replicas"}
    assert any("sync_interval" in f.mend for f in nats.findings)


@pytest.mark.engine("etcd")
def test_three_etcds(new_engine: NewEngine) -> None:
    diagnosis = examine(new_engine("etcd", nodes=3).url)
    healthy(diagnosis, but="version")
    assert by_check(diagnosis)["cluster"].says == "3 nodes, 1 of which may be lost"


@pytest.mark.engine("etcd")
def test_an_etcd_that_may_miss_writes_is_a_problem(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd")
    forgetful = etcd.version in ("3.5.0", "3.5.1", "3.5.2")
    version = by_check(examine(etcd.url))["version"]
    assert version.level is (Level.PROBLEM if forgetful else Level.OK)


@pytest.mark.engine("zookeeper")
def test_zookeeper(zookeeper_url: str) -> None:
    diagnosis = examine(zookeeper_url)
    healthy(diagnosis)
    assert "cluster" in found(diagnosis, Level.WARNING)


@pytest.mark.engine("mariadb")
def test_mariadb(mariadb_url: str) -> None:
    diagnosis = examine(mariadb_url)
    healthy(diagnosis)
    assert by_check(diagnosis)["clock"].level is Level.OK
