"""Queues beside an old transaction, and long ones: what a unit of work reads stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from pxrs.stores.postgres.queues import scout as queue_scout
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance import Rule, queue_checks
from pxrs.testing.conformance.queue_tools import Worker, bodies
from pxrs.types import Delivery
from support.postgres import PostgresLab

pytestmark = pytest.mark.engine("postgres")

MANY = 3_000
# Of 8 kB. Reading many items one after the other takes hundreds.
FEW_PAGES = 150


@contextmanager
def old_transaction(url: str) -> Iterator[None]:
    """Nothing that goes while the block runs can be removed."""
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM pxrs.pxrs_queue_items")
        yield
        other.execute("ROLLBACK")


# Of tables and indexes of pxrs alone: what a connection reads of the catalogs depends on what
# others do, as a server that many change at once makes it forget them in the middle of a call.
_FETCHED = """
SELECT sum(pg_stat_get_xact_blocks_fetched(oid))::int8 FROM pg_class
WHERE relnamespace = 'pxrs'::regnamespace
"""


def pages_read(url: str, statement: str, parameters: tuple[object, ...]) -> int:
    """How many pages a call looks at. It is made, and rolled back."""
    counts = []
    with psycopg.connect(url) as connection:

        def fetched() -> int:
            row = connection.execute(_FETCHED).fetchone()
            assert row is not None
            return int(row[0])

        # A call also reads what it needs to plan, if it is the first of its connection or
        # if that was forgotten. Whatever it reads beyond, it reads each time.
        for _ in range(4):
            connection.execute("SAVEPOINT before")
            before = fetched()
            connection.execute(statement.encode(), parameters)
            counts.append(fetched() - before)
            connection.execute("ROLLBACK TO before")
        connection.rollback()
    return min(counts)


def pages_of_take(url: str, session: str, floor: int | None = None) -> int:
    ranks, floors = (None, None) if floor is None else ([0], [floor])
    return pages_read(
        url,
        "SELECT * FROM pxrs.pxrs_queue_take('q', %s, 'tx', 'unit', 10, 5, 1000, NULL, true,"
        " %s::int8[], %s::int8[], 0, true)",
        (session, ranks, floors),
    )


def churn(worker: Worker, number: int) -> Delivery:
    """Put and finish so many items; the last of them."""
    for _ in range(number // 100):
        worker.put(*[b"x"] * 100)
        items = worker.take(100)
        worker.apply(*items)
    return items[-1]


def test_connections_that_know_no_plan_yet_find_every_priority(stores: PostgresStores) -> None:
    """A pooler hands out many; what they read to make plans is no sign of a queue in trouble."""
    worker = Worker(stores)
    for number in range(4):
        worker.put(b"x", key=f"k{number}", priority=-number)
    for number in range(4):
        stores.database._close_idle()
        item = worker.take_one()
        assert item.priority == -number
        worker.apply(item)


def test_a_long_queue_is_not_read(stores: PostgresStores, postgres_url: str) -> None:
    """Nor if its plans were made when it was empty, and nobody has counted it since."""
    worker = Worker(stores)
    worker.put(b"x")
    worker.apply(worker.take_one())
    worker.put(*[b"x"] * MANY)
    assert pages_of_take(postgres_url, worker.session.id) < FEW_PAGES
    items = worker.take(10)
    removed = pages_read(
        postgres_url,
        "SELECT * FROM pxrs.pxrs_queue_apply(%s, %s, 'unit', '{q}', NULL, %s::int8[], %s::int8[],"
        " NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
        (
            *worker.holder,
            [item.held.id for item in items],
            [item.held.delivery for item in items],
        ),
    )
    assert removed < FEW_PAGES


def test_what_is_gone_is_passed_once(stores: PostgresStores, postgres_url: str) -> None:
    """Whoever knows where the last search ended does not read what was there before."""
    worker = Worker(stores)
    worker.put(b"first")
    with old_transaction(postgres_url):
        worker.apply(worker.take_one())
        last = churn(worker, MANY)
        worker.put(b"x")
        whole = pages_of_take(postgres_url, worker.session.id)
        further_on = pages_of_take(postgres_url, worker.session.id, last.held.id)
    assert whole > FEW_PAGES
    assert further_on < FEW_PAGES


@pytest.fixture
def every_search_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each goes on where the last one ended, and searches the whole only now and then."""
    monkeypatch.setattr(queue_scout, "_MANY_PAGES", -1)
    monkeypatch.setattr(queue_scout, "_REST", 100)


@pytest.mark.usefixtures("every_search_is_slow")
def test_what_shows_below_is_found(stores: PostgresStores) -> None:
    """Given back, of another priority, or freed by a death: in the end everything is handed out."""
    worker, mortal = Worker(stores), Worker(stores)
    worker.put(*[b"%d" % number for number in range(30)])
    given_back = worker.take(5)
    mortal.take(5)
    found = [worker.take_one() for _ in range(10)]
    worker.release(*given_back)
    worker.put(b"urgent", priority=9)
    mortal.session.close()
    while len(found) < 31:
        found += worker.take(1)
    expected = sorted([b"urgent", *(b"%d" % number for number in range(30))])
    assert sorted(bodies(found)) == expected


CHECKS = (
    "check_no_item_is_in_two_hands",
    "check_keys_stay_in_order_in_a_race",
)


@pytest.mark.usefixtures("every_search_is_slow")
@pytest.mark.parametrize(
    "check",
    [check for check in queue_checks() if check.__name__ in CHECKS],
    ids=lambda check: check.__name__,
)
def test_conforms_while_every_search_is_slow(check: Rule, lab: PostgresLab) -> None:
    check(lab)
