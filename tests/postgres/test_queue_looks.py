"""What who waits for items looks at: none of it is missed, and nobody asks without end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pxrs.stores.api import Watch
from pxrs.stores.postgres.looks import Looks
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import Worker, bodies, look
from pxrs.testing.conformance.tools import LONG
from pxrs.types import Holder, NewItem, QueueChange
from support.child import PATIENCE
from support.postgres import PostgresLab

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Watch], None]:
    """Waits until a look has seen all that is there, and who watches was told of it."""
    looked = threading.Semaphore(0)
    really = Looks.look

    def counted(*arguments: Any) -> Any:
        found = really(*arguments)
        looked.release()
        return found

    def wait(watch: Watch) -> None:
        while looked.acquire(blocking=False):
            pass
        # The first may have begun before; that the second one is there says the first has told.
        for _ in range(3):
            assert looked.acquire(timeout=PATIENCE)
        watch.wait(0)

    monkeypatch.setattr(Looks, "look", counted)
    return wait


def put_later(stores: PostgresStores, mine: psycopg.Connection[Any], body: bytes) -> None:
    """Put into the lane of `k`, in a transaction that the caller has yet to commit."""
    mine.execute("SELECT 1")
    with stores.atomic(mine) as tx:
        tx.queue(QueueChange(Holder("nobody", "tx"), (), (NewItem(queue="q", body=body, key="k"),)))


@contextmanager
def locked_lanes(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """As a put does that comes to nothing."""
    connection.execute("SELECT 1 FROM pxrs.pxrs_queue_lanes FOR UPDATE")
    yield
    connection.rollback()


def test_a_put_behind_a_held_item_that_is_committed_late(
    deaf: PostgresLab, postgres_url: str, seen: Callable[[Watch], None]
) -> None:
    """Its number is lower than that of what was put meanwhile."""
    here, there = deaf.open(), deaf.open()
    worker = Worker(here)
    worker.put(b"1", key="k")
    worker.take_one()
    watch = here.queues.watch("q")
    with psycopg.connect(postgres_url) as mine:
        put_later(there, mine, b"2")
        Worker(there).put(b"much later", delay=LONG)
        assert worker.due()
        seen(watch)
        mine.commit()
    assert watch.wait(PATIENCE)
    assert worker.take_one().body == b"2"
    watch.close()


def test_what_was_in_the_way_behind_a_held_item_goes(
    deaf: PostgresLab, seen: Callable[[Watch], None]
) -> None:
    here, there = deaf.open(), deaf.open()
    worker = Worker(here)
    worker.put(b"1", key="k")
    (delayed,) = worker.put(b"delayed", key="k", delay=LONG)
    worker.put(b"3", key="k")
    worker.take_one()
    watch = here.queues.watch("q")
    assert worker.due()
    seen(watch)
    there.queues.drop("q", [delayed])
    assert watch.wait(PATIENCE)
    assert worker.take_one().body == b"3"
    watch.close()


def test_what_a_dead_one_held_while_somebody_was_putting_behind_it(
    deaf: PostgresLab, postgres_url: str, seen: Callable[[Watch], None]
) -> None:
    """It can't be freed while the lane is locked, and a rollback tells nobody."""
    here, there = deaf.open(), deaf.open()
    mortal, heir = Worker(there), Worker(here)
    mortal.put(b"1", key="k")
    mortal.take_one()
    watch = here.queues.watch("q")
    with psycopg.connect(postgres_url) as mine:
        put_later(there, mine, b"2")
        mortal.session.close()
        assert heir.due() is None
        seen(watch)
        mine.rollback()
    assert watch.wait(PATIENCE)
    assert heir.take_one().body == b"1"
    watch.close()


def test_a_lane_that_could_not_be_settled(
    deaf: PostgresLab, postgres_url: str, seen: Callable[[Watch], None]
) -> None:
    """One put could not tell what is at the front, and another one is at it just now."""
    here, there = deaf.open(), deaf.open()
    worker = Worker(here)
    worker.put(b"0", key="k")
    first = worker.take_one()
    watch = here.queues.watch("q")
    with psycopg.connect(postgres_url) as old, psycopg.connect(postgres_url) as mine:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT 1 FROM pxrs.pxrs_queue_items")
        worker.apply(first)
        put_later(there, old, b"1")
        old.commit()
        with locked_lanes(mine):
            assert worker.due() is None
            seen(watch)
    assert watch.wait(PATIENCE)
    assert worker.take_one().body == b"1"
    watch.close()


def test_the_same_items_come_back_between_two_looks(
    deaf: PostgresLab, seen: Callable[[Watch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = deaf.open(), deaf.open()
    worker = Worker(here)
    worker.put(b"delayed", delay=LONG)
    watch = here.queues.watch("q")
    seen(watch)
    kept = look(there)
    shut, looks = threading.Lock(), Looks.look

    def gated(*arguments: Any) -> Any:
        with shut:
            return looks(*arguments)

    monkeypatch.setattr(Looks, "look", gated)
    seen(watch)
    with shut:
        there.queues.purge("q")
        assert worker.due() is None
        there.queues.restore("q", kept)
        watch.wait(0)
    assert watch.wait(PATIENCE)
    assert worker.due()
    watch.close()


def test_nobody_asks_without_a_pause_for_what_somebody_has_locked(
    deaf: PostgresLab, postgres_url: str
) -> None:
    stores = deaf.open()
    worker = Worker(stores)
    worker.put(b"1", b"2", key="k")
    assert bodies(worker.take(1)) == [b"1"]
    with psycopg.connect(postgres_url) as mine:
        put_later(deaf.open(), mine, b"3")
        due = worker.due()
        assert due is not None
        assert due > 0
        mine.commit()
    assert bodies(worker.take(9)) == [b"2", b"3"]
