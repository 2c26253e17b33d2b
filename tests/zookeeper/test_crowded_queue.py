"""Many workers of one queue on ZooKeeper must not keep each other from working."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import pxrs
from pxrs.config import parse_url, zookeeper_settings
from pxrs.stores.zookeeper import coord as module
from pxrs.stores.zookeeper.commits import Commits, Done, Operation, Refused
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.failures import zk
from pxrs.testing.conformance.tools import committed
from pxrs.types import Check, Delete, Put
from support.child import PATIENCE

pytestmark = pytest.mark.engine("zookeeper")
WORKERS = 20
ITEMS = 40
DELETERS, DELETIONS = 8, 80


def count_refused(monkeypatch: pytest.MonkeyPatch) -> list[Refused]:
    """The commits that are refused from now on."""
    run = Commits.run
    refused: list[Refused] = []

    def counted(
        self: Commits, operations: Sequence[Operation], deadline: float, carries: int
    ) -> Done | Refused:
        outcome = run(self, operations, deadline, carries)
        if isinstance(outcome, Refused):
            refused.append(outcome)
        return outcome

    monkeypatch.setattr(Commits, "run", counted)
    return refused


def test_few_commits_are_refused(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit that is refused is work for nothing, and makes the next one wait."""
    with pxrs.connect(zookeeper_url) as px:
        for start in range(0, ITEMS, 20):
            with px.transaction() as tx:
                tx.put_many("q", [str(start + number) for number in range(20)])
        refused = count_refused(monkeypatch)
        done: list[str | bytes] = []

        def work() -> None:
            while len(done) < ITEMS:
                with px.transaction() as tx:
                    item = tx.take("q", 0)
                if item is not None:
                    done.append(item.value)

        workers = [threading.Thread(target=work) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sorted(map(int, done)) == list(range(ITEMS))
    # Alone none is; each item is taken by one commit and removed by another.
    assert len(refused) / ITEMS < 4, f"{len(refused)} commits were refused for {ITEMS} items"


def test_threads_of_one_handle_queue_up_to_delete(
    zookeeper_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that deletes refuses all others of its folder that are under way."""
    coord = ZooKeeperCoord(zookeeper_settings(parse_url(zookeeper_url)))
    keys = [f"q/{number}" for number in range(DELETIONS)]
    versions = committed(coord.commit([], [Put(key, b"") for key in keys])).versions
    refused = count_refused(monkeypatch)
    together = threading.Barrier(DELETERS)

    def delete(first: int) -> None:
        together.wait(PATIENCE)
        for key in keys[first::DELETERS]:
            committed(coord.commit([Check(key, versions[key])], [Delete(key)]))

    with ThreadPoolExecutor(DELETERS) as pool:
        list(pool.map(delete, range(DELETERS)))
    # Each but the first has to read again, once: the one before it has written the folder's guard.
    assert len(refused) < DELETIONS
    assert coord.list("q/") == []
    coord.close()


@pytest.mark.parametrize("refusals", [1, 2], ids=["half", "two of three"])
def test_a_process_that_mostly_comes_too_late_warns_of_it_once(
    zookeeper_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusals: int,
) -> None:
    """As if a rival were faster each time but the last."""
    monkeypatch.setattr(module, "_SAMPLE", 6)
    run = Commits.run
    left = 0

    def overtaken(
        self: Commits, operations: Sequence[Operation], deadline: float, carries: int
    ) -> Done | Refused:
        nonlocal left
        if left:
            left -= 1
            return Refused(operations[-1], zk.BadVersionError())
        return run(self, operations, deadline, carries)

    coord = ZooKeeperCoord(zookeeper_settings(parse_url(zookeeper_url)))
    monkeypatch.setattr(Commits, "run", overtaken)
    with caplog.at_level(logging.WARNING, "pxrs.store"):
        for _ in range(12 // (1 + refusals)):
            left = refusals
            committed(coord.commit([], [Put("q/1", b"")]))
    assert caplog.text.count("use fewer workers") == (refusals == 2)
    coord.close()
