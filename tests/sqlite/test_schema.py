"""Older files open, and people can look into a file with SQL."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.stores.sqlite import schema
from pxrs.types import Outcome

pytestmark = pytest.mark.engine("sqlite")

# Never change these: files like this exist.
VERSION_1 = """
CREATE TABLE pxrs_meta (name TEXT PRIMARY KEY, value);
CREATE TABLE pxrs_coord (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT);
CREATE INDEX pxrs_coord_session ON pxrs_coord (session) WHERE session IS NOT NULL;
CREATE TABLE pxrs_log_partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
    start INTEGER NOT NULL, floor INTEGER NOT NULL, UNIQUE (topic_id, partition));
CREATE TABLE pxrs_log_batches (
    part INTEGER NOT NULL, base INTEGER NOT NULL, next INTEGER NOT NULL,
    max_timestamp INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX pxrs_log_index
    ON pxrs_log_batches (part, base, next, max_timestamp, size);
CREATE TABLE pxrs_log_producers (
    part INTEGER NOT NULL, producer INTEGER NOT NULL, state BLOB NOT NULL,
    used INTEGER NOT NULL, PRIMARY KEY (part, producer));
INSERT INTO pxrs_meta VALUES ('schema', 1), ('revision', 7);
INSERT INTO pxrs_log_partitions (topic_id, partition, start, floor)
    VALUES ('cafe', 0, 0, 0), ('cafe', 1, 5, 5);
INSERT INTO pxrs_coord VALUES
    ('topics/orders', CAST('{"schema":1,"id":"cafe","partitions":2}' AS BLOB), 1, NULL),
    ('group/billing', CAST('{"generation":3,"reason":"a joined","schema":1}' AS BLOB), 2, NULL),
    ('claims/billing/cafe/1',
     CAST('{"owner":"a.1","name":"a","epoch":4,"checkpoint":5,"at_ms":99,"schema":1}' AS BLOB),
     3, NULL);
"""

# Nine were put: five are done, two were purged, one is ready, one dead.
VERSION_3 = """
UPDATE pxrs_meta SET value = 3 WHERE name = 'schema';
INSERT INTO pxrs_queues (id, name, fifo, created, next, put, done)
    VALUES (1, 'inbox', 0, 1, 10, 9, 5);
INSERT INTO pxrs_queue_items (id, queue, state, rank, visible, deliveries, suspect, put_ms, error,
    body) VALUES ((1 << 40) + 8, 1, 0, 0, 1, 0, 0, 1, '', CAST('tx' AS BLOB)),
    ((1 << 40) + 9, 1, 4, 0, 1, 3, 0, 1, 'broken', CAST('ty' AS BLOB));
INSERT INTO pxrs_queue_commits VALUES ('aaaaaaaaaaaaaaaaaaaaaaaa', 1, 'tx-1');
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def query(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_file_of_version_1_opens(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1)
    connection.close()
    with pxrs.connect(f"sqlite:///{path}") as px:
        assert [topic.name for topic in px.topics.list()] == ["orders"]
        first, second = px.groups.describe("billing").partitions
        assert (first.checkpoint, second.checkpoint, second.epoch) == (None, 5, 4)
        with px.producer() as producer:
            assert producer.send("orders", b"x", partition=1).result().offset == 5
    assert query(path, "SELECT value FROM pxrs_meta WHERE name = 'schema'") == [(schema.VERSION,)]
    assert query(path, "SELECT * FROM pxrs_partitions") == [("billing", "orders", 1, "a", 5, 4, 99)]
    with pxrs.connect(f"sqlite:///{path}") as px:
        assert px.groups.list()[0].generation == 3


def test_a_file_of_version_3_keeps_its_queues_and_what_was_counted(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for version in (1, 2, 3):
        for statement in schema.step_to(version):
            connection.execute(statement)
    connection.executescript(VERSION_3)
    connection.close()
    with pxrs.connect(f"sqlite:///{path}") as px:
        stats = px.stores.queues.stats("inbox")
        assert (stats.put, stats.done, stats.ready, stats.held) == (9, 5, 1, 0)
        assert px.stores.queues.outcome("a" * 24, "tx-1") is Outcome.DONE
        with px.transaction() as tx:
            item = tx.take("inbox", timeout=0)
            assert item is not None
            assert item.id == 8
            tx.put("inbox", "more")
        assert [item.id for item in px.queues.peek("inbox")] == [10]
        assert px.stores.queues.stats("inbox").done == 6


def test_every_way_to_a_version_ends_in_the_same_schema(path: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1)
    connection.close()
    fresh = tmp_path / "fresh.db"
    for each in (path, fresh):
        pxrs.connect(f"sqlite:///{each}").close()
    shape = "SELECT type, name, tbl_name FROM sqlite_schema ORDER BY 1, 2"
    assert query(path, shape) == query(fresh, shape)


def test_a_new_file_is_what_all_steps_make_to_the_character() -> None:
    at_once, by_steps = (sqlite3.connect(":memory:", isolation_level=None) for _ in range(2))
    schema.migrate(at_once)
    for statement in schema.step_to(1):
        by_steps.execute(statement)
    schema.migrate(by_steps)
    assert sorted(at_once.iterdump()) == sorted(by_steps.iterdump())
    assert schema.found_version(at_once) == schema.VERSION
    at_once.close()
    by_steps.close()


def test_the_view_shows_who_owns_what(path: Path) -> None:
    columns = 'SELECT "group", topic, partition, owner, checkpoint, epoch FROM pxrs_partitions'
    with pxrs.connect(f"sqlite:///{path}") as px:
        for topic in ("orders", "invoices"):
            px.topics.create(topic, 2)
        with px.producer() as producer:
            for number in (0, 0, 1):
                producer.send("orders", b"x", partition=number)
        with px.consumer(["orders"], "billing", instance="a", debounce=0.0) as consumer:
            seen = 0
            while seen < 3:
                seen += len(consumer.poll(timeout=30))
            consumer.commit()
            assert query(path, f"{columns} ORDER BY partition") == [
                ("billing", "orders", 0, "a", 2, 1),
                ("billing", "orders", 1, "a", 1, 1),
            ]
            (heartbeat,) = query(path, "SELECT max(heartbeat) FROM pxrs_partitions")[0]
            assert heartbeat >= px.groups.describe("billing").at_ms
        assert query(path, f"{columns} WHERE partition = 1") == [
            ("billing", "orders", 1, None, 1, 2)
        ]
        px.topics.delete("orders")
        assert query(path, columns) == []
        px.groups.delete("billing")
        assert query(path, columns) == []


def test_a_newer_file_is_refused(path: Path) -> None:
    pxrs.connect(f"sqlite:///{path}").close()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE pxrs_meta SET value = 99 WHERE name = 'schema'")
    connection.close()
    with pytest.raises(pxrs.SchemaMismatch, match="newer"):
        pxrs.connect(f"sqlite:///{path}")
