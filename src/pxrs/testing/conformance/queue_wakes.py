"""Waiting for items, and many takers at once: one holder per item, none lost, keys in order."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from pxrs.errors import Fenced, SessionLost
from pxrs.stores.api import Stores
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    Worker,
    bodies,
    let_time_pass,
    look,
    soon,
    states_of,
    wait_for_item,
)
from pxrs.testing.conformance.tools import FACTORS, LONG, must_wake, require, same, together
from pxrs.types import Delivery, NewItem

_LOOKS = 3


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


def check_every_queue_is_watched(lab: Lab) -> None:
    """A watch on several queues wakes on each of them, existing or not."""
    here, there = lab.open(), lab.open()
    for name in ("a", "b", "é"):
        watch = there.queues.watch("a", "b", "é")
        Worker(here).put(b"1", queue=name)
        must_wake(lab, watch, f"a put to {name!r}")
        watch.close()


def check_a_used_up_front_wakes(lab: Lab) -> None:
    """A take that finds a key's front used up wakes a waiter that may take the next one."""
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


def check_a_put_wakes_a_sleeper(lab: Lab) -> None:
    """Two workers that wait for each other's items in turn both come to the end."""
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


def check_due_is_when_a_delay_ends(lab: Lab) -> None:
    """A take that finds nothing returns in how many seconds the first delayed item shows."""
    worker = Worker(lab.open())
    same(worker.due(), None, "when an empty queue has something")
    for delay in (LONG, LONG / 2):
        worker.put(b"later", delay=delay)
        for _ in range(2):
            require_due(lab, worker, delay)
    worker.put(b"soon", delay=soon(lab))
    let_time_pass(lab, worker.stores)
    soonest = worker.take_one()
    same(soonest.body, b"soon", "what shows")
    require_due(lab, worker, LONG / 2)
    worker.release(soonest, delay=LONG / 4)
    require_due(lab, worker, LONG / 4)


def check_due_is_when_a_hold_ends(lab: Lab) -> None:
    """A take that finds nothing returns in how many seconds the first hold is over."""
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


def check_due_knows_what_is_behind_a_held_front(lab: Lab) -> None:
    """A holder of a key's front learns when the delayed item behind it can be had."""
    worker = Worker(lab.open())
    for key, delay in (("far", LONG), ("near", soon(lab))):
        worker.put(b"1", key=key)
        worker.put(b"2 " + key.encode(), key=key, delay=delay)
        worker.take_one()
        if delay == LONG:
            for _ in range(2):
                require_due(lab, worker, delay)
    let_time_pass(lab, worker.stores)
    same(worker.take_one().body, b"2 near", "what is behind, in time")
    require_due(lab, worker, LONG)


def check_a_shorter_hold_wakes(lab: Lab) -> None:
    """A hold that will end earlier than before wakes waiting workers; so does a new deadline."""
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


def check_nobody_oversleeps(lab: Lab) -> None:
    """A waiter that uses the watch and `due` gets delayed, released and late items in time."""
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
    """Require that an item is due in about so many seconds; on a slow machine it may be sooner.

    A store that has not searched everything may return an earlier time, but not for ever.
    """
    low = 0.75 * seconds
    for _ in range(_LOOKS):
        due = worker.due()
        if due is None or due >= low:
            break
        let_time_pass(lab, worker.stores)
    require(due is not None and low <= due <= seconds, f"due in {due} s, not {low} to {seconds}")


TAKERS = 8


