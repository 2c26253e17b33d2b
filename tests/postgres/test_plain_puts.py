"""Puts that are one statement without a function, from a process's second put to a queue on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import READY, WAITING, bodies, look, states_of
from pxrs.types import Holder, ItemState, NewItem, Outcome, QueueChange
from support.child import PATIENCE
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")

OpenStores = Callable[[], PostgresStores]
FUNCTION = "pxrs.pxrs_queue_apply"


def put(stores: PostgresStores, tx: str, *values: bytes) -> list[int | None]:
    items = tuple(NewItem(queue="q", body=value) for value in values)
    return stores.queues.apply(QueueChange(Holder("nobody", tx), (), items, tx))


@pytest.fixture
def known(stores: PostgresStores, postgres_url: str) -> PostgresStores:
    """A store that has put to the queue, and can do without the function."""
    put(stores, "first", b"first")
    query(postgres_url, f"DROP FUNCTION {FUNCTION}")
    return stores


def test_items_come_in_the_order_they_were_put_in(known: PostgresStores) -> None:
    values = [b"", b"\x00\xff", *(b"%d" % number for number in range(200)), b"x" * 100_000]
    numbers = put(known, "many", *values)
    (number,) = put(known, "one", b"last")
    found = look(known)
    assert bodies(found) == [b"first", *values, b"last"]
    assert [item.id for item in found[1:]] == [*numbers, number]
    assert {item.state for item in found} == {READY}
    assert known.queues.stats("q").put == len(found)


def test_it_is_known_to_have_been_applied(known: PostgresStores) -> None:
    put(known, "one", b"1")
    assert known.queues.outcome("nobody", "one") is Outcome.DONE
    assert known.queues.outcome("nobody", "another") is Outcome.UNKNOWN


def test_who_asks_whether_it_was_applied_waits_for_it(
    known: PostgresStores, postgres_url: str
) -> None:
    holder = Holder("nobody", "open")
    with psycopg.connect(postgres_url) as mine, ThreadPoolExecutor(1) as pool:
        mine.execute("SELECT 1")
        with known.atomic(mine) as tx:
            tx.queue(QueueChange(holder, (), (NewItem(queue="q", body=b"1"),), "unit"))
        answer = pool.submit(known.queues.outcome, "nobody", "unit")
        while not query(postgres_url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            assert not answer.done()
        mine.commit()
        assert answer.result(PATIENCE) is Outcome.DONE


def test_a_queue_that_was_deleted_is_made_again(
    stores: PostgresStores, open_stores: OpenStores
) -> None:
    put(stores, "1", b"1")
    put(stores, "2", b"2")
    open_stores().queues.delete("q")
    put(stores, "3", b"3")
    assert bodies(look(stores)) == [b"3"]


def test_a_queue_that_was_made_again_as_fifo_stays_in_order(
    stores: PostgresStores, open_stores: OpenStores
) -> None:
    put(stores, "1", b"1")
    put(stores, "2", b"2")
    other = open_stores()
    other.queues.delete("q")
    other.queues.create("q", fifo=True)
    put(stores, "3", b"3")
    put(stores, "4", b"4", b"5")
    expected: dict[bytes, ItemState] = {b"3": READY, b"4": WAITING, b"5": WAITING}
    assert states_of(stores) == expected
