"""Queues as people look after them: figures, looking in, clearing out."""

from __future__ import annotations

from pxrs.errors import Fenced
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    DELAYED,
    HELD,
    PLENTY,
    READY,
    WAITING,
    Worker,
    bodies,
    let_time_pass,
    look,
    soon,
    states_of,
)
from pxrs.testing.conformance.tools import LONG, raises, require, same, together
from pxrs.types import ItemState, QueueStats


def check_stats_add_up(lab: Lab) -> None:
    """After every step each item is counted once, where it stands."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    total = 0

    def expect(what: str, **figures: int) -> None:
        there.queues.reap()
        stats = there.queues.stats("q")
        found = {name: getattr(stats, name) for name in ("ready", "delayed", "held", "waiting")}
        found |= {"dead": stats.dead, "put": stats.put, "done": stats.done}
        same({name: number for name, number in found.items() if number}, figures, what)
        same(stats.depth + stats.dead + stats.done, total, f"the sum, {what}")
        require((stats.oldest_ms is None) == (stats.depth == 0), f"the oldest, {what}")

    expect("before")
    ids = worker.put(b"1", b"2", b"3")
    total = 3
    expect("after a put", ready=3, put=3)
    worker.put(b"k1", b"k2", b"k3", key="k")
    worker.put(b"late", delay=LONG)
    total = 7
    expect("after more", ready=4, waiting=2, delayed=1, put=7)
    first, second, third = worker.take(3)
    expect("after a take", held=3, ready=1, waiting=2, delayed=1, put=7)
    worker.release(first)
    worker.release(second, delay=LONG)
    expect("after releases", held=1, ready=2, waiting=2, delayed=2, put=7)
    worker.release(third, dead=True)
    expect("after a death", ready=2, waiting=2, delayed=2, dead=1, put=7)
    worker.apply(worker.take_one())
    expect("after one is done", ready=1, waiting=2, delayed=2, dead=1, put=7, done=1)
    worker.apply(worker.take_one())
    expect("after a key moved on", ready=1, waiting=1, delayed=2, dead=1, put=7, done=2)
    same(there.queues.redrive("q", [ids[2]]), 1, "how many were dead")
    expect("after a redrive", ready=2, waiting=1, delayed=2, put=7, done=2)
    mortal = Worker(here)
    mortal.take_one()
    mortal.session.close()
    expect("after a crash", ready=2, waiting=1, delayed=2, put=7, done=2)
    same(there.queues.drop("q", [ids[1]]), 1, "how many were dropped")
    total -= 1
    expect("after a drop", ready=2, waiting=1, delayed=1, put=7, done=2)
    same(there.queues.purge("q"), 4, "how many were purged")
    total -= 4
    expect("after a purge", put=7, done=2)


def check_stats_are_of_one_moment(lab: Lab) -> None:
    """While others take and give back, the figures still count every item once."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(*[b""] * 20)

    def stir() -> None:
        for _ in range(150):
            worker.release(*worker.take(15))

    def count() -> None:
        for _ in range(150):
            same(there.queues.stats("q").depth, 20, "the depth")

    together(lab, stir, count)


def check_the_oldest_is_known(lab: Lab) -> None:
    """`oldest_ms` is when the oldest item that is still to be handled was put."""
    worker = Worker(lab.open())
    worker.put(b"old")
    let_time_pass(lab, worker.stores)
    worker.put(b"new", priority=9)
    times = {item.body: item.put_ms for item in look(worker.stores)}
    require(times[b"old"] < times[b"new"], "the later one was put later")
    same(worker.queues.stats("q").oldest_ms, times[b"old"], "the oldest")
    new, old = worker.take(2)
    same(worker.queues.stats("q").oldest_ms, times[b"old"], "the oldest, held")
    worker.release(old, dead=True)
    same(worker.queues.stats("q").oldest_ms, times[b"new"], "the oldest, when the other is dead")
    worker.apply(new)
    same(worker.queues.stats("q").oldest_ms, None, "the oldest of none")


def check_peek_tells_all(lab: Lab) -> None:
    """Each item is shown with where it stands, whose it is and what became of it."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"held", priority=9)
    worker.put(b"dead", priority=8)
    worker.put(b"front", b"behind", key="k", priority=1)
    worker.put(b"late", delay=LONG)
    worker.take_one()
    worker.release(worker.take_one(), error="why", dead=True)
    there.queues.reap()
    items = {item.body: item for item in look(there)}
    states = {b"held": HELD, b"dead": DEAD, b"front": READY, b"behind": WAITING, b"late": DELAYED}
    same({body: item.state for body, item in items.items()}, states, "where they stand")
    same(bodies(there.queues.peek("q")), [b"held", b"front", b"behind", b"late"], "those alive")
    held, dead, late = items[b"held"], items[b"dead"], items[b"late"]
    same((held.holder, held.deliveries, held.priority), (worker.holder, 1, 9), "the held one")
    require(held.taken_ms is not None and held.dead_ms is None, "the held one's times")
    same((dead.holder, dead.deliveries, dead.error), (None, 1, "why"), "the dead one")
    require(dead.dead_ms is not None, "when it died")
    same((late.deliveries, late.taken_ms, late.key), (0, None, None), "the late one")
    require(late.visible_ms is not None and late.visible_ms > late.put_ms, "when it shows")
    same({item.visible_ms for item in (held, dead, items[b"front"])}, {None}, "no other time")
    same((items[b"behind"].key, items[b"behind"].priority), ("k", 1), "the keyed one")


def check_peek_pages(lab: Lab) -> None:
    """`after` leaves out ids up to that one, `limit` cuts; oldest first, whatever the priority."""
    worker = Worker(lab.open())
    ids = [worker.put(b"%d" % number, priority=number % 3)[0] for number in range(7)]
    ids += worker.put(b"k", b"k", key="k")
    for states in ((), (READY,), (READY, WAITING), tuple(ItemState)):
        expected = ids if WAITING in states or not states else ids[:-1]
        found: list[int] = []
        while page := worker.queues.peek("q", states, after=found[-1] if found else None, limit=3):
            same(len(page), min(3, len(expected) - len(found)), "the size of a page")
            found += [item.id for item in page]
        same(found, expected, f"all pages of {states}")
    same(worker.queues.peek("q", (DEAD, HELD)), [], "what is in no state that was asked for")


def check_peek_changes_nothing(lab: Lab) -> None:
    """Looking counts no delivery and holds nothing."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"1")
    for _ in range(3):
        there.queues.peek("q")
    same(worker.take_one().held.delivery, 1, "the delivery after that")


