"""`px.sources.prepare`: the partition of a row is kept by the database, which then filters."""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pxrs
from pxrs import Message, Pxrs
from pxrs.core.routing import md5
from pxrs.errors import ConfigError, DamagedBatch, InvalidRequest, TopicNotFound
from pxrs.sources import Table
from pxrs.sources.tables.postgres_notified import NotifiedWatch
from pxrs.sources.tables.postgres_prepare import partition_of
from support.child import PATIENCE

_CREATE = {
    "postgres": "CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text)",
    "mariadb": """CREATE TABLE events (id bigint AUTO_INCREMENT PRIMARY KEY,
        account varchar(200), payload text) CHARACTER SET utf8mb4""",
}


class Place:
    """A database with a table; checkpoints are there, too, or in a file."""

    def __init__(self, engine: str, url: str, store: str) -> None:
        self.engine = engine
        self.store = store
        self.url = url if engine == "postgres" else f"{url}?ssl_disabled=true"
        self._opened: list[Any] = []
        self.run(_CREATE[engine])

    def connect(self) -> Any:
        parts = urlsplit(self.url)
        db: Any = (
            psycopg.connect(self.url)
            if self.engine == "postgres"
            else pymysql.connect(
                host=parts.hostname,
                port=parts.port or 3306,
                user=parts.username,
                database=parts.path[1:],
                ssl_disabled=True,
            )
        )
        self._opened.append(db)
        return db

    def run(self, *statements: str) -> list[Any]:
        db = self.connect()
        found: list[Any] = []
        with db.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
                found = list(cursor.fetchall()) if cursor.description else []
        db.commit()
        db.close()
        return found

    def insert(self, keys: list[str | None]) -> None:
        db = self.connect()
        with db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO events (account, payload) VALUES (%s, 'x')", [(key,) for key in keys]
            )
        db.commit()
        db.close()

    def table(self, **more: Any) -> Table:
        url = None if self.engine == "postgres" else self.url
        return Table(**{"name": "events", "key": "account", "value": "payload", "url": url} | more)

    def attach(self, partitions: int = 8, **more: Any) -> Pxrs:
        px = pxrs.connect(self.store)
        try:
            px.attach("events", self.table(**more), partitions=partitions)
        except BaseException:
            px.close()
            raise
        return px

    def close(self) -> None:
        for db in self._opened:
            if self.engine == "postgres" or db.open:
                db.close()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.engine(name)) for name in ("postgres", "mariadb")]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    url = request.getfixturevalue(f"{request.param}_url")
    store = url if request.param == "postgres" else f"sqlite:///{tmp_path}/checkpoints.db"
    place = Place(request.param, url, store)
    yield place
    place.close()


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Place]:
    place = Place("postgres", postgres_url, postgres_url)
    yield place
    place.close()


# A look takes a round trip or more.
_LOOKS = 5000


