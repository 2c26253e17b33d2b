"""Queues of a `QueueStore`: create, fill, peek, purge, delete; and what is refused."""

from __future__ import annotations

from typing import Any, cast

from pxrs.errors import Fenced, InvalidRequest, MessageTooLarge, QueueExists
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
    wait_for_item,
)
from pxrs.testing.conformance.tools import LONG, raises, require, same, together
from pxrs.types import Held, ItemState, NewItem, Outcome, QueueChange, QueueStats, Release, Taken


def check_items_come_as_they_were_put(lab: Lab) -> None:
    """A body is any bytes; key, priority and time come with it, on every handle."""
    here, there = lab.open(), lab.open()
    worker, other = Worker(here), Worker(there)
    values = [b"", b"\0", b"\xff\xfe\0\x80", bytes(range(256)) * 400, b"text"]
    for number, value in enumerate(values):
        worker.put(value, key=f"kéy {number}", priority=-number)
    for number, value in enumerate(values):
        item = other.take_one()
        same((item.body, item.key, item.priority), (value, f"kéy {number}", -number), "the item")
        same((item.held.queue, item.held.delivery, item.error), ("q", 1, ""), "its delivery")
        require(item.put_ms > 0, "it says when it was put")
        same(type(item.body), bytes, "the type of its body")
        other.apply(item)


def check_bodies_are_the_stores_own(lab: Lab) -> None:
    """A caller that goes on writing to its buffer changes nothing that it has put."""
    worker, buffer = Worker(lab.open()), bytearray(b"before")
    worker.put(cast(bytes, buffer))
    buffer[:] = b"after!"
    same(bodies(look(worker.stores)), [b"before"], "what lies in the queue")
    same(worker.take_one().body, b"before", "what is handed out")


def check_the_first_put_makes_the_queue(lab: Lab) -> None:
    """The first put makes the queue, not fifo; a take makes none."""
    worker, there = Worker(lab.open()), lab.open()
    same(worker.take(), [], "what an unknown queue holds")
    same((worker.queues.find("q"), worker.queues.all()), (None, []), "the queues before")
    worker.put(b"1")
    found = there.queues.find("q")
    require(found is not None and found.name == "q" and not found.fifo, f"it is {found}")
    require(found is not None and found.created_ms > 0, "it says when it was made")
    same(there.queues.all(), [found], "the queues")
    same(bodies(worker.take(PLENTY)), [b"1"], "what it holds")


def check_a_queue_is_made_once(lab: Lab) -> None:
    """Making a queue again changes nothing; one with another order is refused."""
    here, there = lab.open(), lab.open()
    for name, fifo in (("strict", True), ("loose", False)):
        made = here.queues.create(name, fifo=fifo)
        same((made.name, made.fifo), (name, fifo), "the queue")
        Worker(here).put(b"1", queue=name)
        same(there.queues.create(name, fifo=fifo), made, "the queue made again")
        with raises(QueueExists):
            there.queues.create(name, fifo=not fifo)
        same(there.queues.find(name), made, "the queue after that")
        same(bodies(look(there, name)), [b"1"], "its items")


def check_names_are_exact(lab: Lab) -> None:
    """Names that differ in anything are different queues, listed by their code points."""
    stores = lab.open()
    names = ["a", "A", "á", "a\u0301", "a ", " a", "a%", "a_", "a.b", "a-b", "日本", "x" * 249]
    for name in names:
        Worker(stores).put(name.encode(), queue=name)
    same([queue.name for queue in stores.queues.all()], sorted(names), "the names")
    for name in names:
        same(bodies(look(stores, name)), [name.encode()], f"the items of {name!r}")
    stores.queues.delete("a%")
    same(len(stores.queues.all()), len(names) - 1, "how many are left of them")


def check_an_unknown_queue_is_empty(lab: Lab) -> None:
    """To peek into, take from or purge a queue that does not exist does nothing."""
    stores = lab.open()
    queues, worker = stores.queues, Worker(stores)
    same(queues.take("none", worker.holder, 9), Taken([], None), "what a take gets")
    same(queues.stats("none"), QueueStats(), "its figures")
    same((queues.peek("none"), queues.find("none")), ([], None), "what is found")
    same(
        (queues.drop("none", [1]), queues.redrive("none", [1]), queues.purge("none")), (0, 0, 0), ""
    )
    queues.release(worker.holder, [Release(Held("none", 1, 1))])
    queues.delete("none")
    same(queues.all(), [], "the queues")


def check_ids_rise(lab: Lab) -> None:
    """A later item has a higher id, within one change and from one to the next, on all handles."""
    here, there = lab.open(), lab.open()
    ids: list[int] = []
    for number in range(6):
        ids += Worker((here, there)[number % 2]).put(b"a", b"b", b"c")
    same(ids, sorted(set(ids)), "the ids in the order of the puts")
    same([item.id for item in look(here)], ids, "the ids in the queue")
    worker = Worker(here)
    worker.apply(*worker.drain())
    require(worker.put(b"d")[0] > ids[-1], "an id was given twice")


