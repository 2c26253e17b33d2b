"""Several processes take from one queue on ZooKeeper without a pause; all of them are served."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import pxrs
from support.child import Child
from support.inside import say, wait_for_parent

pytestmark = [pytest.mark.engine("zookeeper"), pytest.mark.long]

PROCESSES = 4
SERVED = 5


def work(url: str) -> None:
    """Remove items and put others in their place, until killed; tell once some were had."""
    with pxrs.connect(url) as px:
        say("ready")
        wait_for_parent()
        done = 0
        while True:
            with px.transaction() as tx:
                item = tx.take("q", 0)
                if item is not None:
                    tx.put("q", "another")
            done += item is not None
            if done == SERVED and item is not None:
                say("served")


def test_no_process_is_left_out(zookeeper_url: str) -> None:
    """Nobody stops before all have had some: whoever is left out is so beside busy rivals."""
    with pxrs.connect(zookeeper_url) as px:
        with px.transaction() as tx:
            tx.put_many("q", [str(number) for number in range(2 * PROCESSES)])
        with ExitStack() as stack:
            workers = [stack.enter_context(Child(work, zookeeper_url)) for _ in range(PROCESSES)]
            assert [worker.read() for worker in workers] == ["ready"] * PROCESSES
            for worker in workers:
                worker.tell()
            assert [worker.read() for worker in workers] == ["served"] * PROCESSES
            for worker in workers:
                worker.kill()
