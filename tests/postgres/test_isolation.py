"""Whatever isolation level is set for everybody, pxrs sees what was committed before it looked.

At REPEATABLE READ and above, what is read after a lock was got may be what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

import engines
from pxrs.errors import CommitConflict, Fenced, TransactionConflict
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import Worker, bodies, look
from pxrs.testing.conformance.tools import batch, put
from pxrs.types import Check, LogPartition, QueueChange
from support.child import PATIENCE
from support.engine_fixtures import server_url, unavailable
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

HERE = LogPartition("t-1", 0)
LEVELS = ("repeatable read", "serializable")


@pytest.fixture(scope="module")
def pgbouncer() -> Iterator[engines.Engine]:
    try:
        engine = engines.build("pgbouncer", server=server_url("postgres"))
    except engines.Missing as why:
        unavailable(why)
        raise
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, postgres_url: str) -> str:
    """What every transaction of the database has that does not say otherwise."""
    level, database = str(request.param), postgres_url.rpartition("/")[2]
    query(postgres_url, f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'")
    return level


@pytest.fixture(params=["direct", "pooled"])
def other_level(
    request: pytest.FixtureRequest, level: str, postgres_url: str
) -> Iterator[PostgresStores]:
    """Stores in such a database."""
    url = postgres_url
    if request.param == "pooled":
        pooler = request.getfixturevalue("pgbouncer")
        url = f"{pooler.url}/{postgres_url.rpartition('/')[2]}"
    with closing(PostgresStores(url)) as stores:
        assert stores.database.pooled is (request.param == "pooled")
        yield stores


def test_a_take_that_waits_while_it_is_given_up_holds_nothing(
    other_level: PostgresStores, postgres_url: str
) -> None:
    stores = other_level
    worker = Worker(stores)
    worker.put(b"1")
    give_up = "SELECT pxrs.pxrs_queue_give_up(%s, 'late')"
    with psycopg.connect(postgres_url) as asking, ThreadPoolExecutor(1) as pool:
        asking.execute(give_up, (worker.session.id,))
        take = pool.submit(stores.queues.take, "q", worker.holder, 1, unit="late")
        while not query(postgres_url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            assert not take.done()
        asking.commit()
        with pytest.raises(Fenced):
            take.result(PATIENCE)
    assert stores.queues.held("q", worker.holder, "late") == []


def test_a_key_goes_on(other_level: PostgresStores) -> None:
    worker = Worker(other_level)
    worker.put(b"1", b"2", key="k")
    for body in (b"1", b"2"):
        item = worker.take_one()
        assert item.body == body
        worker.apply(item)
    with pytest.raises(Fenced):
        worker.apply(item)
    worker.put(b"3", key="k")
    assert worker.take_one().body == b"3"


@pytest.mark.parametrize("level", LEVELS)
def test_what_an_old_snapshot_does_not_show_is_a_conflict_to_be_run_again(
    stores: PostgresStores, postgres_url: str, level: str
) -> None:
    """Nobody is told that an item, a session, a record or a topic is lost that is there."""
    worker = Worker(stores)
    worker.put(b"1", b"2")
    early = worker.take_one()
    with psycopg.connect(postgres_url, autocommit=True) as mine:

        def refused(*changes: object) -> None:
            with pytest.raises(TransactionConflict), stores.atomic(mine) as tx:
                for change in changes:
                    if isinstance(change, Check):
                        tx.check(change)
                    elif isinstance(change, QueueChange):
                        tx.queue(change)
                    else:
                        tx.append(HERE, batch(b"message"))

        query(postgres_url, "UPDATE pxrs.pxrs_sessions SET deadline = clock_timestamp()")
        mine.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        mine.execute("SELECT 1 FROM pxrs.pxrs_sessions")
        query(
            postgres_url,
            "UPDATE pxrs.pxrs_sessions SET deadline = clock_timestamp() + interval '1 min'",
        )
        late = worker.take_one()
        made = put(stores.coord, "made since")
        stores.log.create("t-1", 1)
        refused(QueueChange(worker.holder, (early.held,)))
        refused(Check("made since", made))
        refused("message")
        mine.execute("COMMIT")
        mine.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        with stores.atomic(mine) as tx:
            tx.queue(QueueChange(worker.holder, (early.held,)))
            tx.check(Check("made since", made))
        worker.put(b"3")
        third = worker.take_one()
        refused(QueueChange(worker.holder, (late.held, third.held)))
        mine.execute("COMMIT")
        mine.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        with pytest.raises(CommitConflict) as conflict, stores.atomic(mine) as tx:
            tx.check(Check("never made", made))
        assert conflict.value.current == {"never made": None}
        mine.execute("COMMIT")
    assert sorted(bodies(look(stores))) == [b"2", b"3"]
    assert stores.coord.get("never made") is None