def check_a_change_spans_queues(lab: Lab) -> None:
    """One change removes items from several queues and puts items into several."""
    worker, there = Worker(lab.open()), lab.open()
    for queue in ("a", "b"):
        worker.put(b"1", b"2", queue=queue)
    done = [*worker.take(2, "a"), *worker.take(1, "b")]
    new = [NewItem(queue=queue, body=queue.encode()) for queue in ("z", "a", "b", "z")]
    ids = worker.apply(*done, put=new)
    found = [{item.id: item.body for item in look(there, queue)} for queue in ("z", "a", "b")]
    same([found[0][cast(int, ids[at])] for at in (0, 3)], [b"z", b"z"], "the ids in one queue")
    same(found[1], {ids[1]: b"a"}, "what is in the first queue")
    same(sorted(found[2].values()), [b"2", b"b"], "what is in the second queue")
    same([there.queues.stats(queue).done for queue in ("a", "b", "z")], [2, 1, 0], "what is done")


def check_an_empty_change_is_fine(lab: Lab) -> None:
    """A change that neither removes nor puts is applied, and remembered."""
    worker = Worker(lab.open())
    same(worker.queues.apply(QueueChange(worker.holder, (), (), "unit")), [], "what it tells")
    found = worker.queues.outcome(worker.session.id, "unit")
    same(found, Outcome.DONE, "what became of it")


def check_a_put_needs_no_session(lab: Lab) -> None:
    """A change that removes nothing is done, even if its session is over."""
    worker = Worker(lab.open())
    worker.session.close()
    worker.apply(put=[NewItem(queue="q", body=b"1")])
    same(bodies(look(worker.stores)), [b"1"], "what was put")


def check_done_is_done(lab: Lab) -> None:
    """A removed item is gone on every handle and can't be removed again."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"1", b"2")
    first, second = worker.take(2)
    worker.apply(first)
    with raises(Fenced):
        worker.apply(first, second)
    same(states_of(there), {b"2": HELD}, "what is left")
    with raises(InvalidRequest):
        worker.apply(second, second)
    worker.apply(second)
    same(there.queues.stats("q").done, 2, "what is done")


def check_duplicates_are_left_out(lab: Lab) -> None:
    """Of items with one dedupe key only the first is put: in one change and later."""
    worker, there = Worker(lab.open()), lab.open()

    def item(body: bytes, dedupe: str | None = "k", queue: str = "q") -> NewItem:
        window = LONG if dedupe else 0.0
        return NewItem(queue=queue, body=body, dedupe=dedupe, dedupe_window=window)

    ids = worker.apply(
        put=[item(b"1"), item(b"2"), item(b"3", "K"), item(b"4", None), item(b"5", queue="p")]
    )
    same([number is None for number in ids], [False, True, False, False, False], "the first change")
    same(Worker(there).apply(put=[item(b"6"), item(b"7", None)])[0], None, "a later change")
    worker.apply(*worker.drain())
    same(Worker(there).apply(put=[item(b"8"), item(b"9", queue="p")]), [None, None], "when done")
    same((bodies(look(there)), bodies(look(there, "p"))), ([], [b"5"]), "what is in the queues")
    same(there.queues.stats("q").put, 4, "how many were put")


def check_the_dedupe_window_ends(lab: Lab) -> None:
    """After its window a dedupe key is new again, and opens another one."""
    worker = Worker(lab.open())
    item = NewItem(queue="q", body=b"1", dedupe="k", dedupe_window=soon(lab))
    longer = NewItem(queue="q", body=b"2", dedupe="k", dedupe_window=LONG)
    require(worker.apply(put=[item])[0] is not None, "the first one is new")
    let_time_pass(lab, worker.stores)
    require(worker.apply(put=[longer])[0] is not None, "after the window it is new again")
    let_time_pass(lab, worker.stores)
    same(worker.apply(put=[item]), [None], "inside the second window")
    same(bodies(look(worker.stores)), [b"1", b"2"], "what is in the queue")


def check_a_refused_change_leaves_no_dedupe_key(lab: Lab) -> None:
    """A put that was refused leaves no trace in the dedupe window."""
    worker = Worker(lab.open())
    new = NewItem(queue="q", body=b"1", dedupe="k", dedupe_window=LONG)
    worker.put(b"work", queue="w")
    held = worker.take_one("w")
    worker.release(held)
    with raises(Fenced):
        worker.apply(held, put=[new])
    worker.queues.create("strict", fifo=True)
    with raises(InvalidRequest):
        worker.apply(put=[new, NewItem(queue="strict", body=b"", priority=1)])
    require(worker.apply(put=[new])[0] is not None, "it was taken for a duplicate")


def check_a_deleted_queue_is_gone(lab: Lab) -> None:
    """Deleting a queue removes all its items, held and dead ones too; their holders are fenced."""
    here, there = lab.open(), lab.open()
    holder, other = Worker(here), Worker(there)
    holder.put(b"held", b"dead")
    held = holder.take_one()
    holder.release(holder.take_one(), dead=True)
    holder.put(b"keyed", b"behind", key="k")
    holder.put(b"late", delay=LONG)
    holder.put(bytes(100_000))
    holder.put(b"other", queue="other")
    there.queues.delete("q")
    same([queue.name for queue in here.queues.all()], ["other"], "the queues")
    same((look(here), here.queues.stats("q")), ([], QueueStats()), "what is left of it")
    holder.must_have_lost(held)
    same(bodies(other.drain("other")), [b"other"], "what is in the other queue")
    same(here.queues.reap(), None, "what is left to wait for")


def check_a_queue_made_again_starts_clean(lab: Lab) -> None:
    """A queue made again under an old name has none of the old items, keys, counts or order."""
    here, there = lab.open(), lab.open()
    here.queues.create("q", fifo=True)
    zombie = Worker(here)
    once = NewItem(queue="q", body=b"old", key="k", dedupe="d", dedupe_window=LONG)
    zombie.apply(put=[once])
    held = zombie.take_one()
    there.queues.delete("q")
    there.queues.create("q", fifo=False)
    same(there.queues.stats("q"), QueueStats(), "the figures of the new queue")
    worker = Worker(there)
    require(worker.apply(put=[once])[0] is not None, "the old queue's dedupe key still counts")
    zombie.must_have_lost(held)
    worker.put(b"free", priority=1)
    found = Worker(here).take(PLENTY)
    same([(item.body, item.held.delivery) for item in found], [(b"free", 1), (b"old", 1)], "it")
    zombie.must_have_lost(held)


def check_deleted_items_are_handed_out_by_nobody(lab: Lab) -> None:
    """A handle that takes in a loop, and may know the next items, hands out no deleted ones."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(*(b"old %d" % number for number in range(9)))
    for _ in range(4):
        worker.apply(worker.take_one())
    there.queues.delete("q")
    same(bodies(worker.take()), [], "what is left of a deleted queue")
    worker.put(*(b"old %d" % number for number in range(9)))
    for _ in range(4):
        worker.apply(worker.take_one())
    there.queues.delete("q")
    Worker(there).put(b"new")
    same(bodies(worker.take()), [b"new"], "what there is of the new one")


