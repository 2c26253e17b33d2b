"""Queues shared by real processes, some of which are killed with items in hand."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance.queue_tools import Worker, look
from pxrs.types import ItemState
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

ITEMS = 400
WORKERS = 4


def hold(path: str, number: int, most: int) -> None:
    """Take, tell, and wait to be killed."""
    worker = Worker(SqliteStores(path))
    say([[item.held.id, item.held.delivery] for item in worker.take(number, most=most)])
    wait_for_parent()


def consume(path: str, hands: str, seed: int) -> None:
    """Take one at a time, as if it were fragile: an item that somebody has must not be had."""
    rng, stores = random.Random(seed), SqliteStores(path, durability="relaxed")
    worker, done = Worker(stores), Counter[str]()
    say("ready")
    wait_for_parent()
    while items := worker.take(rng.choice((1, 1, 3)), lock_for=60.0):
        for item in items:
            os.close(os.open(os.path.join(hands, str(item.held.id)), os.O_CREAT | os.O_EXCL))
            done["taken"] += 1
        for item in items:
            os.unlink(os.path.join(hands, str(item.held.id)))
        if rng.random() < 0.3:
            worker.release(*items)
        else:
            worker.apply(*items)
            say([item.body.decode() for item in items])
    say(done["taken"])
    stores.close()


def await_items(stores: SqliteStores, worker: Worker, number: int, most: int) -> list[int]:
    """Take until there are so many, woken by the watch; their deliveries."""
    watch = stores.queues.watch("q")
    found: list[int] = []
    while len(found) < number:
        items = worker.take(number, most=most)
        found += [item.held.delivery for item in items]
        if not items:
            assert watch.wait(PATIENCE)
    watch.close()
    return found


def test_a_killed_processes_items_are_free_at_once_and_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "q.db")
    stores = SqliteStores(path)
    Worker(stores).put(b"1", b"2", b"3")
    with Child(hold, path, 3, 9) as child:
        assert [delivery for _, delivery in child.read()] == [1, 1, 1]
        worker = Worker(stores)
        assert worker.take(3) == []
        watch = stores.queues.watch("q")
        child.signal(signal.SIGKILL)
        assert watch.wait(PATIENCE)
        assert await_items(stores, worker, 3, 9) == [2, 2, 2]
    stores.close()


def test_an_item_that_kills_its_holders_is_dead_after_k(tmp_path: Path) -> None:
    path, most = str(tmp_path / "q.db"), 3
    stores = SqliteStores(path)
    Worker(stores).put(b"poison")
    for delivery in range(1, most + 1):
        with Child(hold, path, 5, most) as child:
            assert [each for _, each in child.read()] == [delivery]
            child.kill()
        assert [item.deliveries for item in look(stores)] == [delivery]
    assert Worker(stores).take(5, most=most) == []
    (dead,) = stores.queues.peek("q", (ItemState.DEAD,))
    assert (dead.body, dead.deliveries) == (b"poison", most)
    assert "died" in dead.error
    stores.close()


def test_a_frozen_process_that_wakes_up_can_do_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "q.db")
    stores = SqliteStores(path)
    Worker(stores).put(b"1")
    with Child(oversleep, path) as child:
        assert child.read() == 1
        child.signal(signal.SIGSTOP)
        heir = Worker(stores)
        assert await_items(stores, heir, 1, 9) == [2]
        child.signal(signal.SIGCONT)
        child.tell()
        assert child.rest() == ["SessionLost", "SessionLost"]
    assert [(item.state, item.holder) for item in look(stores)] == [(ItemState.HELD, heir.holder)]
    stores.close()


def oversleep(path: str) -> None:
    """Hold an item with a short session; after the freeze, try to commit and to extend."""
    stores = SqliteStores(path)
    worker = Worker(stores, stores.coord.session(0.5))
    item = worker.take_one()
    say(item.held.delivery)
    wait_for_parent()
    for call in (lambda: worker.apply(item), lambda: worker.extend(item, lock_for=9.0)):
        try:
            call()
            say("done")
        except Exception as error:  # noqa: BLE001 - told to the parent
            say(type(error).__name__)
    worker.release(item, error="late")
    stores.close()


def test_processes_share_a_queue(tmp_path: Path) -> None:
    path, hands = str(tmp_path / "q.db"), tmp_path / "hands"
    hands.mkdir()
    stores = SqliteStores(path)
    expected = [str(number) for number in range(ITEMS)]
    Worker(stores).put(*(body.encode() for body in expected))
    children = [Child(consume, path, str(hands), seed) for seed in range(WORKERS)]
    try:
        for child in children:
            assert child.read() == "ready"
        for child in children:
            child.tell()
        words = [child.rest() for child in children]
        assert [child.join() for child in children] == [0] * WORKERS
    finally:
        for child in children:
            child.__exit__()
    finished = [body for said in words for word in said[:-1] for body in word]
    assert sorted(finished, key=int) == expected
    shares = [said[-1] for said in words]
    assert min(shares) >= sum(shares) / WORKERS / 4, f"somebody starved: {shares}"
    assert (look(stores), stores.queues.stats("q").done) == ([], ITEMS)
    stores.close()
