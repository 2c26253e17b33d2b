"""Items that are set aside for a worker in a loop: never lost, never counted for nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.stores.sqlite.queues import ahead as queue_ahead
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.types import Delivery, ItemState, NewItem
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "q.db")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def mine(path: str, clock: VirtualClock) -> Iterator[SqliteStores]:
    stores = SqliteStores(path, clock=clock)
    yield stores
    stores.close()


@pytest.fixture
def other(path: str, clock: VirtualClock) -> Iterator[SqliteStores]:
    stores = SqliteStores(path, clock=clock)
    yield stores
    stores.close()


def loop(worker: Worker, rounds: int = 2, number: int = 1) -> list[bytes]:
    """Take and commit as a worker in a loop does: the next items are set aside then."""
    done = []
    for _ in range(rounds):
        items = worker.take(number)
        worker.apply(*items)
        done += [item.body for item in items]
    return done


def aside(stores: SqliteStores) -> list[int]:
    """The rows of what is set aside and not handed out."""
    return [row[1] for each in stores.queues._ahead._all.values() for row in each.rows]


def numbers(stores: SqliteStores) -> list[int]:
    with stores.database.reading() as connection:
        rows = connection.execute("SELECT deliveries FROM pxrs_queue_items ORDER BY id").fetchall()
    return [row[0] for row in rows]


def take_soon(stores: SqliteStores, worker: Worker) -> Delivery:
    """The next item, woken by the watch."""
    watch = stores.queues.watch("q")
    while not (found := worker.take()):
        assert watch.wait(PATIENCE)
    watch.close()
    return found[0]


def test_a_worker_in_a_loop_gets_what_was_set_aside_without_a_transaction(
    mine: SqliteStores, path: str
) -> None:
    worker = Worker(mine)
    worker.put(b"1", b"2", b"3", b"4")
    assert loop(worker) == [b"1", b"2"]
    assert len(aside(mine)) == 1
    assert numbers(mine) == [1, 0]
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    third = worker.take_one()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert (third.body, third.held.delivery) == (b"3", 1)
    worker.apply(third)
    fourth = worker.take_one()
    assert fourth.body == b"4"
    (shown,) = mine.queues.peek("q", [ItemState.HELD])
    assert shown.holder == worker.holder
    worker.release(fourth)
    assert not mine.queues._ahead._lent
    assert worker.take_one().held.delivery == 2


@pytest.mark.parametrize("most", [None, 1])
def test_what_is_set_aside_is_the_next_takers_alone(
    mine: SqliteStores, other: SqliteStores, most: int | None
) -> None:
    worker = Worker(mine)
    worker.put(*(b"%d" % number for number in range(1, 9)))
    for _ in range(2):
        worker.apply(*worker.take(2, most=most))
    assert len(aside(mine)) == 2
    assert [item.body for item in Worker(other).take(9)] == [b"7", b"8"]
    assert [item.held.delivery for item in worker.take(2, most=most)] == [1, 1]


def test_another_question_is_answered_from_the_whole_queue(mine: SqliteStores) -> None:
    worker = Worker(mine)
    worker.put(*(b"%d" % number for number in range(9)))
    loop(worker)
    assert len(aside(mine)) == 1
    found = worker.take(3)
    assert [(item.body, item.held.delivery) for item in found] == [(b"2", 1), (b"3", 1), (b"4", 1)]


def test_a_more_urgent_item_goes_first(mine: SqliteStores, other: SqliteStores) -> None:
    worker = Worker(mine)
    worker.put(b"1", b"2", b"3")
    loop(worker)
    Worker(other).put(b"urgent", priority=5)
    assert worker.take_one().body == b"urgent"
    again = worker.take_one()
    assert (again.body, again.held.delivery) == (b"3", 1)


def test_an_item_that_is_due_is_not_passed_over(mine: SqliteStores, clock: VirtualClock) -> None:
    worker = Worker(mine)
    worker.put(b"1", b"2")
    worker.put(b"later", delay=0.04, priority=5)
    worker.put(b"3")
    loop(worker)
    clock.advance(0.04)
    assert worker.take_one().body == b"later"


def test_what_nobody_asks_for_goes_back(path: str, other: SqliteStores) -> None:
    """By the clock of the machine: the thread that gives it back waits by that."""
    with_time, waiting = SqliteStores(path), SqliteStores(path)
    worker = Worker(with_time)
    worker.put(b"1", b"2", b"3")
    loop(worker)
    found = take_soon(waiting, Worker(waiting))
    assert (found.body, found.held.delivery) == (b"3", 1)
    waiting.close()
    with_time.close()


@pytest.mark.parametrize("how", ["session", "store"])
def test_what_is_left_at_the_end_was_not_delivered(
    mine: SqliteStores, other: SqliteStores, how: str
) -> None:
    worker = Worker(mine)
    worker.put(b"1", b"2", b"3")
    loop(worker)
    assert len(aside(mine)) == 1
    if how == "session":
        worker.session.close()
    else:
        mine.close()
    found = Worker(other).take_one()
    assert (found.body, found.held.delivery, found.error) == (b"3", 1, "")


def test_looking_shows_what_is_there(mine: SqliteStores) -> None:
    worker = Worker(mine)
    worker.put(b"1", b"2", b"3", b"4")
    loop(worker)
    stats = mine.queues.stats("q")
    assert (stats.ready, stats.held, stats.done) == (2, 0, 2)
    loop(worker, 1)
    assert mine.queues.purge("q") == 1
    assert mine.queues.stats("q").done == 3


# Processes that end


def hold_aside(path: str, take_it: bool) -> None:
    """Have an item set aside, in hand or not, and wait to be killed."""
    queue_ahead.PATIENCE = 3600.0
    stores = SqliteStores(path)
    worker = Worker(stores, stores.coord.session(3.0))
    loop(worker)
    if take_it:
        worker.take_one()
    say(len(aside(stores)))
    wait_for_parent()


@pytest.mark.long
@pytest.mark.parametrize("taken", [False, True])
def test_a_killed_process_is_charged_for_what_it_had_in_hand_alone(path: str, taken: bool) -> None:
    stores = SqliteStores(path)
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3", most := b"4")
    with Child(hold_aside, path, taken) as child:
        assert child.read() == (not taken)
        child.signal(signal.SIGKILL)
        found = {
            item.body: item.held.delivery for item in (take_soon(stores, worker) for _ in "34")
        }
        assert found == {b"3": 2 if taken else 1, most: 1}
    stores.queues.reap()
    assert os.listdir(os.path.join(stores.database.folder, "ahead")) == []
    stores.close()


@pytest.mark.long
def test_a_frozen_process_is_charged_for_what_it_may_hand_out(path: str) -> None:
    stores = SqliteStores(path)
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3")
    with Child(hold_aside, path, False) as child:
        assert child.read() == 1
        child.signal(signal.SIGSTOP)
        found = take_soon(stores, worker)
        assert (found.body, found.held.delivery) == (b"3", 2)
        child.signal(signal.SIGCONT)
    stores.close()


# Long queues


def test_no_statement_walks_through_all_items(path: str) -> None:
    """Whatever is done with a queue, it costs as much with a million items waiting."""
    stores = SqliteStores(path)
    heard: list[str] = []
    stores.database._writer.set_trace_callback(heard.append)
    with stores.database.reading() as connection:
        connection.set_trace_callback(heard.append)
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3", b"4", b"5", b"6")
    worker.put(b"k", key="k")
    worker.put(b"later", delay=60.0)
    loop(worker, 3)
    held = worker.take_one(lock_for=5.0)
    worker.extend(held, lock_for=9.0)
    worker.release(held, delay=1.0)
    worker.release(worker.take_one(), dead=True)
    worker.apply(*worker.take(2), put=[NewItem(queue="q", body=b"x", dedupe="d", dedupe_window=1)])
    worker.drain()
    stores.queues.reap()
    stores.queues.redrive("q", [item.id for item in stores.queues.peek("q", [ItemState.DEAD])])
    connection = sqlite3.connect(path)
    for statement in dict.fromkeys(heard):
        if not statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            continue
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
        walks = [row[3] for row in plan if row[3].startswith("SCAN")]
        bad = [step for step in walks if "items" in step and "pxrs_queue_held" not in step]
        bad += [step for step in walks if step.startswith("SCAN i") and "held" not in step]
        assert not bad, statement
    connection.close()
    stores.close()