def poll(consumer: pxrs.Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        more = consumer.poll(max_records=count - len(found), timeout=10)
        if not more:
            break
        found += more
    return found


def drained(px: Pxrs, group: str, count: int) -> dict[int, int]:
    """The partition of each row, as a group gets them."""
    with px.consumer("events", group=group) as consumer:
        found = poll(consumer, count)
        assert len(found) == count
        return {message.offset: message.partition for message in found}


def rows_read(px: Pxrs) -> int:
    topic = px.topics.find("events")
    return int(px._stores.log.virtual(topic.id).source.rows_read)  # type: ignore[attr-defined]


KEYS: list[str | None] = [f"account-{number % 50}" for number in range(400)]


def test_nothing_is_changed_unless_it_is_applied(place: Place) -> None:
    place.insert(KEYS)
    with place.attach() as px:
        statements = px.sources.prepare("events")
        assert any("ADD COLUMN" in each for each in statements)
        assert statements == px.sources.prepare("events")
        assert "prepared" not in px.sources.describe("events").settings
        assert len(place.run("SELECT * FROM events LIMIT 1")[0]) == 3


def test_no_key_moves_to_another_partition(place: Place) -> None:
    place.insert([*KEYS, None, "", "ключ", "🔑"])
    with place.attach() as px:
        before = drained(px, "before", 404)
        px.sources.prepare("events", apply=True)
        assert drained(px, "here", 404) == before
        assert px.sources.prepare("events", apply=True) == []
    with place.attach() as px:
        assert drained(px, "elsewhere", 404) == before
        place.insert(["account-3"])
        assert drained(px, "more", 405).items() >= before.items()
    # The others need not attach it: the record is enough where it needs no password.
    with pxrs.connect(place.store) as px:
        assert px.sources.describe("events").settings["prepared"]["partition"] == "pxrs_partition"


def test_programs_that_name_no_columns_go_on(place: Place) -> None:
    with place.attach() as px:
        px.sources.prepare("events", apply=True)
    place.run("INSERT INTO events VALUES (7, 'a', 'b')")
    assert place.run("SELECT id, pxrs_partition FROM events") == [(7, md5(b"a", 8))]


def test_three_members_read_the_table_once_in_total(place: Place) -> None:
    count = 3000
    place.insert([f"account-{number}" for number in range(count)])
    with place.attach() as one, place.attach() as two, place.attach() as three:
        members = [one, two, three]
        assert shared(members, "before", count) == count
        unprepared = [rows_read(px) for px in members]
        # Each of them has read all of it.
        assert sum(unprepared) >= 2.5 * count
    with place.attach() as px:
        px.sources.prepare("events", apply=True)
    with place.attach() as one, place.attach() as two, place.attach() as three:
        members = [one, two, three]
        assert shared(members, "after", count) == count
        assert sum(rows_read(px) for px in members) == count


def test_a_member_that_runs_makes_use_of_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.sources.log._REFRESH_EVERY", 0.0)
    place.insert(KEYS)
    with (
        place.attach() as px,
        pxrs.connect(place.store) as operator,
        px.consumer("events", group="billing") as consumer,
    ):
        before = poll(consumer, len(KEYS))
        assert rows_read(px) == len(KEYS)
        # Its partition alone is consumed from now on, and only its rows are read.
        mine = before[0].partition
        consumer.pause(*(part for part in consumer.assignment if part.partition != mine))
        assert operator.sources.prepare("events", apply=True)
        place.insert(KEYS)
        own = sum(message.partition == mine for message in before)
        more = poll(consumer, own)
        assert {message.partition for message in more} == {mine}
        assert rows_read(px) == len(KEYS) + len(more) == len(KEYS) + own


def shared(members: list[Pxrs], group: str, count: int) -> int:
    """How many rows three members of a group get together, once each has its share."""
    place_of = members[0].topics.find("events").partitions
    with (
        members[0].consumer("events", group=group, start="latest") as one,
        members[1].consumer("events", group=group, start="latest") as two,
        members[2].consumer("events", group=group, start="latest") as three,
    ):
        consumers = [one, two, three]
        while not all(each.assignment for each in consumers) or place_of != sum(
            len(each.assignment) for each in consumers
        ):
            assert [each.poll(timeout=0.05) for each in consumers] == [[], [], []]
        for px in members:
            topic = px.topics.find("events")
            px._stores.log.virtual(topic.id).source.rows_read = 0  # type: ignore[attr-defined]
        for each in consumers:
            for part in each.assignment:
                each.seek(part.topic, part.partition, 0)
        found: set[int] = set()
        ends = time.monotonic() + PATIENCE
        while len(found) < count:
            # Not for long: one that has all its rows may be asked before others that have not.
            more = [message for each in consumers for message in each.poll(timeout=0.05)]
            assert more or time.monotonic() < ends
            assert not found & {message.offset for message in more}
            found |= {message.offset for message in more}
    return len(found)


@pytest.mark.engine("postgres")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    keys=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    partitions=st.integers(1, 2**14),
)
def test_postgresql_computes_the_same_partition(
    postgres_of_many: str, keys: list[str], partitions: int
) -> None:
    with psycopg.connect(postgres_of_many) as db:
        number = partition_of("key", False, partitions)
        statement = f"SELECT {number} FROM unnest(%s::text[]) WITH ORDINALITY t (key, n) ORDER BY n"
        found = [row[0] for row in db.execute(statement.replace(" % ", " %% ").encode(), [keys])]
        assert found == [md5(key.encode(), partitions) for key in keys]
        number = partition_of("key", True, partitions)
        statement = (
            f"SELECT {number} FROM unnest(%s::bytea[]) WITH ORDINALITY t (key, n) ORDER BY n"
        )
        bare = [key.encode()[::-1] for key in keys]
        found = [row[0] for row in db.execute(statement.replace(" % ", " %% ").encode(), [bare])]
        assert found == [md5(key, partitions) for key in bare]


