"""Many workers of one queue on ZooKeeper must not keep each other from working."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import pxrs
from pxrs.stores.zookeeper.commits import Commits, Done, Operation, Refused

pytestmark = pytest.mark.engine("zookeeper")
WORKERS = 20
ITEMS = 40


def test_few_commits_are_refused(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit that is refused is work for nothing, and makes the next one wait."""
    run = Commits.run
    outcomes: list[Done | Refused] = []

    def counted(self: Commits, operations: Sequence[Operation], deadline: float) -> Done | Refused:
        outcome = run(self, operations, deadline)
        outcomes.append(outcome)
        return outcome

    with pxrs.connect(zookeeper_url) as px:
        for start in range(0, ITEMS, 20):
            with px.transaction() as tx:
                tx.put_many("q", [str(start + number) for number in range(20)])
        monkeypatch.setattr(Commits, "run", counted)
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
    refused = sum(isinstance(outcome, Refused) for outcome in outcomes)
    # Alone none is; each item is taken by one commit and removed by another.
    assert refused / ITEMS < 4, f"{refused} commits were refused for {ITEMS} items"
