"""One transaction of MariaDB across coordination, queues and the caller's own tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

import pxrs
from pxrs.errors import CommitConflict, Fenced, InvalidRequest, NotAtomic
from pxrs.stores.connections import Lent
from pxrs.testing.conformance.log import HERE
from pxrs.testing.conformance.queue_tools import HELD, READY, Worker, bodies, look, states_of
from pxrs.testing.conformance.tools import batch, put, value_of
from pxrs.types import Check, Holder, NewItem, Outcome, Put, QueueChange, Release
from support.child import PATIENCE
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")

_INSERT = sqlalchemy.text("INSERT INTO orders VALUES (:n)")


@pytest.fixture
def orders(place: SqlPlace) -> Iterator[SqlPlace]:
    """With a table of the caller's own."""
    place.query("CREATE TABLE orders (n INT PRIMARY KEY) ENGINE=InnoDB")
    yield place
    place.query("DROP TABLE orders")


def found(place: SqlPlace) -> list[int]:
    return [row[0] for row in place.query("SELECT n FROM orders ORDER BY n")]


def test_everything_commits_together_or_not_at_all(orders: SqlPlace) -> None:
    stores, other = orders.open(), orders.open()
    version = put(stores.coord, "k", b"old")
    worker = Worker(stores)
    worker.put(b"work")
    held = worker.take_one().held
    change = QueueChange(worker.holder, (held,), (NewItem(queue="p", body=b"new"),), "unit")
    with pytest.raises(CommitConflict), stores.atomic() as tx:
        tx.connection.execute("INSERT INTO orders VALUES (1)")
        tx.check(Check("k", version + 99))
        tx.queue(change)
    with pytest.raises(Fenced), stores.atomic() as tx:
        tx.connection.execute(_INSERT, {"n": 1})
        tx.write(Put("k", b"never"))
        tx.queue(QueueChange(worker.holder, (held._replace(delivery=7),), (), "fenced"))
    assert (found(orders), value_of(other.coord, "k")) == ([], b"old")
    assert states_of(other) == {b"work": HELD}
    assert other.queues.outcome(worker.session.id, "fenced") is Outcome.NEVER
    records, items = other.coord.watch("k"), other.queues.watch("p")
    with stores.atomic() as tx:
        tx.connection.execute(_INSERT, {"n": 2})
        tx.check(Check("k", version))
        tx.write(Put("k", b"new"))
        tx.queue(change)
    assert records.wait(PATIENCE)
    assert items.wait(PATIENCE)
    assert (found(orders), value_of(other.coord, "k")) == ([2], b"new")
    assert (look(other), bodies(look(other, "p"))) == ([], [b"new"])
    assert tx.queued == [look(other, "p")[0].id]
    assert tx.versions["k"] > version
    assert other.queues.outcome(worker.session.id, "unit") is Outcome.DONE


def test_an_item_is_put_with_the_callers_own_rows(orders: SqlPlace) -> None:
    """Transactional enqueue: inside a transaction that the caller begins and ends."""
    px = pxrs.connect(orders.url)
    for ends, expected in (("rollback", []), ("commit", [b"1"])):
        with Session(orders.engine) as session:
            session.execute(_INSERT, {"n": 1})
            with px.transaction(join=session) as tx:
                tx.put("q", "1")
            assert px.stores.queues.peek("q") == []
            getattr(session, ends)()
        assert len(px.stores.queues.peek("q")) == len(expected) == len(found(orders))
    px.close()


def test_a_session_that_is_idle_is_committed(orders: SqlPlace) -> None:
    stores = orders.open()
    with Session(orders.engine) as session:
        with stores.atomic(Lent(session)) as tx:
            session.execute(_INSERT, {"n": 3})
            tx.write(Put("k", b"1"))
        assert not tx.joined
    assert (found(orders), value_of(stores.coord, "k")) == ([3], b"1")


