"""Queues on etcd and ZooKeeper when processes die, clients are cut off and answers get lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import Fenced, OutcomeUnknown, SessionLost, StoreError
from pxrs.queues import held_items
from pxrs.stores.api import CoordStore, Stores
from pxrs.stores.composite import CompositeStores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.conformance.queue_tools import Worker, bodies, look, states_of
from pxrs.testing.conformance.tools import FACTORS
from pxrs.types import (
    Check,
    Committed,
    Conflict,
    Delivery,
    ItemState,
    NewItem,
    Outcome,
    QueueChange,
    Write,
)
from support.child import Child
from support.inside import say, wait_for_parent
from support.interrupts import interrupted_at
from support.site import Site

_ALL = re.compile("src/pxrs/")

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
            px.topics.create("t", partitions=1)


class Interrupted(BaseException):
    """What a signal handler may raise."""


def strike() -> None:
    raise Interrupted


def test_an_interrupted_commit_that_is_tried_again_is_done_once(site: Site) -> None:
    """Wherever the interrupt comes, also when the commit is done and its answer is lost with it."""
    # A commit passes ten times as many points on ZooKeeper: about a hundred are tried there too.
    step = 61 if site.url.startswith("zookeeper") else 19
    with pxrs.connect(site.url) as px:
        for point in range(0, 100_000, step):
            with px.transaction() as tx:
                tx.put("jobs", f"{point}")
            with px.transaction() as tx:
                item = tx.take("jobs")
                assert item is not None
                tx.put("out", item.value)
                try:
                    struck = interrupted_at(point, tx.commit, strike, _ALL)
                except Interrupted:
                    struck = True
                tx.finish()
            found = px.queues.peek("out")
            assert [each.value for each in found] == [f"{point}"]
            assert px.queues.describe("jobs").depth == 0
            px.queues.purge("out")
            if not struck:
                assert point > 100
                return


class LateCoord:
    """A coordination store in which a commit is interrupted while it is on its way.

    It arrives just before the commit that comes so many commits later.
    """

    def __init__(self, inner: CoordStore, key: str) -> None:
        self._inner = inner
        self._key = key
        self.commits_until_it_comes: int | None = None
        self._late: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        if self._late is not None:
            assert self.commits_until_it_comes is not None
            self.commits_until_it_comes -= 1
            if self.commits_until_it_comes < 0:
                self.let_it_come()
        elif self.commits_until_it_comes is not None and any(self._key in w.key for w in writes):
            self._late = lambda: self._inner.commit(checks, writes)
            raise Interrupted
        return self._inner.commit(checks, writes)

    def let_it_come(self) -> None:
        late, self._late, self.commits_until_it_comes = self._late, None, None
        assert late is not None
        late()


@contextmanager
def interrupted_in_flight(site: Site, key: str) -> Iterator[tuple[pxrs.Pxrs, LateCoord]]:
    """A store in which a commit that writes such a key is interrupted on its way."""
    with opened(site.url) as stores:
        coord = LateCoord(stores.coord, key)
        queues = RecipeQueues(coord)
        composite = CompositeStores(stores.url, coord, None, queues, [queues.close])
        with pxrs.Pxrs(composite) as px:
            yield px, coord


@pytest.mark.parametrize("delay", range(4))
def test_a_commit_that_was_interrupted_on_its_way_is_done_once(site: Site, delay: int) -> None:
    """It comes before it is asked after, or after that: then it is refused."""
    with interrupted_in_flight(site, "/tail") as (px, coord):
        with px.transaction() as tx:
            tx.put("out", "earlier")
        with px.transaction() as tx:
            tx.put("out", "once")
            coord.commits_until_it_comes = delay
            with pytest.raises(Interrupted):
                tx.commit()
            tx.finish()
        with px.transaction() as tx:
            tx.put("elsewhere", "later")
        if coord.commits_until_it_comes is not None:
            coord.let_it_come()
        assert [each.value for each in px.queues.peek("out")] == ["earlier", "once"]


@pytest.mark.parametrize("delay", range(4))
def test_a_take_that_was_interrupted_on_its_way_leaves_no_lock(site: Site, delay: int) -> None:
    with interrupted_in_flight(site, "/meta/") as (px, coord):
        px.put("jobs", "work")
        tx = px.transaction()
        coord.commits_until_it_comes = delay
        with pytest.raises(Interrupted):
            tx.take("jobs")
        tx.rollback()
        px.put("elsewhere", "later")
        if coord.commits_until_it_comes is not None:
            coord.let_it_come()
        with px.transaction() as tx:
            item = tx.take("jobs", timeout=PATIENCE)
            assert item is not None
            assert item.value == "work"


# The commit that holds the item; what is read next, when that commit was answered.
@pytest.mark.parametrize("unanswered", ["meta-0", "item-0"])
@pytest.mark.parametrize(
    ("then", "lock_for"), [("take", None), ("rollback", 10 * PATIENCE), ("commit", None)]
)
def test_a_take_that_stays_without_an_answer_leaves_nothing_locked(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    unanswered: str,
    then: str,
    lock_for: float | None,
) -> None:
    """Its hold is committed, and the store is away for longer than the take waits for it."""
    monkeypatch.setattr(held_items, "_PATIENCE", 1)
    with pxrs.connect(site.url) as near, pxrs.connect(f"{site.proxied}?timeout=0.5") as far:
        near.put("q", "first")
        near.put("q", "second")
        with far.transaction() as tx:
            assert tx.take("q", PATIENCE, lock_for=lock_for) is not None
        tx = far.begin()
        site.proxy.hold_answers_from(unanswered.encode())
        with pytest.raises(OutcomeUnknown):
            tx.take("q", 0, lock_for=lock_for)
        site.proxy.reset()
        site.proxy.heal()
        assert near.queues.describe("q").held == 1
        taken: list[pxrs.Item | None] = []
        if then == "take":
            insist(lambda: taken.append(tx.take("q", 0)))
        insist(getattr(tx, then.replace("take", "commit")))
        if then == "take":
            assert [item.value for item in taken if item] == ["second"]
            assert near.queues.describe("q").depth == 0
        else:
            with near.transaction() as heir:
                assert heir.take("q", PATIENCE) is not None


def test_a_hold_that_stays_without_an_answer_ends_in_its_own_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process goes on to hold other items for as long, which must not keep it alive."""
    monkeypatch.setattr(held_items, "_PATIENCE", 1)
    lock_for = 4.0
    with pxrs.connect(site.url) as near, pxrs.connect(f"{site.proxied}?timeout=0.5") as far:
        near.put("q", "first")
        tx = far.begin()
        site.proxy.hold_answers_from(b"meta-0")
        with pytest.raises(OutcomeUnknown):
            tx.take("q", 0, lock_for=lock_for)
        site.proxy.reset()
        site.proxy.heal()
        assert near.queues.describe("q").held == 1

        def hold_another() -> None:
            near.put("others", "work")
            with far.transaction() as other:
                assert other.take("others", PATIENCE, lock_for=lock_for) is not None

        ends = SYSTEM_CLOCK.monotonic() + 5 * lock_for
        with near.transaction() as heir:
            while (item := heir.take("q", 0.1)) is None:
                insist(hold_another)
                assert SYSTEM_CLOCK.monotonic() < ends, "it does not end"
            assert item.value == "first"
        tx.rollback()


class HoursAhead:
    """The clock of a host that is wrong."""

    monotonic = staticmethod(SYSTEM_CLOCK.monotonic)

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms() + 24 * 3600 * 1000


def test_a_host_whose_clock_is_ahead_sweeps_nobodys_evidence(site: Site) -> None:
    with opened(site.url) as stores:
        ahead = RecipeQueues(stores.coord, HoursAhead())
        alive, ended = Worker(stores), Worker(stores)
        for worker in (alive, ended):
            new = NewItem(queue="out", body=b"done")
            stores.queues.apply(QueueChange(worker.holder, (), (new,), "unit"))
        ended.session.close()
        for _ in range(3):
            ahead.reap()
        for worker in (alive, ended):
            assert stores.queues.outcome(worker.session.id, "unit") is Outcome.DONE
        ahead.close()
