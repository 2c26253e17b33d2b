"""Consumers are killed and frozen under load, ten times; the ledger ends exactly right."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import psycopg
import pytest

import pxrs
from pxrs.core.records import Head, MemberRecord, decode
from support.child import Child
from support.inside import say, wait_for_parent
from support.loaded import GROUP, PARTITIONS, TOPIC, Loaded

ROUNDS = 10
TTL = 1.0


def consume(url: str) -> None:
    """Write every message into the ledger, in the transaction that commits the checkpoint.

    On SIGUSR1: say so with a batch in hand, and wait; the parent freezes the process there.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGUSR1, ask)
    px = pxrs.connect(url)
    consumer = px.consumer(TOPIC, GROUP, auto_commit=False, session_ttl=TTL, revoke_timeout=5.0)
    say(consumer.member)
    while True:
        messages = consumer.poll(max_records=50, timeout=0.1)
        held = asked.is_set() and bool(messages)
        if held:
            asked.clear()
            say("holding a batch")
            wait_for_parent()
        if messages:
            try:
                with consumer.transaction() as tx:
                    tx.execute(_insert(messages))
                outcome = "committed"
            except pxrs.Fenced:
                outcome = "fenced"
            if held:
                say(outcome)


def _insert(messages: list[pxrs.Message]) -> str:
    """The same statement for every engine."""
    rows = ",".join(
        f"({m.partition}, {m.offset}, '{m.key.decode()}', {int(m.value)}, {m.fence.epoch})"
        for m in messages
    )
    return f"INSERT INTO ledger (part, place, key, number, epoch) VALUES {rows}"


class World(Loaded):
    """The store, the load and the members of one test. `ledger` runs SQL in the same database."""

    def __init__(self, url: str, ledger: Any, id_type: str) -> None:
        ledger.execute(
            f"CREATE TABLE ledger (id {id_type} PRIMARY KEY, part BIGINT, place BIGINT, "
            "key TEXT, number BIGINT, epoch BIGINT)"
        )
        self.ledger = ledger
        self.members: dict[str, Child] = {}
        super().__init__(url)

    def start(self) -> None:
        child = Child(consume, self.url)
        self.members[child.read()] = child

    def settled(self) -> bool:
        """All partitions are owned by those who are there."""
        records = self.px.stores.coord.list(f"members/{GROUP}/")
        ids = {decode(record, MemberRecord).id for record in records}
        claims = self.claims()
        return len(ids) == len(self.members) and (
            [claim.owner in ids for claim in claims] == [True] * PARTITIONS
            and {claim.owner for claim in claims} == ids
        )

    def owned_by(self, name: str) -> int:
        return sum(claim.name == name for claim in self.claims())

    def close(self) -> None:
        for child in self.members.values():
            child.kill()
        super().close()
        self.ledger.close()


def _sqlite_world(request: pytest.FixtureRequest) -> World:
    path = request.getfixturevalue("tmp_path") / "chaos.db"
    ledger = sqlite3.connect(path, isolation_level=None)
    return World(f"sqlite:///{path}", ledger, "INTEGER")


def _postgres_world(request: pytest.FixtureRequest) -> World:
    url = request.getfixturevalue("postgres_url")
    return World(url, psycopg.connect(url, autocommit=True), "BIGSERIAL")


@pytest.fixture(
    params=[
        pytest.param(_sqlite_world, id="sqlite", marks=pytest.mark.engine("sqlite")),
        pytest.param(
            _postgres_world,
            id="postgres",
            marks=[pytest.mark.engine("postgres"), pytest.mark.thorough],
        ),
    ]
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world: World = request.param(request)
    yield world
    world.close()


def test_nothing_is_lost_doubled_or_disordered(world: World) -> None:
    rng = random.Random(4711)
    refused = 0
    for _ in range(3):
        world.start()
    for number in range(ROUNDS):
        world.wait(world.settled)
        victim = rng.choice(sorted(world.members))
        if number % 2 == 0:
            world.members.pop(victim).kill()
            world.start()
        else:
            refused += _freeze_and_wake(world, victim)
    world.finish()
    assert refused == ROUNDS // 2
    _assert_ledger_is_right(world)
    head = world.px.stores.coord.get(f"group/{GROUP}")
    assert head is not None
    assert decode(head, Head).generation >= ROUNDS


def _freeze_and_wake(world: World, victim: str) -> bool:
    """Freeze a member with a batch in hand until others own its partitions; then wake it."""
    child = world.members[victim]
    child.signal(signal.SIGUSR1)
    assert child.read() == "holding a batch"
    child.freeze_between_writes(world.px.stores)
    world.wait(lambda: world.owned_by(victim) == 0)
    child.signal(signal.SIGCONT)
    child.tell()
    outcome: str = child.read()
    return outcome == "fenced"


def _assert_ledger_is_right(world: World) -> None:
    rows = world.ledger.execute(
        "SELECT part, place, key, number FROM ledger ORDER BY id"
    ).fetchall()
    assert len(rows) == world.sent
    assert len({(partition, offset) for partition, offset, _, _ in rows}) == world.sent
    assert sorted(number for *_, number in rows) == list(range(world.sent))
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for _, _, key, number in rows:
        by_key[key].append(number)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    epochs: defaultdict[int, list[int]] = defaultdict(list)
    for partition, epoch in world.ledger.execute("SELECT part, epoch FROM ledger ORDER BY id"):
        epochs[partition].append(epoch)
    assert all(found == sorted(found) for found in epochs.values())
