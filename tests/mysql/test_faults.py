"""MariaDB goes away and comes back; connections are cut; processes die."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy

import pxrs
from pxrs.config import MysqlTls, parse_url, sql_settings
from pxrs.errors import Closed, ConfigError, OutcomeUnknown, SessionLost, StoreUnavailable
from pxrs.stores.mysql.coord import SqlCoord
from pxrs.testing.conformance.tools import committed, put, value_of
from pxrs.types import Check, Committed, Put
from support.child import PATIENCE, Child
from support.engine_fixtures import NewEngine
from support.inside import say, wait_for_parent
from support.proxy import Proxy

pytestmark = pytest.mark.engine("mariadb")


def opened(url: str) -> SqlCoord:
    return SqlCoord(sql_settings(parse_url(url)))


def through(proxy: Proxy, url: str, options: str = "") -> SqlCoord:
    """The same database by way of the proxy."""
    return opened(f"mysql://root@{proxy.address}/{url.rpartition('/')[2]}{options}")


def port_of(url: str) -> int:
    return int(url.rpartition("/")[0].rpartition(":")[2])


def test_a_restart_loses_nothing(new_engine: NewEngine) -> None:
    engine = new_engine("mariadb")
    coord = opened(engine.url)
    version = put(coord, "k", b"1")
    watch = coord.watch("k")
    engine.kill()
    with pytest.raises(StoreUnavailable):
        coord.get("k")
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        coord.commit((), (Put("k", b"2"),))
    engine.start()
    outcome = coord.commit((Check("k", version),), (Put("k", b"3"),))
    assert isinstance(outcome, Committed)
    assert value_of(coord, "k") == b"3"
    assert watch.wait(PATIENCE)
    coord.close()


def test_a_commit_without_an_answer_is_unknown(mariadb_url: str) -> None:
    """The connection breaks after the commit was sent: neither success nor failure is claimed."""
    with Proxy(port_of(mariadb_url)) as proxy:
        direct, cut_off = opened(mariadb_url), through(proxy, mariadb_url)
        put(cut_off, "k", b"1")
        watch = direct.watch("k")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(_until_unknown, cut_off)
            writing.add_done_callback(lambda _: watch.wake())
            while not writing.done():
                # Between two commits nothing is lost with the connection: break it again.
                assert watch.wait(PATIENCE)
                proxy.hold_answers()
                proxy.reset()
                proxy.heal()
            told = writing.result(PATIENCE)
        record = direct.get("k")
        assert record is not None
        # What was told is there; of the one without an answer either may be true.
        assert int(record.value) in (told, told + 1)
        watch.close()
        direct.close()
        cut_off.close()


def _until_unknown(coord: SqlCoord) -> int:
    """Write rising numbers until one has no answer; the last that had one."""
    number = 1
    while True:
        try:
            put(coord, "k", b"%d" % (number + 1))
        except (OutcomeUnknown, StoreUnavailable):
            return number
        number += 1


def test_a_silent_network_is_given_up(mariadb_url: str) -> None:
    with Proxy(port_of(mariadb_url)) as proxy:
        coord = through(proxy, mariadb_url, "?read_timeout=3&connect_timeout=3")
        put(coord, "k", b"1")
        proxy.cut()
        with pytest.raises(StoreUnavailable):
            coord.get("k")
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            put(coord, "k", b"2")
        proxy.heal()
        assert value_of(coord, "k") in (b"1", b"2")
        coord.close()


def hold(url: str) -> None:
    """Hold a session until killed."""
    coord = opened(url)
    session = coord.session(3.0)
    put(coord, "k/mine", b"1", session.id)
    say(session.id)
    wait_for_parent()


def test_a_killed_process_is_gone_after_its_ttl(mariadb_url: str) -> None:
    coord = opened(mariadb_url)
    child = Child(hold, mariadb_url)
    child.read()
    watch = coord.watch("k/")
    child.kill()
    while coord.get("k/mine") is not None:
        assert watch.wait(PATIENCE)
    watch.close()
    coord.close()


def stop_inside(url: str) -> None:
    """Stop inside a transaction that holds a record's row."""
    coord = opened(url)
    with coord.database._writers.lend() as driver, driver.cursor() as cursor:
        cursor.execute("SELECT * FROM pxrs_coord WHERE name = 'k' FOR UPDATE")
        say("holding")
        wait_for_parent()


def test_a_frozen_transaction_does_not_hold_a_row_for_long(mariadb_url: str) -> None:
    coord = opened(mariadb_url)
    put(coord, "k", b"1")
    child = Child(stop_inside, mariadb_url)
    assert child.read() == "holding"
    committed(coord.commit((), (Put("k", b"2"),)))
    child.kill()
    coord.close()


