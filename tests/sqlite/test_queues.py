"""Queues on SQLite where its own ways matter: files, processes, the caller's transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.core.queue import REMEMBERED_FOR
from pxrs.errors import Fenced, InsideTransaction
from pxrs.stores.connections import Lent
from pxrs.stores.sqlite.queues import reaper, store
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance.queue_tools import Worker, bodies, look, states_of
from pxrs.types import Holder, ItemState, NewItem, Outcome, QueueChange

pytestmark = pytest.mark.engine("sqlite")

TABLES = ("queues", "queue_items", "queue_bodies", "queue_seen")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.3)
    yield stores
    stores.close()


@pytest.fixture
def mine(stores: SqliteStores, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None, timeout=0.3)
    mine.execute("CREATE TABLE orders (id)")
    yield mine
    mine.close()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def timed(tmp_path: Path, clock: VirtualClock) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "t.db"), clock=clock)
    yield stores
    stores.close()


# In the caller's own transaction


@pytest.mark.parametrize("commits", [True, False])
def test_a_change_lands_or_goes_with_the_callers_transaction(
    stores: SqliteStores, mine: sqlite3.Connection, commits: bool
) -> None:
    worker = Worker(stores)
    worker.put(b"work")
    held = worker.take_one().held
    mine.execute("BEGIN")
    mine.execute("INSERT INTO orders VALUES (1)")
    with stores.atomic(mine) as tx:
        new = NewItem(queue="p", body=bytes(5000), dedupe="d", dedupe_window=60.0)
        tx.queue(QueueChange(worker.holder, (held,), (new,), "unit"))
    assert len(tx.queued) == 1
    assert states_of(stores) == {b"work": ItemState.HELD}
    mine.execute("COMMIT" if commits else "ROLLBACK")
    orders = mine.execute("SELECT count(*) FROM orders").fetchone()[0]
    assert orders == commits
    assert (look(stores) == []) == commits
    assert [len(item.body) for item in look(stores, "p")] == ([5000] if commits else [])
    found = stores.queues.outcome(worker.session.id, "unit")
    assert found is (Outcome.DONE if commits else Outcome.NEVER)
    if not commits:
        assert worker.apply(remove=[held], put=[new]) == [1]


def test_a_refused_change_leaves_the_callers_transaction_as_it_was(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    worker = Worker(stores)
    worker.put(b"1", b"2")
    first, second = worker.take(2)
    worker.release(second)
    mine.execute("BEGIN")
    mine.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(Fenced), stores.atomic(mine) as tx:
        new = NewItem(queue="p", body=b"new")
        tx.queue(QueueChange(worker.holder, (first.held, second.held), (new,)))
    mine.execute("COMMIT")
    assert mine.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    assert states_of(stores) == {b"1": ItemState.HELD, b"2": ItemState.READY}
    assert stores.queues.find("p") is None


def test_calls_inside_an_open_transaction_say_so(
    stores: SqliteStores, mine: sqlite3.Connection
) -> None:
    worker = Worker(stores)
    worker.put(b"1")
    for connection in (None, Lent(mine)):
        with stores.atomic(connection):
            for call in (worker.take, worker.apply, lambda: worker.put(b"2")):
                with pytest.raises(InsideTransaction):
                    call()
    assert bodies(look(stores)) == [b"1"]


# Upkeep of its own


def test_a_late_front_is_not_followed_before_anybody_has_looked(
    timed: SqliteStores, clock: VirtualClock
) -> None:
    worker = Worker(timed)
    worker.put(b"1", b"2", b"3", key="k")
    worker.put(b"other")
    worker.take_one(lock_for=0.05)
    clock.advance(0.06)
    assert bodies(worker.take(1)) == [b"other"]
    assert [(item.body, item.held.delivery) for item in worker.take(1)] == [(b"1", 2)]


def test_a_busy_queue_does_not_keep_another_from_being_looked_after(
    timed: SqliteStores, clock: VirtualClock
) -> None:
    mortal, worker = Worker(timed), Worker(timed)
    mortal.put(b"lost", key="k", queue="b")
    mortal.take_one("b")
    for queue in ("a", "b"):
        worker.put(*[b"fine"] * 50, queue=queue)
    mortal.session.close()
    got: list[bytes] = []
    for _ in range(20):
        clock.advance(0.11)
        worker.take_one("a")
        got.append(worker.take_one("b").body)
    assert b"lost" in got


def test_units_are_forgotten_with_their_session_in_the_end(
    timed: SqliteStores, clock: VirtualClock
) -> None:
    ended, living = timed.coord.session(60.0), timed.coord.session(86_000.0)
    for session in (ended, living):
        for number in range(200):
            timed.queues.apply(QueueChange(Holder(session.id, "tx"), (), (), f"unit {number}"))
    assert count(timed, "queue_units") == 400
    ended.close()
    timed.queues.reap()
    clock.advance(REMEMBERED_FOR - 1)
    timed.queues.reap()
    assert count(timed, "queue_units") == 400
    clock.advance(1)
    timed.queues.reap()
    assert count(timed, "queue_units") == 200
    assert timed.queues.outcome(living.id, "unit 0") is Outcome.DONE


def test_programs_that_are_killed_each_time_leave_no_more_and_more(tmp_path: Path) -> None:
    """None lives for long: it is seen once that the one before is over, and that counts for all."""
    clock, opened = VirtualClock(), list[SqliteStores]()
    ids: list[str] = []
    for number in range(40):
        stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
        opened.append(stores)
        session = stores.coord.session(10.0)
        ids.append(session.id)
        stores.queues.reap()
        for unit in ("1", "2", "3"):
            stores.queues.apply(QueueChange(Holder(session.id, "tx"), (), (), unit))
        if number >= 9:
            # It can still be asked after by whoever may, for as long as ever.
            assert stores.queues.outcome(ids[number - 9], "1") is Outcome.DONE
        session.forget()  # What a kill leaves of it: a file that nobody has locked.
        clock.advance(60)
    assert count(stores, "queue_units") <= 3 * (REMEMBERED_FOR / 60 + 2)
    assert count(stores, "queue_ended") <= REMEMBERED_FOR / 60 + 2
    clock.advance(REMEMBERED_FOR)
    stores.queues.reap()
    clock.advance(REMEMBERED_FOR)
    stores.queues.reap()
    assert count(stores, "queue_units") == count(stores, "queue_ended") == 0
    for stores in opened:
        stores.close()


def test_a_host_that_starts_again_forgets_no_sooner(tmp_path: Path) -> None:
    clock = VirtualClock(monotonic=1e6)
    stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
    session = stores.coord.session(10.0)
    stores.queues.apply(QueueChange(Holder(session.id, "tx"), (), (), "unit"))
    session.close()
    stores.queues.reap()
    stores.close()
    clock = VirtualClock(monotonic=1.0)
    stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
    for seconds, left in [(0.0, 1), (REMEMBERED_FOR - 1, 1), (1.0, 0)]:
        clock.advance(seconds)
        stores.queues.reap()
        assert count(stores, "queue_units") == left, seconds
    stores.close()


def test_nothing_is_left_of_what_is_gone(stores: SqliteStores) -> None:
    worker = Worker(stores)
    for queue in ("a", "b"):
        item = NewItem(queue=queue, body=bytes(9000), key="k", dedupe="d", dedupe_window=60.0)
        worker.apply(put=[item, NewItem(queue=queue, body=bytes(9000), delay=60.0)])
        worker.put(*[bytes(3000)] * 4, queue=queue)
        worker.take(2, queue)
    worker.apply(*worker.take(1, "a"))
    stores.queues.purge("a", tuple(ItemState))
    assert count(stores, "queue_bodies") == 6
    for queue in ("a", "b"):
        stores.queues.delete(queue)
    assert [count(stores, table) for table in TABLES] == [0] * len(TABLES)


def count(stores: SqliteStores, table: str) -> int:
    with stores.database.reading() as connection:
        number: int = connection.execute(f"SELECT count(*) FROM pxrs_{table}").fetchone()[0]
    return number


def test_no_name_of_a_queue_is_kept_for_ever(
    stores: SqliteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_QUEUES", 4)
    monkeypatch.setattr(reaper, "_MOST_QUEUES", 4)
    worker = Worker(stores)
    for number in range(20):
        worker.put(b"", queue=f"queue {number}")
        assert len(worker.take(2, f"queue {number}")) == 1
        assert worker.take(1, f"queue {number}") == []
    kept = (stores.queues._found_empty, stores.queues._reaper._next_reap)
    assert max(map(len, kept)) <= 5
