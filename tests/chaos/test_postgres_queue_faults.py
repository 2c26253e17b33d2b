"""PostgreSQL is restarted and its connections are cut while workers take from a queue."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

import engines
import pxrs
from support.child import PATIENCE, Child
from support.engine_fixtures import NewEngine
from support.inside import say
from support.postgres import query

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.thorough]

QUEUE, ITEMS, WORKERS, TIMES = "orders", 300, 2, 3


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


def cut_all(url: str) -> None:
    query(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pxrs' "
        "AND datname = current_database() AND pid <> pg_backend_pid()",
    )


def cut(engine: engines.Engine) -> None:
    cut_all(engine.url)


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


class Diary:
    """A listener's handler that notes every delivery. Each fifth item fails every time."""

    def __init__(self) -> None:
        self._more = threading.Condition()
        self.notes: list[tuple[int, int]] = []

    def __call__(self, item: pxrs.Item, tx: pxrs.UnitOfWork) -> None:
        number = int(item.value)
        with self._more:
            self.notes.append((number, item.deliveries))
            self._more.notify_all()
        if number % 5 == 0:
            raise ZeroDivisionError
        tx.execute(f"INSERT INTO ledger VALUES ({number})")

    def await_notes(self, number: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.notes) >= number, PATIENCE)


def test_a_listener_goes_on_and_keeps_its_bound(postgres_url: str) -> None:
    """Its connections are cut again and again: no item is handled more often than allowed."""
    query(postgres_url, "CREATE TABLE ledger (number int)")
    diary = Diary()
    with (
        pxrs.connect(f"{postgres_url}?application_name=observer") as observer,
        pxrs.connect(postgres_url) as px,
    ):
        with observer.transaction() as tx:
            for number in range(ITEMS):
                tx.put(QUEUE, str(number), key=f"k{number % 7}" if number % 3 == 0 else None)
        retry = pxrs.Backoff(first=0.01, longest=0.02, attempts=TIMES)
        with px.listen(QUEUE, diary, workers=4, retry=retry):
            for share in range(1, 6):
                diary.await_notes(ITEMS * share // 6)
                cut_all(postgres_url)
            watch = observer.stores.queues.watch(QUEUE)
            while observer.queues.describe(QUEUE).depth:
                assert watch.wait(PATIENCE), "the listener came to a halt"
            watch.close()
        dead = [int(item.value) for item in observer.queues.dead(QUEUE, None)]
    handled = [number for (number,) in query(postgres_url, "SELECT number FROM ledger")]
    assert sorted(handled + dead) == list(range(ITEMS)), "an item was handled twice, or is lost"
    assert {number for number in range(ITEMS) if number % 5 == 0} <= set(dead)
    assert max(Counter(number for number, _ in diary.notes).values()) == TIMES
    assert len(diary.notes) == len(set(diary.notes)), "one delivery went to two workers"
