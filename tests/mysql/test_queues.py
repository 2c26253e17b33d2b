"""Queues on MariaDB when it goes wrong: lost answers, deadlocks, old tables."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import sqlalchemy
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.orm import Session

import pxrs
from pxrs.errors import OutcomeUnknown, SchemaMismatch, StoreUnavailable, TransactionConflict
from pxrs.stores.mysql.queues import store
from pxrs.stores.mysql.stores import SqlStores
from pxrs.testing.conformance.queue_tools import HELD, Worker, bodies, look, states_of
from pxrs.testing.conformance.tools import put, value_of
from pxrs.types import Holder, NewItem, Outcome, QueueChange
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent
from support.proxy import Proxy
from support.sql import SqlPlace, open_sql

pytestmark = pytest.mark.engine("mariadb")


def test_a_change_without_an_answer_can_be_asked_after(place: SqlPlace) -> None:
    """The connection breaks at each of its requests: what `applied` says is what is there."""
    url = sqlalchemy.make_url(place.url)
    direct = place.open()
    found: list[tuple[bool, bool]] = []
    with Proxy(url.port or 0) as proxy, ThreadPoolExecutor(1) as pool:
        stores = place.open(url.set(port=proxy.port).render_as_string(hide_password=False))
        Worker(stores).put(b"first")
        for request in range(1, 6):
            worker = Worker(stores)
            watch = direct.queues.watch("q")
            proxy.hold_answers_to(request)
            new = NewItem(queue="q", body=b"%d" % request)
            job = pool.submit(stores.queues.apply, QueueChange(worker.holder, (), (new,), "unit"))
            proxy.await_request()
            while request == 5 and b"5" not in bodies(look(direct)):
                # It is the commit, and the server has it.
                assert watch.wait(PATIENCE)
            proxy.reset()
            proxy.heal()
            error = job.exception(PATIENCE)
            assert isinstance(error, (StoreUnavailable, OutcomeUnknown))
            there = b"%d" % request in bodies(look(direct))
            became = direct.queues.outcome(worker.session.id, "unit")
            assert became is (Outcome.DONE if there else Outcome.NEVER)
            found.append((isinstance(error, OutcomeUnknown), there))
            Worker(stores).put(b"again")
            watch.close()
        stores.close()
    assert found == [(False, False)] * 4 + [(True, True)]


def test_a_deadlock_with_the_callers_rows_is_a_conflict(place: SqlPlace) -> None:
    """A transaction of the caller's waits for pxrs' rows, and somebody for the caller's."""
    place.query("CREATE TABLE orders (n INT PRIMARY KEY, m INT) ENGINE=InnoDB")
    place.query("INSERT INTO orders VALUES " + ",".join(f"({n}, 0)" for n in range(1, 101)))
    stores = place.open()
    stores.queues.create("q")
    locked = threading.Barrier(2)

    def enqueue() -> None:
        with Session(place.engine) as session:
            session.execute(sqlalchemy.text("SELECT * FROM orders WHERE n = 1 FOR UPDATE"))
            locked.wait(PATIENCE)
            with stores.atomic(session) as tx:
                new = NewItem(queue="q", body=b"never")
                tx.queue(QueueChange(Worker(stores).holder, (), (new,)))

    with ThreadPoolExecutor(1) as pool, place.engine.begin() as other:
        # The one who has changed more is spared.
        other.exec_driver_sql("UPDATE orders SET m = 1 WHERE n > 1")
        other.exec_driver_sql("SELECT * FROM pxrs_queues FOR UPDATE")
        job = pool.submit(enqueue)
        locked.wait(PATIENCE)
        other.exec_driver_sql("UPDATE orders SET m = 1 WHERE n = 1")
        with pytest.raises(TransactionConflict) as caught:
            job.result(PATIENCE)
    assert caught.value.retryable
    assert look(stores) == []
    place.query("DROP TABLE orders")


def test_changes_that_cross_lock_in_one_order(place: SqlPlace) -> None:
    """From a to b and from b to a, with keys, at once: nothing is lost and nobody is refused."""
    stores = [place.open() for _ in range(4)]
    for queue in ("a", "b"):
        for key in ("x", "y", None):
            Worker(stores[0]).put(b"1", b"2", queue=queue, key=key)

    def move(handle: SqlStores, source: str, target: str) -> None:
        worker = Worker(handle)
        for _ in range(8):
            items = worker.take(2, source)
            new = [NewItem(queue=target, body=item.body, key=item.key) for item in items]
            again = [NewItem(queue=source, body=b"more") for _ in items[1:]]
            worker.apply(*items, put=[*reversed(new), *again])

    with ThreadPoolExecutor(4) as pool:
        ways = [("a", "b"), ("b", "a")] * 2
        for job in [pool.submit(move, h, *way) for h, way in zip(stores, ways, strict=True)]:
            job.result(2 * PATIENCE)
    left = [item.body for queue in ("a", "b") for item in look(stores[0], queue)]
    assert sorted(body for body in left if body != b"more") == sorted([b"1", b"2"] * 6)
    stats = [stores[0].queues.stats(queue) for queue in ("a", "b")]
    assert sum(each.put - each.done for each in stats) == len(left)