def test_many_write_the_same_keys_in_any_order(mariadb_url: str) -> None:
    """Commits over the same records, named in different orders, neither deadlock nor get lost."""
    coords = [opened(mariadb_url) for _ in range(3)]
    keys = [f"k/{number}" for number in range(6)]
    put(coords[0], "count", b"0")

    def work(coord: SqlCoord, order: list[str]) -> None:
        done = 0
        while done < 15:
            current = coord.get("count")
            assert current is not None
            raised = Put("count", b"%d" % (int(current.value) + 1))
            writes = [raised, *(Put(key, b"x") for key in order)]
            outcome = coord.commit([Check("count", current.version)], writes)
            done += isinstance(outcome, Committed)

    with ThreadPoolExecutor(3) as pool:
        orders = [keys, keys[::-1], keys[3:] + keys[:3]]
        for future in [pool.submit(work, *pair) for pair in zip(coords, orders, strict=True)]:
            future.result(2 * PATIENCE)
    assert value_of(coords[0], "count") == b"45"
    for coord in coords:
        coord.close()


def test_a_session_that_was_seen_expired_is_not_renewed(mariadb_url: str) -> None:
    here, there = opened(mariadb_url), opened(mariadb_url)
    session = here.session(0.3)
    put(here, "k", b"1", session.id)
    watch = there.watch("k")
    while there.get("k") is not None:
        watch.wait(PATIENCE)
    with pytest.raises(SessionLost):
        session.renew()
    for coord in (here, there):
        coord.close()


def test_a_forked_child_can_not_use_it(mariadb_url: str) -> None:
    coord = opened(mariadb_url)
    put(coord, "k", b"1")
    child = os.fork()
    if child == 0:
        try:
            coord.get("k")
        except Closed:
            coord.close()
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert value_of(coord, "k") == b"1"
    coord.close()


def test_urls() -> None:
    """Options are the driver's own, as Python has them; TLS files make it check the server."""
    url = "mariadb://ann:s%40cret@[::1]:3307/shop?read_timeout=3&ssl_disabled=false&ssl_ca=/ca.pem"
    settings = sql_settings(parse_url(url))
    assert settings.shown == "mariadb://[::1]:3307/shop"
    assert settings.options == {
        "user": "ann",
        "password": b"s@cret",
        "host": "::1",
        "port": 3307,
        "database": "shop",
        "connect_timeout": 5,
        "read_timeout": 3,
        "write_timeout": 15,
        "ssl_disabled": False,
    }
    assert settings.tls == MysqlTls(ca="/ca.pem", checks_name=True, verifies=True)
    assert sql_settings(parse_url("oracle://ann@db/XE")).options == {
        "user": "ann",
        "host": "db",
        "sid": "XE",
    }


def test_bad_urls() -> None:
    with pytest.raises(ConfigError, match="must be pymysql, got mysqldb"):
        pxrs.connect("mysql+mysqldb://root@127.0.0.1/x")
    with pytest.raises(ConfigError, match="nonsense"):
        pxrs.connect("mysql://root@127.0.0.1:1/x?nonsense=1")
    with pytest.raises(ConfigError, match="oracledb is not installed"):
        pxrs.connect("oracle://ann@127.0.0.1:1/XE")
    with pytest.raises(ConfigError, match="names no database"):
        pxrs.connect("memory://", coord="mysql://root@127.0.0.1")
    with pytest.raises(StoreUnavailable, match=r"mysql://127\.0\.0\.1:1/x") as caught:
        pxrs.connect("memory://", coord="mysql://ann:s3cret@127.0.0.1:1/x")
    assert "s3cret" not in str(caught.value)


def test_groups_in_mariadb_with_messages_in_jetstream(mariadb_url: str, nats_url: str) -> None:
    log = f"{nats_url}/t-{secrets.token_hex(6)}"
    with (
        pxrs.connect(mariadb_url, log=log) as here,
        pxrs.connect(mariadb_url, log=log) as there,
    ):
        here.topics.create("orders", partitions=4)
        with here.producer() as producer:
            for number in range(40):
                producer.send("orders", str(number), key=f"key-{number % 8}")
        found: list[bytes] = []
        with (
            here.consumer("orders", "g", session_ttl=2.0) as one,
            there.consumer("orders", "g", session_ttl=2.0) as other,
        ):
            while len(found) < 40:
                found += [m.value for m in one.poll(timeout=0.1)]
                found += [m.value for m in other.poll(timeout=0.1)]
            one.commit()
            other.commit()
            rows = _partitions(mariadb_url)
            assert {row[:3] for row in rows} == {("g", "orders", number) for number in range(4)}
            assert {row[3] for row in rows} <= {one.member, other.member}
            assert sum(row[4] for row in rows) == 40
        assert set(found) == {b"%d" % number for number in range(40)}
        here.topics.delete("orders")


def _partitions(url: str) -> list[tuple[Any, ...]]:
    """What the view for operators says."""
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        query = "SELECT `group`, topic, `partition`, owner, checkpoint FROM pxrs_partitions"
        return [tuple(row) for row in connection.exec_driver_sql(query)]