def check_large_items_can_be_looked_at_while_they_go(lab: Lab) -> None:
    """Looking while others remove shows each item whole, or not at all."""
    here, there = lab.open(), lab.open()
    body = bytes(50_000)
    worker = Worker(here)
    worker.put(*[body] * 60)

    def remove() -> None:
        while items := worker.take(1):
            worker.apply(*items)

    def watch() -> None:
        while found := there.queues.peek("q", limit=5):
            same({len(item.body) for item in found}, {len(body)}, "the sizes")

    together(lab, remove, watch)


def check_drop_spares_the_held(lab: Lab) -> None:
    """`drop` leaves held items; it removes all others, the dead too, once."""
    worker, there = Worker(lab.open()), lab.open()
    ids = worker.put(b"held", b"dead", b"ready")
    ids += worker.put(b"late", delay=LONG) + worker.put(b"front", b"behind", key="k")
    held, dead = worker.take(2)
    worker.release(dead, dead=True)
    same(there.queues.drop("q", [*ids, ids[2], ids[-1] + 99]), 5, "how many were dropped")
    same(states_of(there), {b"held": HELD}, "what is left")
    same(there.queues.drop("q", ids), 0, "how many were dropped again")
    same(there.queues.drop("q", []), 0, "how many of none")
    worker.apply(held)
    same(there.queues.stats("q"), QueueStats(put=6, done=1), "the figures")


def check_purge_takes_what_it_is_told(lab: Lab) -> None:
    """Without states all that is neither held nor dead goes; with states just those."""
    here, there = lab.open(), lab.open()
    for states, left in (
        ((), {b"held": HELD, b"dead": DEAD}),
        ((READY,), {b"held": HELD, b"dead": DEAD, b"late": DELAYED, b"behind": READY}),
        ((DELAYED, WAITING), {b"held": HELD, b"dead": DEAD, b"ready": READY, b"front": READY}),
        (
            (DEAD,),
            {b"held": HELD, b"ready": READY, b"late": DELAYED, b"front": READY, b"behind": WAITING},
        ),
        (tuple(ItemState), {}),
    ):
        worker = Worker(here)
        worker.put(b"held", b"dead", b"ready")
        worker.put(b"late", delay=LONG)
        worker.put(b"front", b"behind", key="k")
        held, dead = worker.take(2)
        worker.release(dead, dead=True)
        same(there.queues.purge("q", states), 6 - len(left), f"how many were purged of {states}")
        same(states_of(there), left, f"what is left of a purge of {states}")
        if HELD in states:
            worker.must_have_lost(held)
        else:
            worker.apply(held)
        there.queues.delete("q")


def check_purge_sees_what_is_due(lab: Lab) -> None:
    """An item whose delay is over is ready, to a purge too."""
    worker = Worker(lab.open())
    worker.put(b"soon", delay=soon(lab))
    worker.put(b"later", delay=LONG)
    let_time_pass(lab, worker.stores)
    same(worker.queues.purge("q", (READY,)), 1, "how many were ready")
    same(states_of(worker.stores), {b"later": DELAYED}, "what is left")


def check_a_purged_holder_is_fenced(lab: Lab) -> None:
    """A holder of a purged item finds it gone, and its key free."""
    stores = lab.open()
    worker = Worker(stores)
    worker.put(b"1", b"2", key="k")
    held = worker.take_one()
    same(stores.queues.purge("q", (HELD,)), 1, "how many were held")
    with raises(Fenced):
        worker.apply(held)
    same(bodies(Worker(stores).take(PLENTY)), [b"2"], "what others get then")


def check_redrive_takes_the_dead_alone(lab: Lab) -> None:
    """`redrive` puts back no item that is not dead, or not there."""
    stores = lab.open()
    worker = Worker(stores)
    ids = worker.put(b"held", b"dead", b"ready")
    _, dead = worker.take(2)
    worker.release(dead, dead=True)
    same(stores.queues.redrive("q", [*ids, ids[-1] + 99]), 1, "how many were put back")
    same(stores.queues.redrive("q", ids), 0, "how many were put back again")
    same(states_of(stores), {b"held": HELD, b"dead": READY, b"ready": READY}, "where they stand")
