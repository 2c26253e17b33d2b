"""Workers are killed and frozen under load, twenty times; each item ends handled or dead, once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import Backoff, Item
from pxrs.errors import PxrsError
from pxrs.queues.item import decode_body
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.open import open_stores
from pxrs.types import ItemState
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

QUEUE = "jobs"
ROUNDS = 20
TIMES = 3
TTL = 0.7
WORKERS = 3
EVERY_FIFTH = 5


def work(url: str, diary: str) -> None:
    """Note every item before it is handled, in a file that outlives this process, then handle it.

    Items whose number can be divided by five always fail. On SIGUSR1: say so with an item in
    hand, and wait; the parent freezes the process there.
    """
    asked = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.set())
    fd = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    px = pxrs.Pxrs(open_stores(url), session_ttl=TTL)
    say("ready")
    while True:
        held = False
        try:
            with px.transaction() as tx:
                item = tx.take(QUEUE, 1.0, retry=Backoff(first=0.0, attempts=TIMES))
                if item is None:
                    continue
                os.write(fd, f"{item.value!s} {item.deliveries}\n".encode())
                held = asked.is_set()
                if held:
                    asked.clear()
                    say(item.value)
                    wait_for_parent()
                    say([outcome(tx.extend, 5.0), outcome(tx.commit)])
                elif int(item.value) % EVERY_FIFTH == 0:
                    raise ZeroDivisionError
                else:
                    handle(item, tx)
        except (PxrsError, ZeroDivisionError):
            continue


def outcome(call: object, *args: object) -> str:
    """The name of what it raises."""
    try:
        call(*args)  # type: ignore[operator]
    except PxrsError as error:
        return type(error).__name__
    return "done"


def handle(item: Item, tx: UnitOfWork) -> None:
    tx.execute("INSERT INTO handled VALUES (?)", (int(item.value),))


class World:
    """The store, the load and the workers of one test."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/chaos.db"
        self.diary = folder / "diary"
        self.px = pxrs.connect(self.url)
        self.px.queues.create(QUEUE)
        self.table = sqlite3.connect(folder / "chaos.db", isolation_level=None, timeout=PATIENCE)
        self.table.execute("CREATE TABLE handled (number INTEGER)")
        self.workers: list[Child] = []
        self.put = 0
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._keep_putting)
        self._load.start()

    def _keep_putting(self) -> None:
        """As much as is handled: there are always some to take, never thousands."""
        while not self._stop.wait(0.02):
            if self.px.queues.describe(QUEUE).ready < 30:
                with self.px.transaction() as tx:
                    for number in range(self.put, self.put + 10):
                        key = f"k{number % 4}" if number % 3 == 0 else None
                        tx.put(QUEUE, str(number), key=key)
                self.put += 10

    def start(self) -> None:
        child = Child(work, self.url, str(self.diary))
        assert child.read() == "ready"
        self.workers.append(child)

    def with_item_in_hand(self, child: Child) -> str:
        child.signal(signal.SIGUSR1)
        value: str = child.read()
        return value

    def wait_until_not_held(self, value: str, delivery: int) -> None:
        """Somebody else has it, or has had it."""
        watch = self.px.stores.queues.watch(QUEUE)
        while any(
            decode_body(item.body)[0] == value and item.deliveries == delivery
            for item in self.px.stores.queues.peek(QUEUE, [ItemState.HELD], limit=10_000)
        ):
            assert watch.wait(PATIENCE), f"{value} is held for ever"
        watch.close()

    def finish(self) -> None:
        """End the load, and wait until nothing is left to do."""
        self._stop.set()
        self._load.join()
        watch = self.px.stores.queues.watch(QUEUE)
        while self.px.queues.describe(QUEUE).depth:
            assert watch.wait(PATIENCE), "the workers came to a halt"
        watch.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world._stop.set()
    world._load.join()
    for child in world.workers:
        child.kill()
    world.table.close()
    world.px.close()


@pytest.mark.engine("sqlite")
def test_every_item_ends_handled_or_dead(world: World) -> None:
    rng = random.Random(4711)
    for _ in range(WORKERS):
        world.start()
    refused: Counter[str] = Counter()
    for number in range(ROUNDS):
        victim = rng.choice(world.workers)
        value = world.with_item_in_hand(victim)
        if number % 2 == 0:
            world.workers.remove(victim)
            victim.kill()
            world.start()
            continue
        [stored] = [
            item
            for item in world.px.stores.queues.peek(QUEUE, [ItemState.HELD], limit=10_000)
            if decode_body(item.body)[0] == value
        ]
        victim.freeze_between_writes(world.px.stores)
        world.wait_until_not_held(value, stored.deliveries)
        victim.signal(signal.SIGCONT)
        victim.tell()
        refused.update(victim.read())
    world.finish()
    # A woken zombie can neither extend nor commit.
    assert set(refused) <= {"SessionLost", "Fenced"}
    assert refused.total() == ROUNDS
    _assert_each_ended_once(world)


def _assert_each_ended_once(world: World) -> None:
    handled = [number for (number,) in world.table.execute("SELECT number FROM handled")]
    dead = [int(item.value) for item in world.px.queues.dead(QUEUE, None)]
    assert sorted(handled + dead) == list(range(world.put))
    assert {number for number in range(world.put) if number % EVERY_FIFTH == 0} <= set(dead)
    notes = [line.split() for line in world.diary.read_text().splitlines()]
    times = Counter(value for value, _ in notes)
    assert max(times.values()) <= TIMES
    assert len(notes) == len({tuple(note) for note in notes}), "one delivery went to two workers"
    stats = world.px.queues.describe(QUEUE)
    assert (stats.put, stats.done, stats.dead) == (world.put, len(handled), len(dead))
    assert world.put > 200
