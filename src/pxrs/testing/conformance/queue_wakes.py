"""Waiting for items: watches of a `QueueStore`, and when it says to look again."""

from __future__ import annotations

from collections.abc import Callable

from pxrs.errors import SessionLost
from pxrs.testing.conformance.lab import Lab, Suite, Violation
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    Worker,
    bodies,
    let_time_pass,
    soon,
    wait_for_item,
)
from pxrs.testing.conformance.sessions import LONG
from pxrs.testing.conformance.tools import FACTORS, require, same, together
from pxrs.testing.conformance.watches import must_wake
from pxrs.types import Delivery

_LOOKS = 3

suite = Suite()


@suite
def check_every_kind_of_change_wakes(lab: Lab) -> None:
    """Every change that makes an item available wakes a waiter on another handle."""
    here, there = lab.open(), lab.open()
    worker, mortal = Worker(here), Worker(here)
    watch = there.queues.watch("q")

    def expect(name: str, change: Callable[[], object]) -> None:
        watch.wait(0)
        change()
        must_wake(lab, watch, name)

    expect("a put", lambda: worker.put(b"1"))
    held = worker.take_one()
    expect("a release", lambda: worker.release(held))
    again = worker.take_one()
    expect(
        "a release with a delay: what is due has changed", lambda: worker.release(again, delay=9)
    )
    expect("a put of a key", lambda: worker.put(b"1", b"2", b"3", b"4", b"5", b"6", key="k"))
    first = worker.take_one()
    expect("a key's front that is done", lambda: worker.apply(first))
    second = worker.take_one()
    expect("a key's front that died", lambda: worker.release(second, dead=True))
    (third,) = here.queues.peek("q", limit=1, after=second.held.id)
    expect("a key's front that was dropped", lambda: here.queues.drop("q", [third.id]))
    mortal.take_one()
    expect("the end of a session", mortal.session.close)
    (dead,) = here.queues.peek("q", (DEAD,))
    expect("a redrive", lambda: here.queues.redrive("q", [dead.id]))
    expect("a purge", lambda: here.queues.purge("q"))
    watch.close()


@suite
def check_every_queue_is_watched(lab: Lab) -> None:
    """A watch on several queues wakes on each of them, there already or not."""
    here, there = lab.open(), lab.open()
    for name in ("a", "b", "é"):
        watch = there.queues.watch("a", "b", "é")
        Worker(here).put(b"1", queue=name)
        must_wake(lab, watch, f"a put to {name!r}")
        watch.close()


@suite
def check_a_used_up_front_wakes(lab: Lab) -> None:
    """A take that finds a key's front used up wakes a waiter that may have the next one."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    worker.put(b"used", key="k", priority=9)
    worker.put(b"next", key="k")
    worker.release(worker.take_one())
    worker.put(b"free", priority=5)
    sleeper = Worker(there)
    watch = there.queues.watch("q")
    watch.wait(0)
    same(bodies(Worker(here).take(1, most=1)), [b"free"], "what the taker got")
    must_wake(lab, watch, "a front that was used up")
    same(bodies(sleeper.take(1, most=1)), [b"next"], "what the sleeper gets")
    watch.close()


@suite
def check_expiry_wakes_a_sleeper(lab: Lab) -> None:
    """A waiter is woken when a holder's session expires, and gets what it held."""
    if not any(a_sleeper_inherits(lab, factor) for factor in FACTORS):
        raise Violation("no session lived long enough to be waited for")


def a_sleeper_inherits(lab: Lab, factor: int) -> bool:
    """False if the session was over before the waiter waited, which proves nothing."""
    here, there = lab.open(), lab.open()
    holder = Worker(here, here.coord.session(factor * lab.ttl / FACTORS[0]))
    queue, heir = f"q{factor}", Worker(there)
    heir.put(b"1", queue=queue)
    try:
        holder.take_one(queue)
    except SessionLost:
        return False
    watch = there.queues.watch(queue)
    watch.wait(0)
    if heir.take(1, queue):
        watch.close()
        return False
    got: list[Delivery] = []

    def wait() -> None:
        must_wake(lab, watch, "the expiry of a holder's session")
        got.append(wait_for_item(lab, heir, queue))

    together(lab, wait, lambda: lab.let_expire(holder.session))
    same([(item.body, item.held.delivery) for item in got], [(b"1", 2)], "what the sleeper got")
    watch.close()
    return True


@suite
def check_a_put_wakes_a_sleeper(lab: Lab) -> None:
    """Two who wait for each other's items in turn both come to the end."""
    here, there = lab.open(), lab.open()

    def play(worker: Worker, mine: str, other: str) -> None:
        for number in range(25):
            worker.put(b"%d" % number, queue=mine)
            item = wait_for_item(lab, worker, other)
            same(item.body, b"%d" % number, "the next item")
            worker.apply(item)

    together(
        lab,
        lambda: play(Worker(here), "a", "b"),
        lambda: play(Worker(there), "b", "a"),
    )


