"""Requests that a `QueueStore` refuses without changing anything."""

from __future__ import annotations

from typing import Any, cast

from pxrs.errors import InvalidRequest, MessageTooLarge
from pxrs.testing.conformance.lab import Lab, Suite
from pxrs.testing.conformance.queue_tools import HELD, Worker, look, states_of
from pxrs.testing.conformance.sessions import LONG
from pxrs.testing.conformance.tools import raises, same
from pxrs.types import NewItem

suite = Suite()

NAN, INFINITE = float("nan"), float("inf")


@suite
def check_bad_names_are_refused(lab: Lab) -> None:
    """A name that some engine could not keep is refused on all, in `create` and in a put."""
    stores = lab.open()
    for name in ("", "a/b", "a\nb", "a\0b", "x" * 250, "\ud800", cast(Any, None), cast(Any, 7)):
        with raises(InvalidRequest):
            stores.queues.create(name)
        with raises(InvalidRequest):
            Worker(stores).put(b"1", queue=name)
    same(stores.queues.all(), [], "the queues")


@suite
def check_limits_hold(lab: Lab) -> None:
    """A change within the store's limits is applied; one beyond them is refused whole."""
    stores = lab.open()
    worker, limits = Worker(stores), stores.queues.limits
    most = min(limits.items, 200)
    worker.put(*(b"%d" % number for number in range(most)))
    taken = worker.drain()
    same(len(taken), most, "how many could be taken")
    worker.apply(*taken)
    big = bytes(min(limits.body_bytes, 512 * 1024))
    worker.put(big)
    same(worker.take_one().body, big, "a large body")
    before = look(stores)
    with raises(MessageTooLarge):
        worker.apply(
            put=[NewItem(queue="q", body=body) for body in (b"small", bytes(limits.body_bytes + 1))]
        )
    with raises(InvalidRequest):
        worker.apply(put=[NewItem(queue="q", body=b"")] * (limits.items + 1))
    same(look(stores), before, "the items")


@suite
def check_bad_items_are_refused(lab: Lab) -> None:
    """An item that can't be is refused, with all that came with it."""
    stores = lab.open()
    worker = Worker(stores)
    worker.put(b"work", queue="w")
    held = worker.take_one("w")
    bad: list[dict[str, Any]] = [
        *({"delay": delay} for delay in (-1.0, -0.001, NAN, INFINITE)),
        *({"priority": priority} for priority in (2**31, -(2**31), 2**70)),
        *({"key": key} for key in ("", "x" * 1025, "a\0b", "\ud800")),
        *({"dedupe": key, "dedupe_window": 1.0} for key in ("", "x" * 1025, "a\0b", "\ud800")),
        *({"dedupe": "k", "dedupe_window": window} for window in (0.0, -1.0, NAN, INFINITE)),
    ]
    good = NewItem(queue="q", body=b"good", dedupe="good", dedupe_window=LONG)
    for values in bad:
        with raises(InvalidRequest):
            worker.apply(held, put=[good, NewItem(queue="q", body=b"", **values)])
    same(
        (stores.queues.find("q"), states_of(stores, "w")), (None, {b"work": HELD}), "what is there"
    )
    worker.apply(held, put=[good])


@suite
def check_bad_calls_are_refused(lab: Lab) -> None:
    """Invalid requests are refused, and change or count nothing."""
    stores = lab.open()
    queues, worker = stores.queues, Worker(stores)
    worker.put(b"1", b"2")
    for number, most, lock_for in (
        *((number, None, None) for number in (0, -1)),
        *((1, most, None) for most in (0, -1)),
        *((1, None, lock_for) for lock_for in (0.0, -1.0, NAN, INFINITE)),
    ):
        with raises(InvalidRequest):
            queues.take("q", worker.holder, number, most=most, lock_for=lock_for)
    held = worker.take_one()
    same(held.held.delivery, 1, "the first delivery")
    for lock_for in (0.0, -1.0, NAN, INFINITE):
        with raises(InvalidRequest):
            worker.extend(held, lock_for=lock_for)
    before = look(stores)
    for delay in (-1.0, NAN, INFINITE):
        with raises(InvalidRequest):
            worker.release(held, delay=delay)
    for limit in (0, -1):
        with raises(InvalidRequest):
            queues.peek("q", limit=limit)
    same(look(stores), before, "the items")
    worker.apply(held)


@suite
def check_numbers_may_be_huge(lab: Lab) -> None:
    """A count beyond everything takes what is there; ids that can't be belong to no item."""
    stores = lab.open()
    queues, worker = stores.queues, Worker(stores)
    for queue in ("a", "b", "c"):
        worker.put(b"1", b"2", queue=queue)
    same(len(worker.take(2**70, "a")), 2, "how many were taken")
    odd = [n * 2**power + low for power in (32, 40, 63, 70) for n in (-1, 1) for low in (0, 1, 2)]
    for queue in ("a", "b", "c"):
        same(queues.drop(queue, odd), 0, "how many were dropped")
        same(queues.redrive(queue, odd), 0, "how many were put back")
        same(queues.peek(queue, after=2**70), [], "what comes after them")
        same(len(queues.peek(queue, after=-(2**70), limit=2**70)), 2, "what comes after less")