@pytest.mark.engine("mariadb")
def test_mariadb_computes_the_same_partition(mariadb_url: str, tmp_path: Path) -> None:
    place = Place("mariadb", mariadb_url, f"sqlite:///{tmp_path}/checkpoints.db")
    with place.attach(partitions=13) as px:
        px.sources.prepare("events", apply=True)
    db = place.connect()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), min_size=1))
    def check(keys: list[str]) -> None:
        with db.cursor() as cursor:
            cursor.execute("DELETE FROM events")
            cursor.executemany("INSERT INTO events (account) VALUES (%s)", [(key,) for key in keys])
            cursor.execute("SELECT account, pxrs_partition FROM events ORDER BY id")
            found = cursor.fetchall()
        assert [row[0] for row in found] == keys
        assert [row[1] for row in found] == [md5(key.encode(), 13) for key in keys]

    check()
    place.close()


KINDS = {
    "postgres": {
        "bigint": "42", "numeric(10, 2)": "1.50", "uuid": "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "bytea": "'\\xff00'", "char(8)": "'ab'", "varchar(9)": "'é'", "boolean": "true",
    },
    "mariadb": {
        "bigint": "42", "decimal(10, 2)": "1.50", "uuid": "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "varbinary(9)": "x'ff00'", "char(8)": "'ab'",
        "varchar(9) CHARACTER SET latin1": "'é'", "int unsigned": "4000000000",
    },
}  # fmt: skip


def test_keys_of_many_types(place: Place) -> None:
    for number, (kind, value) in enumerate(KINDS[place.engine].items()):
        name = f"keyed{number}"
        serial = "bigserial" if place.engine == "postgres" else "bigint AUTO_INCREMENT"
        place.run(
            f"CREATE TABLE {name} (id {serial} PRIMARY KEY, account {kind}, payload text)",
            f"INSERT INTO {name} (account, payload) VALUES ({value}, 'x')",
        )
        with pxrs.connect(place.store) as px:
            px.attach(name, place.table(name=name), partitions=10_000)
            source = px._stores.log.virtual(px.topics.find(name).id).source
            # Transactions of other tests, under way in the same server, may hold the row back.
            reads = (source.read(0, 0, 10).rows for _ in range(_LOOKS))
            ((_, _, key, *_),) = next(filter(None, reads))
            px.sources.prepare(name, apply=True)
            [(partition,)] = place.run(f"SELECT pxrs_partition FROM {name}")
            assert partition == md5(key or b"", 10_000), kind


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine, kind, marks=pytest.mark.engine(engine))
        for engine, kind in (
            ("postgres", "timestamptz"),
            ("postgres", "json"),
            ("mariadb", "timestamp"),
        )
    ],
)
def test_keys_that_can_not_be_hashed_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, kind: str
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    place = Place(engine, url, f"sqlite:///{tmp_path}/checkpoints.db")
    using = f"TYPE {kind} USING NULL" if engine == "postgres" else f"{kind} NULL"
    verb = "ALTER" if engine == "postgres" else "MODIFY"
    place.run(f"ALTER TABLE events {verb} account {using}")
    with (
        place.attach(url=place.url) as px,
        pytest.raises(ConfigError, match="depends on settings"),
    ):
        px.sources.prepare("events")
    place.close()


