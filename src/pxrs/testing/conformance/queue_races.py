"""Many who take at once: no item in two hands, none lost, and keys in order."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from pxrs.errors import Fenced, SessionLost
from pxrs.stores.api import Stores
from pxrs.testing.conformance.lab import Lab, Suite
from pxrs.testing.conformance.queue_tools import Worker, look, states_of, wait_for_item
from pxrs.testing.conformance.tools import require, same, together
from pxrs.types import Delivery, NewItem

suite = Suite()

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
        # The handler at work: others get their turn.
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


@suite
def check_no_item_is_in_two_hands(lab: Lab) -> None:
    """Eight who take, give back and crash at random finish every item once, each its share."""
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


@suite
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


@suite
def check_one_of_many_puts_a_duplicate(lab: Lab) -> None:
    """Of many who put with one dedupe key at once exactly one does."""
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
    """Remove an item and put another in its place; whether that was done."""
    try:
        worker.apply(item, put=[NewItem(queue=item.held.queue, body=b"new")])
        done.append(True)
    except (SessionLost, Fenced):
        done.append(False)


def race_for_one(lab: Lab, name: str, let_go: Callable[[Worker, Delivery], None]) -> None:
    """One commits an item while it lets go of it and another takes: exactly one has it."""
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
            # A take may pass it while the commit that will be refused has it in its hands; then
            # it says when to look again. In the end there is the old item or the new one.
            got.append(wait_for_item(lab, heir, item.held.queue).body)

        jobs = [partial(commit, worker, item, done), partial(inherit, worker, heir, item, got)]
        # Who comes to the start last goes first, more often than not.
        together(lab, *(jobs if number % 2 else reversed(jobs)))
        same((b"old" in got) + done[0], 1, f"how many had the item: {got}, {done}")
        expected = {b"new"} if done[0] else {b"old"}
        same(set(states_of(there, queue)), expected, f"what is there when done is {done[0]}")


@suite
def check_commit_races_with_the_sessions_end(lab: Lab) -> None:
    """A commit that races with its session's end is done, or its item is the next one's."""
    race_for_one(lab, "ends", lambda worker, item: worker.session.close())


@suite
def check_commit_races_with_a_release(lab: Lab) -> None:
    """A commit that races with a release is done, or its item is the next one's."""
    race_for_one(lab, "gives back", lambda worker, item: worker.release(item))
