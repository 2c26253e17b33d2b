"""`px.run` by key in processes that are killed and frozen: nothing is lost, each key in order.

At least once, without transactions: what a dead or frozen process had handled and not committed is
handled again. What must never happen: a message that nobody handled, or one that was begun before
its predecessor of the same key had been handled by somebody.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pxrs
from pxrs import GroupNotFound
from support.child import Child
from support.inside import say
from support.loaded import GROUP, KEYS, TOPIC, Loaded

ROUNDS = 10
TTL = 1.0

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.thorough]


def ship(url: str, journal: str) -> None:
    """Write a line for every message that was handled, at once and whole."""
    lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(message: pxrs.Message) -> None:
        line = (
            f"{message.partition} {message.fence.epoch} {message.offset} {message.value.decode()}\n"
        )
        os.write(lines, line.encode())

    px = pxrs.connect(url)
    say("ready")
    px.run(
        handle,
        topic=TOPIC,
        group=GROUP,
        workers=3,
        parallel="key",
        session_ttl=TTL,
        revoke_timeout=5.0,
        auto_commit_interval=0.05,
    ).join()


class Handled(NamedTuple):
    """One line of a journal."""

    partition: int
    epoch: int
    offset: int
    number: int


class World(Loaded):
    """The store, the load and the processes, each with a journal of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[Child] = []
        self.started = 0
        super().__init__(f"sqlite:///{folder}/chaos.db")

    def start(self) -> None:
        self.started += 1
        child = Child(ship, self.url, str(self._folder / f"journal-{self.started}"))
        assert child.read() == "ready"
        self.processes.append(child)

    def settled(self) -> bool:
        try:
            info = self.px.groups.describe(GROUP, lag_seconds=False)
        except GroupNotFound:
            return False  # they have started, and nobody has joined yet
        return (
            info.state == "STABLE"
            and len(info.members) == len(self.processes)
            and all(member.owned for member in info.members)
        )

    def is_owner(self, child: Child) -> bool:
        """Whether this process owns anything."""
        info = self.px.groups.describe(GROUP, lag_seconds=False)
        return any(
            member.owned and member.client.endswith(f":{child.pid}") for member in info.members
        )

    def finish(self) -> None:
        """Let everything be handled and committed, and the processes end by themselves."""
        super().finish()
        for child in self.processes:
            child.signal(signal.SIGTERM)
        assert [child.join() for child in self.processes] == [0] * len(self.processes)

    def handled(self) -> list[Handled]:
        lines = [
            line
            for path in self._folder.glob("journal-*")
            for line in path.read_text().splitlines()
        ]
        return [Handled(*map(int, line.split())) for line in lines]

    def close(self) -> None:
        for child in self.processes:
            child.kill()
        super().close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_nothing_is_lost_and_each_key_is_in_order(world: World) -> None:
    rng = random.Random(815)
    for _ in range(3):
        world.start()
    for number in range(ROUNDS):
        world.wait(world.settled)
        victim = rng.choice(world.processes)
        if number % 2 == 0:
            world.processes.remove(victim)
            victim.kill()
            world.start()
        else:
            victim.freeze_between_writes(world.px.stores)
            world.wait(lambda victim=victim: not world.is_owner(victim))  # type: ignore[misc]
            victim.signal(signal.SIGCONT)
    world.finish()
    handled = world.handled()
    assert {each.number for each in handled} == set(range(world.sent))
    _assert_in_order(handled)


def _assert_in_order(handled: list[Handled]) -> None:
    """Journals are per process and an epoch is one process's: their lines are in order."""
    by_epoch: defaultdict[tuple[int, int], list[Handled]] = defaultdict(list)
    for each in handled:
        by_epoch[each.partition, each.epoch].append(each)
    done: defaultdict[int, int] = defaultdict(lambda: -1)
    for where in sorted(by_epoch):
        last: dict[int, int] = {}
        for each in by_epoch[where]:
            key = each.number % KEYS
            turn = each.number // KEYS
            assert turn > last.get(key, -1), f"{each} came again, or too late"
            assert turn <= max(done[key], last.get(key, -1)) + 1, f"{each} came before its turn"
            last[key] = turn
        for key, turn in last.items():
            done[key] = max(done[key], turn)