def test_a_second_topic_of_the_table_is_refused(place: Place) -> None:
    with place.attach() as px:
        px.sources.prepare("events", apply=True)
        px.attach("again", place.table(), partitions=9)
        with pytest.raises(ConfigError, match="another topic"):
            px.sources.prepare("again")
        px.attach("unkeyed", place.table(key=None), partitions=1)
        with pytest.raises(ConfigError, match="another topic"):
            px.sources.prepare("unkeyed")


@pytest.mark.engine("postgres")
def test_the_guide_shows_what_is_executed(on_postgres: Place) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    (shown,) = re.findall(r"\$ pxrs sources prepare events\n(.*?)```", guide, re.DOTALL)
    with on_postgres.attach() as px:
        assert shown == "".join(f"{each};\n" for each in px.sources.prepare("events"))


@pytest.mark.engine("postgres")
def test_what_can_not_be_prepared(on_postgres: Place) -> None:
    on_postgres.run("CREATE VIEW paid AS SELECT * FROM events")
    with on_postgres.attach() as px:
        px.attach("paid", Table("paid", key="account", value="payload"), partitions=2)
        with pytest.raises(ConfigError, match="is a view"):
            px.sources.prepare("paid")
        px.topics.create("real", partitions=1)
        with pytest.raises(TopicNotFound):
            px.sources.prepare("real")


@pytest.mark.engine("postgres")
def test_an_index_that_was_not_finished_is_made_again(on_postgres: Place) -> None:
    on_postgres.insert(["a", "a"])
    with on_postgres.attach() as px:
        column, index, *_ = px.sources.prepare("events")
        on_postgres.run(column)
        db = on_postgres.connect()
        db.autocommit = True
        broken = index.replace("CREATE INDEX", "CREATE UNIQUE INDEX").replace(', "id")', ")")
        with pytest.raises(psycopg.Error):
            db.execute(broken.encode())
        left = px.sources.prepare("events", apply=True)
        assert [each.split()[0] for each in left] == ["DROP", "CREATE", "CREATE", "CREATE"]
        assert px.sources.prepare("events") == []


def test_a_column_that_was_dropped_again_is_done_without(place: Place) -> None:
    place.insert(KEYS)
    with place.attach() as px:
        before = drained(px, "before", 400)
        px.sources.prepare("events", apply=True)
    place.run("ALTER TABLE events DROP COLUMN pxrs_partition")
    with place.attach() as px:
        assert drained(px, "after", 400) == before
        assert any("ADD COLUMN" in each for each in px.sources.prepare("events", apply=True))
        assert drained(px, "again", 400) == before


# A partition column of the user's own


def with_partitions(place: Place, *values: Any) -> None:
    place.run("ALTER TABLE events ADD COLUMN part int")
    for value in values:
        place.run(f"INSERT INTO events (account, payload, part) VALUES ('a', 'x', {value})")


def test_rows_are_where_the_column_says(place: Place) -> None:
    with_partitions(place, *range(8), *range(8))
    with place.attach(partition="part") as px:
        assert drained(px, "billing", 16) == {number: (number - 1) % 8 for number in range(1, 17)}
        statements = px.sources.prepare("events", apply=True)
        assert any("INDEX" in each for each in statements)
        assert not any("ADD COLUMN" in each for each in statements)
        assert px.sources.prepare("events") == []


@pytest.mark.parametrize(("value", "shown"), [("8", "8"), ("-1", "-1"), ("NULL", "NULL")])
def test_partitions_that_are_none_are_refused(place: Place, value: str, shown: str) -> None:
    with_partitions(place, 0, 7, value)
    with pytest.raises(ConfigError, match=f"from 0 to 7 in every row, and is {shown} in some"):
        place.attach(partition="part")
    with pytest.raises(ConfigError, match="column of integers"):
        place.attach(partition="payload")


