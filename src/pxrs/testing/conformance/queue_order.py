"""In which order items are handed out: keys, fifo queues, priorities and delays."""

from __future__ import annotations

from pxrs.errors import InvalidRequest
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
from pxrs.testing.conformance.tools import LONG, raises, require, same
from pxrs.types import NewItem


def check_older_items_come_first(lab: Lab) -> None:
    """A single taker gets items without a key in the order in which they were put."""
    worker, there = Worker(lab.open()), lab.open()
    expected = [b"%d" % number for number in range(12)]
    for number in range(0, 12, 2):
        (worker if number % 4 else Worker(there)).put(*expected[number : number + 2])
    same(bodies(worker.take(5)), expected[:5], "the first five")
    found = [worker.take_one().body for _ in range(3)] + bodies(worker.take(PLENTY))
    same(found, expected[5:], "the rest")


def check_higher_priorities_come_first(lab: Lab) -> None:
    """Of ready items the higher priority goes first, and the older of equal ones."""
    worker = Worker(lab.open())
    for number, priority in enumerate([0, 5, -5, 5, 2**31 - 1, 0, -(2**31) + 1]):
        worker.put(b"%d" % number, priority=priority)
    found = [worker.take_one() for _ in range(7)]
    same(bodies(found), [b"4", b"1", b"3", b"0", b"5", b"2", b"6"], "the order")
    same([item.priority for item in found][::6], [2**31 - 1, -(2**31) + 1], "the priorities")


def check_a_key_has_one_holder(lab: Lab) -> None:
    """While one transaction holds an item of a key, no other gets an item of that key."""
    here, there = lab.open(), lab.open()
    first = Worker(here)
    first.put(b"1", b"2", b"3", key="k")
    held = first.take_one()
    same(held.body, b"1", "the first one")
    same(states_of(there), {b"1": HELD, b"2": WAITING, b"3": WAITING}, "where they stand")
    for other in (Worker(here, first.session), Worker(there)):
        same(bodies(other.take(PLENTY)), [], "what another transaction got of the key")
        other.put(b"4", key="k")
        same(bodies(other.take(PLENTY)), [], "what it got after a put")
    first.apply(held)
    second = Worker(there)
    same(bodies(second.take(1)), [b"2"], "the next one, when the first is done")
    same(bodies(first.take(PLENTY)), [], "what the first holder gets then")


def check_keys_run_in_parallel(lab: Lab) -> None:
    """A held key blocks no other key, nor items without one."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    for key in ("a", "b", "a", "b", "c"):
        worker.put(key.encode(), key=key)
    worker.put(b"free", b"free")
    same([Worker(there).take_one().body for _ in range(3)], [b"a", b"b", b"c"], "the fronts")
    same(bodies(Worker(here).drain()), [b"free", b"free"], "what has no key")


def check_keys_are_exact(lab: Lab) -> None:
    """Keys that differ in case, accents or spaces, or in their queue, are different keys."""
    stores = lab.open()
    keys = ["key", "KEY", "kéy", "ke\u0301y", "key ", " key", "k%", "k_y", "日" * 1024]
    for queue in ("q", "Q"):
        for key in keys:
            Worker(stores).put(key.encode(), queue=queue, key=key)
            Worker(stores).put(b"behind", queue=queue, key=key)
        found = [Worker(stores).take_one(queue) for _ in keys]
        same([item.key for item in found], keys, "the keys that run at once")
        same(Worker(stores).take(1, queue), [], "what else could be had")


def check_the_same_holder_may_go_on(lab: Lab) -> None:
    """The holder of an item of a key may take those behind it, in order, in one take or in many."""
    worker, there = Worker(lab.open()), lab.open()
    expected = [b"%d" % number for number in range(6)]
    worker.put(*expected, key="k")
    found = worker.take(2) + worker.take(1)
    same(bodies(Worker(there).take(PLENTY)), [], "what another gets in between")
    found += worker.take(PLENTY)
    same(bodies(found), expected, "the order")
    worker.apply(found[0], found[3])
    same(bodies(Worker(there).take(PLENTY)), [], "what another gets while some are held")
    worker.apply(*(found[at] for at in (1, 2, 4, 5)))
    same(look(there), [], "what is left")


def check_a_released_run_is_in_order_again(lab: Lab) -> None:
    """Items of a key that are given back are handed out again in order, before what came later."""
    here, there = lab.open(), lab.open()
    for giving in ("in turn", "backwards", "by the session's end"):
        worker = Worker(here)
        worker.put(b"1", b"2", b"3", key="k")
        found = worker.take(3)
        same(bodies(found), [b"1", b"2", b"3"], "the run")
        Worker(there).put(b"4", key="k")
        if giving == "in turn":
            worker.release(*found)
        elif giving == "backwards":
            for item in found[::-1]:
                worker.release(item)
        else:
            worker.session.close()
        heir = Worker(there)
        again = heir.drain()
        same(bodies(again), [b"1", b"2", b"3", b"4"], f"the order after a release {giving}")
        heir.apply(*again)


def check_what_is_given_back_is_next(lab: Lab) -> None:
    """A released front is next for its holder, too, even if that holds the items behind it."""
    worker = Worker(lab.open())
    worker.put(b"1", b"2", b"3", key="k")
    first, second = worker.take(2)
    worker.release(first)
    same(bodies(Worker(lab.open()).take(PLENTY)), [], "what another gets")
    again = worker.take(PLENTY)
    same(bodies(again), [b"1", b"3"], "what the holder gets")
    worker.apply(second, *again)


def check_a_lost_front_is_not_followed(lab: Lab) -> None:
    """A holder that was late with a key's front gets the front again, not the items behind it."""
    worker = Worker(lab.open())
    for queue, lot in (("warm", 1), ("cold", 2)):
        worker.put(b"1", b"2", b"3", queue=queue, key="k")
        worker.put(b"other", queue=queue)
        held = worker.take(1, queue, lock_for=LONG)
        if lot == 2:
            held += worker.take(1, queue)
        same(held[0].body, b"1", "the front")
        worker.extend(held[0], lock_for=soon(lab))
        let_time_pass(lab, worker.stores)
        worker.put(b"", queue="elsewhere")
        worker.take_one("elsewhere")
        got = [item for _ in range(4 - lot) for item in worker.take(1, queue)]
        mine = [item for item in got if item.key == "k"]
        same(bodies(mine)[:1], [b"1"], "what is handed out first of the key")
        same(mine[0].held.delivery, 2, "its delivery")


