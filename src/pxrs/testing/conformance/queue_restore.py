"""Items that come from another store: `ItemRestorer.restore`."""

from __future__ import annotations

from pxrs.errors import InvalidRequest, QueueNotFound
from pxrs.stores.api import ItemRestorer, Stores
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    DELAYED,
    HELD,
    READY,
    WAITING,
    Worker,
    bodies,
    look,
    states_of,
)
from pxrs.testing.conformance.tools import raises, require, same
from pxrs.types import Holder, ItemState, StoredItem

_HOUR_MS = 3_600_000


def _item(
    number: int,
    body: bytes,
    state: ItemState = READY,
    *,
    key: str | None = None,
    priority: int = 0,
    deliveries: int = 0,
    visible_ms: int | None = None,
    error: str = "",
) -> StoredItem:
    return StoredItem(
        id=number,
        state=state,
        body=body,
        key=key,
        priority=priority,
        deliveries=deliveries,
        put_ms=1_000 + number,
        taken_ms=5_000 if deliveries else None,
        visible_ms=visible_ms,
        dead_ms=9_000 if state is DEAD else None,
        error=error,
        holder=Holder("a session elsewhere", "tx") if state is HELD else None,
    )


def _filled(lab: Lab, *items: StoredItem) -> Stores:
    """Stores with a queue `q` into which these items were restored."""
    stores = lab.open()
    stores.queues.create("q")
    same(_restorer(stores).restore("q", items), len(items), "how many were added")
    return stores


def _restorer(stores: Stores) -> ItemRestorer:
    queues = stores.queues
    require(isinstance(queues, ItemRestorer), "the queues can be filled from another store")
    assert isinstance(queues, ItemRestorer)
    return queues


def _later(stores: Stores) -> int:
    """An hour from now, by the store's clock."""
    Worker(stores).put(b"for the time", queue="clock")
    return look(stores, "clock")[0].put_ms + _HOUR_MS


def check_items_come_as_they_stood(lab: Lab) -> None:
    """Number, body, key, priority, deliveries, times and error are those of the other store."""
    stores = lab.open()
    stores.queues.create("q")
    later = _later(stores)
    items = [
        _item(3, b"plain"),
        _item(5, b"urgent", priority=7, deliveries=2, error="it failed"),
        _item(8, b"x" * 100_000, key="k"),
        _item(9, b"behind", WAITING, key="k", visible_ms=later),
        _item(12, b"late", DELAYED, visible_ms=later),
        _item(20, b"dead", DEAD, key="k", deliveries=5, error="gave up"),
    ]
    same(_restorer(stores).restore("q", items), 6, "how many were added")
    same(look(lab.open(), "q"), items, "the items")
    stats = stores.queues.stats("q")
    found = (stats.ready, stats.waiting, stats.delayed, stats.dead, stats.put, stats.done)
    same(found, (3, 1, 1, 1, 6, 0), "the figures")


def check_what_is_there_is_left_alone(lab: Lab) -> None:
    """Restoring the same again adds nothing and changes nothing."""
    stores = _filled(lab, _item(1, b"a"), _item(2, b"b"))
    restorer = _restorer(stores)
    again = [_item(1, b"other"), _item(2, b"other", DEAD), _item(3, b"c")]
    same(restorer.restore("q", again), 1, "how many were new")
    same(bodies(look(stores)), [b"a", b"b", b"c"], "the items")
    same(stores.queues.stats("q").put, 3, "how many were put")
    same(restorer.restore("q", []), 0, "how many of none")


def check_new_items_come_after(lab: Lab) -> None:
    """An item that is put later has a higher number, and no number is used twice."""
    stores = _filled(lab, _item(41, b"old"))
    (number,) = Worker(lab.open()).put(b"new")
    require(number > 41, f"the new item has number {number}")
    same(bodies(Worker(stores).drain()), [b"old", b"new"], "the order")


def check_keys_and_fifo_keep_their_order(lab: Lab) -> None:
    """Items of one key order are handed out by number, whatever the order of their restoring."""
    for fifo, key in ((False, "k"), (True, None)):
        name = "fifo" if fifo else "keyed"
        stores = lab.open()
        stores.queues.create(name, fifo=fifo)
        restorer = _restorer(stores)
        restorer.restore(name, [_item(7, b"third", key=key), _item(5, b"second", key=key)])
        restorer.restore(name, [_item(2, b"first", key=key), _item(1, b"dead", DEAD, key=key)])
        for expected in (b"first", b"second", b"third"):
            worker = Worker(stores)
            delivery = worker.take_one(name)
            same(delivery.body, expected, f"what is next in {name}")
            same(Worker(stores).take(1, name), [], "what another can have")
            worker.apply(delivery)


def check_the_held_front_of_a_key_stays(lab: Lab) -> None:
    """Restoring behind an item that is held shows nothing of its key."""
    stores = _filled(lab, _item(1, b"front", key="k"))
    worker = Worker(stores)
    delivery = worker.take_one()
    _restorer(stores).restore("q", [_item(2, b"behind", key="k")])
    same(states_of(stores), {b"front": HELD, b"behind": WAITING}, "where they stand")
    same(Worker(stores).take(2), [], "what another can have")
    worker.apply(delivery)
    same(bodies(Worker(stores).take(2)), [b"behind"], "what comes then")


def check_deliveries_count_on(lab: Lab) -> None:
    """An item goes on with its count, and dies of it."""
    stores = _filled(lab, _item(1, b"a", deliveries=2, error="twice"))
    worker = Worker(stores)
    delivery = worker.take_one(most=3)
    same((delivery.held.delivery, delivery.error), (3, "twice"), "the delivery")
    worker.release(delivery)
    same(Worker(stores).take(1, most=3), [], "what can be had after the last delivery")
    same(states_of(stores), {b"a": DEAD}, "where it stands")


def check_what_was_held_is_free_and_goes_out_alone(lab: Lab) -> None:
    """An item that was held is handed out alone: its holder may have died of it."""
    stores = _filled(lab, _item(1, b"suspect", HELD, deliveries=1), _item(2, b"innocent"))
    same(states_of(stores), {b"suspect": READY, b"innocent": READY}, "where they stand")
    same(bodies(Worker(stores).take(2)), [b"suspect"], "what goes out first")


def check_restored_items_wake_who_waits(lab: Lab) -> None:
    """A worker that waits for items is woken."""
    here, there = lab.open(), lab.open()
    here.queues.create("q")
    watch = there.queues.watch("q")
    _restorer(here).restore("q", [_item(1, b"a")])
    require(watch.wait(lab.patience), "the watch is woken")
    watch.close()


def check_dead_items_can_be_driven_again(lab: Lab) -> None:
    """A dead item of another store is a dead item here."""
    stores = _filled(lab, _item(4, b"dead", DEAD, deliveries=5, error="gave up"))
    same(stores.queues.redrive("q", [4]), 1, "how many were driven again")
    delivery = Worker(stores).take_one()
    same((delivery.body, delivery.held.delivery), (b"dead", 1), "the delivery")


def check_restore_refuses(lab: Lab) -> None:
    """No queue, no number, too many: refused, and nothing is changed."""
    stores = lab.open()
    restorer = _restorer(stores)
    with raises(QueueNotFound):
        restorer.restore("q", [_item(1, b"a")])
    stores.queues.create("q")
    with raises(InvalidRequest):
        restorer.restore("q", [_item(1, b"a"), _item(0, b"b")])
    many = [_item(number, b"") for number in range(1, stores.queues.limits.items + 2)]
    with raises(InvalidRequest):
        restorer.restore("q", many)
    same(look(stores), [], "the items")
