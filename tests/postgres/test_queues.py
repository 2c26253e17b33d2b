"""Work queues on PostgreSQL: on the caller's connection, beside old transactions, after deaths."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm

import pxrs
from pxrs.errors import Fenced
from pxrs.stores.postgres.queues import store
from pxrs.stores.postgres.queues.scout import Plan, Scout
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import Worker, bodies, look
from pxrs.types import Delivery, Held, Holder, NewItem, Outcome, QueueChange
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

OpenStores = Callable[[], PostgresStores]
_numbers = count(1)


def new(*values: bytes, key: str | None = None) -> QueueChange:
    items = tuple(NewItem(queue="q", body=value, key=key) for value in values)
    return QueueChange(Holder("nobody", f"tx-{next(_numbers)}"), (), items)


def test_an_item_is_there_when_the_callers_transaction_is(
    stores: PostgresStores, postgres_url: str
) -> None:
    query(postgres_url, "CREATE TABLE effects (n int)")
    with psycopg.connect(postgres_url) as mine:
        mine.execute("INSERT INTO effects VALUES (1)")
        with stores.atomic(mine) as tx:
            tx.queue(new(b"1"))
        assert tx.joined
        assert bodies(look(stores)) == []
        mine.rollback()
        assert bodies(look(stores)) == []
        mine.execute("INSERT INTO effects VALUES (2)")
        with stores.atomic(mine) as tx:
            tx.queue(new(b"2"))
    assert bodies(look(stores)) == [b"2"]
    assert query(postgres_url, "SELECT n FROM effects") == [(2,)]


def test_put_with_psycopg_and_sqlalchemy(postgres_url: str) -> None:
    address = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool)
    with pxrs.connect(postgres_url) as px:
        with psycopg.connect(postgres_url) as mine, px.transaction(join=mine) as tx:
            tx.put("q", b"psycopg")
        with sqlalchemy.orm.Session(engine) as session:
            session.execute(sqlalchemy.text("SELECT 1"))
            with px.transaction(join=session) as tx:
                tx.put("q", b"rolled back")
            session.rollback()
            session.execute(sqlalchemy.text("SELECT 1"))
            with px.transaction(join=session) as tx:
                tx.put("q", b"alchemy")
            session.commit()
        with px.transaction() as tx:
            found = [item.value for item in tx.take_many("q", 9, timeout=0)]
        assert found == [b"psycopg", b"alchemy"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_goes_on_after_a_put_from_an_old_snapshot(
    stores: PostgresStores, postgres_url: str, level: str
) -> None:
    """It does not see that the front it would wait behind is done."""
    worker = Worker(stores)
    worker.put(b"1", key="k")
    held = worker.take_one()
    with psycopg.connect(postgres_url, autocommit=True) as mine:
        mine.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        mine.execute("SELECT count(*) FROM pxrs.pxrs_queue_items")
        worker.apply(held)
        with stores.atomic(mine) as tx:
            tx.queue(new(b"2", key="k"))
        mine.execute("COMMIT")
    assert worker.take_one().body == b"2"


def test_numbers_of_a_key_are_in_the_order_of_the_commits(
    stores: PostgresStores, open_stores: OpenStores, postgres_url: str
) -> None:
    """Who puts to a key waits for whoever has put to it and not committed yet."""
    other = open_stores()
    stores.queues.apply(new(b"0", key="k"))
    with psycopg.connect(postgres_url) as mine:
        mine.execute("SELECT 1")
        with stores.atomic(mine) as tx:
            tx.queue(new(b"1", key="k"))
        other.queues.apply(new(b"free", key="another"))
        with pytest.raises(psycopg.errors.LockNotAvailable), other.atomic() as held_up:
            held_up.connection.execute("SET LOCAL lock_timeout = '50ms'")
            held_up.connection.execute(
                "SELECT 1 FROM pxrs.pxrs_queue_lanes WHERE lane = 'kk' FOR UPDATE"
            )
    other.queues.apply(new(b"2", key="k"))
    keyed = [item for item in look(stores) if item.key == "k"]
    assert bodies(keyed) == [b"0", b"1", b"2"]


def commit_during(url: str, worker: Worker, items: list[Delivery], change: str) -> None:
    """Commit items while somebody else is changing them: it waits for what becomes of that."""
    with psycopg.connect(url) as other, ThreadPoolExecutor(1) as pool:
        other.execute(f"UPDATE pxrs.pxrs_queue_items SET {change}".encode())
        commit = pool.submit(worker.apply, *items)
        while not query(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            assert not commit.done()
        other.commit()
        commit.result(PATIENCE)


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_freed_at_this_moment_is_not_removed(
    stores: PostgresStores, postgres_url: str, key: str | None
) -> None:
    worker = Worker(stores)
    worker.put(b"1", b"2", key=key)
    items = worker.take(2)
    with pytest.raises(Fenced):
        commit_during(
            postgres_url, worker, items, "state = 0, session = NULL, tx = NULL WHERE body = '1'"
        )
    assert bodies(look(stores)) == [b"1", b"2"]


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_extended_at_this_moment_is_removed(
    stores: PostgresStores, postgres_url: str, key: str | None
) -> None:
    worker = Worker(stores)
    worker.put(b"1", b"2", key=key)
    items = worker.take(2, lock_for=60.0)
    commit_during(postgres_url, worker, items, "deadline = deadline + 1000 WHERE body = '1'")
    assert look(stores) == []


def test_some_of_what_is_held_can_be_removed(stores: PostgresStores) -> None:
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3")
    first, second, third = worker.take(3)
    worker.apply(third, first)
    assert bodies(look(stores)) == [b"2"]
    worker.apply(second)
    assert look(stores) == []


def hold_one(url: str) -> None:
    """Take an item and wait to be killed."""
    with pxrs.connect(url) as px, px.transaction() as tx:
        item = tx.take("q", timeout=PATIENCE)
        say(str(item.value) if item is not None else "nothing")
        wait_for_parent()


def test_a_killed_worker_frees_its_items_at_once(postgres_url: str) -> None:
    """Long before its session would have expired."""
    with pxrs.connect(postgres_url) as px:
        px.put("q", "1")
        child = Child(hold_one, postgres_url)
        assert child.read() == "1"
        child.kill()
        with px.transaction() as tx:
            item = tx.take("q", timeout=PATIENCE)
            assert item is not None
            assert item.deliveries == 2


def test_commits_are_forgotten_and_still_counted(stores: PostgresStores, postgres_url: str) -> None:
    known: tuple[str, ...] = ()
    for number in range(300):
        change = QueueChange(Holder("one", "tx"), (), new(b"").put, f"unit {number}", known)
        stores.queues.apply(change)
        known = (*known, change.unit) if len(known) < 64 else (change.unit,)
    ((kept,),) = query(postgres_url, "SELECT count(*) FROM pxrs.pxrs_queue_commits")
    assert kept <= 64
    stores.queues.reap()
    assert stores.queues.stats("q").put == 300


def delivery(number: int) -> Delivery:
    held = Held("q", number, 1)
    return Delivery(held=held, body=b"", key=None, priority=0, put_ms=1, error="")


def test_a_slow_search_is_not_repeated_all_the_time() -> None:
    scout = Scout()
    for now in (1.0, 2.0):
        assert scout.plan(now).is_whole
        scout.searched(now, 0.1, began_ms=int(1000 * now), pages=100, found=1)
        scout.found([delivery(7)])
    assert scout.plan(2.5) == Plan([0], [7], after=2000)
    scout.shown(5)
    assert scout.plan(2.5) == Plan([0], [4], after=2000)
    assert scout.rest(2.5) == pytest.approx(0.5)
    assert scout.plan(3.0) == Plan(is_thorough=True)
    scout.searched(3.0, 0.1, began_ms=3000, pages=2, found=1)
    assert scout.plan(3.0) == Plan()


def test_a_search_that_stood_still_is_no_reason_to_miss_what_is_below_for_long() -> None:
    scout = Scout()
    rests = []
    for took in (0.2, 0.2, 600, 0.1, 600, 600):
        scout.searched(0.0, took, began_ms=0, pages=100, found=1)
        rests.append(scout.rest(0.0))
    assert rests == pytest.approx([0, 2, 2, 1, 1, 5])


def test_what_a_lost_session_never_did_is_known_for_a_while(
    stores: PostgresStores, open_stores: OpenStores, postgres_url: str
) -> None:
    """As long as nothing that it did is forgotten. A late one is refused."""
    other, worker = open_stores(), Worker(stores)
    stores.queues.apply(QueueChange(worker.holder, (), new(b"1").put, "unit"))
    query(postgres_url, "UPDATE pxrs.pxrs_sessions SET deadline = clock_timestamp()")
    assert other.queues.outcome(worker.session.id, "late") is Outcome.NEVER
    worker.session.close()
    assert other.queues.outcome(worker.session.id, "later") is Outcome.NEVER
    for late in ("late", "later"):
        with pytest.raises(Fenced):
            stores.queues.apply(QueueChange(worker.holder, (), new(b"2").put, late))
    query(postgres_url, "UPDATE pxrs.pxrs_queue_commits SET at = 'epoch', ended = 'epoch'")
    open_stores().queues.reap()
    assert other.queues.outcome(worker.session.id, "unit") is Outcome.DONE
    query(postgres_url, "UPDATE pxrs.pxrs_ended_sessions SET at = 'epoch'")
    open_stores().queues.reap()
    assert other.queues.outcome(worker.session.id, "unit") is Outcome.UNKNOWN
    assert bodies(look(stores)) == [b"1"]
    assert stores.queues.stats("q").put == 1


def test_no_name_of_a_queue_is_kept_for_ever(
    stores: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_QUEUES", 4)
    worker = Worker(stores)
    for number in range(20):
        worker.take(1, f"queue {number}")
    assert len(stores.queues._scouts) <= 5
    assert len(stores.queues._next_sweep) <= 5
