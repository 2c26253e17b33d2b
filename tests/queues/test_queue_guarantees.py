"""The guarantees of a transaction over queues, each by its name, while the store fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest

import pxrs
from pxrs import Backoff, InvalidRequest, SessionLost
from pxrs.errors import OutcomeUnknown, PxrsError, StoreError, StoreFull, TransactionConflict
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.open import open_stores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import NOTHING, Rates
from pxrs.types import ItemState
from support.child import Child
from support.inside import say, wait_for_parent
from support.interrupts import interrupted_at
from support.queueplace import Place

SHORT = 0.4
FAULTS = [
    Rates(unknown_applied=0.5),
    Rates(unknown_lost=0.5),
    Rates(unknown_late=0.5, longest_delay=0.01),
    Rates(unavailable=0.5, reads=0.3),
    Rates(busy=0.5),
]


def fault(rates: Rates) -> str:
    return ",".join(name for name, rate in msgspec.structs.asdict(rates).items() if 0 < rate < 1)


@pytest.fixture
def place(url: str) -> Iterator[Place]:
    """Its session outlives the test: the end of that must not hide a lock that was left."""
    with contextlib.closing(Place(open_stores(url), 3600.0)) as place:
        yield place


@pytest.fixture
def brief(url: str) -> Iterator[Place]:
    """Its session is soon over when the store can't be reached."""
    with contextlib.closing(Place(open_stores(url), SHORT)) as place:
        yield place


def interrupt() -> None:
    raise KeyboardInterrupt


# If commit returns without exception, the transaction is committed.


@pytest.mark.parametrize("rates", FAULTS, ids=fault)
def test_if_commit_returns_without_exception_the_transaction_is_committed(
    place: Place, rates: Rates
) -> None:
    place.fill("in", *(str(number) for number in range(20)))
    committed = set()
    for _ in range(20):
        tx = place.px.begin()
        item = tx.take("in", 5.0)
        assert item is not None
        tx.put("out", item.value)
        place.faults.rates = rates
        try:
            tx.commit()
            committed.add(item.value)
        except PxrsError:
            place.faults.rates = NOTHING
            tx.rollback()
        finally:
            place.faults.rates = NOTHING
    place.faults.heal()
    assert committed
    assert sorted(place.values("out")) == sorted(committed)
    assert set(place.values("in")) == {str(n) for n in range(20)} - committed
    assert place.held("in") == 0


@pytest.mark.parametrize("rates", FAULTS, ids=fault)
def test_a_commit_that_failed_can_be_tried_again(place: Place, rates: Rates) -> None:
    for number in range(20):
        tx = place.px.begin()
        tx.put("out", str(number))
        place.faults.rates = rates
        with contextlib.suppress(PxrsError):
            tx.commit()
        place.faults.rates = NOTHING
        if tx.is_open:
            tx.commit()
    place.faults.heal()
    assert place.values("out") == [str(number) for number in range(20)]


def test_a_commit_nobody_can_vouch_for_is_neither_confirmed_nor_denied(brief: Place) -> None:
    """It was done, no answer came, and the session that could tell is over."""
    brief.faults.rates = Rates(unknown_applied=1.0)

    def cut_off_after_apply(what: str) -> None:
        if what == "outcome":
            brief.faults.cut_off(None, brief.faults.clock.monotonic() + 10 * SHORT)

    brief.on_call = cut_off_after_apply
    tx = brief.px.begin()
    tx.put("out", "once")
    with pytest.raises(OutcomeUnknown):
        tx.commit()
    brief.faults.heal()
    brief.on_call = None
    # Trying again must not do it twice.
    with contextlib.suppress(PxrsError):
        tx.commit()
    assert brief.values("out") == ["once"]


# rollback always succeeds, removes all locks and cancels all puts.


def holding(place: Place) -> UnitOfWork:
    """A transaction with an item in hand and one to put."""
    if not place.values("in"):
        place.fill("in", "item")
    tx = place.px.begin()
    item = tx.take("in", 10.0)
    assert item is not None
    tx.put("out", item.value)
    return tx


def test_rollback_always_succeeds_and_removes_all_locks(place: Place) -> None:
    place.fill("in", "a", "b")
    place.fill("also", "c")
    tx = place.px.begin()
    assert len(tx.take_many("in", 5, 0)) == 2
    assert tx.take("also", 0) is not None
    tx.put("out", "never")
    tx.rollback()
    assert place.held("in") == place.held("also") == 0
    assert place.values("out") == []
    tx.rollback()
    with pytest.raises(InvalidRequest, match="rolled back"):
        tx.commit()