class Hands:
    """Records which taker holds which item, and fails at the first contradiction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self.deliveries: defaultdict[int, list[int]] = defaultdict(list)
        self.done: list[bytes] = []

    def grasp(self, who: int, items: list[Delivery]) -> None:
        with self._lock:
            for item in items:
                owner = self._held.setdefault(item.held.id, who)
                require(owner == who, f"item {item.held.id} is in the hands of {owner} and {who}")
                self.deliveries[item.held.id].append(item.held.delivery)

    def let_go(self, items: list[Delivery]) -> None:
        with self._lock:
            for item in items:
                del self._held[item.held.id]

    def finish(self, items: list[Delivery]) -> None:
        self.let_go(items)
        with self._lock:
            self.done += [item.body for item in items]


def work(stores: Stores, hands: Hands, who: int, quota: int) -> None:
    """Take, and finish, give back or crash, until `quota` items are finished by this one."""
    rng = random.Random(who)
    worker = Worker(stores)
    finished = 0
    while finished < quota:
        items = worker.take(min(quota - finished, rng.choice((1, 1, 2, 5))))
        hands.grasp(who, items)
        # The handler works: other threads get their turn.
        time.sleep(rng.random() / 1000)
        fate = rng.random()
        if fate < 0.3:
            hands.let_go(items)
            worker.release(*items)
        elif fate < 0.4:
            hands.let_go(items)
            worker.session.close()
            worker = Worker(stores)
        else:
            hands.finish(items)
            worker.apply(*items)
            finished += len(items)


def check_no_item_is_in_two_hands(lab: Lab) -> None:
    """Eight workers take, give back and crash at random: each item is finished once."""
    handles = [lab.open() for _ in range(2)]
    quota, hands = 12, Hands()
    expected = [b"%d" % number for number in range(TAKERS * quota)]
    Worker(handles[0]).put(*expected)
    together(lab, *(partial(work, handles[who % 2], hands, who, quota) for who in range(TAKERS)))
    same(sorted(hands.done), sorted(expected), "what was finished")
    for item, numbers in hands.deliveries.items():
        same(numbers, list(range(1, len(numbers) + 1)), f"the deliveries of item {item}")
    same(look(handles[0]), [], "what is left")
    same(handles[1].queues.stats("q").done, len(expected), "what is done")


def check_keys_stay_in_order_in_a_race(lab: Lab) -> None:
    """Each key's items are finished in the order of their puts, whichever worker takes them."""
    handles = [lab.open() for _ in range(2)]
    quota, hands = 8, Hands()
    keys = ("a", "b", "c", None, "d")
    order: defaultdict[str | None, list[bytes]] = defaultdict(list)
    for number in range(TAKERS * quota):
        key = keys[number % len(keys)]
        order[key].append(b"%s %03d" % (str(key).encode(), number))
        Worker(handles[0]).put(order[key][-1], key=key)
    together(lab, *(partial(work, handles[who % 2], hands, who, quota) for who in range(TAKERS)))
    for key, expected in order.items():
        name = str(key).encode()
        found = [body for body in hands.done if body.split()[0] == name]
        same(found if key is not None else sorted(found), expected, f"the order of key {key!r}")


def check_one_of_many_puts_a_duplicate(lab: Lab) -> None:
    """Of many puts with one dedupe key at the same time, exactly one succeeds."""
    handles = [lab.open() for _ in range(2)]
    ids: list[int | None] = []

    def put(stores: Stores, number: int) -> None:
        item = NewItem(queue=f"q{number}", body=b"1", dedupe="k", dedupe_window=60.0)
        ids.extend(Worker(stores).apply(put=[item]))

    for number in range(5):
        ids.clear()
        together(lab, *(partial(put, handles[who % 2], number) for who in range(4)))
        same(sorted(each is None for each in ids), [False, True, True, True], "who put")
        same(len(look(handles[0], f"q{number}")), 1, "how many there are")


def commit(worker: Worker, item: Delivery, done: list[bool]) -> None:
    """Remove an item and put another in its place; `done` gets whether that was done."""
    try:
        worker.apply(item, put=[NewItem(queue=item.held.queue, body=b"new")])
        done.append(True)
    except (SessionLost, Fenced):
        done.append(False)


def race_for_one(lab: Lab, name: str, let_go: Callable[[Worker, Delivery], None]) -> None:
    """A worker commits an item while it lets go of it and another takes: exactly one has it."""
    here, there = lab.open(), lab.open()
    for number in range(10):
        queue = f"{name} {number}"
        worker, heir = Worker(here), Worker(there)
        worker.put(b"old", queue=queue)
        item = worker.take_one(queue)
        done: list[bool] = []
        got: list[bytes] = []

        def inherit(worker: Worker, heir: Worker, item: Delivery, got: list[bytes]) -> None:
            let_go(worker, item)
            # A take may skip the item while a commit that will be refused has it locked; then the
            # take returns when to look again. In the end there is the old item or the new one.
            got.append(wait_for_item(lab, heir, item.held.queue).body)

        jobs = [partial(commit, worker, item, done), partial(inherit, worker, heir, item, got)]
        # The thread that is started last usually runs first.
        together(lab, *(jobs if number % 2 else reversed(jobs)))
        same((b"old" in got) + done[0], 1, f"how many had the item: {got}, {done}")
        expected = {b"new"} if done[0] else {b"old"}
        same(set(states_of(there, queue)), expected, f"what is there when done is {done[0]}")


def check_commit_races_with_the_sessions_end(lab: Lab) -> None:
    """A commit that races with its session's end is done, or its item is the next one's."""
    race_for_one(lab, "ends", lambda worker, item: worker.session.close())


def check_commit_races_with_a_release(lab: Lab) -> None:
    """A commit that races with a release is done, or its item is the next one's."""
    race_for_one(lab, "gives back", lambda worker, item: worker.release(item))
