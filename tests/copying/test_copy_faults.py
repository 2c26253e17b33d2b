"""Copies into a store that fails, and two copies at once: nothing is there twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import CopyRefused, PxrsError, StoreBusy, StoreError, StoreUnavailable
from pxrs.operations.copy import CopyReport, copy_store
from pxrs.operations.copy.messages import copy_topic, sum_up
from pxrs.stores.open import open_stores
from pxrs.testing.conformance.tools import append, batch
from pxrs.testing.faults import Faults, FaultyCoord, FaultyLog, FaultyQueues, Rates
from pxrs.types import Append, Appended, Fetched, LogPartition, Topic
from support.filled import fill
from support.seeds import few_are_fast

RATES = Rates(
    unknown_applied=0.1,
    unknown_lost=0.1,
    unknown_late=0.05,
    unavailable=0.05,
    busy=0.05,
    reads=0.01,
    longest_delay=0.05,
)


class ForgetfulLog(FaultyLog):
    """Appends whose answer is lost, too."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        results = super().append(appends)
        if self._faults.happens(self._faults.rates.unknown_applied):
            raise self._faults.unknown(self._who, "append", ())
        return results


class FailingStores:
    """`Stores` whose every part fails."""

    def __init__(self, url: str, faults: Faults) -> None:
        self._inner = open_stores(url)
        self.url = self._inner.url
        self.coord = FaultyCoord(self._inner.coord, faults)
        self.log = ForgetfulLog(self._inner.log, faults)
        self.queues = FaultyQueues(self._inner.queues, faults)
        self.atomic = self._inner.atomic
        self.close = self._inner.close


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("seed", few_are_fast(range(6)))
def test_into_a_store_that_fails(tmp_path: Path, seed: int) -> None:
    source, target = f"sqlite:///{tmp_path}/from.db", f"sqlite:///{tmp_path}/to.db"
    fill(source)
    faults = Faults(Random(seed), SYSTEM_CLOCK, RATES)
    failures = 0
    with closing(open_stores(source)) as origin, closing(FailingStores(target, faults)) as place:
        while True:
            try:
                report = copy_store(origin, place)
            except StoreError:
                failures += 1
                continue
            # A commit on its way may have landed after the comparison: then the next run mends it.
            if report.complete:
                break
        faults.heal()
        assert failures > 0
        assert copy_store(origin, place).differences == ()


@pytest.mark.engine("sqlite")
def test_two_copies_at_once(tmp_path: Path) -> None:
    source, target = f"sqlite:///{tmp_path}/from.db", f"sqlite:///{tmp_path}/to.db"
    fill(source)
    outcomes: list[CopyReport | CopyRefused] = []
    at_once = threading.Barrier(3)

    def run() -> None:
        with closing(open_stores(source)) as origin, closing(open_stores(target)) as place:
            at_once.wait(30.0)
            while True:
                try:
                    outcomes.append(copy_store(origin, place))
                except StoreBusy:
                    continue
                except CopyRefused as refused:
                    outcomes.append(refused)
                return

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(outcomes) == 3
    with closing(open_stores(source)) as origin, closing(open_stores(target)) as place:
        report = copy_store(origin, place)
    assert (report.complete, report.differences) == (True, ())


@pytest.mark.engine("memory")
def test_a_source_that_stops_before_its_confirmed_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server does that was cut off since it was asked: neither a copy nor a sum goes on."""
    with closing(open_stores("memory://")) as source, closing(open_stores("memory://")) as target:
        topic = Topic(name="t", id="t-1", partitions=1)
        where = LogPartition(topic.id, 0)
        for stores in (source, target):
            stores.log.create(topic.id, 1)
        append(source.log, where, batch(b"a"), batch(b"b"))
        fetch = source.log.fetch

        def behind(where: LogPartition, offset: int, max_bytes: int) -> Fetched:
            fetched = fetch(where, offset, 1)
            return fetched._replace(batches=[it for it in fetched.batches if it.next < 2])

        monkeypatch.setattr(source.log, "fetch", behind)
        with pytest.raises(StoreUnavailable, match="read up to 1, and it ends at 2"):
            copy_topic(source.log, target.log, topic, lambda count: None)
        assert target.log.bounds(topic.id)[0].end == 1
        with pytest.raises(StoreUnavailable, match="read up to 1, and it ends at 2"):
            sum_up(source.log, topic, 0, lambda count: None)