def check_a_dead_front_lets_the_next_through(lab: Lab) -> None:
    """When the first of a key dies, by release, use or its holder's death, the next one shows."""
    worker = Worker(lab.open())
    worker.put(b"1", b"2", b"3", b"4", key="k")
    worker.release(worker.take_one(), dead=True)
    second = worker.take_one(most=1)
    same(second.body, b"2", "after a dead release")
    worker.release(second)
    mortal = Worker(lab.open())
    third = mortal.take_one(most=1)
    same(third.body, b"3", "after one that was used up")
    mortal.session.close()
    fourth = worker.take_one(most=1)
    same(fourth.body, b"4", "after one that died with its holder")
    same(bodies(worker.queues.peek("q", (DEAD,))), [b"1", b"2", b"3"], "the dead")


def check_a_dead_front_among_others(lab: Lab) -> None:
    """A used-up front in the middle of a batch costs no item its place, and its key goes on."""
    stores = lab.open()
    worker = Worker(stores)
    worker.put(b"a1", key="a")
    worker.put(b"b1", b"b2", key="b")
    worker.release(*[item for item in worker.take(2) if item.key == "b"])
    worker.put(b"c1", key="c")
    got = Worker(stores).drain(most=1)
    same(sorted(bodies(got)), [b"b2", b"c1"], "what is handed out")
    same(states_of(stores)[b"b1"], DEAD, "where the used-up one stands")


def check_a_delayed_front_holds_up_its_key(lab: Lab) -> None:
    """A delay, or a back-off, of the first of a key blocks those behind it, and no others."""
    worker = Worker(lab.open())
    worker.put(b"1", key="a", delay=LONG)
    worker.put(b"2", key="a")
    worker.put(b"1", b"2", b"3", key="b")
    backing_off = worker.take_one()
    worker.release(backing_off, delay=LONG)
    worker.put(b"other", key="c")
    found = worker.take(PLENTY)
    same(bodies(found), [b"other"], "what could be had")
    states = [item.state for item in look(worker.stores)]
    same(states, [DELAYED, WAITING, DELAYED, WAITING, WAITING, HELD], "where they stand")
    worker.put(b"1", b"2", b"3", key="d")
    worker.release(worker.take_one(), delay=soon(lab))
    let_time_pass(lab, worker.stores)
    found = worker.drain()
    same([(item.key, item.body) for item in found], [("d", n) for n in (b"1", b"2", b"3")], "then")


def check_a_delay_behind_is_kept(lab: Lab) -> None:
    """An item that is delayed itself is not due because the one before it is done or held."""
    worker = Worker(lab.open())
    for key, delay in (("far", LONG), ("near", soon(lab))):
        worker.put(b"1", key=key)
        worker.put(b"2 " + key.encode(), key=key, delay=delay)
        worker.put(b"3", key=key)
        first = worker.take(PLENTY if key == "far" else 1)
        same(bodies(first), [b"1"], "what its holder gets at once")
        worker.apply(*first)
        if key == "far":
            same(bodies(worker.take(PLENTY)), [], "what could be had")
    let_time_pass(lab, worker.stores)
    same(bodies(worker.take(PLENTY)), [b"2 near", b"3"], "what could be had in time")


def check_priority_yields_to_the_key(lab: Lab) -> None:
    """Within a key the order of the puts goes before priorities."""
    worker = Worker(lab.open())
    worker.put(b"1", key="k")
    worker.put(b"2", key="k", priority=9)
    worker.put(b"other", priority=5)
    same([worker.take_one().body for _ in range(3)], [b"other", b"1", b"2"], "the order")


