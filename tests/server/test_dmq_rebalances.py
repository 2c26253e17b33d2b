"""Clients of both of DMQ's APIs while members come, go and die, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Protocol

import pytest

from pxrs import aio
from pxrs.server.rest.dmq import AssignmentQuery, CommitOffsets, Heartbeat, Join
from pxrs.server.rest.problems import HttpError
from support.child import PATIENCE
from support.wire_node import GROUP, SteppedNode, call

pytestmark = pytest.mark.engine("memory")

# In tenths of a second, as all times here.
HEARTBEATS = 30
BUSY, QUIET = 600, 900


class Client(Protocol):
    """One of a group. `refused`: the codes of its commits that were refused."""

    name: str
    refused: list[str]

    @property
    def partitions(self) -> frozenset[int]:
        """Those that it reads."""
        ...

    async def join(self) -> None: ...

    async def work(self, now: int) -> None: ...


class DocumentedClient:
    """What the document's client does with each heartbeat's answer, if it gets that.

    `by_heartbeat`: whether it goes on from the generation of its heartbeat or of its assignment:
    the document has both.
    """

    def __init__(
        self, node: SteppedNode, name: str, chance: random.Random, losses: float, by_heartbeat: bool
    ) -> None:
        self.name = name
        self._node = node
        self._api = node.documented
        self._chance = chance
        self._losses = losses
        self._by_heartbeat = by_heartbeat
        self._id = f"{name}~{GROUP}"
        self._names_generation = chance.random() < 0.5
        self._phase = chance.randrange(HEARTBEATS)
        self._generation = 0
        self.partitions: frozenset[int] = frozenset()
        self.refused: list[str] = []

    async def join(self) -> None:
        await self._node.looking(self._api.join(call(Join(GROUP, self.name))))
        await self._fetch(None)

    async def work(self, now: int) -> None:
        if now % HEARTBEATS != self._phase:
            return
        named = self._generation if self._names_generation else None
        told = await self._api.heartbeat(call(Heartbeat(GROUP, self._id, named)))
        self._node.look()
        if self._is_lost() or told.generation <= self._generation:
            return
        offsets = dict.fromkeys(map(str, self.partitions), 0)
        try:
            await self._api.commit(call(CommitOffsets(GROUP, self._id, offsets)))
        except HttpError as error:
            self.refused.append(error.code)
        self._node.look()
        await self._fetch(told.generation)

    async def _fetch(self, generation: int | None) -> None:
        path = {"member": self._id}
        found = await self._api.assignment(call(path=path, query=AssignmentQuery(0.0)))
        if self._is_lost():
            return
        self.partitions = frozenset(found.partitions)
        self._generation = found.generation
        if self._by_heartbeat and generation is not None:
            self._generation = generation

    def _is_lost(self) -> bool:
        return self._chance.random() < self._losses


class ExistingClient:
    """What DMQ's existing client does with each heartbeat's answer, if it gets that."""

    def __init__(self, node: SteppedNode, name: str, chance: random.Random, losses: float) -> None:
        self.name = name
        self._node = node
        self._chance = chance
        self._losses = losses
        self._phase = chance.randrange(HEARTBEATS)
        self._stable = self._has_had_set = False
        self._partitions: frozenset[int] = frozenset()
        self._offsets: dict[str, int] = {}
        self.refused: list[str] = []

    @property
    def partitions(self) -> frozenset[int]:
        """Those that it reads."""
        return self._partitions if self._stable else frozenset()

    async def join(self) -> None:
        await self._node.join(self.name)

    async def work(self, now: int) -> None:
        for number in map(str, self.partitions):
            self._offsets[number] = self._offsets.get(number, 0) + 1
        # Once a second until it has a set.
        every = HEARTBEATS if self._has_had_set else HEARTBEATS // 3
        if now % every != self._phase % every:
            return
        told = await self._node.beat(self.name, dict(self._offsets))
        if self._chance.random() < self._losses:
            return
        if told.rebalance_state != "STABLE":
            self._stable = False
        elif not self._stable and told.assigned_partitions:
            self._stable = self._has_had_set = True
            self._partitions = frozenset(told.assigned_partitions)


async def share(
    px: aio.Pxrs,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    losses: float,
    make: Callable[[SteppedNode, str, random.Random, float], Client],
) -> None:
    """Clients come and die for a while; then all partitions have one that reads them, the owner.

    If no answer is lost, no two ever read the same one, and what they have read is committed.
    """
    chance = random.Random(seed)
    await px.topics.create("orders", partitions=10)
    node = SteppedNode(px, monkeypatch)
    await node.groups.find_or_create("orders", "app")
    clients: list[Client] = []
    for now in range(1, BUSY + QUIET):
        node.pass_time(now / 10)
        if now == BUSY or (now < BUSY and len(clients) < 4 and chance.random() < 0.03):
            clients.append(make(node, f"client-{now}", chance, losses))
            await clients[-1].join()
        # The last one that joins has no rebalance after its own that would help it.
        if now < BUSY - 300 and clients and chance.random() < 0.02:
            clients.remove(chance.choice(clients))  # it is dead
        for client in clients:
            await client.work(now)
        if not losses:
            assert not any(a.partitions & b.partitions for a, b in combinations(clients, 2))
            assert not [client for client in clients if "not_owned" in client.refused]
    owners = [each.owner for each in (await px.groups.describe(GROUP)).partitions]
    readers = {number: it.name for it in clients for number in it.partitions}
    assert [readers.get(number) for number in range(10)] == owners
    assert sum(len(client.partitions) for client in clients) == 10
    await node.die()


@pytest.mark.parametrize("losses", [0.0, 0.2], ids=["no losses", "answers are lost"])
@pytest.mark.parametrize("by_heartbeat", [False, True], ids=["its assignment's", "its heartbeat's"])
@pytest.mark.parametrize("seed", range(4))
def test_documented_clients_share_the_partitions_whatever_happens_before(
    monkeypatch: pytest.MonkeyPatch, seed: int, by_heartbeat: bool, losses: float
) -> None:
    async def walk() -> None:
        make = partial(DocumentedClient, by_heartbeat=by_heartbeat)
        async with aio.connect("memory://") as px:
            await share(px, monkeypatch, seed, losses, make)

    asyncio.run(asyncio.wait_for(walk(), 4 * PATIENCE))


@pytest.mark.parametrize("losses", [0.0, 0.5], ids=["no losses", "answers are lost"])
@pytest.mark.parametrize("seed", [5, 7, 8, 14])
def test_existing_clients_share_the_partitions_whatever_happens_before(
    monkeypatch: pytest.MonkeyPatch, seed: int, losses: float
) -> None:
    """Answers that say PREPARING_REBALANCE may all be lost."""

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            await share(px, monkeypatch, seed, losses, ExistingClient)

    asyncio.run(asyncio.wait_for(walk(), 4 * PATIENCE))
