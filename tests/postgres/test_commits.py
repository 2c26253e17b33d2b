"""Commits: one round trip, checks that lock, outcomes that nobody heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from pxrs.errors import (
    CommitConflict,
    Fenced,
    OutcomeUnknown,
    TransactionConflict,
)
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import LONG, batch, put, value_of, values_in
from pxrs.types import (
    Append,
    Appended,
    Check,
    Committed,
    Conflict,
    Delete,
    Holder,
    LogPartition,
    Outcome,
    Put,
    QueueChange,
)
from support.child import PATIENCE
from support.postgres import query
from support.proxy import Proxy

pytestmark = pytest.mark.engine("postgres")

HERE = LogPartition("t-1", 0)
BESIDE = LogPartition("t-1", 1)
OpenStores = Callable[[], PostgresStores]


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    with Proxy(int(postgres_url.rpartition("/")[0].rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def far(postgres_url: str, proxy: Proxy) -> Iterator[PostgresStores]:
    """Stores on the other side of a network that can fail."""
    database = postgres_url.rpartition("/")[2]
    stores = PostgresStores(f"postgresql://postgres@{proxy.address}/{database}")
    stores.log.create("t-1", 2)
    # One is for notifications, in the background: no test has to make a new one meanwhile.
    for connection in [stores.database.take() for _ in range(3)]:
        stores.database.give_back(connection)
    yield stores
    proxy.heal()
    stores.close()


def counting(stores: PostgresStores, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that is sent from now on, except those of the background threads."""
    sent: list[str] = []
    execute, me = psycopg.Cursor.execute, threading.get_ident()

    def spy(cursor: object, statement: bytes, *args: object, **kwargs: object) -> object:
        if threading.get_ident() == me:
            sent.append(statement.decode())
        return execute(cursor, statement, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(psycopg.Cursor, "execute", spy)
    return sent


def test_a_commit_an_append_and_a_fetch_are_one_statement_each(
    stores: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.log.create("t-1", 2)
    version = put(stores.coord, "k")
    sent = counting(stores, monkeypatch)
    stores.coord.commit(
        (Check("k", version), Check("new", 0)), (Put("k", b"2"), Put("new", b"1"), Delete("x"))
    )
    stores.log.append([Append(HERE, batch(b"a")), Append(BESIDE, batch(b"b", b"c"))])
    stores.log.fetch(BESIDE, 0, 1 << 20)
    assert len(sent) == 3
    # In a mode where each is a transaction of its own: nothing else is sent.
    connection = stores.database.take()
    assert connection.autocommit
    stores.database.give_back(connection)


def test_a_check_locks_what_it_reads(stores: PostgresStores, postgres_url: str) -> None:
    """Else a fence could be moved between the look at it and the commit behind it."""
    fence = put(stores.coord, "fence")
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT pg_advisory_xact_lock(1)")
        with stores.atomic() as tx:
            tx.check(Check("fence", fence))
            tx.write(Put("k", b"1"))
            # What the block will do at its end, done here to look at it from outside.
            stores.coord.apply(tx.connection, [Check("fence", fence)], [])
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("SELECT 1 FROM pxrs.pxrs_coord WHERE key = 'fence' FOR UPDATE NOWAIT")


def test_a_deadlock_is_a_conflict_to_be_run_again(
    stores: PostgresStores, postgres_url: str
) -> None:
    version = put(stores.coord, "k", b"old")
    query(postgres_url, "CREATE TABLE mine (n int)")
    query(postgres_url, "INSERT INTO mine VALUES (1)")
    with psycopg.connect(postgres_url) as other:
        other.execute("SET deadlock_timeout = '1min'")
        other.execute("SELECT 1 FROM pxrs.pxrs_coord WHERE key = 'k' FOR UPDATE")
        waits = threading.Thread(target=lambda: other.execute("UPDATE mine SET n = 3"))
        with pytest.raises(TransactionConflict) as failed, stores.atomic() as tx:
            tx.connection.execute("UPDATE mine SET n = 2")
            waits.start()
            while not query(
                postgres_url,
                "SELECT 1 FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND datname = current_database()",
            ):
                pass
            tx.check(Check("k", version))
            tx.write(Put("k", b"new"))
        waits.join(PATIENCE)
    assert failed.value.retryable
    assert value_of(stores.coord, "k") == b"old"
    assert query(postgres_url, "SELECT n FROM mine") == [(3,)]


def test_every_transaction_is_ended_when_its_process_freezes(
    stores: PostgresStores, postgres_url: str
) -> None:
    session = stores.coord.session(0.4)
    with pytest.raises(TransactionConflict), stores.atomic() as tx:
        pid = tx.connection.info.backend_pid
        setting = tx.connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
        assert setting == ("400ms",)
        while query(postgres_url, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid):
            pass
        tx.write(Put("k", b"1"))
    assert stores.coord.get("k") is None
    session.close()


def test_a_stricter_setting_of_the_database_stays(
    stores: PostgresStores, postgres_url: str
) -> None:
    database = postgres_url.rpartition("/")[2]
    query(
        postgres_url,
        f"ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '3s'",
    )
    fresh = PostgresStores(postgres_url)
    with fresh.atomic() as tx:
        assert tx.connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == (
            "3s",
        )
    fresh.close()


def test_a_commit_without_an_answer_is_unknown_and_can_be_found_out(
    far: PostgresStores, proxy: Proxy, stores: PostgresStores
) -> None:
    version = put(far.coord, "k", b"old")
    proxy.hold_answers()
    outcome: list[BaseException] = []

    def commit() -> None:
        try:
            far.coord.commit((Check("k", version),), (Put("k", b"new"),))
        except BaseException as error:  # noqa: BLE001 - looked at below
            outcome.append(error)

    thread = threading.Thread(target=commit)
    watch = stores.coord.watch("k")
    thread.start()
    while value_of(stores.coord, "k") == b"old":
        assert watch.wait(PATIENCE)
    proxy.reset()
    proxy.heal()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], OutcomeUnknown)
    again = far.coord.commit((Check("k", version),), (Put("k", b"new"),))
    assert isinstance(again, Conflict)
    assert value_of(far.coord, "k") == b"new"


