"""Held items: which transaction holds them, and for how long."""

from __future__ import annotations

from pxrs.errors import Fenced, SessionLost
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.queue_tools import (
    DEAD,
    DELAYED,
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
from pxrs.testing.conformance.tools import LONG, raises, require, same
from pxrs.types import Held, Holder, NewItem


def check_a_held_item_is_nobody_elses(lab: Lab) -> None:
    """No other transaction gets a held item, on any handle, not even in the same session."""
    here, there = lab.open(), lab.open()
    first = Worker(here)
    first.put(b"a", b"b")
    held = first.take_one()
    for other in (Worker(here, first.session), Worker(there)):
        got = other.drain()
        same(bodies(got), [b"b"], "what another transaction got")
        other.release(*got)
    same(bodies(first.drain()), [b"b"], "what its holder gets: not again what it holds")
    same(first.apply(held), [], "what a change without a put tells")
    same(states_of(there), {b"b": HELD}, "what is left")


def check_fence_knows_the_holder(lab: Lab) -> None:
    """Only the transaction that holds an item can remove, extend or release it."""
    here, there = lab.open(), lab.open()
    owner = Worker(here)
    owner.put(b"a")
    held = owner.take_one()
    for other in (Worker(here, owner.session), Worker(there)):
        other.must_have_lost(held)
    owner.extend(held, lock_for=LONG)
    owner.apply(held)
    same(look(here), [], "what is left")


def check_fence_knows_the_delivery(lab: Lab) -> None:
    """A delivery that was given back is void, even if the same holder has the item again."""
    worker = Worker(lab.open())
    worker.put(b"a")
    first = worker.take_one()
    worker.release(first)
    second = worker.take_one()
    require(second.held.delivery > first.held.delivery, "a later delivery has a higher number")
    worker.must_have_lost(first)
    same(states_of(worker.stores), {b"a": HELD}, "what a stale release did")
    worker.apply(second)
    same(look(worker.stores), [], "what is left")
    worker.must_have_lost(second)


def check_fence_knows_the_future(lab: Lab) -> None:
    """A delivery that has not happened, or an item that never was, is not held."""
    worker = Worker(lab.open())
    worker.put(b"a")
    held = worker.take_one().held
    for wrong in (
        held._replace(delivery=held.delivery + 1),
        held._replace(delivery=0),
        held._replace(id=held.id + 1),
        held._replace(id=-1),
        held._replace(id=2**62),
        held._replace(queue="other"),
    ):
        with raises(Fenced):
            worker.apply(remove=[wrong])
        with raises(Fenced):
            worker.queues.extend(worker.holder, [wrong], LONG)
    worker.apply(remove=[held])


def check_fence_knows_the_session(lab: Lab) -> None:
    """A holder that lost its session can do nothing with its items, noticed by others or not."""
    here, there = lab.open(), lab.open()
    for closes in (True, False):
        zombie = Worker(here, here.coord.session(LONG if closes else lab.ttl))
        Worker(there).put(b"a")
        held = zombie.take_one()
        if closes:
            zombie.session.close()
        else:
            lab.let_expire(zombie.session)
        with raises(SessionLost):
            zombie.apply(held, put=[NewItem(queue="never", body=b"")])
        with raises(SessionLost):
            zombie.extend(held, lock_for=LONG)
        with raises(SessionLost):
            zombie.take()
        zombie.release(held, delay=LONG, error="from the grave")
        zombie.must_have_lost(held)
        heir = Worker(there)
        again = heir.take_one()
        require(again.error != "from the grave", "a dead session's release was heard")
        zombie.must_have_lost(held)
        zombie.must_have_lost(again)
        heir.apply(again)
        same(look(there), [], "what is left")


def check_unknown_sessions_hold_nothing(lab: Lab) -> None:
    """A session that never was can't take."""
    worker = Worker(lab.open())
    worker.put(b"a")
    with raises(SessionLost):
        worker.queues.take("q", Holder("never-was", "tx"), 1)
    same(worker.take_one().held.delivery, 1, "the delivery after that")


def check_fence_knows_the_deadline(lab: Lab) -> None:
    """A holder past its deadline has lost its items, even if no other worker has looked yet."""
    stores = lab.open()
    late = Worker(stores)
    late.put(b"a")
    held = late.take_one(lock_for=soon(lab))
    let_time_pass(lab, stores)
    with raises(Fenced):
        late.apply(held, put=[NewItem(queue="never", body=b"")])
    with raises(Fenced):
        late.extend(held, lock_for=LONG)
    late.release(held, delay=LONG)
    late.release(held, dead=True)
    late.must_have_lost(held)
    again = Worker(stores).take_one()
    same(again.held, Held("q", held.held.id, 2), "what the next one gets")


def check_a_zombie_is_fenced_by_its_heir(lab: Lab) -> None:
    """A late holder can't touch an item that was handed out again, even to itself."""
    stores = lab.open()
    zombie, heir = Worker(stores), Worker(lab.open())
    zombie.put(b"a")
    first = zombie.take_one(lock_for=soon(lab))
    let_time_pass(lab, stores)
    second = heir.take_one(lock_for=LONG)
    zombie.must_have_lost(first)
    same([(item.state, item.holder) for item in look(stores)], [(HELD, heir.holder)], "the item")
    heir.release(second)
    third = zombie.take_one()
    zombie.must_have_lost(first)
    heir.must_have_lost(second)
    zombie.apply(third)


def check_a_lost_item_undoes_the_whole_change(lab: Lab) -> None:
    """One item that is not held any more: no other is removed and nothing is put, anywhere."""
    here, there = lab.open(), lab.open()
    names = ("a", "b", "c")
    worker, other = Worker(here), Worker(there)
    for queue in names:
        worker.put(b"1", b"2", queue=queue)
    held = [item for queue in names for item in worker.take(2, queue)]
    for at in (0, 3, 5):
        lost = held[at]
        worker.release(lost)
        theirs = other.take_one(lost.held.queue)
        before = [look(there, queue) for queue in names]
        with raises(Fenced):
            worker.apply(
                *held, put=[NewItem(queue=queue, body=b"new") for queue in ("0", "a", "c", "z")]
            )
        same([look(there, queue) for queue in names], before, "the items")
        same([queue.name for queue in here.queues.all()], [*names], "the queues")
        same([here.queues.stats(queue).done for queue in names], [0, 0, 0], "what was done")
        other.release(theirs)
        held[at] = worker.take_one(lost.held.queue)
    worker.apply(*held)
    same([look(there, queue) for queue in names], [[], [], []], "what is left")


def check_extension_is_all_or_nothing(lab: Lab) -> None:
    """If one item is lost none is held for longer, or for shorter."""
    worker = Worker(lab.open())
    worker.put(b"a", b"b")
    lost, kept = worker.take(2)
    worker.release(lost)
    with raises(Fenced):
        worker.extend(kept, lost, lock_for=soon(lab))
    with raises(Fenced):
        worker.extend(lost, kept, lock_for=soon(lab))
    let_time_pass(lab, worker.stores)
    worker.apply(kept)


def check_extension_holds_on(lab: Lab) -> None:
    """An extended hold ends `lock_for` seconds after the extension, not after the take."""
    stores = lab.open()
    worker, other = Worker(stores), Worker(lab.open())
    worker.put(b"a")
    held = worker.take_one(lock_for=4 * lab.ttl)
    worker.extend(held, lock_for=LONG)
    for _ in range(5):
        let_time_pass(lab, stores)
    same(bodies(other.take()), [], "what another got of it")
    worker.extend(held, held, lock_for=soon(lab))
    let_time_pass(lab, stores)
    worker.must_have_lost(held)
    same(bodies(other.take()), [b"a"], "what another got of it when it was over")


def check_holds_without_a_deadline_last(lab: Lab) -> None:
    """Without `lock_for` an item is held while its session lives, whatever others end."""
    worker = Worker(lab.open())
    worker.put(b"a")
    held = worker.take_one()
    let_time_pass(lab, worker.stores)
    same(bodies(Worker(lab.open()).drain()), [], "what another got of it")
    worker.apply(held)


def check_locks_vanish_with_the_session(lab: Lab) -> None:
    """The end of a session frees all it held, in every queue and transaction, and only that."""
    here, there = lab.open(), lab.open()
    for closes in (True, False):
        session = here.coord.session(LONG if closes else lab.ttl)
        first, second, other = Worker(here, session), Worker(here, session), Worker(there)
        for queue in ("a", "b"):
            other.put(b"1", b"2", b"3", queue=queue)
        kept = [other.take_one(queue) for queue in ("a", "b")]
        for queue in ("a", "b"):
            require(bool(first.take(1, queue) and second.take(1, queue)), "nothing could be had")
        if closes:
            session.close()
        else:
            lab.let_expire(session)
        heir = Worker(there)
        free = [sorted(bodies(heir.drain(queue))) for queue in ("a", "b")]
        same(free, [[b"2", b"3"]] * 2, "what was free")
        other.apply(*kept)
        for queue in ("a", "b"):
            there.queues.delete(queue)


def check_release_gives_back_at_once(lab: Lab) -> None:
    """Any worker can take a released item again, with its count and its last error."""
    here, there = lab.open(), lab.open()
    worker, other = Worker(here), Worker(there)
    worker.put(b"a")
    worker.release(worker.take_one(), error="first")
    second = other.take_one()
    same((second.held.delivery, second.error), (2, "first"), "the second delivery")
    other.release(second)
    third = worker.take_one()
    same((third.held.delivery, third.error), (3, "first"), "an error lasts until the next one")
    worker.release(third, error="third")
    same([item.error for item in look(there)], ["third"], "the last error")


def check_release_after_a_delay(lab: Lab) -> None:
    """An item released with a delay is handed out to no worker until the delay is over."""
    worker = Worker(lab.open())
    worker.put(b"a", b"b")
    first, second = worker.take(2)
    worker.release(first, delay=LONG)
    same(states_of(worker.stores), {b"a": DELAYED, b"b": HELD}, "where they stand")
    same(worker.take(2), [], "what could be had at once")
    worker.release(second, delay=soon(lab), error="later")
    let_time_pass(lab, worker.stores)
    (again,) = worker.take(2)
    same((again.body, again.error, again.held.delivery), (b"b", "later", 2), "what came back")


def check_errors_of_any_kind_are_kept(lab: Lab) -> None:
    """The release is done with any text as error."""
    worker = Worker(lab.open())
    worker.put(b"a")
    for error in ("é\n日本 𝄞", "x" * 100_000, "zero \0 byte", "half \ud800 a character"):
        worker.release(worker.take_one(), error=error)
        (item,) = look(worker.stores)
        require(item.state is READY and item.error[:1] == error[:1], f"{item.error[:50]!r} is kept")
    same(worker.take_one().held.delivery, 5, "the delivery after them all")


def check_release_of_several_minds_its_own(lab: Lab) -> None:
    """Of items released together, those that are not held any more are ignored."""
    stores = lab.open()
    worker, other = Worker(stores), Worker(lab.open())
    worker.put(b"a", b"b", b"c")
    first, second, third = worker.take(3)
    worker.apply(second)
    worker.release(first)
    theirs = other.take_one()
    worker.release(first, second, third, error="mine")
    found = [(item.body, item.state, item.error) for item in look(stores)]
    same(found, [(b"a", HELD, ""), (b"c", READY, "mine")], "the items")
    other.apply(theirs)


def check_a_dead_release_is_final(lab: Lab) -> None:
    """An item released as dead stays, with its error, and is never handed out."""
    worker = Worker(lab.open())
    worker.put(b"a", b"b")
    first, second = worker.take(2)
    worker.release(first, error="poison", dead=True)
    worker.must_have_lost(first)
    worker.release(second)
    same(bodies(worker.take(PLENTY)), [b"b"], "what can be had")
    (dead,) = worker.queues.peek("q", (DEAD,))
    same((dead.body, dead.error, dead.deliveries, dead.holder), (b"a", "poison", 1, None), "it")
    require(dead.dead_ms is not None and dead.taken_ms is not None, "its times are known")


def check_reap_frees(lab: Lab) -> None:
    """`reap` frees items of ended sessions and late holders, and returns when to look again."""
    here, there = lab.open(), lab.open()
    mortal, late, fine = Worker(here), Worker(there), Worker(there)
    for queue in ("a", "b"):
        fine.put(b"1", b"2", b"3", queue=queue)
    held = []
    for queue in ("a", "b"):
        mortal.take_one(queue)
        held.append(late.take_one(queue, lock_for=LONG / 2))
        fine.take_one(queue, lock_for=LONG)
    due = there.queues.reap()
    require(due is not None and due <= LONG / 2, f"looks again in {due} s, and not before")
    late.extend(*held, lock_for=soon(lab))
    mortal.session.close()
    let_time_pass(lab, here)
    due = there.queues.reap()
    require(due is not None and soon(lab) < due <= LONG, f"then looks again in {due} s")
    for queue in ("a", "b"):
        stats = there.queues.stats(queue)
        same((stats.held, stats.ready), (1, 2), "held and ready")
    there.queues.reap()


def check_reap_knows_nothing_to_wait_for(lab: Lab) -> None:
    """`reap` returns no time to look again if nothing is delayed or held with a deadline."""
    worker = Worker(lab.open())
    same(worker.queues.reap(), None, "when to look again at nothing")
    worker.put(b"a", b"b")
    worker.take_one()
    same(worker.queues.reap(), None, "when to look again")
    worker.put(b"c", delay=soon(lab))
    let_time_pass(lab, worker.stores)
    same(worker.queues.reap(), None, "when to look again at what is due already")
