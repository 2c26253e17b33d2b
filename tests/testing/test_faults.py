"""The wrapper that fails: without faults it is the store itself, with them each kind is seen."""

from __future__ import annotations

import inspect
from contextlib import closing
from random import Random
from typing import Any

import pytest

from pxrs.codec.batches import encode
from pxrs.errors import OutcomeUnknown, StoreBusy, StoreUnavailable
from pxrs.stores.api import Atomic, CoordStore, LogStore, QueueStore, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import (
    MemoryLab,
    Rule,
    atomic_checks,
    coord_checks,
    log_checks,
    queue_checks,
    restore_checks,
)
from pxrs.testing.faults import Faults, FaultyStores, Interrupted, Rates
from pxrs.types import (
    Append,
    Check,
    Committed,
    Conflict,
    Holder,
    LogPartition,
    NewItem,
    Put,
    QueueChange,
)

pytestmark = pytest.mark.engine("memory")


class Place:
    """A store, seen by `a` through faults and as it is."""

    def __init__(self, rates: Rates) -> None:
        self.clock = VirtualClock()
        self.inner = MemoryStores(clock=self.clock)
        self.faults = Faults(Random(1), self.clock, rates)
        self.coord = FaultyStores(self.inner, self.faults, "a").coord

    def value(self, key: str) -> bytes | None:
        found = self.inner.coord.get(key)
        return found.value if found is not None else None


@pytest.mark.parametrize(
    "check",
    coord_checks() + log_checks() + queue_checks() + restore_checks() + atomic_checks(),
    ids=lambda check: check.__name__,
)
def test_without_faults_it_conforms(check: Rule) -> None:
    with closing(
        MemoryLab(lambda clock: FaultyStores(MemoryStores(clock=clock), Faults(Random(1), clock)))
    ) as lab:
        check(lab)


def test_answer_lost() -> None:
    place = Place(Rates(unknown_applied=1))
    with pytest.raises(OutcomeUnknown):
        place.coord.commit([], [Put("k", b"1")])
    assert place.value("k") == b"1"


@pytest.mark.parametrize(
    ("rates", "error"),
    [
        (Rates(unknown_lost=1), OutcomeUnknown),
        (Rates(unavailable=1), StoreUnavailable),
        (Rates(busy=1), StoreBusy),
    ],
)
def test_commit_not_done(rates: Rates, error: type[Exception]) -> None:
    place = Place(rates)
    with pytest.raises(error):
        place.coord.commit([], [Put("k", b"1")])
    assert place.value("k") is None


@pytest.mark.parametrize(
    ("rates", "error", "done"),
    [
        (Rates(unavailable=1), StoreUnavailable, False),
        (Rates(unknown_lost=1), OutcomeUnknown, False),
        (Rates(unknown_applied=1), OutcomeUnknown, True),
        (Rates(interrupted=1), Interrupted, True),
    ],
)
def test_all_that_changes_something_suffers_the_same(
    rates: Rates, error: type[BaseException], done: bool
) -> None:
    """A transaction, a batch of an append and a change of a queue, as a commit does."""
    place = Place(Rates())
    place.inner.log.create("t", 1)
    stores = FaultyStores(place.inner, place.faults, "a")
    place.faults.rates = rates
    # Interrupted, and done; all of what was sent was on its way by then.
    drawn = iter([0.0, 0.0] * 2 + [0.0, 0.0, 0.9, 0.9])
    if rates.interrupted:
        place.faults.rng.random = drawn.__next__  # type: ignore[method-assign]
    with pytest.raises(error):
        stores.queues.apply(QueueChange(Holder("", "u"), put=(NewItem(queue="q", body=b"1"),)))
    with pytest.raises(error), stores.atomic() as block:
        block.write(Put("k", b"1"))
    batch = encode([(b"k", b"v", [], 0)])
    if rates.unavailable or rates.interrupted:
        with pytest.raises(error):
            stores.log.append([Append(LogPartition("t", 0), batch)])
    else:
        (answer,) = stores.log.append([Append(LogPartition("t", 0), batch)])
        assert isinstance(answer, error)
    assert len(place.inner.queues.peek("q")) == done
    assert place.value("k") == (b"1" if done else None)
    assert place.inner.log.bounds("t")[0].end == done


