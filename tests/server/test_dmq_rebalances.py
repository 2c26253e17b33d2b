"""Clients of DMQ's documented API while members come, go and die, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import random
from itertools import combinations

import pytest

from pxrs import aio
from pxrs.server.rest.dmq import AssignmentQuery, CommitOffsets, Heartbeat, Join
from pxrs.server.rest.problems import HttpError
from support.child import PATIENCE
from support.wire_node import GROUP, SteppedNode, call

pytestmark = pytest.mark.engine("memory")

# In tenths of a second, as all times here.
HEARTBEATS = 30
BUSY, QUIET = 600, 300


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


@pytest.mark.parametrize("losses", [0.0, 0.2], ids=["no losses", "answers are lost"])
@pytest.mark.parametrize("by_heartbeat", [False, True], ids=["its assignment's", "its heartbeat's"])
@pytest.mark.parametrize("seed", range(8))
def test_clients_share_the_partitions_whatever_happens_before(
    monkeypatch: pytest.MonkeyPatch, seed: int, by_heartbeat: bool, losses: float
) -> None:
    """And if no answer is lost, no two work on one, and each commits before it fetches."""
    chance = random.Random(seed)

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", partitions=10)
            node = SteppedNode(px, monkeypatch)
            await node.groups.find_or_create("orders", "app")
            clients: list[DocumentedClient] = []
            for now in range(1, BUSY + QUIET):
                node.pass_time(now / 10)
                if now == BUSY or (now < BUSY and len(clients) < 4 and chance.random() < 0.03):
                    name = f"client-{now}"
                    clients.append(DocumentedClient(node, name, chance, losses, by_heartbeat))
                    await clients[-1].join()
                # The last one that joins has no rebalance after its own that would help it.
                if now < BUSY - QUIET and clients and chance.random() < 0.02:
                    clients.remove(chance.choice(clients))  # it is dead
                for client in clients:
                    await client.work(now)
                if not losses:
                    assert not any(a.partitions & b.partitions for a, b in combinations(clients, 2))
                    assert not [client for client in clients if "not_owned" in client.refused]
            owners = [each.owner for each in (await px.groups.describe(GROUP)).partitions]
            believed = {number: it.name for it in clients for number in it.partitions}
            assert believed == {n: name for n, name in enumerate(owners) if name is not None}
            assert len(believed) == 10
            await node.die()

    asyncio.run(asyncio.wait_for(walk(), PATIENCE))
