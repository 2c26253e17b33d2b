"""A table in MariaDB, consumed by groups; checkpoints are in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest

import pxrs
from pxrs import Message, Pxrs
from pxrs.config import parse_url, sql_settings
from pxrs.errors import ConfigError, SourceChanged
from pxrs.sources import Table
from pxrs.sources.tables.mysql import MysqlTable
from pxrs.sources.tables.mysql_writers import (
    MetadataLocks,
    TransactionsAndStatements,
    transactions_in,
)
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("mariadb")

_EVENTS = """CREATE TABLE events (id bigint AUTO_INCREMENT PRIMARY KEY, account varchar(100),
    payload text, created_at datetime(6) DEFAULT (utc_timestamp(6))) CHARACTER SET utf8mb4"""


class Place:
    """A database with a table, and connections of the program that writes to it."""

    def __init__(self, url: str, store: str) -> None:
        self.url = f"{url}?ssl_disabled=true"
        self.store = store
        self._opened: list[Any] = []
        self.run(_EVENTS)

    def table(self, **other: Any) -> Table:
        given: dict[str, Any] = {"key": "account", "value": "payload", "timestamp": "created_at"}
        return Table(**{"name": "events", **given, "url": self.url, **other})

    def connect(self, user: str | None = None) -> Any:
        parts = urlsplit(self.url)
        db = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=user or parts.username,
            database=parts.path[1:],
            ssl_disabled=True,
        )
        self._opened.append(db)
        return db

    def run(self, *statements: str) -> list[Any]:
        db = self.connect()
        found = [run(db, statement) for statement in statements]
        db.commit()
        db.close()
        return found

    def insert(self, *payloads: str) -> None:
        self.run(
            *(f"INSERT INTO events (account, payload) VALUES ('{p}', '{p}')" for p in payloads)
        )

    def open(self, table: Table | None = None) -> MysqlTable:
        made = table or self.table()
        return MysqlTable(sql_settings(parse_url(made.url or "")), made.columns)

    def close(self) -> None:
        for db in self._opened:
            if db.open:
                db.close()


def run(db: Any, statement: str) -> list[Any]:
    with db.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


@pytest.fixture
def place(mariadb_url: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(mariadb_url, f"sqlite:///{tmp_path}/checkpoints.db")
    yield place
    place.close()


@contextmanager
def attached(place: Place, table: Table | None = None) -> Iterator[Pxrs]:
    with pxrs.connect(place.store) as px:
        px.attach("events", table or place.table(), partitions=8)
        yield px


def poll(consumer: pxrs.Consumer, count: int) -> list[Message]:
    """So many messages, or as many as come in ten seconds."""
    found: list[Message] = []
    while len(found) < count:
        more = consumer.poll(max_records=count - len(found), timeout=10)
        if not more:
            break
        found += more
    return found


def offsets(messages: list[Message]) -> set[int]:
    return {message.offset for message in messages}


def test_a_group_consumes_rows_and_goes_on(place: Place) -> None:
    place.insert(*(f"payload-{number}" for number in range(300)))
    with attached(place) as px:
        with px.consumer("events", group="billing") as consumer:
            found = poll(consumer, 300)
            assert offsets(found) == set(range(1, 301))
            assert all(message.key == message.value for message in found)
            now = time.time() * 1000
            assert all(abs(now - message.timestamp) < 60_000 for message in found)
            consumer.commit()
        with px.consumer("events", group="billing") as consumer:
            place.insert("later")
            assert [message.value for message in poll(consumer, 1)] == [b"later"]


def test_keys_are_text_in_any_character_set(place: Place) -> None:
    place.run(
        "ALTER TABLE events MODIFY account varchar(100) CHARACTER SET latin1",
        "INSERT INTO events (account, payload) VALUES ('café', 'x'), (NULL, 'y')",
    )
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        found = {message.offset: message for message in poll(consumer, 2)}
    assert found[1].key == "café".encode()
    assert (found[2].key, found[2].partition) == (None, 0)


def test_going_to_a_time(place: Place) -> None:
    place.run(
        "INSERT INTO events (payload, created_at) VALUES ('a', '2026-01-01 00:00:00'), "
        "('b', '2026-01-02 00:00:00.001'), ('c', '2026-01-03')"
    )
    table = place.open()
    midnight = 1767312000000
    assert [table.first_at(midnight + more) for more in (0, 1, 2, 86_400_001)] == [2, 2, 3, None]
    assert [row[1] for row in table.select(1, 3, 3)][1] == midnight + 1
    table.close()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_lower_id_that_commits_later_is_not_skipped(place: Place, ends: str) -> None:
    slow = place.connect()
    run(slow, "INSERT INTO events (account, payload) VALUES ('slow', 'slow')")
    place.insert("first", "second")
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert consumer.poll(timeout=0.5) == []
        assert px.sources.describe("events").final is None
        getattr(slow, ends)()
        wanted = {1, 2, 3} if ends == "commit" else {2, 3}
        assert offsets(poll(consumer, len(wanted))) == wanted


def until(happened: Any) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_readers_are_not_waited_for(place: Place) -> None:
    """A report that has been open for hours has no id."""
    report = place.connect()
    run(report, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    run(report, "SELECT * FROM events")
    gone = place.connect()
    run(gone, "INSERT INTO events (payload) VALUES ('rolled back')")
    place.insert("second")
    gone.rollback()
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert offsets(poll(consumer, 1)) == {2}
    report.rollback()


def test_writers_are_seen_though_others_look_all_the_time(place: Place) -> None:
    """Whoever reads INNODB_TRX more often than every 100 ms keeps it as it is: it must not do."""
    table = place.open()
    stop = threading.Event()
    hammered = threading.Event()

    def hammer() -> None:
        db = place.connect()
        while not stop.is_set():
            run(db, "SELECT count(*) FROM information_schema.INNODB_TRX")
            hammered.set()
            stop.wait(0.01)

    thread = threading.Thread(target=hammer)
    thread.start()
    assert hammered.wait(10)
    try:
        for number in range(20):
            slow = place.connect()
            run(slow, "INSERT INTO events (payload) VALUES ('x')")
            ((mine,),) = run(slow, "SELECT CONNECTION_ID()")
            top, writers, *_ = table.look()
            assert top >= number + 1
            status = place.run("SHOW ENGINE INNODB STATUS")[0][0][2]
            ours = [each for each, at in transactions_in(status).items() if at == mine]
            assert f"transaction {ours[0]}" in (writers or ())
            slow.rollback()
            assert f"transaction {ours[0]}" not in (table.look().writers or ())
            slow.close()
    finally:
        stop.set()
        thread.join()
        table.close()


def test_a_statement_without_a_transaction_is_waited_for(place: Place) -> None:
    """An insert has its id before InnoDB begins a transaction: the statement itself counts."""
    table = place.open()
    db = place.connect()
    ((mine,),) = run(db, "SELECT CONNECTION_ID()")

    def sleep() -> None:
        with suppress(pymysql.Error):
            run(db, "SELECT SLEEP(30)")

    thread = threading.Thread(target=sleep)
    thread.start()

    def waited_for() -> set[str]:
        found = table.look().writers or frozenset()
        return {each for each in found if each.endswith(f"@{mine}")}

    until(waited_for)
    place.run(f"KILL QUERY {mine}")
    thread.join()
    # It has its answer a moment before the server has done with it.
    until(lambda: not waited_for())
    table.close()


def no_rows(*_: Any) -> list[Any]:
    return []


def test_a_statement_goes_on_as_the_transaction_that_it_begins() -> None:
    seen = TransactionsAndStatements(no_rows).seen
    assert seen([(7, 100, "Query")], {}) == {"statement 100@7"}
    # It has begun one, and is between two statements.
    assert seen([], {55: 7}) == {"transaction 55", "statement 100@7"}
    assert seen([(7, 101, "Query")], {55: 7}) == {"transaction 55", "statement 100@7"}
    # The connection's next transaction is another.
    assert seen([(7, 102, "Query")], {56: 7}) == {"transaction 56"}
    assert seen([], {}) == set()


def test_a_statement_that_ends_without_a_transaction_is_gone() -> None:
    seen = TransactionsAndStatements(no_rows).seen
    assert seen([(7, 100, "Query"), (8, 90, "Query")], {3: 8}) == {
        "transaction 3",
        "statement 100@7",
    }
    assert seen([(7, 101, "Query")], {3: 8}) == {"transaction 3", "statement 101@7"}
    assert seen([], {}) == set()
    # A transaction that was prepared by a connection which is gone.
    assert seen([], {4: None}) == {"transaction 4"}


def test_a_statement_may_go_on_as_a_transaction_that_was_prepared() -> None:
    seen = TransactionsAndStatements(no_rows).seen
    assert seen([(7, 100, "Query"), (8, 101, "Query")], {}) == {
        "statement 100@7",
        "statement 101@8",
    }
    # Both connections are gone, and one of them has left a transaction.
    wanted = {"transaction 55", "statement 100@7", "statement 101@8"}
    assert seen([], {55: None}) == wanted
    # One that is prepared later is another.
    assert seen([], {55: None, 56: None}) == {*wanted, "transaction 56"}
    assert seen([], {56: None}) == {"transaction 56"}


def test_a_transaction_that_is_prepared_is_waited_for(place: Place) -> None:
    slow = place.connect()
    slow.autocommit(True)
    run(slow, "XA START 'payment'")
    run(slow, "INSERT INTO events (payload) VALUES ('slow')")
    place.insert("a")
    table = place.table().open("")
    assert table.read(0, 0, 10).rows == []
    run(slow, "XA END 'payment'")
    run(slow, "XA PREPARE 'payment'")
    assert table.read(0, 0, 10).rows == []
    number = slow.thread_id()
    slow.close()
    ids = "SELECT ID FROM information_schema.PROCESSLIST"
    until(lambda: (number,) not in place.run(ids)[0])
    assert table.read(0, 0, 10).rows == []
    other = place.connect()
    other.autocommit(True)
    run(other, "XA COMMIT 'payment'")
    # Others write to the server, too, and are waited for.
    until(lambda: [row[0] for row in table.read(0, 0, 10).rows] == [1, 2])
    table.close()


STATUS = """
TRANSACTIONS
LIST OF TRANSACTIONS FOR EACH SESSION:
---TRANSACTION (0x7fb48f7dc180), ACTIVE 1 sec
MariaDB thread id 6, OS thread handle 140413460813504, query id 13 127.0.0.1 root
---TRANSACTION 19, ACTIVE 1 sec inserting
mysql tables in use 1, locked 1
MariaDB thread id 5, OS thread handle 140413461120704, query id 11 127.0.0.1 root
SELECT '
---TRANSACTION 99, ACTIVE 1 sec'
---TRANSACTION 20, ACTIVE (PREPARED) 5 sec recovered trx
---TRANSACTION 21, not started
---TRANSACTION (0x7fb48f7dab80), not started
MariaDB thread id 9, OS thread handle 140413461120704, query id 11 127.0.0.1 root
--------
"""


def test_transactions_in_the_status() -> None:
    assert transactions_in(STATUS) == {19: 5, 99: None, 20: None}


@pytest.mark.parametrize("settle", [None, 3600.0])
def test_writers_that_are_hidden_for_a_moment_are_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, settle: float | None
) -> None:
    """The server lists as many transactions as fit into 1 MB."""
    slow = place.connect()
    run(slow, "INSERT INTO events (payload) VALUES ('slow')")
    place.insert("a")
    source = place.table(settle=settle).open("")
    assert source.read(0, 0, 10).rows == []
    database = source.database
    assert isinstance(database, MysqlTable)
    told = database._rows

    def truncated(statement: str, *values: Any) -> list[Any]:
        if "INNODB STATUS" in statement:
            return [("InnoDB", "", f"... truncated...\n{STATUS}")]
        return told(statement, *values)

    with monkeypatch.context() as patch:
        patch.setattr(database._writers, "_rows", truncated)
        place.insert("b")
        assert source.read(0, 0, 10).rows == []
    assert source.read(0, 0, 10).rows == []
    slow.commit()
    # Others write to the server, too, and are waited for.
    until(lambda: [row[0] for row in source.read(0, 0, 10).rows] == [1, 2, 3])
    source.close()


def test_a_right_that_is_gone_ends_no_wait(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = place.connect()
    run(slow, "INSERT INTO events (payload) VALUES ('slow')")
    place.insert("a")
    source = place.table(settle=3600).open("")
    assert source.read(0, 0, 10).rows == []
    assert isinstance(source.database, MysqlTable)
    monkeypatch.setattr(source.database._writers, "look", lambda: None)
    assert source.read(0, 0, 10).rows == []
    slow.rollback()
    # Nobody says so.
    assert source.read(0, 0, 10).rows == []
    source.close()


def test_without_the_right_to_see_others_a_time_is_needed(place: Place) -> None:
    name = urlsplit(place.url).path[1:]
    place.run(
        f"CREATE USER {name}@'%'",
        f"GRANT SELECT, INSERT ON {name}.* TO {name}@'%'",
        "INSERT INTO events (id, payload) VALUES (5, 'five')",
    )
    try:
        parts = urlsplit(place.url)
        url = f"mysql://{name}@{parts.hostname}:{parts.port}/{name}?ssl_disabled=true"
        with pxrs.connect(place.store) as px:
            with pytest.raises(ConfigError, match=r"GRANT PROCESS.*settle="):
                px.attach("events", place.table(url=url), partitions=8)
            px.attach("events", place.table(url=url, settle=0.3), partitions=8)
            with px.consumer("events", group="billing") as consumer:
                assert offsets(poll(consumer, 1)) == {5}
    finally:
        place.run(f"DROP USER {name}@'%'")


def test_a_right_that_is_taken_away_stops_the_reading(place: Place) -> None:
    name = urlsplit(place.url).path[1:]
    place.run(
        f"CREATE USER {name}@'%'",
        f"GRANT SELECT ON {name}.* TO {name}@'%'",
        f"GRANT PROCESS ON *.* TO {name}@'%'",
    )
    try:
        parts = urlsplit(place.url)
        url = f"mysql://{name}@{parts.hostname}:{parts.port}/{name}?ssl_disabled=true"
        source = place.table(url=url).open("")
        source.check()
        ((connection,),) = place.run(
            f"SELECT ID FROM information_schema.PROCESSLIST WHERE USER = '{name}'"
        )[0]
        # A connection keeps the rights it was made with.
        place.run(f"REVOKE PROCESS ON *.* FROM {name}@'%'", f"KILL {connection}", "SELECT 1")
        place.insert("a")
        with pytest.raises((ConfigError, pxrs.StoreUnavailable)):
            source.read(0, 0, 10)
        with pytest.raises(ConfigError, match="GRANT PROCESS"):
            source.read(0, 0, 10)
        source.close()
    finally:
        place.run(f"DROP USER {name}@'%'")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("ALTER TABLE events ENGINE = Aria", "InnoDB"),
        ("ALTER TABLE events MODIFY id varchar(10)", "integers"),
        ("ALTER TABLE events MODIFY id bigint, DROP PRIMARY KEY, ADD KEY (id)", "unique"),
        ("ALTER TABLE events MODIFY id bigint", "settle="),
        ("ALTER TABLE events DROP COLUMN payload", "no column 'payload'"),
        ("DROP TABLE events", "no table or view"),
    ],
)
def test_tables_that_can_not_be_read_in_parallel(place: Place, change: str, why: str) -> None:
    place.run(change)
    with pxrs.connect(place.store) as px:
        with pytest.raises(ConfigError, match=why):
            px.attach("events", place.table(), partitions=8)
        assert px.sources.list() == []


def test_a_table_that_was_emptied_goes_on_and_a_truncated_one_is_told(place: Place) -> None:
    place.insert(*map(str, range(10)))
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 10)) == 10
        consumer.commit()
        place.run("DELETE FROM events")
        assert consumer.poll(timeout=0.2) == []
        place.insert("new")
        assert offsets(poll(consumer, 1)) == {11}
        place.run("TRUNCATE TABLE events")
        place.insert("lost?")
        with pytest.raises(SourceChanged):
            consumer.poll(timeout=10)


def test_a_view_is_consumed(place: Place) -> None:
    place.run("CREATE VIEW paid AS SELECT * FROM events WHERE payload <> 'no'")
    place.insert("yes", "no", "yes")
    table = place.table(name="paid")
    with attached(place, table) as px, px.consumer("events", group="billing") as consumer:
        assert offsets(poll(consumer, 2)) == {1, 3}


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_view_waits_for_those_who_write_to_its_table(place: Place, ends: str) -> None:
    place.run("CREATE VIEW paid AS SELECT * FROM events")
    slow = place.connect()
    run(slow, "INSERT INTO events (payload) VALUES ('slow')")
    place.insert("a", "b")
    source = place.table(name="paid").open("")
    assert source.read(0, 0, 10).rows == []
    getattr(slow, ends)()
    wanted = [1, 2, 3] if ends == "commit" else [2, 3]
    # Others write to the server, too, and are waited for.
    until(lambda: [row[0] for row in source.read(0, 0, 10).rows] == wanted)
    source.close()


@pytest.mark.long
def test_rows_that_many_transactions_write_are_all_delivered_once(place: Place) -> None:
    """Eight writers commit and roll back out of order while two members read."""
    committed: list[int] = []

    def write(number: int) -> None:
        db = place.connect()
        for turn in range(30):
            ids = []
            for _ in range(2):
                with db.cursor() as cursor:
                    cursor.execute("INSERT INTO events (account) VALUES (%s)", [f"k{turn}"])
                    ids.append(cursor.lastrowid)
            if (turn + number) % 4:
                db.commit()
                committed.extend(ids)
            else:
                db.rollback()

    writers = [threading.Thread(target=write, args=[number]) for number in range(8)]
    with (
        attached(place) as px,
        pxrs.connect(place.store) as other,
        px.consumer("events", group="billing") as one,
        other.consumer("events", group="billing") as two,
    ):
        while len(one.assignment) + len(two.assignment) < 8 or not two.assignment:
            assert one.poll(timeout=0.1) + two.poll(timeout=0.1) == []
        for writer in writers:
            writer.start()
        found: list[int] = []
        more: list[Message] = []
        while more or any(writer.is_alive() for writer in writers) or len(found) < len(committed):
            more = one.poll(timeout=0.2) + two.poll(timeout=0.2)
            found += [message.offset for message in more]
    assert set(found) == set(committed)
    assert len(found) == len(committed)


@pytest.fixture
def own_place(new_engine: NewEngine, tmp_path: Path) -> Iterator[Place]:
    """A server that keeps metadata locks, as MySQL does, and in which inserts reserve ids."""
    engine = new_engine(
        "mariadb",
        settings={
            "performance-schema": "ON",
            "performance-schema-instrument": "%=ON",
            "performance-schema-consumer-events-statements-current": "ON",
            "innodb-autoinc-lock-mode": "2",
        },
    )
    parts = urlsplit(engine.url)
    with pymysql.connect(
        host=parts.hostname, port=parts.port or 0, user=parts.username, ssl_disabled=True
    ) as db:
        run(db, "CREATE DATABASE app")
    place = Place(f"{engine.url.rpartition('/')[0]}/app", f"sqlite:///{tmp_path}/checkpoints.db")
    yield place
    place.close()


@pytest.mark.long
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_ids_that_a_statement_has_reserved_are_waited_for(own_place: Place, ends: str) -> None:
    """An `INSERT … SELECT` takes ids ahead of its rows; others insert above them meanwhile."""
    place = own_place
    place.run(
        "CREATE TABLE held (n int PRIMARY KEY)", "INSERT INTO held VALUES (1), (2), (3), (4), (5)"
    )
    blocker, slow = place.connect(), place.connect()
    run(blocker, "SELECT n FROM held WHERE n = 3 FOR UPDATE")

    def copy() -> None:
        run(slow, "INSERT INTO events (payload) SELECT n FROM held ORDER BY n FOR UPDATE")
        getattr(slow, ends)()

    thread = threading.Thread(target=copy)
    thread.start()
    # Not INNODB_TRX: who reads that often reads the same for ever.
    until(lambda: "LOCK WAIT" in str(place.run("SHOW ENGINE INNODB STATUS")))
    place.insert("above")
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert consumer.poll(timeout=0.3) == []
        blocker.rollback()
        thread.join()
        wanted = {b"1", b"2", b"3", b"4", b"5", b"above"} if ends == "commit" else {b"above"}
        assert {message.value for message in poll(consumer, len(wanted))} == wanted


@pytest.mark.long
def test_metadata_locks_tell_who_writes_to_the_table(own_place: Place) -> None:
    """MySQL's way, on a MariaDB that keeps them."""
    place = own_place
    place.run("CREATE TABLE another (id int PRIMARY KEY)")
    table = place.open()
    locks = MetadataLocks(table._rows, table._table)
    slow, other = place.connect(), place.connect()
    assert locks.look() == frozenset[str]()
    run(slow, "INSERT INTO events (payload) VALUES ('x')")
    first = locks.look()
    assert first is not None
    assert len(first) == 1
    # Readers, and writers of other tables, are others.
    run(other, "INSERT INTO another VALUES (1)")
    run(other, "SELECT * FROM events")
    assert locks.look() == first
    slow.commit()
    assert locks.look() == frozenset[str]()
    run(slow, "INSERT INTO events (payload) VALUES ('y')")
    again = locks.look()
    assert again
    assert not again & first
    place.run("UPDATE performance_schema.setup_instruments SET ENABLED = 'NO'")
    assert locks.look() is None
    slow.rollback()
    table.close()