def check_fifo_is_one_order(lab: Lab) -> None:
    """A fifo queue hands out in order to one transaction at a time, whatever the keys."""
    here, there = lab.open(), lab.open()
    here.queues.create("q", fifo=True)
    worker, other = Worker(here), Worker(there)
    worker.put(b"1")
    other.put(b"2", key="a")
    worker.put(b"3", b"4", key="b")
    first = worker.take(2)
    same(bodies(first), [b"1", b"2"], "the first two")
    same([item.key for item in first], [None, "a"], "their keys")
    same(bodies(other.take(PLENTY)), [], "what another gets")
    worker.apply(first[0])
    same(bodies(other.take(PLENTY)), [], "what another gets while one is held")
    worker.release(first[1], delay=LONG)
    same(bodies(other.take(PLENTY)), [], "what another gets while the front backs off")


def check_fifo_goes_on_after_a_back_off(lab: Lab) -> None:
    """When the front of a fifo queue has backed off for long enough, all follow it."""
    here, there = lab.open(), lab.open()
    here.queues.create("q", fifo=True)
    worker, other = Worker(here), Worker(there)
    worker.put(b"1", b"2", key="a")
    worker.put(b"3", key="b")
    worker.release(worker.take_one(), delay=soon(lab))
    let_time_pass(lab, here)
    same(bodies(other.take(PLENTY)), [b"1", b"2", b"3"], "what another gets then")


def check_fifo_refuses_priority_and_delay(lab: Lab) -> None:
    """A change that would break a fifo queue's order is refused as a whole."""
    stores = lab.open()
    stores.queues.create("q", fifo=True)
    worker = Worker(stores)
    worker.put(b"work", queue="other")
    held = worker.take_one("other")
    for bad in (
        NewItem(queue="q", body=b"", priority=1),
        NewItem(queue="q", body=b"", priority=-1),
        NewItem(queue="q", body=b"", delay=0.001),
    ):
        with raises(InvalidRequest):
            worker.apply(held, put=[NewItem(queue="q", body=b""), bad])
    same((look(stores), states_of(stores, "other")), ([], {b"work": HELD}), "what was changed")
    worker.apply(held, put=[NewItem(queue="q", body=b"fine")])
    same(bodies(look(stores)), [b"fine"], "what a fifo queue takes")


def check_delayed_items_show_on_time(lab: Lab) -> None:
    """A delayed item can't be taken before its time; from then on it is, and counts as, ready."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    worker.put(b"late", delay=LONG)
    worker.put(b"later", delay=LONG, priority=9)
    same(bodies(Worker(there).take(PLENTY)), [], "what could be had at once")
    items = {item.body: item for item in look(there)}
    require((items[b"later"].visible_ms or 0) > items[b"later"].put_ms, "it says when it shows")
    same(states_of(there), {b"late": DELAYED, b"later": DELAYED}, "where they stand")
    worker.put(b"soon", delay=soon(lab))
    let_time_pass(lab, here)
    stats = there.queues.stats("q")
    same((stats.ready, stats.delayed), (1, 2), "ready and delayed, before the first take")
    same(bodies(there.queues.peek("q", (READY,))), [b"soon"], "what is ready")
    same(bodies(there.queues.peek("q", (DELAYED,))), [b"late", b"later"], "what is delayed")
    same(bodies(Worker(there).take(PLENTY)), [b"soon"], "what could be had in time")


def check_removed_fronts_keep_keys_moving(lab: Lab) -> None:
    """Dropping or purging a key's front shows the item behind it."""
    worker = Worker(lab.open())
    ids = worker.put(b"1", b"2", b"3", b"4", b"5", key="k")
    same(worker.queues.drop("q", ids[:2]), 2, "how many were dropped")
    same(states_of(worker.stores), {b"3": READY, b"4": WAITING, b"5": WAITING}, "after a drop")
    same(worker.queues.purge("q", (READY,)), 1, "how many were purged")
    same(states_of(worker.stores), {b"4": READY, b"5": WAITING}, "after a purge")
    held = worker.take_one()
    same(worker.queues.drop("q", ids), 1, "how many could be dropped beside the held one")
    same(states_of(worker.stores), {b"4": HELD}, "what is left")
    worker.apply(held)
    worker.put(b"6", key="k")
    same(worker.take_one().body, b"6", "the key goes on")


def check_redriven_items_stand_behind_their_key(lab: Lab) -> None:
    """A dead item put back is the last of its key, and waits while the key is held."""
    stores = lab.open()
    worker = Worker(stores)
    ids = worker.put(b"1", b"2", key="k")
    worker.release(worker.take_one(), dead=True)
    second = worker.take_one()
    stores.queues.redrive("q", ids[:1])
    same(bodies(Worker(stores).take(PLENTY)), [], "what another gets while the key is held")
    worker.apply(second)
    got = Worker(stores).take(PLENTY)
    same([(item.body, item.key) for item in got], [(b"1", "k")], "then")