def test_an_old_snapshot_does_not_strand_a_key(orders: SqlPlace) -> None:
    """The caller's transaction still sees a front that is gone: what it puts shows all the same."""
    stores = orders.open()
    worker = Worker(stores)
    worker.put(b"front", key="k")
    item = worker.take_one()
    with Session(orders.engine) as session:
        assert session.execute(sqlalchemy.text("SELECT COUNT(*) FROM pxrs_queue_items")).scalar()
        worker.apply(item)
        opened_later = Worker(stores)
        with stores.atomic(session) as tx:
            new = NewItem(queue="q", body=b"next", key="k")
            tx.queue(QueueChange(opened_later.holder, (), (new,)))
            tx.write(Put("mine", b"1", opened_later.session.id))
        assert tx.joined
        session.commit()
    assert states_of(stores) == {b"next": READY}
    assert value_of(stores.coord, "mine") == b"1"


def test_what_fails_inside_leaves_the_callers_transaction_alone(orders: SqlPlace) -> None:
    stores = orders.open()
    version = put(stores.coord, "k", b"old")
    with Session(orders.engine) as session:
        session.execute(_INSERT, {"n": 4})
        with pytest.raises(CommitConflict), stores.atomic(session) as tx:
            tx.check(Check("k", version + 99))
            tx.write(Put("k", b"never"))
        session.commit()
    assert (found(orders), value_of(stores.coord, "k")) == ([4], b"old")


def test_a_checkpoint_commits_with_the_handlers_rows(orders: SqlPlace) -> None:
    """Messages elsewhere, effects and checkpoint here: together, or handed out again."""
    with pxrs.connect("memory://", coord=orders.url) as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "7").result(PATIENCE)
        with px.consumer("orders", group="g", auto_commit=False) as consumer:
            for fails in (True, False):
                (message,) = consumer.poll(timeout=PATIENCE)
                with (
                    suppress(ZeroDivisionError),
                    Session(orders.engine) as session,
                    consumer.transaction(commits=session),
                ):
                    session.execute(_INSERT, {"n": int(message.value)})
                    if fails:
                        raise ZeroDivisionError
                assert found(orders) == ([] if fails else [7])
            with pytest.raises(NotAtomic), consumer.transaction() as tx:
                tx.execute("INSERT INTO orders VALUES (8)")
                tx.send("orders", "never")
        assert px.groups.describe("g").partitions[0].checkpoint == 1
    assert found(orders) == [7]


def test_keys_are_the_same_whatever_character_set_a_caller_has(orders: SqlPlace) -> None:
    url = sqlalchemy.make_url(orders.url)
    stores = orders.open()
    place = {"host": url.host, "port": url.port or 0, "user": url.username}
    caller = pymysql.connect(**place, database=url.database, charset="latin1")
    with stores.atomic(caller) as tx:
        new = NewItem(queue="q", body=b"1", key="ключ ä")
        tx.queue(QueueChange(Worker(stores).holder, (), (new,)))
        tx.write(Put("ключ ä", b"2"))
    caller.commit()
    caller.close()
    assert [item.key for item in look(stores)] == ["ключ ä"]
    assert value_of(stores.coord, "ключ ä") == b"2"


def test_what_can_not_be_joined_is_refused(place: SqlPlace, mariadb_url: str) -> None:
    stores = place.open()
    elsewhere = sqlalchemy.create_engine(mariadb_url, poolclass=sqlalchemy.NullPool)
    with (
        elsewhere.connect() as connection,
        pytest.raises(NotAtomic, match="not one to"),
        stores.atomic(connection),
    ):
        pass
    url = sqlalchemy.make_url(place.url)
    driver = pymysql.connect(host=url.host, port=url.port or 0, user=url.username)
    with pytest.raises(NotAtomic, match="SQLAlchemy"), stores.atomic(Lent(driver)):
        pass
    with pytest.raises(NotAtomic, match="not one to"), stores.atomic(driver):
        pass
    with pytest.raises(NotAtomic, match="PyMySQL"), stores.atomic(object()):
        pass
    driver.close()
    with pytest.raises(NotAtomic, match="keeps no messages"), stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
    with pytest.raises(InvalidRequest, match="ended inside"), stores.atomic() as tx:
        tx.connection.rollback()
        tx.write(Put("k", b"1"))
    assert stores.coord.list("") == []