@pytest.mark.parametrize("rates", FAULTS, ids=fault)
def test_rollback_while_the_store_fails(place: Place, rates: Rates) -> None:
    for _ in range(10):
        tx = holding(place)
        place.faults.rates = rates
        tx.rollback()
        assert place.take_back("in", 0) == "item"
        place.faults.rates = NOTHING
    place.faults.heal()
    assert place.values("out") == []


def test_rollback_while_the_store_is_away_for_a_while(place: Place) -> None:
    tx = holding(place)
    place.faults.cut_off(None, place.faults.clock.monotonic() + 0.2)
    tx.rollback()
    assert place.take_back("in", 0) == "item"


def test_rollback_while_the_store_is_away_for_longer_than_the_session(brief: Place) -> None:
    tx = holding(brief)
    brief.faults.cut_off(None, brief.faults.clock.monotonic() + 3600)
    tx.rollback()
    assert brief.take_back("in") == "item"
    brief.faults.heal()
    with pytest.raises(InvalidRequest):
        tx.put("out", "x")
    assert brief.px.begin().take("in", 5.0) is not None


def test_rollback_that_the_store_refuses_ends_the_session(place: Place) -> None:
    """A full disk: it can't be written down that the item is free, so the lock's root has to go."""
    tx = holding(place)

    def refuse(what: str) -> None:
        if what == "release":
            raise StoreFull("no space left")

    place.on_call = refuse
    tx.rollback()
    assert place.take_back("in") == "item"


@pytest.mark.long
def test_interrupted_rollback_can_be_finished(place: Place) -> None:
    """By calling it again, or by dropping the transaction."""
    for point in range(1000):
        tx = holding(place)
        try:
            struck = interrupted_at(point, tx.rollback, interrupt)
        except KeyboardInterrupt:
            struck = True
        if not struck:
            break
        if point % 2:
            tx.rollback()
            assert place.take_back("in", 0) == "item", point
        else:
            del tx
            gc.collect()
            assert place.take_back("in") == "item", point
    assert point > 10
    assert place.values("out") == []


# Leaving the block rolls back what was not committed.


def test_with_begin_rolls_back_what_is_not_committed(place: Place) -> None:
    place.fill("in", "item")
    with place.px.begin() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
    assert (place.held("in"), place.values("in"), place.values("out")) == (0, ["item"], [])
    with pytest.raises(ZeroDivisionError), place.px.begin() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
        raise ZeroDivisionError
    assert (place.held("in"), place.values("in"), place.values("out")) == (0, ["item"], [])
    with place.px.begin() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
        tx.commit()
    assert (place.values("in"), place.values("out")) == ([], ["x"])


def test_with_transaction_commits_unless_it_raises(place: Place) -> None:
    place.fill("in", "item")
    with pytest.raises(ZeroDivisionError), place.px.transaction() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
        raise ZeroDivisionError
    assert (place.held("in"), place.values("in"), place.values("out")) == (0, ["item"], [])
    with place.px.transaction() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
    assert (place.values("in"), place.values("out")) == ([], ["x"])


# The end of a session removes all its locks at once.


def test_session_expiration_removes_all_locks_in_a_single_step(brief: Place) -> None:
    brief.fill("in", "a", "b", "c")
    brief.fill("also", "d")
    one, two = brief.px.begin(), brief.px.begin()
    assert len(one.take_many("in", 2, 0)) == 2
    assert two.take("in", 0) is not None
    assert two.take("also", 0) is not None
    two.put("out", "never")
    watch = brief.inner.queues.watch("in", "also")
    brief.faults.cut_off(None, brief.faults.clock.monotonic() + 3600)
    with brief.other.begin() as tx:
        assert tx.take("also", 10.0) is not None
        # The first of its locks is free: so is every other one.
        assert tx.take("in", 0) is not None
        assert brief.held("also") == 1
        assert brief.held("in") == 1
    watch.close()
    brief.faults.heal()
    for tx in (one, two):
        for call in further_calls(tx):
            with pytest.raises(SessionLost):
                call()
        tx.rollback()
    assert brief.values("out") == []
    assert sorted(brief.values("in")) == ["a", "b", "c"]


