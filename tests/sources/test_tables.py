"""A table that a program writes to already, consumed by groups."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import pxrs
from pxrs import Message, Pxrs
from pxrs.errors import (
    ConfigError,
    Fenced,
    InvalidRequest,
    OffsetOutOfRange,
    SourceChanged,
    StoreBusy,
    StoreUnavailable,
    TopicExists,
)
from pxrs.sources import Table
from pxrs.sources.table import OpenTable
from pxrs.testing.clock import VirtualClock
from support.engine_fixtures import NewEngine

EVENTS = Table("events", offset="id", key="account", value=["payload"], timestamp="created_at")
_SQLITE = """CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, payload TEXT,
    created_at TEXT DEFAULT CURRENT_TIMESTAMP)"""
_POSTGRES = """CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text,
    created_at timestamptz DEFAULT now())"""

_UUID = "00000000-0000-0000-0000-00000000000a"


class Place:
    """A database with a table, and connections of the program that writes to it."""

    def __init__(self, engine: str, url: str) -> None:
        self.engine = engine
        self.url = url
        self._opened: list[Any] = []

    def connect(self) -> Any:
        if self.engine == "sqlite":
            db: Any = sqlite3.connect(self.url.removeprefix("sqlite:///"), check_same_thread=False)
        else:
            db = psycopg.connect(self.url)
        self._opened.append(db)
        return db

    def run(self, *statements: str) -> None:
        db = self.connect()
        for statement in statements:
            db.execute(statement)
        db.commit()
        db.close()

    def insert(self, rows: list[tuple[str | None, str | None]]) -> None:
        db = self.connect()
        insert(db, rows)
        db.commit()
        db.close()

    def close(self) -> None:
        for db in self._opened:
            db.close()


def insert(db: Any, rows: list[tuple[str | None, str | None]]) -> None:
    mark = "?" if isinstance(db, sqlite3.Connection) else "%s"
    statement = f"INSERT INTO events (account, payload) VALUES ({mark}, {mark})"
    cursor = db.cursor()
    cursor.executemany(statement, rows)
    cursor.close()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.engine(name)) for name in ("sqlite", "postgres")]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        place = Place("sqlite", f"sqlite:///{tmp_path}/app.db")
        place.run(_SQLITE)
    else:
        place = Place("postgres", request.getfixturevalue("postgres_url"))
        place.run(_POSTGRES)
    yield place
    place.close()


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Place]:
    place = Place("postgres", postgres_url)
    place.run(_POSTGRES)
    yield place
    place.close()


@contextmanager
def attached(place: Place, table: Table = EVENTS, partitions: int = 8) -> Iterator[Pxrs]:
    with pxrs.connect(place.url) as px:
        px.attach("events", table, partitions=partitions)
        yield px


def rows(count: int, keys: int = 7) -> list[tuple[str | None, str | None]]:
    return [(f"account-{number % keys}", f"payload-{number}") for number in range(count)]


def poll(consumer: pxrs.Consumer, count: int) -> list[Message]:
    """So many messages, or as many as come in ten seconds."""
    found: list[Message] = []
    while len(found) < count:
        more = consumer.poll(max_records=count - len(found), timeout=10)
        if not more:
            break
        found += more
    return found


def by_key(messages: list[Message]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for message in messages:
        found.setdefault(message.key, []).append(message.value)
    return found


def test_a_group_consumes_rows_in_order_of_their_keys(place: Place) -> None:
    place.insert(rows(500))
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        messages = poll(consumer, 500)
        assert sorted(message.offset for message in messages) == list(range(1, 501))
        assert {key.decode(): [value.decode() for value in values]
                for key, values in by_key(messages).items()} == {
            f"account-{key}": [f"payload-{number}" for number in range(key, 500, 7)]
            for key in range(7)
        }  # fmt: skip
        assert all(len({m.partition for m in messages if m.key == key}) == 1
                   for key in by_key(messages))  # fmt: skip
        assert all(message.timestamp > 1_600_000_000_000 for message in messages)


def test_what_comes_later_wakes_the_consumer(place: Place) -> None:
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert consumer.poll(timeout=0) == []
        writer = threading.Timer(0.05, place.insert, [rows(3)])
        writer.start()
        assert len(poll(consumer, 3)) == 3
        writer.join()


def test_checkpoints_pass_gaps_and_a_new_member_goes_on(place: Place) -> None:
    """Also those of partitions that have no rows: nobody has to read the table from its start."""
    place.insert(rows(100, keys=1))
    place.run("DELETE FROM events WHERE id > 40 AND id < 60")
    with attached(place) as px:
        with px.consumer("events", group="billing") as consumer:
            assert len(poll(consumer, 81)) == 81
            consumer.commit()
        found = px.groups.describe("billing").partitions
        assert {part.checkpoint for part in found} == {101}
        assert {part.lag for part in found} == {0}
        place.insert([("account-0", "new")])
        with px.consumer("events", group="billing") as consumer:
            assert [m.offset for m in poll(consumer, 1)] == [101]


def test_two_members_share_the_partitions_and_lose_nothing(place: Place) -> None:
    place.insert(rows(2000, keys=50))
    with attached(place) as px, pxrs.connect(place.url) as other:
        found: list[Message] = []
        with px.consumer("events", group="billing", auto_commit_interval=0.05) as one:
            found += poll(one, 500)
            with other.consumer("events", group="billing") as two:
                while len({message.offset for message in found}) < 2000:
                    found += one.poll(timeout=0.2) + two.poll(timeout=0.2)
                assert len(one.assignment) + len(two.assignment) == 8
        # Handed out twice only where a partition moved before it was committed.
        assert {message.offset for message in found} == set(range(1, 2001))


def test_a_transaction_has_the_checkpoint_and_the_callers_row(place: Place) -> None:
    place.run("CREATE TABLE ledger (id bigint)")
    place.insert(rows(20))
    statement = f"INSERT INTO ledger VALUES ({'?' if place.engine == 'sqlite' else '%s'})"

    def enter(consumer: pxrs.Consumer, fails: bool) -> None:
        batch = consumer.poll(max_records=5, timeout=5)
        with consumer.transaction() as tx:
            for message in batch:
                tx.execute(statement, (message.offset,))
            if fails:
                raise ZeroDivisionError

    with attached(place) as px:
        with px.consumer("events", group="billing", auto_commit=False) as consumer:
            enter(consumer, fails=False)
            with pytest.raises(ZeroDivisionError):
                enter(consumer, fails=True)
        with px.consumer("events", group="billing", auto_commit=False) as consumer:
            while len(ledger(place)) < 20:
                enter(consumer, fails=False)
    assert ledger(place) == list(range(1, 21))


def ledger(place: Place) -> list[int]:
    db = place.connect()
    return [row[0] for row in db.execute("SELECT id FROM ledger ORDER BY id").fetchall()]


def test_a_run_by_key_finishes_rows_in_any_order(place: Place) -> None:
    place.insert(rows(399, keys=40))
    place.run("DELETE FROM events WHERE id % 5 = 0")
    done: list[int] = []
    everything = threading.Event()

    def handle(message: Message) -> None:
        done.append(message.offset)
        if len(done) == 320:
            everything.set()

    with attached(place, partitions=2) as px:
        with px.run(handle, topic="events", group="billing", workers=4, parallel="key"):
            assert everything.wait(30)
        assert sorted(done) == [number for number in range(1, 400) if number % 5]
        assert {part.checkpoint for part in px.groups.describe("billing").partitions} == {400}


def test_going_to_a_time(place: Place) -> None:
    now = "datetime('now', {})" if place.engine == "sqlite" else "now() + interval {}"
    for age in ("'-3 hours'", "'-2 hours'", "'-1 hours'"):
        place.run(f"INSERT INTO events (account, created_at) VALUES ('a', {now.format(age)})")
    with attached(place, partitions=1) as px:
        with px.consumer("events", group="billing") as consumer:
            [first, second, third] = poll(consumer, 3)
        assert second.timestamp - first.timestamp == pytest.approx(3_600_000, abs=2000)
        assert px.reader("events").offset_at(0, second.timestamp) == 2
        assert px.reader("events").offset_at(0, third.timestamp + 10_000) is None
        px.groups.reset("billing", "events", timestamp_ms=third.timestamp)
        with px.consumer("events", group="billing") as consumer:
            assert [message.offset for message in poll(consumer, 1)] == [3]


def test_several_columns_are_an_object(place: Place) -> None:
    place.insert([("a", "b"), ("c", None)])
    table = Table("events", key="account", value=["id", "payload"])
    with (
        attached(place, table, partitions=1) as px,
        px.consumer("events", group="billing", serde=pxrs.JSON()) as consumer,
    ):
        assert [message.value for message in poll(consumer, 2)] == [
            {"id": 1, "payload": "b"},
            {"id": 2, "payload": None},
        ]


@pytest.mark.engine("postgres")
@pytest.mark.parametrize(
    ("kind", "written", "delivered"),
    [
        ("text", "'é'", b"\xc3\xa9"),
        ("varchar(5)", "'ab '", b"ab "),
        ("char(5)", "'ab'", b"ab   "),
        ("bytea", "'\\x00ff'", b"\x00\xff"),
        ("integer", "-7", b"-7"),
        ("boolean", "true", b"1"),
        ("json", "'{\"a\":  1}'", b'{"a":  1}'),
        ("jsonb", "'{\"a\":  1}'", b'{"a": 1}'),
        ("numeric", "1.50", b'"1.50"'),
        ("uuid", f"'{_UUID}'", f'"{_UUID}"'.encode()),
        ("text[]", "'{a,b}'", b'["a","b"]'),
        ("text", "NULL", None),
    ],
)
def test_values_of_many_types(
    on_postgres: Place, kind: str, written: str, delivered: bytes | None
) -> None:
    on_postgres.run(
        f"ALTER TABLE events ALTER payload TYPE {kind} USING NULL",
        f"INSERT INTO events (account, payload) VALUES ('a', {written})",
    )
    with (
        attached(on_postgres) as px,
        px.consumer("events", group="billing") as consumer,
    ):
        [message] = poll(consumer, 1)
        assert (message.key, message.value, message.headers) == (b"a", delivered, ())


@pytest.mark.engine("postgres")
def test_text_is_utf_8_whatever_the_database_keeps(on_postgres: Place) -> None:
    with psycopg.connect(on_postgres.url, autocommit=True) as db:
        name = db.info.dbname + "_latin"
        db.execute(f"CREATE DATABASE \"{name}\" ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        latin = urlsplit(on_postgres.url)._replace(path=f"/{name}").geturl()
        try:
            with psycopg.connect(latin, client_encoding="UTF8") as there:
                there.execute(_POSTGRES)
                there.execute("INSERT INTO events (account, payload) VALUES ('é', 'ü')")
            table = Table("events", key="account", value="payload", url=latin)
            with (
                attached(on_postgres, table) as px,
                px.consumer("events", group="billing") as consumer,
            ):
                [message] = poll(consumer, 1)
                assert (message.key, message.value) == ("é".encode(), "ü".encode())
        finally:
            db.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def test_rows_without_a_key_are_in_the_first_partition(place: Place) -> None:
    place.insert([(None, "a"), (None, "b")])
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert [(m.partition, m.key, m.value) for m in poll(consumer, 2)] == [
            (0, None, b"a"),
            (0, None, b"b"),
        ]


def test_large_rows_are_read_in_small_chunks(place: Place) -> None:
    place.insert([("a", "x" * 500_000) for _ in range(40)])
    with (
        attached(place, partitions=2) as px,
        px.consumer("events", group="billing", prefetch_bytes=2**20) as consumer,
    ):
        assert len(poll(consumer, 40)) == 40


def test_the_reader_reads_and_follows(place: Place) -> None:
    place.insert(rows(50, keys=5))
    with attached(place, partitions=2) as px:
        reader = px.reader("events")
        for partition in (0, 1):
            found = reader.read(partition, 0, 100)
            assert reader.read(partition, found[3].offset, 2) == found[3:5]
            assert reader.read(partition, found[3].offset + 1, 1) == found[4:5]
        followed = list(reader.follow(start="earliest", timeout=0.2))
        assert sorted(message.offset for message in followed) == list(range(1, 51))


def test_latest_begins_behind_what_is_there(place: Place) -> None:
    place.insert(rows(10))
    with attached(place) as px, px.consumer("events", group="new", start="latest") as consumer:
        # The start is a checkpoint once it is known.
        while any(part.checkpoint is None for part in px.groups.describe("new").partitions):
            assert consumer.poll(timeout=0.1) == []
        place.insert([("a", "new")])
        assert [message.value for message in poll(consumer, 1)] == [b"new"]


# What may not happen


def test_settings_are_kept_and_others_refused(place: Place) -> None:
    with attached(place) as px, pxrs.connect(place.url) as other:
        assert [topic.name for topic in other.sources.list()] == ["events"]
        other.attach("events", EVENTS, partitions=8)
        with pytest.raises(TopicExists, match="partitions = 8, not 4"):
            other.attach("events", EVENTS, partitions=4)
        with pytest.raises(TopicExists, match="source"):
            other.attach("events", Table("events", key="payload", value="payload"), partitions=8)
        with other.producer() as producer, pytest.raises(InvalidRequest, match="only be read"):
            producer.send("events", b"x").result()
        with pytest.raises(InvalidRequest, match="only be read"), other.transaction() as tx:
            tx.send("events", b"x")
        px.sources.detach("events")
        assert px.sources.list() == []


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (Table("nothing", value="payload"), "no table or view 'nothing'"),
        (Table("events", key="acount", value="payload"), "no column 'acount'; it has account"),
        (Table("events", offset="payload", value="payload"), "column of integers"),
        (Table("odd", offset="number", value="text"), "unique and NOT NULL"),
        (Table("odd", offset="optional", value="text"), "unique and NOT NULL"),
        (Table("gaps", offset="number", value="text"), "must not be NULL"),
    ],
)
def test_tables_that_can_not_be_read_in_parallel(place: Place, table: Table, why: str) -> None:
    place.run(
        "CREATE TABLE odd (number integer NOT NULL, optional integer UNIQUE, text text)",
        "INSERT INTO odd VALUES (1, NULL, 'a')",
        "CREATE VIEW gaps AS SELECT optional AS number, text FROM odd",
    )
    with pxrs.connect(place.url) as px:
        with pytest.raises(ConfigError, match=why):
            px.attach("odd", table, partitions=2)
        assert px.topics.list() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table("events"),
        lambda: Table("", value="payload"),
        lambda: Table("events", value=["payload", 3]),  # type: ignore[list-item]
        lambda: Table("events", value="payload", settle=-1),
        lambda: Table("events", value="payload", key=""),
    ],
)
def test_descriptions_that_make_no_sense(make: Callable[[], Table]) -> None:
    with pytest.raises(InvalidRequest):
        make()


def test_a_table_that_was_emptied_goes_on(place: Place) -> None:
    place.insert(rows(10))
    with attached(place) as px:
        with px.consumer("events", group="billing") as consumer:
            assert len(poll(consumer, 10)) == 10
            consumer.commit()
        place.run("DELETE FROM events")
        with px.consumer("events", group="billing") as consumer:
            assert consumer.poll(timeout=0.2) == []
            place.insert([("a", "new")])
            assert [message.offset for message in poll(consumer, 1)] == [11]


def test_a_table_that_was_made_anew_is_told(place: Place) -> None:
    place.insert(rows(10))
    with attached(place) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 10)) == 10
        consumer.commit()
        place.run("DROP TABLE events", _SQLITE if place.engine == "sqlite" else _POSTGRES)
        place.insert(rows(3))
        with pytest.raises((SourceChanged, ConfigError)):
            consumer.poll(timeout=10)
    with attached(place) as px:
        with (
            px.consumer("events", group="billing") as consumer,
            pytest.raises(OffsetOutOfRange, match="11"),
        ):
            consumer.poll(timeout=10)
        assert {part.checkpoint for part in px.groups.describe("billing").partitions} == {11}


@pytest.mark.engine("postgres")
def test_a_table_that_is_truncated_under_a_group(on_postgres: Place) -> None:
    """Its counter goes on, and so do members; if it begins anew, they are told."""
    on_postgres.insert(rows(10))
    with attached(on_postgres) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 10)) == 10
        on_postgres.run("TRUNCATE events")
        on_postgres.insert(rows(2))
        assert {message.offset for message in poll(consumer, 2)} == {11, 12}
        consumer.commit()
        before = checkpoints(px)
        on_postgres.run("TRUNCATE events RESTART IDENTITY")
        on_postgres.insert(rows(3))
        with pytest.raises(SourceChanged, match="read up to id 12, and its highest id is 3 now"):
            consumer.poll(timeout=10)
        consumer.commit()
        assert checkpoints(px) == before


_REPLACED = """BEGIN; ALTER TABLE events RENAME TO old; ALTER TABLE new RENAME TO events; COMMIT"""


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("how", ["truncated", "another", "another, read by its name"])
def test_a_table_that_is_replaced_and_filled_again_is_told(on_postgres: Place, how: str) -> None:
    """Its highest id is above what was read: only what the name means tells."""
    on_postgres.insert(rows(10))
    with attached(on_postgres) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 10)) == 10
        consumer.commit()
        before = checkpoints(px)
        if how == "truncated":
            on_postgres.run("TRUNCATE events RESTART IDENTITY")
        else:
            on_postgres.run(_POSTGRES.replace("events", "new"))
            if how == "another":
                on_postgres.run(*_REPLACED.split("; "))
            else:
                on_postgres.run("DROP TABLE events", "ALTER TABLE new RENAME TO events")
        on_postgres.insert(rows(20))
        for _ in range(3):
            with pytest.raises(SourceChanged, match="reset the groups"):
                consumer.poll(timeout=10)
            consumer.commit()
            assert checkpoints(px) == before
        # In the process that has read the old rows, and has some of them in its memory.
        px.groups.reset("billing", "events", to=3, force=True)
        found: list[int] = []
        while len(found) < 18:
            with suppress(SourceChanged, Fenced):
                found += [message.offset for message in consumer.poll(timeout=10)]
        assert sorted(found) == list(range(3, 21))
        consumer.commit()
        # Those who write are those who write to this table.
        slow = on_postgres.connect()
        insert(slow, [("slow", "21")])
        on_postgres.insert([("a", "22")])
        assert consumer.poll(timeout=0.3) == []
        slow.commit()
        assert {message.offset for message in poll(consumer, 2)} == {21, 22}


@pytest.mark.engine("postgres")
def test_a_table_that_is_written_anew_is_the_same(on_postgres: Place) -> None:
    on_postgres.insert(rows(3))
    with attached(on_postgres) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 3)) == 3
        for number, change in enumerate(
            (
                "CLUSTER events USING events_pkey",
                "ALTER SEQUENCE events_id_seq CACHE 1 MAXVALUE 1000000",
                "ALTER TABLE events ADD COLUMN day date DEFAULT clock_timestamp()",
                "TRUNCATE events",
                "ALTER TABLE events ALTER payload TYPE varchar(100)",
            )
        ):
            on_postgres.run(change)
            on_postgres.insert(rows(1))
            assert [message.offset for message in poll(consumer, 1)] == [4 + number]


@pytest.mark.engine("sqlite")
def test_a_sqlite_file_that_is_replaced_is_told(tmp_path: Path) -> None:
    """As a restore does: who has the file open reads the old one for ever."""
    place = Place("sqlite", f"sqlite:///{tmp_path}/app.db")
    place.run(_SQLITE)
    place.insert(rows(10))
    other = Place("sqlite", f"sqlite:///{tmp_path}/restored.db")
    other.run(_SQLITE)
    other.insert(rows(15))
    table = Table("events", key="account", value="payload", url=place.url)
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        px.attach("events", table, partitions=8)
        with px.consumer("events", group="billing") as consumer:
            assert len(poll(consumer, 10)) == 10
            consumer.commit()
            (tmp_path / "restored.db").replace(tmp_path / "app.db")
            for _ in range(3):
                with pytest.raises(SourceChanged):
                    consumer.poll(timeout=10)
            assert checkpoints(px) == {11}
            px.groups.reset("billing", "events", to="earliest", force=True)
            found: list[int] = []
            while len(found) < 15:
                with suppress(SourceChanged, Fenced):
                    found += [message.offset for message in consumer.poll(timeout=10)]
            assert sorted(found) == list(range(1, 16))
    place.close()


def test_a_view_has_no_order_of_its_own(place: Place) -> None:
    place.insert(rows(50))
    place.run("CREATE VIEW shuffled AS SELECT * FROM events ORDER BY payload DESC")
    table = Table("shuffled", key="account", value="payload")
    with (
        attached(place, table) as px,
        px.consumer("events", group="billing") as consumer,
    ):
        found = poll(consumer, 50)
        assert sorted(message.offset for message in found) == list(range(1, 51))
        for key in {message.key for message in found}:
            offsets = [message.offset for message in found if message.key == key]
            assert offsets == sorted(offsets)


@pytest.mark.parametrize("name", ["events", "shown"])
def test_negative_ids_are_refused(place: Place, name: str) -> None:
    place.insert(rows(3))
    place.run(
        "INSERT INTO events (id, payload) VALUES (-1, 'never read')",
        "CREATE VIEW shown AS SELECT * FROM events",
        "CREATE VIEW others AS SELECT * FROM events WHERE id >= 0",
    )
    with pxrs.connect(place.url) as px:
        with pytest.raises(ConfigError, match="negative in some rows"):
            px.attach("events", Table(name, key="account", value="payload"), partitions=2)
        px.attach("events", Table("others", key="account", value="payload"), partitions=2)


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("settle", [None, 60.0])
def test_a_materialized_view_is_refused(on_postgres: Place, settle: float | None) -> None:
    on_postgres.run("CREATE MATERIALIZED VIEW kept AS SELECT * FROM events")
    with pxrs.connect(on_postgres.url) as px, pytest.raises(ConfigError, match="REFRESH"):
        px.attach("kept", Table("kept", value="payload", settle=settle), partitions=2)


def test_a_view_with_an_id_twice_is_refused_when_it_is_read(place: Place) -> None:
    place.insert(rows(5))
    place.run("CREATE VIEW twice AS SELECT * FROM events UNION ALL SELECT * FROM events")
    table = Table("twice", key="account", value="payload")
    with (
        attached(place, table) as px,
        px.consumer("events", group="billing") as consumer,
    ):
        with pytest.raises(SourceChanged, match="two rows have the same id"):
            consumer.poll(timeout=10)
        consumer.commit()
        assert checkpoints(px) <= {None, 0}


@pytest.mark.parametrize("number", [1, 63, 64, 65])
def test_a_view_with_an_id_twice_is_refused_wherever_a_read_ends(place: Place, number: int) -> None:
    place.insert(rows(100))
    place.run(
        "CREATE VIEW twice AS SELECT * FROM events "
        f"UNION ALL SELECT * FROM events WHERE id = {number}"
    )
    source = Table("twice", key="account", value="payload").open(place.url)
    offset = 0
    with pytest.raises(SourceChanged, match="two rows have the same id"):
        while offset <= 100:
            offset = source.read(0, offset, 5000).next
    # Neither of them was passed.
    assert offset <= number
    source.close()


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("change", ["INCREMENT BY -1 MINVALUE -100", "CYCLE"])
def test_ids_that_do_not_rise_are_refused(on_postgres: Place, change: str) -> None:
    on_postgres.run(f"ALTER SEQUENCE events_id_seq {change}")
    with pxrs.connect(on_postgres.url) as px:
        with pytest.raises(ConfigError, match="ids must rise"):
            px.attach("events", EVENTS, partitions=2)
        assert px.topics.list() == []


def checkpoints(px: Pxrs) -> set[int | None]:
    """As another process sees them, which has not read the table."""
    with pxrs.connect(px.url) as other:
        return {part.checkpoint for part in other.groups.describe("billing").partitions}


# Ids are given before they commit


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("holds", ["a row", "an id"])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_lower_id_that_commits_later_is_not_skipped(
    on_postgres: Place, holds: str, ends: str
) -> None:
    """Whether it has inserted its row, or has only taken an id from the sequence."""
    slow = on_postgres.connect()
    if holds == "a row":
        insert(slow, [("slow", "slow")])
        number = 1
    else:
        [(number,)] = slow.execute("SELECT nextval('events_id_seq')").fetchall()
    on_postgres.insert([("a", "first"), ("b", "second")])
    with (
        attached(on_postgres) as px,
        px.consumer("events", group="billing", auto_commit_interval=0.01) as consumer,
    ):
        assert consumer.poll(timeout=0.5) == []
        assert px.sources.describe("events").final is None
        if holds == "an id":
            slow.execute("INSERT INTO events (id, account) VALUES (%s, 'slow')", (number,))
        getattr(slow, ends)()
        wanted = {1, 2, 3} if ends == "commit" else {2, 3}
        assert {message.offset for message in poll(consumer, len(wanted))} == wanted


@pytest.mark.long
@pytest.mark.engine("postgres")
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_transaction_that_is_prepared_is_waited_for(
    new_engine: NewEngine, ends: str, restarts: bool
) -> None:
    """It loses its connection, by whose name it was known, and commits from any other."""
    engine = new_engine("postgres", settings={"max_prepared_transactions": "4"})
    with psycopg.connect(engine.url, autocommit=True) as db:
        db.execute(_POSTGRES.encode())
        slow = psycopg.connect(engine.url, autocommit=True)
        slow.execute("BEGIN")
        slow.execute("SAVEPOINT inner_one")
        slow.execute("INSERT INTO events (account) VALUES ('slow')")
        db.execute("INSERT INTO events (account) VALUES ('a')")
        table = EVENTS.open(engine.url)
        assert table.read(0, 0, 10).rows == []
        slow.execute("PREPARE TRANSACTION 'payment'")
        assert table.read(0, 0, 10).rows == []
    slow.close()
    if restarts:
        engine.stop()
        engine.start()
        with suppress(StoreUnavailable):
            table.read(0, 0, 10)
    with psycopg.connect(engine.url, autocommit=True) as db:
        # Others that are prepared later are not waited for in its place.
        db.execute("BEGIN")
        db.execute("INSERT INTO events (account) VALUES ('later')")
        db.execute("PREPARE TRANSACTION 'later'")
        assert table.read(0, 0, 10).rows == []
        db.execute(f"{ends} PREPARED 'payment'".encode())
        wanted = [1, 2] if ends == "COMMIT" else [2]
        assert [row[0] for row in table.read(0, 0, 10).rows] == wanted
        db.execute("ROLLBACK PREPARED 'later'")
    table.close()


@pytest.mark.engine("postgres")
def test_what_follows_without_a_gap_waits_for_nobody(on_postgres: Place) -> None:
    on_postgres.insert(rows(3))
    with attached(on_postgres) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 3)) == 3
        slow = on_postgres.connect()
        slow.execute("UPDATE events SET payload = 'x' WHERE id = 1")
        on_postgres.insert(rows(2))
        assert {message.offset for message in poll(consumer, 2)} == {4, 5}
        insert(slow, [("slow", "6")])
        on_postgres.insert([("a", "7")])
        assert consumer.poll(timeout=0.3) == []
        slow.commit()
        assert [message.offset for message in poll(consumer, 2)] != []


def checkpoints_of(px: Pxrs, group: str) -> set[int | None]:
    return {part.checkpoint for part in px.groups.describe(group).partitions}


@pytest.mark.engine("postgres")
def test_going_to_a_time_or_an_end_passes_no_row_that_may_come(on_postgres: Place) -> None:
    """A transaction keeps id 4 open while 5 is there, of the same time and later."""
    on_postgres.insert(rows(3))
    with attached(on_postgres) as px:
        with px.consumer("events", group="billing") as consumer:
            [*_, last] = sorted(poll(consumer, 3), key=lambda message: message.offset)
            slow = on_postgres.connect()
            insert(slow, [("slow", "4")])
            on_postgres.insert([("a", "5")])
            at = last.timestamp + 1
            reader = px.reader("events")
            assert {reader.offset_at(part, at) for part in range(8)} == {4}
            assert {reader.offset_at(part, at + 3_600_000) for part in range(8)} == {4}
            consumer.seek_to_time(at)
            slow.commit()
            assert {message.offset for message in poll(consumer, 2)} == {4, 5}
            consumer.commit()
        slow = on_postgres.connect()
        insert(slow, [("slow", "6")])
        on_postgres.insert([("a", "7")])
        px.groups.reset("billing", "events", to="latest")
        assert checkpoints_of(px, "billing") == {6}
        px.groups.reset("billing", "events", timestamp_ms=at + 3_600_000)
        assert checkpoints_of(px, "billing") == {6}
        slow.commit()
        with px.consumer("events", group="billing") as consumer:
            assert {message.offset for message in poll(consumer, 2)} == {6, 7}


@pytest.mark.engine("postgres")
def test_a_process_that_knows_no_end_yet_waits_for_it(
    on_postgres: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_postgres.insert(rows(3))
    with attached(on_postgres) as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 3)) == 3
        consumer.commit()
    slow = on_postgres.connect()
    insert(slow, [("slow", "4")])
    on_postgres.insert([("a", "5")])
    with pxrs.connect(on_postgres.url) as other:
        with monkeypatch.context() as patch:
            patch.setattr("pxrs.topics._PATIENCE", 0.0)
            for to in ({"to": "latest"}, {"timestamp_ms": 1}):
                with pytest.raises(StoreBusy, match="try again") as error:
                    other.groups.reset("billing", "events", **to)
                assert error.value.retryable
        # It is an offset that the caller has chosen.
        other.groups.reset("billing", "events", to=2)
        monkeypatch.setattr("pxrs.topics.time.sleep", lambda seconds: slow.commit())
        other.groups.reset("billing", "events", to="latest")
        assert checkpoints_of(other, "billing") == {6}


@pytest.mark.engine("postgres")
def test_ids_that_connections_keep_are_refused(on_postgres: Place) -> None:
    on_postgres.run("ALTER SEQUENCE events_id_seq CACHE 20")
    with pxrs.connect(on_postgres.url) as px, pytest.raises(ConfigError, match="CACHE 1"):
        px.attach("events", EVENTS, partitions=8)


@pytest.mark.engine("postgres")
def test_ids_that_programs_take_in_blocks_need_a_time(on_postgres: Place) -> None:
    on_postgres.run("ALTER SEQUENCE events_id_seq INCREMENT BY 50")
    with pxrs.connect(on_postgres.url) as px:
        with pytest.raises(ConfigError, match=r"INCREMENT BY 50.*settle="):
            px.attach("events", EVENTS, partitions=8)
        px.attach("events", dataclasses.replace(EVENTS, settle=60.0), partitions=8)


@pytest.mark.long
@pytest.mark.engine("postgres")
def test_a_table_that_another_server_fills_needs_a_time(new_engine: NewEngine) -> None:
    engine = new_engine("postgres", settings={"wal_level": "logical"})
    with psycopg.connect(engine.url, autocommit=True) as db:
        db.execute("CREATE DATABASE copy")
        db.execute(_POSTGRES.encode())
        db.execute("CREATE PUBLICATION all_of_it FOR TABLE events")
        db.execute("SELECT pg_create_logical_replication_slot('copy', 'pgoutput')")
    url = f"{engine.url.rpartition('/')[0]}/copy"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(_POSTGRES.encode())
        source = EVENTS.open(url)
        source.check()
        db.execute(
            f"CREATE SUBSCRIPTION copy CONNECTION '{engine.url}' PUBLICATION all_of_it "
            "WITH (create_slot = false, enabled = false, copy_data = false)".encode()
        )
        with pytest.raises(ConfigError, match=r"logical replication.*settle="):
            source.check()
        source.close()
        db.execute("ALTER SUBSCRIPTION copy SET (slot_name = NONE)")
        db.execute("DROP SUBSCRIPTION copy")


@pytest.mark.engine("postgres")
def test_ids_of_unknown_origin_need_a_time(on_postgres: Place) -> None:
    on_postgres.run("CREATE TABLE bare (id bigint PRIMARY KEY, text text)")
    with pxrs.connect(on_postgres.url) as px:
        with pytest.raises(ConfigError, match="settle="):
            px.attach("bare", Table("bare", value="text"), partitions=1)
        px.attach("bare", Table("bare", value="text", settle=0.3), partitions=1)
        on_postgres.run("INSERT INTO bare VALUES (5, 'five')")
        with px.consumer("bare", group="billing") as consumer:
            assert [message.offset for message in poll(consumer, 1)] == [5]


@pytest.mark.engine("postgres")
def test_a_row_that_commits_within_the_time_is_not_skipped(on_postgres: Place) -> None:
    on_postgres.run("CREATE TABLE bare (id bigint PRIMARY KEY, text text)")
    clock = VirtualClock()
    table = Table("bare", value="text", settle=30.0)
    with closing(table.open(on_postgres.url)) as opened:
        source = OpenTable(table, opened.database, clock)
        slow = on_postgres.connect()
        slow.execute("INSERT INTO bare VALUES (5, 'five')")
        on_postgres.run("INSERT INTO bare VALUES (6, 'six')")
        for passes in (0.0, 29.0):
            clock.advance(passes)
            assert source.read(0, 0, 10).rows == []
            assert source.final(0) is None
        slow.commit()
        assert source.read(0, 0, 10).rows == []
        clock.advance(1.0)
        assert [row[0] for row in source.read(0, 0, 10).rows] == [5, 6]
        # That one of them was waited for says nothing about the next.
        on_postgres.run("INSERT INTO bare VALUES (9, 'nine')")
        assert source.read(0, 7, 10).rows == []


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_view_waits_for_those_who_write_to_its_table(on_postgres: Place, ends: str) -> None:
    on_postgres.run("CREATE VIEW shown AS SELECT * FROM events")
    slow = on_postgres.connect()
    insert(slow, [("slow", "slow")])
    on_postgres.insert([("a", "first"), ("b", "second")])
    with closing(Table("shown", value="payload").open(on_postgres.url)) as source:
        assert source.read(0, 0, 10).rows == []
        getattr(slow, ends)()
        wanted = [1, 2, 3] if ends == "commit" else [2, 3]
        assert [row[0] for row in source.read(0, 0, 10).rows] == wanted


@pytest.mark.engine("postgres")
def test_rows_that_many_transactions_write_are_all_delivered_once(on_postgres: Place) -> None:
    """Twelve writers commit and roll back out of order while two members read."""
    committed: list[int] = []

    def write(number: int) -> None:
        db = on_postgres.connect()
        for turn in range(40):
            [(first,)] = db.execute(
                "INSERT INTO events (account, payload) VALUES (%s, '') RETURNING id", [f"k{turn}"]
            ).fetchall()
            [(second,)] = db.execute(
                "INSERT INTO events (account, payload) VALUES (%s, '') RETURNING id", [f"k{turn}"]
            ).fetchall()
            if (turn + number) % 4:
                db.commit()
                committed.extend([first, second])
            else:
                db.rollback()

    writers = [threading.Thread(target=write, args=[number]) for number in range(12)]
    with (
        attached(on_postgres) as px,
        pxrs.connect(on_postgres.url) as other,
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


# Taking over from a single consumer


def test_a_group_begins_behind_what_another_consumer_has_handled(place: Place) -> None:
    place.insert(rows(100))
    with attached(place) as px:
        with px.consumer("events", group="billing", start={"events": 60}) as consumer:
            assert {message.offset for message in poll(consumer, 40)} == set(range(61, 101))
        # Nothing was committed but where to begin, and that some partitions have no rows.
        found = px.groups.describe("billing").partitions
        assert {part.checkpoint for part in found} == {61, 101}
        with px.consumer("events", group="billing", start={"events": 5}) as consumer:
            assert len(poll(consumer, 40)) == 40


def test_a_checkpoint_is_imported_once(place: Place) -> None:
    place.insert(rows(100))
    with attached(place) as px:
        changes = px.groups.import_checkpoint("billing", "events", 60)
        assert [(each.before, each.after) for each in changes] == [(None, 61)] * 8
        with pytest.raises(InvalidRequest, match="checkpoints in 'events' already"):
            px.groups.import_checkpoint("billing", "events", 70)
        with px.consumer("events", group="billing") as consumer:
            assert {message.offset for message in poll(consumer, 40)} == set(range(61, 101))
            with pytest.raises(pxrs.GroupNotEmpty):
                px.groups.import_checkpoint("billing", "events", 70)


@pytest.mark.parametrize("last", [101, 10**12])
def test_a_checkpoint_beyond_the_end_is_refused(place: Place, last: int) -> None:
    place.insert(rows(100))
    with attached(place) as px:
        with pytest.raises(OffsetOutOfRange):
            px.groups.import_checkpoint("billing", "events", last)
        with (
            px.consumer("events", group="other", start={"events": last}) as consumer,
            pytest.raises(OffsetOutOfRange),
        ):
            consumer.poll(timeout=5)
        found = px.groups.describe("other").partitions
        assert all(part.checkpoint is None for part in found)


@pytest.mark.parametrize("start", [{"events": "60"}, {"events": True}, {"": 1}, {"events": -2}])
def test_starts_that_make_no_sense(start: Any) -> None:
    with pxrs.connect("memory://") as px:
        px.topics.create("events", partitions=1)
        with pytest.raises(InvalidRequest):
            px.consumer("events", group="billing", start=start)


# Lag


def test_lag_counts_rows_of_each_partition(place: Place) -> None:
    place.insert(rows(300))
    # Gaps, below and above what is handled.
    place.run("DELETE FROM events WHERE id % 3 = 0")
    with attached(place) as px:
        with px.consumer("events", group="billing", auto_commit=False) as consumer:
            found = poll(consumer, 200)
            for message in found:
                if message.offset <= 100:
                    consumer.commit(message)
        waiting = [message for message in found if message.offset > 100]
        shown = px.groups.describe("billing")
        assert shown.lag == len(waiting)
        assert shown.lag_is_exact
        for part in shown.partitions:
            assert part.lag == sum(m.partition == part.partition for m in waiting)


def test_lag_far_behind_is_estimated_at_bounded_cost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.sources.virtual._COUNTED", 500)
    place.insert(rows(4000, keys=100))
    place.run("DELETE FROM events WHERE id % 2 = 0")
    with attached(place) as px:
        px.groups.import_checkpoint("billing", "events", 0)
        shown = px.groups.describe("billing", lag_seconds=False)
        assert not shown.lag_is_exact
        assert 1600 <= shown.lag <= 2400
        # What is near the end is counted, however far behind the others are.
        px.groups.reset("billing", "events", to=3900, partitions=[3])
        part = px.groups.describe("billing", lag_seconds=False).partitions[3]
        assert part.lag_is_exact
        assert part.lag == len(px.reader("events").read(3, 3900))


def test_offsets_of_partitions_are_not_added_up(place: Place) -> None:
    place.insert(rows(10))
    with attached(place) as px:
        info = px.topics.describe("events")
        assert info.messages == 11
        assert {part.end for part in info.partitions} == {11}
