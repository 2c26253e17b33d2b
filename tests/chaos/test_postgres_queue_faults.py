"""PostgreSQL is restarted and its connections are cut while workers take from a queue."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

import engines
import pxrs
from support.child import PATIENCE, Child
from support.engine_fixtures import NewEngine
from support.inside import say
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

QUEUE, ITEMS, WORKERS = "orders", 300, 2


def work(url: str) -> None:
    """Write every item into the ledger, in the transaction that removes it."""
    say("started")
    while True:
        try:
            with pxrs.connect(url) as px:
                while True:
                    with px.transaction() as tx:
                        for item in tx.take_many(QUEUE, 5, timeout=1.0):
                            tx.execute(f"INSERT INTO ledger VALUES ({int(item.value)})")
        except (pxrs.PxrsError, psycopg.Error):
            # As any service would: the engine is away, start again.
            continue


def cut(engine: engines.Engine) -> None:
    query(
        engine.url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'pxrs' AND pid <> pg_backend_pid()",
    )


def restart(engine: engines.Engine) -> None:
    engine.restart()


def crash(engine: engines.Engine) -> None:
    engine.kill()
    engine.start()


def handled(url: str) -> int:
    ((number,),) = query(url, "SELECT count(*) FROM ledger")
    return int(number)


@pytest.mark.parametrize("fault", [cut, restart, crash], ids=lambda fault: fault.__name__)
def test_every_item_is_handled_once(
    new_engine: NewEngine, fault: Callable[[engines.Engine], None]
) -> None:
    engine = new_engine("postgres", durable=True)
    with pxrs.connect(engine.url) as px:
        query(engine.url, "CREATE TABLE ledger (number int)")
        with px.transaction() as tx:
            for number in range(ITEMS):
                tx.put(QUEUE, str(number))
        watch = px.stores.queues.watch(QUEUE)
        children = [Child(work, engine.url) for _ in range(WORKERS)]
        try:
            for child in children:
                assert child.read() == "started"
            for share in (1, 2):
                while handled(engine.url) < ITEMS * share // 3:
                    watch.wait(0.05)
                fault(engine)
            while handled(engine.url) < ITEMS:
                watch.wait(PATIENCE / 100)
        finally:
            watch.close()
            for child in children:
                child.kill()
    rows = query(engine.url, "SELECT number FROM ledger ORDER BY number")
    assert rows == [(number,) for number in range(ITEMS)]
