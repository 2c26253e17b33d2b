"""Checks of deliveries: how often an item is handed out, and what follows a failure."""

from __future__ import annotations

from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    HELD,
    PLENTY,
    READY,
    Worker,
    bodies,
    let_time_pass,
    look,
    soon,
    states_of,
)
from pxrs.testing.conformance.tools import LONG, require, same
from pxrs.types import Delivery


def check_deliveries_are_counted_before_the_hand_out(lab: Lab) -> None:
    """When `take` returns, every reader sees the delivery counted; a crash does not undo it."""
    here, there = lab.open(), lab.open()
    Worker(here).put(b"a")
    for number in range(1, 4):
        worker = Worker(here)
        same(worker.take_one().held.delivery, number, "the number of the delivery")
        same([item.deliveries for item in look(there)], [number], "the count for others")
        worker.session.close()
        same([item.deliveries for item in look(there)], [number], "the count after a crash")


def check_most_is_an_upper_bound(lab: Lab) -> None:
    """With `most` an item is handed out that often and never again, however its holders end."""
    stores = lab.open()

    def crash(worker: Worker, held: Delivery) -> None:
        worker.session.close()

    def give_up(worker: Worker, held: Delivery) -> None:
        worker.release(held)

    def hang(worker: Worker, held: Delivery) -> None:
        let_time_pass(lab, stores)

    ends = (crash, give_up, hang)
    for most, last in [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)]:
        ids = Worker(stores).put(b"a")
        handed = 0
        while True:
            worker = Worker(stores)
            found = worker.take(PLENTY, most=most, lock_for=soon(lab))
            if not found:
                break
            handed += 1
            require(handed <= most, f"delivery {handed} of {most}")
            ends[(last + most - handed) % len(ends)](worker, found[0])
        same(handed, most, "how often it was handed out")
        (dead,) = look(stores)
        same((dead.state, dead.deliveries), (DEAD, most), "what became of it")
        same(stores.queues.drop("q", ids), 1, "how many there were")


def check_most_is_each_takers_own(lab: Lab) -> None:
    """An item that one taker has used up is dead for all, whatever bounds the others have."""
    stores = lab.open()
    worker = Worker(stores)
    worker.put(b"a", b"b")
    for bound in (5, None):
        for item in worker.take(2, most=bound):
            worker.release(item)
    (first, second) = worker.take(2, most=3)
    worker.release(first)
    same(bodies(Worker(stores).take(PLENTY, most=3)), [], "what was used up")
    same(states_of(stores)[b"a"], DEAD, "where it stands")
    worker.release(second)
    (again,) = Worker(lab.open()).take(PLENTY, most=4)
    same((again.body, again.held.delivery), (b"b", 4), "who allows more gets more")


