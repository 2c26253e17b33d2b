"""The plans of the statements on queues."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.types import ItemState, NewItem

pytestmark = pytest.mark.engine("sqlite")


def test_no_statement_walks_through_all_items(tmp_path: Path) -> None:
    """Whatever is done with a queue, it costs as much with a million items waiting."""
    path = str(tmp_path / "q.db")
    stores = SqliteStores(path)
    heard: list[str] = []
    stores.database._writer.set_trace_callback(heard.append)
    with stores.database.reading() as connection:
        connection.set_trace_callback(heard.append)
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3", b"4", b"5", b"6")
    worker.put(b"k", key="k")
    worker.put(b"later", delay=60.0)
    for _ in range(3):
        worker.apply(worker.take_one())
    held = worker.take_one(lock_for=5.0)
    worker.extend(held, lock_for=9.0)
    worker.release(held, delay=1.0)
    worker.release(worker.take_one(), dead=True)
    worker.apply(*worker.take(2), put=[NewItem(queue="q", body=b"x", dedupe="d", dedupe_window=1)])
    worker.drain()
    stores.queues.reap()
    stores.queues.redrive("q", [item.id for item in stores.queues.peek("q", [ItemState.DEAD])])
    connection = sqlite3.connect(path)
    for statement in dict.fromkeys(heard):
        if not statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            continue
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
        walks = [row[3] for row in plan if row[3].startswith("SCAN")]
        bad = [step for step in walks if "items" in step and "pxrs_queue_held" not in step]
        bad += [step for step in walks if step.startswith("SCAN i") and "held" not in step]
        assert not bad, statement
    connection.close()
    stores.close()
