"""What older versions have stored is there after a migration, and goes on."""

from __future__ import annotations

import psycopg
import pytest

import pxrs
from pxrs.stores.postgres import schema
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import Worker, bodies
from pxrs.testing.conformance.tools import put
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture
def postgres_url(bare_postgres_url: str) -> str:
    return bare_postgres_url


FIRST, BEFORE_LAST = 1, schema.VERSION - 1

# As the second version had them: a front, one behind it, one that is free, one that is dead.
_ITEMS = """
INSERT INTO pxrs.pxrs_queues (id, name, fifo, created) VALUES (7, 'q', false, 1000);
INSERT INTO pxrs.pxrs_queue_lanes VALUES (7, 'kk');
INSERT INTO pxrs.pxrs_queue_items (queue, id, state, rank, lane, key, visible, deliveries, suspect,
    put_ms, dead_ms, error, body) VALUES
    (7, 1, 0, 0, 'kk', 'k', 1000, 0, false, 1000, NULL, '', 'front'),
    (7, 2, 3, 0, 'kk', 'k', 1000, 0, false, 1000, NULL, '', 'behind'),
    (7, 3, 0, -5, NULL, NULL, 1000, 2, false, 1000, NULL, 'failed', 'urgent'),
    (7, 4, 4, 0, NULL, NULL, 1000, 5, false, 1000, 2000, 'gave up', 'dead');
INSERT INTO pxrs.pxrs_queue_counts (queue, put, done) VALUES (7, 10, 6);
SELECT setval('pxrs.pxrs_queue_numbers', 4);
CREATE FUNCTION pxrs.pxrs_queue_take(text, int8) RETURNS int8 LANGUAGE sql AS 'SELECT 1::int8'"""


def as_version(url: str, version: int) -> None:
    """Make the schema as that version had it."""
    with psycopg.connect(url, autocommit=True) as connection:
        schema.migrate(connection, schema.DEFAULT_SCHEMA, "here", version)


def test_topics_and_checkpoints_of_the_first_version(postgres_url: str) -> None:
    as_version(postgres_url, FIRST)
    query(
        postgres_url,
        "INSERT INTO pxrs.pxrs_coord VALUES ('old/key', 'kept', 41, NULL);"
        "SELECT setval('pxrs.pxrs_revision', 41);"
        "INSERT INTO pxrs.pxrs_log_partitions (topic_id, partition, start, floor)"
        " VALUES ('t', 0, 5, 5)",
    )
    stores = PostgresStores(postgres_url)
    kept = stores.coord.get("old/key")
    assert kept is not None
    assert (kept.value, kept.version) == (b"kept", 41)
    assert put(stores.coord, "old/key") > 41
    assert stores.log.bounds("t")[0].end == 5
    worker = Worker(stores)
    worker.put(b"new")
    assert worker.take_one().body == b"new"
    stores.close()


def test_queues_of_the_version_before(postgres_url: str) -> None:
    as_version(postgres_url, BEFORE_LAST)
    query(postgres_url, _ITEMS)
    stores = PostgresStores(postgres_url)
    stats = stores.queues.stats("q")
    assert (stats.ready, stats.waiting, stats.dead, stats.put, stats.done) == (2, 1, 1, 10, 6)
    worker = Worker(stores)
    urgent = worker.take_one()
    assert (urgent.body, urgent.held.delivery, urgent.error) == (b"urgent", 3, "failed")
    (number,) = worker.put(b"new")
    assert number is not None
    assert number > 4
    rest = worker.drain()
    assert sorted(bodies(rest)) == [b"behind", b"front", b"new"]
    assert [item.body for item in rest if item.key == "k"] == [b"front", b"behind"]
    assert stores.queues.redrive("q", [4]) == 1
    stores.close()


def test_what_nobody_was_noted_to_hold_is_free(postgres_url: str) -> None:
    """Until version 3 that came of a queue that was deleted and made again."""
    as_version(postgres_url, 3)
    query(postgres_url, _ITEMS)
    query(
        postgres_url,
        "UPDATE pxrs.pxrs_queue_items SET state = 2, session = 'gone', tx = 't' WHERE id = 3",
    )
    stores = PostgresStores(postgres_url)
    found = Worker(stores).drain()
    assert sorted(bodies(found)) == [b"behind", b"front", b"urgent"]
    stores.close()


def test_whoever_has_the_newest_version_migrates_nothing(postgres_url: str) -> None:
    pxrs.connect(postgres_url).close()
    before = query(postgres_url, "SELECT oid FROM pg_proc WHERE proname LIKE 'pxrs%' ORDER BY 1")
    pxrs.connect(postgres_url).close()
    assert before == query(
        postgres_url, "SELECT oid FROM pg_proc WHERE proname LIKE 'pxrs%' ORDER BY 1"
    )
