"""Things that are really wrong with an engine, and what the doctor says of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy
from engines.mariadb import galera
from engines.places import free_ports

from pxrs.clock import SYSTEM_CLOCK
from pxrs.codec.batches import encode
from pxrs.config import etcd_settings, parse_url, sql_settings
from pxrs.errors import StoreError
from pxrs.operations.doctor import Diagnosis, examine
from pxrs.stores.etcd import doctor as etcd_doctor
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.wire import grpc, rpc
from pxrs.stores.findings import Finding, Level
from pxrs.stores.mysql import doctor as sql_doctor
from pxrs.stores.mysql.coord import SqlCoord
from pxrs.stores.open import open_place, open_stores
from pxrs.types import Append, LogPartition, Put
from support.engine_fixtures import NewEngine


def finding(diagnosis: Diagnosis, check: str, says: str = "") -> Finding:
    """The one finding of this check that says so."""
    found = [f for place in diagnosis.places for f in place.findings]
    (one,) = [f for f in found if f.check == check and says in f.says]
    return one


@pytest.mark.engine("postgres")
def test_postgres_without_fsync(postgres_url: str) -> None:
    found = finding(examine(postgres_url), "durability", "fsync=off")
    assert (found.level, "power cut" in found.says) == (Level.WARNING, True)


@pytest.mark.engine("postgres")
def test_postgres_that_may_only_be_read(postgres_url: str) -> None:
    open_stores(postgres_url).close()
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    found = finding(examine(postgres_url), "permissions")
    assert (found.level, "read-only" in found.says) == (Level.PROBLEM, True)


@pytest.mark.engine("mariadb")
def test_mariadb_that_syncs_now_and_then(mariadb_url: str) -> None:
    found = finding(examine(mariadb_url), "durability")
    assert (found.level, "innodb_flush_log_at_trx_commit=2" in found.says) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("flush", "binlog", "logs", "says"),
    [
        (0, 1, 0, "a crash of the server may take the last commits"),
        (2, 1, 1, "a power cut may take the last commits"),
        (1, 0, 1, "sync_binlog=0"),
        (1, 100, 1, "sync_binlog=100"),
        (1, 0, 0, ""),
        (1, 1, 1, ""),
        (3, 0, 1, ""),
    ],
)
def test_what_mariadb_may_lose(flush: int, binlog: int, logs: int, says: str) -> None:
    found = sql_doctor._durability(flush, binlog, logs)
    assert (found.level, says in found.says) == (Level.WARNING if says else Level.OK, True)


@pytest.mark.engine("mariadb")
def test_a_transaction_that_is_open_in_mariadb(mariadb_url: str) -> None:
    engine = sqlalchemy.create_engine(mariadb_url, poolclass=sqlalchemy.NullPool)
    with closing(open_place(mariadb_url)) as place, engine.connect() as other:
        thread = other.execute(sqlalchemy.text("SELECT connection_id()")).scalar()
        other.execute(sqlalchemy.text("START TRANSACTION WITH CONSISTENT SNAPSHOT"))
        coord = place.coord
        assert isinstance(coord, SqlCoord)
        found = sql_doctor.findings(coord.database, long_after=0)
        (long,) = [f for f in found if f"KILL {thread}" in f.mend]
        assert (long.check, long.level) == ("long transactions", Level.WARNING)


@pytest.mark.engine("mariadb")
def test_a_node_of_a_galera_cluster(new_engine: NewEngine) -> None:
    server = new_engine("mariadb", settings=galera(*free_ports(1)))
    found = finding(examine(server.url), "server")
    assert (found.level, "Galera" in found.says) == (Level.PROBLEM, True)


@pytest.mark.parametrize(
    ("single", "state", "consistency", "level", "says"),
    [
        ("OFF", "ONLINE", "EVENTUAL", Level.PROBLEM, "several primaries"),
        ("OFF", None, "EVENTUAL", Level.PROBLEM, "several primaries"),
        ("ON", "RECOVERING", "EVENTUAL", Level.PROBLEM, "RECOVERING"),
        ("ON", "ONLINE", "EVENTUAL", Level.WARNING, "after a fail-over"),
        ("ON", "ONLINE", "BEFORE_ON_PRIMARY_FAILOVER", Level.OK, "the primary"),
        ("ON", None, "BEFORE_ON_PRIMARY_FAILOVER", Level.OK, "the primary"),
        ("OFF", "OFFLINE", "EVENTUAL", Level.OK, "does not run"),
    ],
)
def test_group_replication_of_mysql(
    single: str, state: str | None, consistency: str, level: Level, says: str
) -> None:
    """As MySQL's manual describes its variables: no MySQL runs here."""
    variables = {
        "group_replication_group_name": "5dbabbe6-8050-49a0-9131-1de449167446",
        "group_replication_single_primary_mode": single,
        "group_replication_consistency": consistency,
    }
    found = sql_doctor.judge_group(variables, state)
    assert (found.level, says in found.says) == (level, True)
    assert bool(found.mend) == (level is not Level.OK)