@pytest.mark.parametrize("value", ["8", "-1", "NULL"])
def test_nobody_goes_past_a_later_row_of_no_partition(place: Place, value: str) -> None:
    with_partitions(place, *range(8))
    with place.attach(partition="part") as px:
        with px.consumer("events", group="billing") as consumer:
            assert len(poll(consumer, 8)) == 8
            consumer.commit()
        for part in [value, *range(8)]:
            place.run(f"INSERT INTO events (account, payload, part) VALUES ('a', 'x', {part})")
        goes_on_at_the_odd_row(px, lambda: place.run("UPDATE events SET part = 5 WHERE id = 9"))


def goes_on_at_the_odd_row(px: Pxrs, mend: Callable[[], object]) -> None:
    """Row 9 of 17 is odd: all members stop there, and go on once it is mended."""
    with px.consumer("events", group="billing") as consumer:
        with pytest.raises(DamagedBatch, match="from 0 to 7: no consumer would get") as raised:
            consumer.poll(timeout=10)
        assert raised.value.offset == 9
        consumer.commit()
        parts = px.groups.describe("billing").partitions
        assert max(part.checkpoint or 0 for part in parts) <= 9
        mend()
        assert sorted(message.offset for message in poll(consumer, 9)) == list(range(9, 18))


@pytest.mark.engine("sqlite")
def test_nobody_goes_past_a_later_row_of_no_partition_in_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    add = "INSERT INTO events (account, part) VALUES ('a', ?)"
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, part INTEGER)"
        )
        db.executemany(add, [(part,) for part in range(8)])
        db.commit()
    table = Table("events", key="account", value="account", partition="part")
    with pxrs.connect(f"sqlite:///{path}") as px, closing(sqlite3.connect(path)) as db:
        px.attach("events", table, partitions=8)
        with px.consumer("events", group="billing") as consumer:
            assert len(poll(consumer, 8)) == 8
            consumer.commit()
        db.executemany(add, [(part,) for part in (None, *range(8))])
        db.commit()

        def mend() -> None:
            db.execute("UPDATE events SET part = 5 WHERE id = 9")
            db.commit()

        goes_on_at_the_odd_row(px, mend)


def test_rows_that_follow_a_writer_go_to_their_own_partition(place: Place) -> None:
    """While somebody writes, rows are read as far as there is no gap: only those of a partition."""
    with_partitions(place, *range(8))
    with place.attach(partition="part") as px, px.consumer("events", group="billing") as consumer:
        assert len(poll(consumer, 8)) == 8
        slow = place.connect()
        with slow.cursor() as cursor:
            cursor.execute("UPDATE events SET payload = 'y' WHERE id = 1")
            for value in range(8):
                place.run(f"INSERT INTO events (payload, part) VALUES ('x', {value})")
            more = poll(consumer, 8)
        assert sorted((m.offset, m.partition) for m in more) == [(9 + n, n) for n in range(8)]
        slow.rollback()


@pytest.mark.engine("sqlite")
def test_sqlite_gets_an_index_on_a_column_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, part INTEGER)"
        )
        db.executemany(
            "INSERT INTO events (account, part) VALUES ('a', ?)", [(n,) for n in range(4)]
        )
    db.close()
    with pxrs.connect(f"sqlite:///{path}") as px:
        px.attach("plain", Table("events", key="account", value="account"), partitions=4)
        with pytest.raises(ConfigError, match="SQLite has no md5"):
            px.sources.prepare("plain")
        with pytest.raises(ConfigError, match="from 0 to 2"):
            px.attach("few", Table("events", value="account", partition="part"), partitions=3)
        with pytest.raises(ConfigError, match="column of integers"):
            px.attach("few", Table("events", value="part", partition="account"), partitions=3)
        px.attach("events", Table("events", value="account", partition="part"), partitions=4)
        assert len(px.sources.prepare("events", apply=True)) == 1
        assert px.sources.prepare("events") == []
        assert drained(px, "billing", 4) == {number + 1: number for number in range(4)}


