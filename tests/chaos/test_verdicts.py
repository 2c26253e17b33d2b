"""What a unit of work was told holds, whatever happens to the server and to its connections.

`PXRS_ROUNDS=100 ./run test tests/chaos/test_verdicts.py` attacks for longer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import sqlalchemy

import pxrs
from pxrs.chance import CHANCE
from pxrs.errors import OutcomeUnknown, TransactionConflict
from pxrs.testing.conformance.queue_tools import Worker, bodies, look
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.postgres import query
from support.proxy import Proxy
from support.sql import SqlPlace
from support.verdicts import QUEUE, TABLE, Attacked

pytestmark = pytest.mark.thorough

postgres = pytest.mark.engine("postgres")
mariadb = pytest.mark.engine("mariadb")
ROUNDS = int(os.environ.get("PXRS_ROUNDS", "3"))


@postgres
def test_a_crashed_server_does_not_make_a_unit_lie(new_engine: NewEngine) -> None:
    """A crash loses commits that were never flushed, and gives their numbers to others."""
    engine = new_engine("postgres")
    query(engine.url, TABLE)
    with pxrs.connect(engine.url) as px:
        attacked = Attacked(px)
        for _ in range(ROUNDS):
            attacked.await_progress()
            engine.kill()
            engine.restart()
        attacked.await_progress()
        attacked.finish()
        attacked.judge(lambda: {name for (name,) in query(engine.url, "SELECT name FROM units")})


@postgres
def test_cut_connections_do_not_make_a_unit_lie_on_postgresql(postgres_url: str) -> None:
    query(postgres_url, TABLE)
    place, _, database = postgres_url.rpartition("/")
    with (
        Proxy(int(place.rpartition(":")[2])) as proxy,
        pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as px,
    ):
        cut_while_working(px, proxy).judge(
            lambda: {name for (name,) in query(postgres_url, "SELECT name FROM units")}
        )


@mariadb
def test_cut_connections_do_not_make_a_unit_lie_on_mariadb(mariadb_url: str) -> None:
    place = SqlPlace(mariadb_url)
    place.query(TABLE)
    url = sqlalchemy.make_url(place.url)
    with Proxy(url.port or 0) as proxy:
        far = url.set(port=proxy.port).render_as_string(hide_password=False)
        with pxrs.connect(far) as px:
            cut_while_working(px, proxy).judge(
                lambda: {name for (name,) in place.query("SELECT name FROM units")}
            )
    place.query("DROP TABLE units")
    place.close()


def cut_while_working(px: pxrs.Pxrs, proxy: Proxy) -> Attacked:
    attacked = Attacked(px)
    for _ in range(5 * ROUNDS):
        attacked.await_progress(CHANCE.randint(1, 100))
        if CHANCE.random() < 0.5:
            # What is asked now is done, and the answers are lost. Maybe all wait for one already.
            proxy.hold_answers()
            with suppress(AssertionError):
                proxy.await_request(0.1)
        proxy.reset()
        proxy.heal()
    attacked.finish()
    return attacked


@pytest.fixture
def far(postgres_url: str) -> Iterator[tuple[pxrs.Pxrs, Proxy]]:
    """An open store and the network to it."""
    place, _, database = postgres_url.rpartition("/")
    with (
        Proxy(int(place.rpartition(":")[2])) as proxy,
        pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as px,
    ):
        # It is known to be a simple queue, so that items are put into it by the shorter way.
        for _ in range(3):
            px.put(QUEUE, "early")
        px.stores.queues.purge(QUEUE)
        yield px, proxy


@contextmanager
def late_reader(url: str, proxy: Proxy) -> Iterator[None]:
    """The server does not read what it is sent in the block; at its end it reads all of it.

    Every process that serves a connection is frozen; those of new connections are not. The old
    connections are cut when something was sent on one of them.
    """
    serving = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pxrs' AND datname = %s"
    pids = [pid for (pid,) in query(url, serving, url.rpartition("/")[2])]
    proxy.hold_answers()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    while query(url, "SELECT 1 FROM pg_stat_activity WHERE pid = ANY (%s)", pids):
        pass


@postgres
def test_a_unit_that_was_given_up_is_refused_when_it_comes(
    far: tuple[pxrs.Pxrs, Proxy], postgres_url: str
) -> None:
    """The server reads what it was sent only after the caller has been told that it is not done."""
    px, proxy = far
    given_up = False
    for _ in range(10):
        with ThreadPoolExecutor(1) as pool, late_reader(postgres_url, proxy):
            job = pool.submit(px.put, QUEUE, "late")
            proxy.await_request()
            proxy.reset()
            proxy.heal()
            error = job.exception(PATIENCE)
        if given_up := error is not None:
            break
        # Another request was the one that got no answer, such as a session's renewal: the put came
        # after it, on a new connection, and is done.
        assert len(look(px.stores, QUEUE)) == 1
        px.stores.queues.purge(QUEUE)
    assert given_up
    assert isinstance(error, TransactionConflict)
    assert look(px.stores, QUEUE) == []
    px.put(QUEUE, "again")
    assert len(look(px.stores, QUEUE)) == 1


@postgres
def test_a_take_that_was_given_up_holds_nothing_when_it_comes(
    far: tuple[pxrs.Pxrs, Proxy], postgres_url: str
) -> None:
    px, proxy = far
    px.put(QUEUE, "item")
    other = Worker(px.stores)
    with ThreadPoolExecutor(1) as pool, px.begin() as tx:
        assert tx._held.holder.session
        with late_reader(postgres_url, proxy):
            job = pool.submit(tx.take, QUEUE, 0)
            proxy.await_request()
            proxy.reset()
            proxy.heal()
            assert job.result(PATIENCE) is None
        assert bodies([other.take_one(QUEUE)]) == [b"titem"]


@mariadb
def test_a_take_whose_commit_is_under_way_is_waited_for(new_engine: NewEngine) -> None:
    """It is held up by a lock, and cut off then: what the holder is told stays so.

    The server ends such a commit when it notices that nobody listens, or does it when it can.
    """
    place = SqlPlace(new_engine("mariadb").url)
    url = sqlalchemy.make_url(place.url)
    with Proxy(url.port or 0) as proxy, ThreadPoolExecutor(1) as pool:
        direct = place.open()
        stores = place.open(url.set(port=proxy.port).render_as_string(hide_password=False))
        worker = Worker(stores)
        worker.put(b"1", b"2")
        worker.take_one()
        proxy.hold_request_with(b"COMMIT")
        job = pool.submit(stores.queues.take, "q", worker.holder, 1, unit="take")
        proxy.await_request()
        ((taking,),) = place.query(
            "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx "
            "WHERE trx_rows_modified > 0"
        )
        with place.engine.connect() as admin:
            admin.exec_driver_sql("BACKUP STAGE START")
            admin.exec_driver_sql("BACKUP STAGE BLOCK_COMMIT")
            proxy.heal()
            while not running(place).get(taking, "").startswith("COMMIT"):
                assert not job.done()
            proxy.reset()
            assert isinstance(job.exception(PATIENCE), OutcomeUnknown)
            held = pool.submit(direct.queues.held, "q", worker.holder, "take")
            while not held.done() and "FOR UPDATE" not in " ".join(running(place).values()):
                pass
            admin.exec_driver_sql("BACKUP STAGE END")
        told = bodies(held.result(PATIENCE))
        while taking in running(place):
            pass
        assert told == bodies(direct.queues.held("q", worker.holder, "take"))
    place.close()


def running(place: SqlPlace) -> dict[int, str]:
    """What the server's connections are at, by their numbers."""
    rows = place.query("SELECT id, info FROM information_schema.processlist")
    return {number: (info or "").upper() for number, info in rows}