def check_holds_in_a_queue_made_again_end_with_their_session(lab: Lab) -> None:
    """A session that held items of a deleted queue holds those of a new one only while it lives."""
    here, there = lab.open(), lab.open()
    session = here.coord.session(LONG)
    for body in (b"first", b"second", b"third"):
        there.queues.delete("q")
        Worker(there).put(body)
        same(Worker(here, session).take_one().body, body, "what the session takes")
    session.close()
    found = wait_for_item(lab, Worker(there))
    same((found.body, found.held.delivery), (b"third", 2), "what is free when the session is over")


def check_changes_name_their_holder_alone(lab: Lab) -> None:
    """A change by a holder that holds nothing may put; by one that lacks one item it may not."""
    stores = lab.open()
    worker, other = Worker(stores), Worker(stores)
    worker.put(b"1")
    held = worker.take_one()
    change = QueueChange(other.holder, (held.held,), (NewItem(queue="q", body=b"2"),))
    with raises(Fenced):
        stores.queues.apply(change)
    same(states_of(stores), {b"1": HELD}, "what is there")


NAN, INFINITE = float("nan"), float("inf")


def check_bad_names_are_refused(lab: Lab) -> None:
    """A name that some engine could not keep is refused on all, in `create` and in a put."""
    stores = lab.open()
    for name in ("", "a/b", "a\nb", "a\0b", "x" * 250, "\ud800", cast(Any, None), cast(Any, 7)):
        with raises(InvalidRequest):
            stores.queues.create(name)
        with raises(InvalidRequest):
            Worker(stores).put(b"1", queue=name)
    same(stores.queues.all(), [], "the queues")


def check_limits_hold(lab: Lab) -> None:
    """A change within the store's limits is applied; one beyond them is refused as a whole."""
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


def check_bad_items_are_refused(lab: Lab) -> None:
    """An invalid item is refused, together with the rest of its change."""
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


def check_numbers_may_be_huge(lab: Lab) -> None:
    """A huge count takes all that there is; impossible ids belong to no item."""
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


def check_stats_add_up(lab: Lab) -> None:
    """After every step each item is counted once, in its state."""
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
    """Each item is shown with its state, its holder and its history."""
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
    """A peek while others remove items shows each item whole, or not at all."""
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
    """`drop` keeps held items; it removes all others, dead ones too, once."""
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
    """Without states a purge removes all but held and dead items; with states just those."""
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
    """`redrive` puts back only dead items that exist."""
    stores = lab.open()
    worker = Worker(stores)
    ids = worker.put(b"held", b"dead", b"ready")
    _, dead = worker.take(2)
    worker.release(dead, dead=True)
    same(stores.queues.redrive("q", [*ids, ids[-1] + 99]), 1, "how many were put back")
    same(stores.queues.redrive("q", ids), 0, "how many were put back again")
    same(states_of(stores), {b"held": HELD, b"dead": READY, b"ready": READY}, "where they stand")