@pytest.mark.engine("mariadb")
def test_a_server_without_group_replication_is_asked_all_the_same(mariadb_url: str) -> None:
    with closing(SqlCoord(sql_settings(parse_url(mariadb_url)))) as coord:
        assert coord.database.read(sql_doctor._GROUP) == []
        assert sql_doctor._state_in_group(coord.database) is None


@pytest.mark.engine("mariadb")
def test_a_mariadb_that_may_only_be_read(new_engine: NewEngine) -> None:
    server = new_engine("mariadb")
    assert finding(examine(server.url), "server").level is Level.OK
    engine = sqlalchemy.create_engine(server.url, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("SET GLOBAL read_only = 1"))
    found = finding(examine(server.url), "server")
    assert (found.level, "read-only" in found.says) == (Level.PROBLEM, True)


@pytest.mark.engine("mariadb")
def test_a_reader_endpoint_of_mysql(new_engine: NewEngine) -> None:
    """Its tables are read-only, as those of a reader of Aurora are; `read_only` may be off."""
    server = new_engine("mariadb")
    open_stores(server.url, log="memory://").close()
    server.stop()
    (node,) = server.nodes
    node._command = replace(
        node._command, argv=[*node._command.argv, "--innodb-read-only", "--read-only=0"]
    )
    server.start()
    found = finding(examine(server.url), "server")
    assert (found.level, "reader endpoint" in found.says) == (Level.PROBLEM, True)


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("prepared", [True, False], ids=["with pxrs' tables", "without them"])
def test_a_standby_of_postgres(new_engine: NewEngine, prepared: bool) -> None:
    server = new_engine("postgres")
    if prepared:
        open_stores(server.url).close()
    server.stop()
    (server.folder / "data" / "standby.signal").touch()
    server.start()
    diagnosis = examine(server.url)
    found = [f for place in diagnosis.places for f in place.findings]
    assert {f.level for f in found if "standby" in f.says} == {Level.PROBLEM}
    if prepared:
        assert finding(diagnosis, "server", "standby").level is Level.PROBLEM


@pytest.mark.engine("etcd")
@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.5.3", "3.4.23"])
def test_versions_of_etcd_that_miss_writes(version: str) -> None:
    loses = version in ("3.5.0", "3.5.1", "3.5.2")
    assert etcd_doctor._version("host", version).level is (Level.PROBLEM if loses else Level.OK)


def old_node() -> Any:
    """Answers for a node of etcd 3.5.1; it refuses everything but the request for its status."""
    status = rpc.StatusResponse(version="3.5.1", header=rpc.ResponseHeader(member_id=7))
    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: status,
        request_deserializer=rpc.StatusRequest.FromString,
        response_serializer=rpc.StatusResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor())
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": handler}),)
    )
    return server


@pytest.mark.engine("etcd")
@pytest.mark.parametrize("alone", [False, True], ids=["mixed cluster", "refuses all else"])
def test_every_node_of_etcd_is_asked_for_its_version(etcd_url: str, alone: bool) -> None:
    server = old_node()
    old = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    known = parse_url(etcd_url)
    url = f"etcd://{old}" if alone else f"etcd://{','.join(etcd_settings(known).hosts)},{old}"
    nodes = Nodes(etcd_settings(parse_url(url)), SYSTEM_CLOCK)
    try:
        found = [each for each in etcd_doctor.findings(nodes) if each.check == "version"]
        assert [each.level for each in found if f"etcd 3.5.1 at {old}" in each.says] == [
            Level.PROBLEM
        ]
        assert len(found) == (1 if alone else 2)
    finally:
        nodes.close()
        server.stop(None)