def test_only_tables_are_prepared() -> None:
    class Other:
        streams = 1
        read = bounds = final = watch = offset_at = None

        def close(self) -> None:
            pass

    with pxrs.connect("memory://") as px:
        px.attach("other", cast(Any, Other()), partitions=1)
        with pytest.raises(InvalidRequest, match="no table"):
            px.sources.prepare("other")


# News


@pytest.mark.engine("postgres")
def test_the_trigger_wakes_the_watch(on_postgres: Place) -> None:
    """Only news can end its pause: by looking it sees no change."""
    with on_postgres.attach() as px:
        prepared = px.sources.prepare("events", apply=True)
        assert any("TRIGGER" in each for each in prepared)
        channel = px.sources.describe("events").settings["prepared"]["channel"]
        connect = partial(psycopg.connect, on_postgres.url)
        watch = NotifiedWatch(connect, channel, lambda: None, lambda: False)
        try:
            assert not watch._pause(0.01)
            on_postgres.insert(["a"])
            assert watch._pause(10)
            watch.wake()
            assert watch.wait(10)
            assert not watch.wait(0.05)
        finally:
            watch.close()
        assert watch.wait(10)


@pytest.mark.engine("postgres")
def test_a_consumer_hears_of_rows_and_survives_the_loss_of_its_connections(
    on_postgres: Place,
) -> None:
    with on_postgres.attach() as px:
        px.sources.prepare("events", apply=True)
        with px.consumer("events", group="billing") as consumer:
            assert consumer.poll(timeout=0.2) == []
            on_postgres.insert(["a"])
            assert len(poll(consumer, 1)) == 1
            listens = "application_name = 'pxrs source watch' AND datname = current_database()"
            assert on_postgres.run(f"SELECT count(*) FROM pg_stat_activity WHERE {listens}") != [
                (0,)
            ]
            on_postgres.run(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listens}"
            )
            on_postgres.insert(["b"])
            assert len(poll(consumer, 1)) == 1
    left = on_postgres.run(f"SELECT count(*) FROM pg_stat_activity WHERE {listens}")
    assert left == [(0,)]


def test_a_topic_that_was_detached_meanwhile_is_not_marked(place: Place) -> None:
    with place.attach() as px:
        topic = px.topics.find("events")
        px.sources.detach("events")
        with pytest.raises(TopicNotFound):
            px._topics._set_prepared(topic, {"partition": "pxrs_partition"})
        px.attach("events", place.table(), partitions=8)
        with pytest.raises(TopicNotFound):
            px._topics._set_prepared(topic, {"partition": secrets.token_hex(4)})
        assert "prepared" not in px.sources.describe("events").settings


@pytest.mark.engine("postgres")
def test_the_server_reads_only_the_rows_of_a_partition(postgres_url: str) -> None:
    """By the index on partition and id, not by that on ids with all rows of all partitions."""
    with psycopg.connect(postgres_url, autocommit=True) as db, pxrs.connect(postgres_url) as px:
        db.execute("CREATE TABLE many (id bigserial PRIMARY KEY, account text, payload text)")
        db.execute(
            "INSERT INTO many (account, payload) "
            "SELECT 'account-' || n % 1000, repeat('x', 100) FROM generate_series(1, 20000) n"
        )
        px.attach("many", Table("many", key="account", value="payload"), partitions=8)
        px.sources.prepare("many", apply=True)
        db.execute("VACUUM ANALYZE many")
        database = px._stores.log.virtual(px.topics.find("many").id).source.database  # type: ignore[attr-defined]
        statement, values = database._reading().rows(1, 20_000, 500, 3)
        plan = db.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values).fetchall()
        [[scan]] = [each["Plan"]["Plans"] for each in plan[0][0]]
        assert scan["Index Name"].startswith("pxrs_partition")
        assert scan["Actual Rows"] == 500
        assert not scan.get("Rows Removed by Filter")