def check_the_used_up_die_once(lab: Lab) -> None:
    """Items without deliveries left die at the next take; they block nothing."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    worker.put(*(b"%d" % number for number in range(6)))
    used = worker.take(4)
    worker.release(*used, error="in vain")
    same([item.state for item in look(there)], [READY] * 6, "the items before")
    same(bodies(Worker(there).drain(most=1)), [b"4", b"5"], "what is handed out")
    dead = there.queues.peek("q", (DEAD,))
    same(bodies(dead), [b"0", b"1", b"2", b"3"], "the dead")
    same({item.error for item in dead}, {"in vain"}, "their last error")
    same(bodies(Worker(here).drain()), [], "what is handed out of the dead")
    same(there.queues.stats("q").dead, 4, "how many died")


def check_the_dead_have_an_error(lab: Lab) -> None:
    """An item that was used up without error, or died with its holder, has an error for that."""
    stores = lab.open()
    worker, mortal = Worker(stores), Worker(stores)
    worker.put(b"silent", b"lost")
    worker.release(worker.take_one(most=1))
    same(bodies(mortal.take(1, most=1)), [b"lost"], "what is left to be taken")
    mortal.session.close()
    stores.queues.reap()
    dead = stores.queues.peek("q", (DEAD,))
    same(bodies(dead), [b"silent", b"lost"], "the dead")
    require(all(item.error for item in dead), "a dead item does not say why")


def check_death_at_the_last_delivery_is_death(lab: Lab) -> None:
    """`reap` buries an item whose holder died or was late at its last delivery."""
    stores = lab.open()
    mortal, late = Worker(lab.open()), Worker(stores)
    late.put(b"a", b"b", b"c")
    mortal.take_one(most=1)
    late.take_one(most=1, lock_for=soon(lab))
    mortal.take_one(most=2)
    mortal.session.close()
    let_time_pass(lab, stores)
    stores.queues.reap()
    same(states_of(stores), {b"a": DEAD, b"b": DEAD, b"c": READY}, "where they stand")
    same(stores.queues.stats("q").dead, 2, "how many are dead")
    stores.queues.reap()
    same(len(stores.queues.peek("q", (DEAD,))), 2, "how many died in all")


def check_suspects_are_handed_out_alone(lab: Lab) -> None:
    """Items whose holder died or was late are handed out one by one: one may kill again."""
    stores = lab.open()
    mortal, late = Worker(lab.open()), Worker(stores)
    late.put(*(b"%d" % number for number in range(6)))
    same(len(mortal.take(2)) + len(late.take(2, lock_for=soon(lab))), 4, "how many are held")
    mortal.session.close()
    let_time_pass(lab, stores)
    stores.queues.reap()
    heir, lots = Worker(stores), []
    while lot := heir.take(PLENTY):
        lots.append(bodies(lot))
    suspects = {b"0", b"1", b"2", b"3"}
    for each in lots:
        require(len(each) == 1 or not suspects & set(each), f"{each} were handed out together")
    found = sorted(body for lot in lots for body in lot)
    same(found, [b"%d" % number for number in range(6)], "all of them")


def check_suspects_go_to_who_wants_them(lab: Lab) -> None:
    """A holder of other items gets no suspect; it learns of it, and the suspect is not counted."""
    stores = lab.open()
    mortal, heir = Worker(lab.open()), Worker(stores)
    heir.put(b"suspect", b"next")
    mortal.take_one()
    mortal.session.close()
    stores.queues.reap()
    for number in (1, PLENTY, 1):
        taken = stores.queues.take("q", heir.holder, number, suspects=False)
        same((taken.items, taken.suspect), ([], True), f"what {number} without suspects gets")
    heir.put(b"urgent", priority=1)
    taken = stores.queues.take("q", heir.holder, PLENTY, suspects=False)
    same((bodies(taken.items), taken.suspect), ([b"urgent"], False), "what is before it")
    taken = stores.queues.take("q", heir.holder, PLENTY)
    same((bodies(taken.items), taken.suspect), ([b"suspect"], False), "with suspects")
    same([item.held.delivery for item in taken.items], [2], "its delivery")
    taken = stores.queues.take("q", heir.holder, PLENTY, suspects=False)
    same((bodies(taken.items), taken.suspect), ([b"next"], False), "what is behind it")
    taken = stores.queues.take("q", heir.holder, PLENTY, suspects=False)
    same((taken.items, taken.suspect), ([], False), "what is left")


def check_suspects_keep_their_place_and_their_bound(lab: Lab) -> None:
    """Without suspects nothing of their key goes before them, and the used-up ones die."""
    stores = lab.open()
    mortal, heir = Worker(lab.open()), Worker(stores)
    heir.put(b"first", b"second", key="k")
    mortal.take_one()
    mortal.session.close()
    stores.queues.reap()
    taken = stores.queues.take("q", heir.holder, PLENTY, suspects=False)
    same((taken.items, taken.suspect), ([], True), "what could be taken of the key")
    taken = stores.queues.take("q", heir.holder, PLENTY, most=1, suspects=False)
    same((bodies(taken.items), taken.suspect), ([b"second"], False), "what is left of the key")
    same(states_of(stores), {b"first": DEAD, b"second": HELD}, "where they stand")


def check_poison_burns_no_innocent_counts(lab: Lab) -> None:
    """An item that kills every taker ends up dead; the batch it first was in does not."""
    stores = lab.open()
    Worker(stores).put(*(b"%d" % number for number in range(8)), b"poison")
    done: set[bytes] = set()
    for _ in range(50):
        worker = Worker(lab.open())
        lot = worker.take(PLENTY, most=3)
        if not lot:
            break
        if b"poison" in bodies(lot):
            worker.session.close()
        else:
            worker.apply(*lot)
            done |= set(bodies(lot))
    same(done, {b"%d" % number for number in range(8)}, "what was done in the end")
    same(states_of(stores), {b"poison": DEAD}, "what is left")


def check_a_released_suspect_is_cleared(lab: Lab) -> None:
    """A suspect that is given back is handed out with others again."""
    stores = lab.open()
    mortal = Worker(stores)
    mortal.put(b"a", b"b")
    mortal.take(1)
    mortal.session.close()
    worker = Worker(stores)
    worker.put(b"c")
    found = worker.drain()
    worker.release(*found)
    same(bodies(worker.take(3)), [b"a", b"b", b"c"], "one hand-out")


def check_redriven_items_start_again(lab: Lab) -> None:
    """A redriven item is at the end of the queue, and its delivery count is reset."""
    worker, there = Worker(lab.open()), lab.open()
    ids = worker.put(b"a", b"b", b"c", priority=3)
    first, second = worker.take(2)
    worker.release(first, second, error="why", dead=True)
    same(there.queues.redrive("q", [ids[0], ids[2], ids[0]]), 1, "how many were dead")
    same(states_of(there), {b"a": READY, b"b": DEAD, b"c": READY}, "where they stand")
    heir = Worker(there)
    got = heir.drain(most=1)
    found = [(item.body, item.held.delivery, item.error, item.priority) for item in got]
    same(found, [(b"c", 1, "", 3), (b"a", 1, "why", 3)], "what is handed out")
    require(got[1].held.id > ids[2], "a redriven item stands at the end")
    worker.must_have_lost(first)
    heir.apply(*got)
    stats = there.queues.stats("q")
    same((stats.put, stats.done, stats.dead, stats.depth), (3, 2, 1, 0), "the queue's figures")


def check_redriven_large_bodies_survive(lab: Lab) -> None:
    """A large body is whole after death and redrive, and gone when its item is."""
    stores = lab.open()
    worker, body = Worker(stores), bytes(range(256)) * 400
    (number,) = worker.put(body)
    for _ in range(2):
        worker.release(worker.take_one(lock_for=LONG), dead=True)
        same(bodies(stores.queues.peek("q", (DEAD,))), [body], "the dead one's body")
        same(stores.queues.redrive("q", [number]), 1, "how many were dead")
        (number,) = [item.id for item in look(stores)]
    item = worker.take_one()
    same(item.body, body, "the body")
    worker.apply(item)
    same(look(stores), [], "what is left")
