"""The memory backend passes every suite on virtual time, and what time decides on real time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pxrs.errors import Closed, InvalidRequest, NotAtomic, TopicExists
from pxrs.stores.api import Session, Stores
from pxrs.stores.memory.stores import MemoryStores, open_memory
from pxrs.stores.wakeups import LocalWatch
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import (
    MemoryLab,
    Rule,
    atomic_checks,
    await_end,
    coord_checks,
    doubt_checks,
    log_checks,
    queue_checks,
    restore_checks,
    wake_checks,
)
from pxrs.types import LogPartition, Put

pytestmark = pytest.mark.engine("memory")


class RealTimeLab:
    """The memory backend as a backend without a clock of its own would be tested."""

    ttl = 0.4
    patience = 10.0

    def __init__(self) -> None:
        self._stores = MemoryStores()

    def open(self) -> Stores:
        return self._stores

    def let_expire(self, session: Session) -> None:
        await_end(self._stores, session, self.patience)

    def close(self) -> None:
        self._stores.close()


@pytest.fixture
def lab() -> Iterator[MemoryLab]:
    lab = MemoryLab()
    yield lab
    lab.close()


@pytest.fixture
def real_time_lab() -> Iterator[RealTimeLab]:
    lab = RealTimeLab()
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    coord_checks()
    + log_checks()
    + doubt_checks()
    + queue_checks()
    + restore_checks()
    + atomic_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: MemoryLab) -> None:
    check(lab)


@pytest.mark.parametrize("check", wake_checks(), ids=lambda check: check.__name__)
def test_conforms_on_real_time(check: Rule, real_time_lab: RealTimeLab) -> None:
    check(real_time_lab)


def test_a_new_session_wakes_a_sleeper_that_waits_for_a_later_one() -> None:
    stores = MemoryStores()
    coord = stores.coord
    coord.commit((), (Put("k/late", b"", coord.session(3600.0).id),))
    watch = coord.watch("k/early")
    woken = threading.Event()

    def sleep() -> None:
        while coord.get("k/early") is None:
            watch.wait()
        while coord.get("k/early") is not None:
            watch.wait()
        woken.set()

    threading.Thread(target=sleep, daemon=True).start()
    coord.commit((), (Put("k/early", b"", coord.session(0.05).id),))
    assert woken.wait(10)


def test_a_wait_ends_after_its_timeout_whatever_the_stores_clock() -> None:
    for clock in (VirtualClock(), None):
        stores = MemoryStores(clock=clock) if clock else MemoryStores()
        stores.coord.session(3600.0)
        assert not stores.coord.watch("k").wait(0.01)


def test_a_closed_store_refuses_and_wakes() -> None:
    stores = MemoryStores("shop")
    assert stores.url == "memory://shop"
    session = stores.coord.session(10.0)
    watches = [stores.coord.watch("k"), stores.log.watch(LogPartition("t", 0))]
    stores.close()
    assert all(watch.wait() for watch in watches)
    for call in (
        lambda: stores.coord.get("k"),
        lambda: stores.coord.watch("k"),
        lambda: stores.log.create("t", 1),
        lambda: stores.log.bounds("t"),
        session.renew,
    ):
        with pytest.raises(Closed):
            call()
    session.close()
    stores.close()


def test_a_closed_store_leaves_the_clock() -> None:
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    stores.close()
    assert not clock.subscribers


def test_there_is_no_connection_to_commit_on() -> None:
    stores = MemoryStores()
    with pytest.raises(NotAtomic):
        stores.atomic(object())
    with stores.atomic() as tx:
        assert tx.connection is None


def test_a_topic_is_not_made_again_with_another_size() -> None:
    stores = MemoryStores()
    stores.log.create("t", 2)
    with pytest.raises(TopicExists):
        stores.log.create("t", 3)
    assert len(stores.log.bounds("t")) == 2


def test_a_session_has_to_end() -> None:
    for ttl in (float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            MemoryStores().coord.session(ttl)


def test_stores_of_one_name_are_shared_until_the_last_closes() -> None:
    first, second, other = open_memory("a"), open_memory("a"), open_memory("b")
    first.coord.commit((), (Put("k", b"1"),))
    assert second.coord.get("k") is not None
    assert other.coord.get("k") is None
    first.close()
    first.close()
    with pytest.raises(Closed):
        _ = first.coord
    assert second.coord.get("k") is not None
    second.close()
    third = open_memory("a")
    assert third.coord.get("k") is None
    third.close()
    other.close()


def test_stores_without_a_name_are_not_shared() -> None:
    first, second = open_memory(""), open_memory("")
    first.coord.commit((), (Put("k", b"1"),))
    assert second.coord.get("k") is None


@pytest.mark.parametrize(
    "check",
    [rule for rule in coord_checks() + queue_checks() if "expiry_wakes" in rule.__name__],
    ids=lambda rule: f"{rule.__module__.rpartition('.')[2]}-{rule.__name__}",
)
def test_a_machine_so_slow_that_a_session_is_over_before_anybody_waits_breaks_no_rule(
    check: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = MemoryLab(patience=1.0)
    wait = LocalWatch.wait

    def late(self: LocalWatch, timeout: float | None = None) -> bool:
        if timeout == 0:
            lab._clock.advance(2 * lab.ttl)
        return wait(self, timeout)

    monkeypatch.setattr(LocalWatch, "wait", late)
    check(lab)
    lab.close()