def test_late_commit_arrives_when_its_time_comes() -> None:
    place = Place(Rates(unknown_late=1, longest_delay=5))
    with pytest.raises(OutcomeUnknown):
        place.coord.commit([], [Put("k", b"1")])
    place.faults.arrive()
    assert place.value("k") is None
    place.clock.advance(5)
    place.faults.arrive()
    assert place.value("k") == b"1"


def test_late_commit_is_conditional_still() -> None:
    place = Place(Rates(unknown_late=1))
    with pytest.raises(OutcomeUnknown):
        place.coord.commit([Check("k", 0)], [Put("k", b"late")])
    assert isinstance(place.inner.coord.commit([], [Put("k", b"other")]), Committed)
    place.faults.heal()
    assert place.value("k") == b"other"


def test_healed_store_works() -> None:
    place = Place(Rates(unavailable=1, reads=1))
    place.faults.cut_off(None, until=100)
    place.faults.heal()
    assert isinstance(place.coord.commit([Check("k", 0)], [Put("k", b"1")]), Committed)
    assert isinstance(place.coord.commit([Check("k", 0)], [Put("k", b"2")]), Conflict)
    assert place.coord.get("k") is not None


def test_reads_fail() -> None:
    place = Place(Rates(reads=1))
    with pytest.raises(StoreUnavailable):
        place.coord.get("k")
    with pytest.raises(StoreUnavailable):
        place.coord.list("k")


def members(seam: type) -> list[str]:
    return [name for name in vars(seam) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (part, name)
        for part, seam in (("coord", CoordStore), ("log", LogStore), ("queues", QueueStore))
        for name in members(seam)
        if name not in ("limits", "close")
    ],
)
def test_every_call_of_a_store_can_fail(part: str, name: str) -> None:
    """A method that is new to a seam has to be told what it can suffer."""
    place = Place(Rates())
    stores = FaultyStores(place.inner, place.faults, "a")
    place.faults.cut_off("a", until=10)
    call: Any = getattr(getattr(stores, part), name)
    inner = inspect.signature(getattr(getattr(place.inner, part), name))
    needed = [each for each in inner.parameters.values() if each.default is each.empty]
    with pytest.raises(StoreUnavailable):
        call(*["x" for each in needed if each.kind is not each.VAR_POSITIONAL])


def test_what_does_not_fail_is_the_inner_one_s() -> None:
    place = Place(Rates())
    stores = FaultyStores(place.inner, place.faults, "a")
    assert stores.url == place.inner.url
    assert stores.coord.limits == place.inner.coord.limits
    with stores.atomic() as block:
        block.write(Put("k", b"1"))
        assert {name for name in members(Atomic) if not hasattr(block, name)} == set()
    assert block.versions == {"k": 1}
    assert {name for name in members(Stores) if not hasattr(stores, name)} == set()
    assert not hasattr(stores.log, "fetch_many")


def test_one_is_cut_off_and_comes_back() -> None:
    place = Place(Rates())
    other = FaultyStores(place.inner, place.faults, "b").coord
    place.faults.cut_off("a", until=10)
    with pytest.raises(StoreUnavailable):
        place.coord.get("k")
    assert other.get("k") is None
    place.clock.advance(10)
    assert place.coord.get("k") is None


def test_renewal_that_had_no_answer_does_not_count() -> None:
    """The store keeps the session longer than its holder may trust in."""
    place = Place(Rates())
    session = place.coord.session(10)
    place.clock.advance(4)
    place.faults.cut_off("a", until=5)
    with pytest.raises(StoreUnavailable):
        session.renew()
    assert session.remaining() == 6
    place.clock.advance(1)
    session.renew()
    assert session.remaining() == 10


def test_wake_up_lost() -> None:
    place = Place(Rates(wake_lost=1))
    watch = place.coord.watch("k")
    place.inner.coord.commit([], [Put("k", b"1")])
    assert not watch.wait(0)
    assert not watch.wait(0)


def test_wake_up_late() -> None:
    place = Place(Rates(wake_late=1))
    watch = place.coord.watch("k")
    place.inner.coord.commit([], [Put("k", b"1")])
    assert not watch.wait(0)
    assert watch.wait(0)
    assert not watch.wait(0)