def test_a_joined_commit_that_is_fenced_waits_for_no_lock_of_its_caller(
    orders: SqlPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InnoDB keeps the removed item locked, although the savepoint was rolled back to."""
    px, other = pxrs.connect(orders.url), pxrs.connect(orders.url)
    release, released_by = px.stores.queues.release, list[str]()

    def noted(holder: Holder, releases: Sequence[Release]) -> None:
        released_by.append(threading.current_thread().name)
        release(holder, releases)

    monkeypatch.setattr(px.stores.queues, "release", noted)
    px.put("q", "mine")
    px.put("q", "late")
    with Session(orders.engine) as session, ThreadPoolExecutor(1, "caller") as pool:
        tx = px.begin(join=session)
        assert tx.take("q", PATIENCE) is not None
        assert tx.take("q", PATIENCE, lock_for=0.01) is not None
        with other.begin() as theirs:
            assert theirs.take("q", PATIENCE) is not None
            # With nothing before the savepoint, to roll back to it would end the transaction.
            session.execute(_INSERT, {"n": 1})
            job = pool.submit(tx.commit)
            try:
                with pytest.raises(Fenced):
                    job.result(PATIENCE)
            finally:
                session.rollback()
        with other.begin() as theirs:
            assert theirs.take("q", PATIENCE) is not None
            assert theirs.take("q", PATIENCE) is not None
    assert not any(name.startswith("caller") for name in released_by)
    px.close()
    other.close()


def _await_lock_wait(orders: SqlPlace) -> None:
    # Not INNODB_TRX: who reads that often reads the same for ever.
    while "LOCK WAIT" not in str(orders.query("SHOW ENGINE INNODB STATUS")):
        pass


def _at_read_committed(orders: SqlPlace) -> sqlalchemy.Engine:
    """Where the caller reads from a snapshot, its joined commit itself locks the queue."""
    return orders.engine.execution_options(isolation_level="READ COMMITTED")


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_who_waits_for_the_callers_commit_stops_no_put(orders: SqlPlace, ends: str) -> None:
    """Giving back what a joined commit may have removed waits for the item, and locks no queue."""
    stores, other = orders.open(), orders.open()
    worker, putter = Worker(stores), Worker(other)
    worker.put(b"item")
    item = worker.take_one()
    with Session(_at_read_committed(orders)) as session, ThreadPoolExecutor(1) as pool:
        with stores.atomic(session) as tx:
            tx.queue(QueueChange(worker.holder, (item.held,)))
        job = pool.submit(worker.release, item)
        try:
            _await_lock_wait(orders)
            putter.put(b"another")
            assert not job.done()
        finally:
            getattr(session, ends)()
        job.result(PATIENCE)
    left = {b"another": READY}
    assert states_of(other) == (left if ends == "commit" else {b"item": READY, **left})


def test_to_free_an_item_nobody_waits_for_the_callers_commit(orders: SqlPlace) -> None:
    """Its hold runs out while the caller's transaction, which has removed it, is still open."""
    stores, other = orders.open(), orders.open()
    worker, sweeper = Worker(stores), Worker(other)
    worker.put(b"item")
    [item] = stores.queues.take("q", worker.holder, 1, lock_for=2.0).items
    ran_out = (
        "SELECT 1 FROM pxrs_queue_items WHERE due_ms <= ROUND(1000 * UNIX_TIMESTAMP(SYSDATE(3)))"
    )
    with Session(_at_read_committed(orders)) as session:
        with stores.atomic(session) as tx:
            tx.queue(QueueChange(worker.holder, (item.held,)))
        while not orders.query(ran_out):
            pass
        other.queues.reap()
        sweeper.put(b"another")
        assert bodies(sweeper.take(2)) == [b"another"]
        session.rollback()
    assert bodies(sweeper.take(2)) == [b"item"]


def test_a_take_waits_for_no_transaction_of_a_caller(orders: SqlPlace) -> None:
    """Neither for an item that one removes, nor for one that it puts behind those taken."""
    worker, other = Worker(orders.open()), Worker(orders.open())
    other.put(b"theirs")
    theirs = other.take_one()
    worker.put(b"1", b"2", key="a")
    assert bodies(worker.take(1)) == [b"1"]
    with Session(_at_read_committed(orders)) as session:
        with other.stores.atomic(session) as tx:
            new = NewItem(queue="q", body=b"3", key="a")
            tx.queue(QueueChange(other.holder, (theirs.held,), (new,)))
        assert bodies(worker.take(3)) == [b"2"]
        session.commit()
    assert bodies(worker.take(3)) == [b"3"]