def further_calls(tx: UnitOfWork) -> list[Callable[[], object]]:
    return [
        lambda: tx.take("in", 0),
        lambda: tx.put("out", "x"),
        lambda: tx.extend(5.0),
        lambda: tx.send("topic", "x"),
        tx.commit,
    ]


@pytest.mark.engine("memory")
def test_a_session_found_to_be_over_never_comes_back() -> None:
    """Its holder was told so, and went on; a renewal that is answered later must not revive it."""
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    place = Place(stores, 10.0, clock)
    place.fill("in", "item")
    hold_session = place.px._context().hold_session
    tx = place.px.begin()
    assert tx.take("in", 0) is not None
    clock.advance(6)
    # Renewed in the store, but its holder never heard of it: 4 s are left here, 10 s there.
    stores.coord.renew(tx._held.holder.session, 10.0)
    clock.advance(5)
    with pytest.raises(SessionLost):
        tx.put("out", "x")
    hold_session.renew()
    with pytest.raises(SessionLost):
        tx.put("out", "x")
    tx.rollback()
    hold_session.tidy()
    assert place.take_back("in", 0) == "item"
    place.close()


# An interrupted transaction can be rolled back.


def test_interrupted_transaction_can_be_rolled_back(place: Place) -> None:
    """Wherever the interrupt strikes: no lock stays, and all or nothing has happened."""
    for point in range(1000):
        place.fill("in", "item")
        tx = place.px.begin()

        def work(tx: UnitOfWork = tx) -> None:
            item = tx.take("in", 10.0)
            assert item is not None
            tx.put("out", item.value)
            tx.commit()

        try:
            struck = interrupted_at(point, work, interrupt)
        except KeyboardInterrupt:
            struck = True
        tx.rollback()
        assert place.held("in") == 0, point
        assert len(place.values("in")) + len(place.values("out")) == 1, point
        place.inner.queues.purge("in")
        place.inner.queues.purge("out")
        if not struck:
            break
    assert point > 30


def test_interrupted_transaction_that_is_dropped_leaves_no_lock(place: Place) -> None:
    place.fill("in", "item")
    for point in range(0, 1000, 3):
        tx = place.px.begin()
        work = partial(tx.take, "in", 10.0)
        try:
            struck = interrupted_at(point, work, interrupt)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            struck = True
        del tx, work
        # The trace function and the frames it saw hold each other, and the transaction.
        gc.collect()
        assert place.take_back("in") == "item", point
        if not struck:
            break


# Backoff(attempts=K) delivers at most K times.


@pytest.mark.parametrize("rates", [NOTHING, *FAULTS], ids=fault)
@pytest.mark.parametrize("times", [1, 3])
def test_consume_times_is_an_upper_bound(place: Place, times: int, rates: Rates) -> None:
    retry = Backoff(first=0.0, attempts=times)
    values = [str(number) for number in range(5)]
    place.fill("in", *values)
    rng, handed = Random(3), []
    place.faults.rates = rates
    while place.values("in"):
        try:
            with place.px.begin() as tx:
                item = tx.take("in", 0, retry=retry)
                if item is not None:
                    handed.append(item.value)
                    if rng.random() < 0.2:
                        tx.commit()
                    elif rng.random() < 0.3:
                        del tx
        except (StoreError, TransactionConflict):
            continue
    assert all(handed.count(value) <= times for value in values)
    stats = place.inner.queues.stats("in")
    assert (stats.done + stats.dead, stats.depth) == (5, 0)
    place.faults.heal()
    assert all(item.deliveries <= times for item in place.other.queues.dead("in"))


def take_and_say(url: str, times: int) -> None:
    px = pxrs.connect(url)
    # Kept: one that is dropped gives back what it has.
    tx = px.begin()
    item = tx.take("in", 10.0, retry=Backoff(first=0.0, attempts=times))
    say(item and item.deliveries)
    wait_for_parent()


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.long
def test_consume_times_counts_deliveries_to_those_who_were_killed(
    tmp_path: Path, times: int
) -> None:
    with contextlib.closing(Place(open_stores(f"sqlite:///{tmp_path}/store.db"))) as place:
        place.fill("in", "item")
        for number in range(times):
            with Child(take_and_say, place.inner.url, times) as child:
                assert child.read() == number + 1
                child.kill()
        with place.other.begin() as tx:
            assert tx.take("in", 0, retry=Backoff(first=0.0, attempts=times)) is None
        [dead] = place.inner.queues.peek("in", [ItemState.DEAD])
        assert dead.deliveries == times
        assert "died" in dead.error