@pytest.mark.engine("etcd")
def test_nodes_of_etcd_that_the_url_does_not_name(new_engine: NewEngine) -> None:
    hosts = new_engine("etcd", nodes=2).url
    one = hosts.partition(",")[0]
    for url, level in ((hosts, None), (one, Level.NOTE)):
        found = [f for place in examine(url).places for f in place.findings]
        assert next((f.level for f in found if "not asked" in f.says), None) is level


@pytest.mark.engine("etcd")
def test_etcd_that_is_full(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd", flags=["--quota-backend-bytes=4000000"])
    with closing(open_stores(etcd.url)) as stores, suppress(StoreError):
        for number in range(100):
            stores.coord.commit([], [Put(f"large/{number}", bytes(900_000))])
    diagnosis = examine(etcd.url)
    found = finding(diagnosis, "alarms")
    assert (found.level, "quota" in found.says) == (Level.PROBLEM, True)
    assert finding(diagnosis, "permissions").level is Level.PROBLEM


@pytest.mark.engine("etcd")
def test_two_etcds_bear_no_more_than_one(new_engine: NewEngine) -> None:
    found = finding(examine(new_engine("etcd", nodes=2).url), "cluster")
    assert (found.level, "2 nodes" in found.says) == (Level.NOTE, True)


@pytest.mark.engine("zookeeper")
def test_zookeeper_that_grants_short_sessions_and_does_not_tell(new_engine: NewEngine) -> None:
    zookeeper = new_engine(
        "zookeeper", settings={"maxSessionTimeout": "3000", "4lw.commands.whitelist": "srvr, stat"}
    )
    found = finding(examine(zookeeper.url), "sessions")
    assert (found.level, "instead of" in found.says) == (Level.WARNING, True)
    assert "session" in found.mend


@pytest.mark.engine("zookeeper")
@pytest.mark.thorough
def test_three_zookeepers(new_engine: NewEngine) -> None:
    diagnosis = examine(new_engine("zookeeper", nodes=3).url)
    assert finding(diagnosis, "cluster").level is Level.OK


@pytest.mark.engine("nats")
def test_a_cluster_of_nats_whose_topics_are_on_one_node(new_engine: NewEngine) -> None:
    nats = new_engine("nats", nodes=3)
    found = finding(examine(f"memory:// log={nats.url}"), "replicas")
    assert (found.level, "one server of the cluster" in found.says) == (Level.WARNING, True)
    assert finding(examine(f"memory:// log={nats.url}?replicas=3"), "replicas").level is Level.OK


@pytest.mark.engine("nats")
def test_nats_without_jetstream(new_engine: NewEngine) -> None:
    nats = new_engine("nats", settings={"jetstream": None})
    diagnosis = examine(f"memory:// log={nats.url}?timeout=2")
    assert diagnosis.worst is Level.PROBLEM
    (problem,) = [
        f for f in diagnosis.places[1].findings if f.level is Level.PROBLEM and "-js" in f.mend
    ]
    assert "JetStream" in problem.says


@pytest.mark.engine("nats")
def test_nats_that_is_nearly_full(new_engine: NewEngine) -> None:
    account = {"jetstream": {"max_store": 3_000_000}, "users": [{"user": "u", "password": "p"}]}
    nats = new_engine("nats", settings={"accounts": {"A": account}})
    url = nats.url.replace("://", "://u:p@")
    with closing(open_stores("memory://", log=url)) as stores:
        stores.log.create("t", 1)
        for _ in range(28):
            batch = encode([(None, bytes(100_000), [], 1)])
            stores.log.append([Append(LogPartition("t", 0), batch)])
        assert finding(examine(f"memory:// log={url}"), "space").level is Level.WARNING
        stores.log.drop("t")