@pytest.mark.parametrize(("level", "key"), [("REPEATABLE READ", None), ("READ COMMITTED", "k")])
def test_two_who_put_in_transactions_of_their_own_wait_for_each_other(
    place: SqlPlace, level: IsolationLevel, key: str | None
) -> None:
    """Neither holds what the other needs before it waits: nobody is a deadlock's victim."""
    stores = place.open()
    engine = place.engine.execution_options(isolation_level=level)
    for name in ("a", "b"):
        stores.queues.create(name)

    def enqueue(first: str, second: str) -> None:
        for number in range(10):
            with Session(engine) as session:
                session.execute(sqlalchemy.text("SELECT COUNT(*) FROM pxrs_queue_items")).all()
                with stores.atomic(session) as tx:
                    names = (first, second) if number % 2 else (first,)
                    new = tuple(NewItem(queue=name, body=b"1", key=key) for name in names)
                    tx.queue(QueueChange(Holder("no session", f"{first} {number}"), (), new))
                session.commit()

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(enqueue, *names) for names in (("a", "b"), ("b", "a"))]:
            job.result(2 * PATIENCE)
    assert [stores.queues.stats(name).depth for name in ("a", "b")] == [15, 15]
    ready = 15 if key is None else 1
    assert [stores.queues.stats(name).ready for name in ("a", "b")] == [ready, ready]


def take_and_wait(url: str) -> None:
    """Hold an item until killed."""
    stores = open_sql(url)
    worker = Worker(stores, stores.coord.session(1.0))
    say(worker.take_one().body.decode())
    wait_for_parent()


def test_what_a_killed_worker_held_is_handed_out_again(place: SqlPlace) -> None:
    stores = place.open()
    worker = Worker(stores)
    worker.put(b"1", b"2", key="k")
    child = Child(take_and_wait, place.url)
    assert child.read() == "1"
    watch = stores.queues.watch("q")
    child.kill()
    while not (items := worker.take(1)):
        assert watch.wait(PATIENCE)
    assert [(item.body, item.held.delivery) for item in items] == [(b"1", 2)]
    watch.close()


def test_a_putter_in_a_long_transaction_holds_up_no_taker(place: SqlPlace) -> None:
    """Whoever takes skips what is locked, queues too."""
    stores = place.open()
    worker = Worker(stores)
    worker.put(b"1", b"2")
    with Session(place.engine) as session:
        session.execute(sqlalchemy.text("SELECT 1 FROM pxrs_meta")).all()
        with stores.atomic(session) as tx:
            new = NewItem(queue="q", body=b"3")
            tx.queue(QueueChange(Worker(stores).holder, (), (new,)))
        worker.apply(*worker.take(2))
        session.rollback()
    assert look(stores) == []


def test_workers_share_a_queue_through_the_front_door(place: SqlPlace) -> None:
    """`connect("mariadb://…")`: units of work, a listener, priorities and dead letters."""
    url = sqlalchemy.make_url(place.url).set(drivername="mariadb")
    with pxrs.connect(url.render_as_string(hide_password=False)) as px:
        with px.transaction() as tx:
            for number in range(10):
                tx.put("inbox", f"{number}")
        with px.transaction() as tx:
            item = tx.take("inbox", 5.0)
            assert item is not None
            tx.put("outbox", f"Hello, {item.value!s}")
        with suppress(ZeroDivisionError), px.transaction() as tx:
            assert tx.take("inbox", 5.0) is not None
            raise ZeroDivisionError
        assert [px.stores.queues.stats(name).depth for name in ("inbox", "outbox")] == [9, 1]


