"""What a fetch costs in a partition of many batches: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, LogPartition

pytestmark = pytest.mark.engine("sqlite")

FEW, MANY = 64, 4096
# How many instructions of SQLite's machine pass between two calls of the counter.
EVERY = 10


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "log.db"))
    yield stores
    stores.close()


def filled(stores: SqliteStores, batches: int) -> LogPartition:
    """A partition of so many batches, of one message each."""
    where = LogPartition(f"of-{batches}", 0)
    stores.log.create(where.topic_id, 1)
    stores.log.append([Append(where, batch(b"x")) for _ in range(batches)])
    return where


def cost(stores: SqliteStores, where: LogPartition, offset: int) -> tuple[int, int]:
    """How many instructions and statements the fetch of the batch at `offset` takes."""
    steps, statements = [0], list[str]()

    def count() -> int:
        steps[0] += EVERY
        return 0

    with stores.database.reading() as connection:
        connection.set_progress_handler(count, EVERY)
        connection.set_trace_callback(statements.append)
    found = stores.log.fetch(where, offset, 1)
    with stores.database.reading() as connection:
        connection.set_progress_handler(None, EVERY)
        connection.set_trace_callback(None)
    assert len(found.batches) == 1
    assert statements
    return steps[0], len(statements)


def test_a_fetch_costs_as_much_however_many_batches_are_there(stores: SqliteStores) -> None:
    few, many = filled(stores, FEW), filled(stores, MANY)
    for count, where in ((FEW, few), (MANY, many)):
        # The remembered place of the partition is read once.
        assert stores.log.fetch(where, count, 1).batches == []
    most, statements = cost(stores, few, 0)
    # With all batches behind the offset, with as many before it, and with all before it.
    for offset in (0, MANY // 2, MANY - 1):
        steps, asked = cost(stores, many, offset)
        assert steps <= 2 * most
        assert asked <= statements
