"""Several partitions in one go: each as `fetch` gives it, or raises it."""

from __future__ import annotations

from contextlib import closing

import pytest

import pxrs
from pxrs.errors import (
    DamagedBatch,
    OffsetOutOfRange,
    PartitionNotFound,
    PxrsError,
    SchemaMismatch,
    TopicNotFound,
)
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, Fetched, LogPartition
from support.child import PATIENCE
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

SMALL, A_LOT = 1, 1 << 20
PLACES = [LogPartition("t", number) for number in range(4)]


@pytest.fixture
def filled(stores: PostgresStores) -> PostgresStores:
    """Partition 0 has 3 batches, 1 is empty, 2 is cut off at its start, 3 has a hole."""
    stores.log.create("t", 4)
    for _ in range(3):
        for where in (PLACES[0], PLACES[2], PLACES[3]):
            stores.log.append([Append(where, batch(b"a", b"b"))])
    stores.log.trim(PLACES[2], 2)
    return stores


def one_by_one(
    stores: PostgresStores, asked: list[tuple[LogPartition, int]], most: int
) -> list[Fetched | type[PxrsError]]:
    found: list[Fetched | type[PxrsError]] = []
    for where, offset in asked:
        try:
            found.append(stores.log.fetch(where, offset, most))
        except PxrsError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("most", [SMALL, A_LOT])
def test_each_is_what_fetch_gives(filled: PostgresStores, postgres_url: str, most: int) -> None:
    query(
        postgres_url,
        "DELETE FROM pxrs.pxrs_log_batches b USING pxrs.pxrs_log_partitions p "
        "WHERE b.part = p.id AND p.partition = 3 AND b.base = 2",
    )
    asked = [
        (PLACES[3], 0),
        (PLACES[0], 3),
        (PLACES[1], 0),
        (LogPartition("nothing", 0), 0),
        (PLACES[2], 1),
        (PLACES[0], 7),
        (LogPartition("t", 9), 0),
        (PLACES[0], 0),
        (PLACES[3], 2),
    ]
    many = list(filled.log.fetch_many(asked, most))
    assert [type(each) if isinstance(each, PxrsError) else each for each in many] == one_by_one(
        filled, asked, most
    )
    kinds = [type(each) for each in many]
    assert kinds == [
        Fetched,
        Fetched,
        Fetched,
        TopicNotFound,
        OffsetOutOfRange,
        OffsetOutOfRange,
        PartitionNotFound,
        Fetched,
        DamagedBatch,
    ]
    assert list(filled.log.fetch_many([], most)) == []


def test_who_stops_early_leaves_the_connection_as_it_was(filled: PostgresStores) -> None:
    for _ in range(2):
        with closing(filled.log.fetch_many([(PLACES[0], 0), (PLACES[2], 2)], A_LOT)) as coming:
            assert isinstance(next(coming), Fetched)
    assert len(filled.log.fetch(PLACES[0], 0, A_LOT).batches) == 3


def test_a_dead_connection_is_replaced(filled: PostgresStores, postgres_url: str) -> None:
    # It returns when they have ended.
    cut = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity \
        WHERE pid <> pg_backend_pid() AND datname = current_database()"
    asked = [(PLACES[0], 0), (PLACES[1], 0)]
    list(filled.log.fetch_many(asked, A_LOT))
    query(postgres_url, cut)
    first, second = filled.log.fetch_many(asked, A_LOT)
    assert isinstance(first, Fetched)
    assert isinstance(second, Fetched)


def test_what_the_server_refuses_is_told_for_each(
    filled: PostgresStores, postgres_url: str
) -> None:
    query(postgres_url, "ALTER TABLE pxrs.pxrs_log_batches RENAME TO moved")
    found = list(filled.log.fetch_many([(PLACES[0], 0), (PLACES[2], 2)], A_LOT))
    assert [type(each) for each in found] == [SchemaMismatch, SchemaMismatch]


def test_a_consumer_gets_every_partition_in_order(postgres_url: str) -> None:
    with pxrs.connect(postgres_url) as px:
        px.topics.create("orders", partitions=20)
        pairs = [(f"k{number % 97}", str(number)) for number in range(5_000)]
        with px.producer() as producer:
            producer.send_many("orders", pairs).result()
        got: dict[bytes, list[int]] = {}
        with px.consumer("orders", group="g") as consumer:
            while sum(map(len, got.values())) < len(pairs):
                for message in consumer.poll(timeout=PATIENCE):
                    got.setdefault(message.key, []).append(int(message.value))
        assert len(got) == 97
        assert all(numbers == sorted(numbers) for numbers in got.values())