@suite
def check_a_put_behind_a_held_item_wakes(lab: Lab) -> None:
    """A holder of a key's front is woken when any handle puts the next item of that key."""
    here, there = lab.open(), lab.open()
    holder = Worker(here)
    holder.put(b"1", key="k")
    holder.take_one()
    watch = here.queues.watch("q")
    due = holder.due()
    require(due is None or due > LONG / 2, f"due in {due} s")
    watch.wait(0)
    Worker(there).put(b"2", key="k")
    must_wake(lab, watch, "a put behind a held item")
    same(wait_for_item(lab, holder).body, b"2", "what the holder gets")
    watch.close()


@suite
def check_due_is_when_a_delay_ends(lab: Lab) -> None:
    """A take that finds nothing says in how many seconds the first delayed item shows."""
    stores = lab.open()
    worker = Worker(stores)
    same(worker.due(), None, "when an empty queue has something")
    for delay in (LONG, LONG / 2):
        worker.put(b"later", delay=delay)
        for _ in range(2):
            require_due(lab, worker, delay)
    worker.put(b"soon", delay=soon(lab))
    let_time_pass(lab, stores)
    soonest = worker.take_one()
    same(soonest.body, b"soon", "what shows")
    require_due(lab, worker, LONG / 2)
    worker.release(soonest, delay=LONG / 4)
    require_due(lab, worker, LONG / 4)


@suite
def check_due_is_when_a_hold_ends(lab: Lab) -> None:
    """A take that finds nothing says in how many seconds the first hold is over."""
    stores = lab.open()
    worker, other = Worker(stores), Worker(lab.open())
    worker.put(b"1", b"2")
    first = worker.take_one()
    worker.take_one(lock_for=LONG)
    require_due(lab, other, LONG)
    worker.extend(first, lock_for=LONG / 2)
    require_due(lab, other, LONG / 2)
    worker.extend(first, lock_for=soon(lab))
    let_time_pass(lab, stores)
    same(other.take_one().body, b"1", "what is free then")
    require_due(lab, other, LONG)


@suite
def check_due_knows_what_is_behind_a_held_front(lab: Lab) -> None:
    """A holder of a key's front learns when the delayed item behind it can be had."""
    stores = lab.open()
    worker = Worker(stores)
    for key, delay in (("far", LONG), ("near", soon(lab))):
        worker.put(b"1", key=key)
        worker.put(b"2 " + key.encode(), key=key, delay=delay)
        worker.take_one()
        if delay == LONG:
            for _ in range(2):
                require_due(lab, worker, delay)
    let_time_pass(lab, stores)
    same(worker.take_one().body, b"2 near", "what is behind, in time")
    require_due(lab, worker, LONG)


@suite
def check_a_shorter_hold_wakes(lab: Lab) -> None:
    """A hold that will end earlier than was said wakes who trusted that; so does a deadline."""
    here, there = lab.open(), lab.open()
    for lock_for in (None, LONG):
        worker, sleeper = Worker(here), Worker(there)
        worker.put(b"1")
        held = worker.take_one(lock_for=lock_for)
        watch = there.queues.watch("q")
        due = sleeper.due()
        require(due is None or due > LONG / 2, f"due in {due} s")
        watch.wait(0)
        worker.extend(held, lock_for=LONG / 2)
        must_wake(lab, watch, "a shorter hold")
        require_due(lab, sleeper, LONG / 2)
        watch.close()
        here.queues.delete("q")


@suite
def check_nobody_oversleeps(lab: Lab) -> None:
    """A waiter that minds the watch and `due` gets delayed, released and late items in time."""
    here, there = lab.open(), lab.open()
    worker, sleeper = Worker(here), Worker(there)
    worker.put(b"backs off")
    back = worker.take_one()
    worker.put(b"late")
    worker.take_one(lock_for=0.05)
    worker.put(b"delayed", delay=0.06)
    got: list[bytes] = []

    def wait() -> None:
        got.extend(wait_for_item(lab, sleeper).body for _ in range(4))

    def stir() -> None:
        worker.release(back, delay=0.04)
        let_time_pass(lab, here)
        worker.put(b"new", delay=0.03)
        let_time_pass(lab, here)

    together(lab, wait, stir)
    same(sorted(got), [b"backs off", b"delayed", b"late", b"new"], "what the sleeper got")


def require_due(lab: Lab, worker: Worker, seconds: float) -> None:
    """Require that an item is due in about so many seconds; a slow machine may bring it nearer.

    Who has not seen all may say to look again sooner, but not for ever.
    """
    low = 0.75 * seconds
    for _ in range(_LOOKS):
        due = worker.due()
        if due is None or due >= low:
            break
        let_time_pass(lab, worker.stores)
    require(due is not None and low <= due <= seconds, f"due in {due} s, not {low} to {seconds}")