def test_an_append_without_an_answer_is_repeated_without_harm(
    far: PostgresStores, proxy: Proxy, stores: PostgresStores
) -> None:
    sent = batch(b"a", b"b", producer=(7, 0, 0))
    proxy.hold_answers()
    outcome: list[BaseException] = []

    def append() -> None:
        try:
            far.log.append([Append(HERE, sent)])
        except BaseException as error:  # noqa: BLE001 - looked at below
            outcome.append(error)

    thread = threading.Thread(target=append)
    watch = stores.log.watch(HERE)
    thread.start()
    while not values_in(stores.log, HERE):
        assert watch.wait(PATIENCE)
    proxy.reset()
    proxy.heal()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], OutcomeUnknown)
    assert far.log.append([Append(HERE, sent)]) == [Appended(0, duplicate=True)]
    assert values_in(stores.log, HERE) == {0: b"a", 1: b"b"}


@pytest.mark.parametrize("arrives", [True, False], ids=["COMMIT arrived", "COMMIT was lost"])
def test_a_transaction_whose_commit_had_no_answer_is_found_out(
    far: PostgresStores, proxy: Proxy, stores: PostgresStores, arrives: bool
) -> None:
    """Its unit tells, and one that never was will never be."""
    version = put(far.coord, "k", b"old")
    session = stores.coord.session(LONG)
    unit = QueueChange(Holder(session.id, "tx"), (), (), "unit")
    failed: list[BaseException] = []

    def commit() -> None:
        try:
            with far.atomic() as tx:
                tx.check(Check("k", version))
                tx.write(Put("k", b"new"))
                tx.queue(unit)
                finish = tx._commit

                def commit_on_a_bad_network(connection: psycopg.Connection[object]) -> None:
                    (proxy.hold_answers if arrives else proxy.cut)()
                    finish(connection)

                tx._commit = commit_on_a_bad_network  # type: ignore[method-assign]
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    if arrives:
        watch = stores.coord.watch("k")
        while value_of(stores.coord, "k") == b"old":
            assert watch.wait(PATIENCE)
    else:
        proxy.await_request()
    proxy.reset()
    proxy.heal()
    thread.join(PATIENCE)
    assert isinstance(failed[0], OutcomeUnknown)
    became = far.queues.outcome(session.id, "unit")
    assert became is (Outcome.DONE if arrives else Outcome.NEVER)
    assert value_of(stores.coord, "k") == (b"new" if arrives else b"old")
    with pytest.raises(Fenced):
        far.queues.apply(unit)


def test_reads_go_on_after_all_connections_were_cut(
    stores: PostgresStores, postgres_url: str
) -> None:
    version = put(stores.coord, "k", b"1")
    query(
        postgres_url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()",
    )
    assert value_of(stores.coord, "k") == b"1"
    assert isinstance(stores.coord.commit((Check("k", version),), (Put("k", b"2"),)), Committed)


def test_places_of_rows_are_only_hints(stores: PostgresStores, postgres_url: str) -> None:
    """Rows that were moved by others, or by VACUUM FULL, are found all the same."""
    for number in range(50):
        put(stores.coord, f"k{number}", b"1")
    query(postgres_url, "DELETE FROM pxrs.pxrs_coord WHERE key < 'k3'")
    query(postgres_url, "VACUUM FULL pxrs.pxrs_coord")
    for number in range(50):
        assert put(stores.coord, f"k{number}", b"%d" % number)
    found = {record.key: record.value for record in stores.coord.list("k")}
    assert found == {f"k{number}": b"%d" % number for number in range(50)}


def test_a_serialisable_database_works_too(postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2]
    query(
        postgres_url, f"ALTER DATABASE {database} SET default_transaction_isolation = serializable"
    )
    stores = PostgresStores(postgres_url)
    stores.log.create("t-1", 2)

    def work(name: int) -> None:
        for number in range(20):
            stores.log.append([Append(HERE, batch(b"%d/%d" % (name, number)))])
            stores.coord.commit((), (Put("k", b"%d" % number), Put(f"k{name}", b"")))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(values_in(stores.log, HERE)) == list(range(60))
    with pytest.raises(CommitConflict), stores.atomic() as tx:
        tx.check(Check("k", 1))
    stores.close()
