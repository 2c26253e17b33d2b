"""Queues on etcd and ZooKeeper when processes die, clients are cut off and answers get lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

import pxrs
from pxrs.errors import Fenced, OutcomeUnknown, SessionLost, StoreError
from pxrs.stores.api import Stores
from pxrs.stores.open import open_stores
from pxrs.testing.conformance.queue_tools import Worker, bodies, look, states_of
from pxrs.testing.conformance.tools import FACTORS
from pxrs.types import Delivery, ItemState, NewItem, Outcome, QueueChange
from support.child import Child
from support.inside import say, wait_for_parent
from support.site import Site

PATIENCE = 60.0


@contextmanager
def opened(url: str) -> Iterator[Stores]:
    stores = open_stores(url)
    yield stores
    stores.close()


def await_item(worker: Worker) -> Delivery:
    """Take, woken by the watch alone."""
    watch = worker.queues.watch("q")
    while not (items := worker.take(1)):
        assert watch.wait(PATIENCE), "nobody was woken"
    watch.close()
    return items[0]


def hold(url: str) -> None:
    """Take two items, tell, and wait to be killed."""
    stores = open_stores(url)
    _, items = take_as_mortal(stores, 2)
    say([item.held.delivery for item in items])
    wait_for_parent()


def take_as_mortal(stores: Stores, number: int) -> tuple[Worker, list[Delivery]]:
    """Items of a session that nobody renews; it lives longer where taking them lasts longer."""
    for factor in FACTORS:
        worker = Worker(stores, stores.coord.session(factor))
        with suppress(SessionLost):
            return worker, worker.take(number)
    raise AssertionError("no session lived long enough to take anything")


def test_a_killed_processes_items_are_free_when_its_session_is_over(site: Site) -> None:
    with opened(site.url) as stores:
        heir = Worker(stores)
        heir.put(b"1", b"2")
        with Child(hold, site.url) as child:
            assert child.read() == [1, 1]
            child.kill()
            first = await_item(heir)
            second = await_item(heir)
        # Each alone: one of them may be what killed its holder.
        assert sorted(bodies([first, second])) == [b"1", b"2"]
        assert [item.held.delivery for item in (first, second)] == [2, 2]
        heir.apply(first, second)
        assert look(stores) == []


def test_who_was_cut_off_and_comes_back_can_commit_nothing(site: Site) -> None:
    with opened(site.proxied) as far, opened(site.url) as near:
        heir = Worker(near)
        heir.put(b"work")
        zombie, (held,) = take_as_mortal(far, 1)
        site.proxy.cut()
        again = await_item(heir)
        assert again.held.delivery == 2
        site.proxy.reset()
        site.proxy.heal()
        with pytest.raises((Fenced, SessionLost)):
            insist(lambda: zombie.apply(held, put=[NewItem(queue="never", body=b"")]))
        assert near.queues.find("never") is None
        assert states_of(near) == {b"work": ItemState.HELD}
        heir.apply(again)
        assert look(near) == []


def insist(call: Callable[[], object]) -> None:
    """Until the store answers. Whatever it answers counts."""
    while True:
        try:
            call()
            return
        except OutcomeUnknown:
            raise
        except StoreError:
            continue


def test_a_commit_whose_answer_was_lost_can_be_asked_for(site: Site) -> None:
    with opened(f"{site.proxied}?timeout=3") as far, opened(site.url) as near:
        # Once before: then the commit is the first that the next transaction sends.
        before, worker = Worker(far), Worker(far)
        before.put(b"earlier")
        before.apply(before.take_one(), put=[NewItem(queue="out", body=b"first")])
        worker.put(b"work")
        held = worker.take_one()
        site.proxy.hold_answers()
        new = NewItem(queue="out", body=b"done")
        with pytest.raises(OutcomeUnknown):
            far.queues.apply(QueueChange(worker.holder, (held.held,), (new,), "unit"))
        site.proxy.reset()
        site.proxy.heal()
        answers: list[Outcome] = []
        insist(lambda: answers.append(far.queues.outcome(worker.session.id, "unit")))
        done = answers == [Outcome.DONE]
        # Whatever it is, it is so for good, and for both queues.
        assert bodies(look(near, "out")) == ([b"first", b"done"] if done else [b"first"])
        assert bodies(look(near)) == ([] if done else [b"work"])
        assert near.queues.outcome(worker.session.id, "unit") is answers[0]


def test_the_verbs_work_where_there_are_no_messages(site: Site) -> None:
    seen: list[str] = []
    enough = threading.Event()

    def handle(item: pxrs.Item, tx: pxrs.UnitOfWork) -> None:
        tx.put("archive", item.value)
        seen.append(str(item.value))
        if len(seen) >= 20:
            enough.set()

    with pxrs.connect(site.url) as px:
        with px.transaction() as tx:
            for number in range(20):
                tx.put("jobs", f"job {number}", key=f"key {number % 3}" if number % 2 else None)
        with px.listen("jobs", handle, workers=3):
            assert enough.wait(PATIENCE)
        with px.transaction() as tx:
            assert len(tx.take_many("archive", 5)) == 5
        assert sorted(seen) == sorted(f"job {number}" for number in range(20))
        assert (px.queues.describe("jobs").done, px.queues.describe("archive").done) == (20, 5)
        with pytest.raises(pxrs.ConfigError, match="keeps no messages"):
            px.create_topic("t", partitions=1)