def test_tables_of_the_first_version_get_queues(mariadb_url: str) -> None:
    place = SqlPlace(mariadb_url)
    old = open_sql(mariadb_url)
    put(old.coord, "k", b"kept")
    old.close()
    newer = ("queues", "queue_items", "queue_commits", "queue_seen", "identity")
    for table in newer:
        place.query(f"DROP TABLE pxrs_{table}")
    place.query("UPDATE pxrs_meta SET schema_version = 1")
    stores = place.open()
    worker = Worker(stores)
    worker.put(b"1")
    worker.take_one()
    assert (states_of(stores), value_of(stores.coord, "k")) == ({b"1": HELD}, b"kept")
    place.query("UPDATE pxrs_meta SET schema_version = 99")
    with pytest.raises(SchemaMismatch):
        open_sql(mariadb_url)
    place.close()


def test_who_asks_what_it_holds_waits_for_nobody_elses_removal(place: SqlPlace) -> None:
    """Another holder's transaction, which may last; and for its own take it does wait."""
    stores, other = place.open(), place.open()
    worker, busy = Worker(stores), Worker(other)
    worker.put(*(b"%d" % number for number in range(5)))
    mine = worker.take(2)
    removed = busy.take_one()
    with Session(place.engine) as session, ThreadPoolExecutor(1) as pool:
        with other.atomic(session) as tx:
            tx.queue(QueueChange(busy.holder, (removed.held,)))
        began = time.monotonic()
        assert stores.queues.held("q", worker.holder, "unit") == mine
        assert time.monotonic() - began < PATIENCE / 2
        session.commit()
        # As a take does that is about to be committed.
        session.execute(
            sqlalchemy.text(
                "UPDATE pxrs_queue_items SET state = 2, deliveries = 1, session_id = :session,"
                " tx = :tx WHERE state = 0"
            ),
            {"session": worker.holder.session, "tx": worker.holder.transaction},
        )
        answer = pool.submit(stores.queues.held, "q", worker.holder, "another")
        waiting = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        while not place.query(waiting):
            if answer.done():
                # Two waited for each other, and the server chose this one: it is asked again.
                assert isinstance(answer.exception(), TransactionConflict)
                answer = pool.submit(stores.queues.held, "q", worker.holder, "another")
        session.commit()
        assert len(answer.result(PATIENCE)) == 4


def test_what_nobody_can_ask_after_goes_by_itself(place: SqlPlace) -> None:
    """Units without a name, of sessions that live: what they did stays counted."""
    stores = place.open()
    worker = Worker(place.open())
    worker.put(b"1", b"2")
    for delivery in worker.take(2):
        worker.queues.apply(QueueChange(worker.holder, (delivery.held,), (), ""))
    left = "SELECT count(*) FROM pxrs_queue_commits WHERE session_id = '-'"
    assert place.query(left) == [(2,)]
    stores.queues.reap()
    # So long ago was it first seen, by the server's clock.
    place.query("UPDATE pxrs_queue_commits SET n = n - 600000 WHERE tx = '(ended)'")
    place.open().queues.reap()
    assert place.query(left) == [(0,)]
    assert stores.queues.stats("q").done == 2


def test_programs_that_are_killed_each_time_leave_no_more_and_more(place: SqlPlace) -> None:
    """None lives for long: that the one before is over is noted, by the server's clock."""
    ids: list[str] = []
    for _ in range(3):
        stores = place.open()
        session = stores.coord.session(60.0)
        ids.append(session.id)
        stores.queues.reap()
        stores.queues.apply(QueueChange(Holder(session.id, "tx"), (), (), "unit"))
        # It was killed, and its time is over.
        place.query(f"DELETE FROM pxrs_sessions WHERE id = '{session.id}'")
    assert units_of(place) == set(ids)
    # So long ago was it seen of the first: but for the time, all is as ever.
    place.query(
        "UPDATE pxrs_queue_commits SET n = n - 600000 "
        f"WHERE tx = '(ended)' AND session_id = '{ids[0]}'"
    )
    stores = place.open()
    stores.queues.reap()
    assert units_of(place) == {*ids[1:]}
    assert stores.queues.outcome(ids[1], "unit") is Outcome.DONE
    place.query("UPDATE pxrs_queue_commits SET n = n - 600000 WHERE tx = '(ended)'")
    place.open().queues.reap()
    assert place.query("SELECT tx FROM pxrs_queue_commits") == []


def units_of(place: SqlPlace) -> set[str]:
    rows = place.query("SELECT session_id FROM pxrs_queue_commits WHERE tx = 'unit'")
    return {session for (session,) in rows}


def test_no_name_of_a_queue_is_kept_for_ever(
    place: SqlPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_QUEUES", 4)
    stores = place.open()
    worker = Worker(stores)
    for number in range(20):
        worker.take(1, f"queue {number}")
    assert len(stores.queues._next_free) <= 5
