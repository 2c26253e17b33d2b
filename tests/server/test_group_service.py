"""What a node's groups do between two requests of their clients."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pxrs import aio
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.groups.host import Context, GroupHost
from pxrs.server.groups.service import GroupService
from pxrs.server.metrics import Metrics
from pxrs.server.node_session import NodeSession
from support.child import PATIENCE

pytestmark = pytest.mark.engine("memory")


async def started(px: aio.Pxrs) -> tuple[GroupService, NodeSession]:
    """The groups of a node, and its session."""
    await px.topics.create("orders", partitions=1)
    coord, topics = px._blocking.stores.coord, px._blocking.topics
    session = NodeSession(coord, 10.0)
    context = Context(coord, topics, SYSTEM_CLOCK, session, "node:1")
    cluster: Any = SimpleNamespace(leader_of=lambda group: None)
    return GroupService(px, context, cluster, Metrics(SYSTEM_CLOCK)), session


def test_the_owners_of_members_that_are_gone_are_removed_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pxrs.server.groups.service._MANY_OWNERS", 2)

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            groups, session = await started(px)
            for member in ("a", "b"):
                await groups.join("g", member, ("orders",), "test", 30.0)
                await groups.note_owner("g", member, f"token-{member}")
            assert await groups.owner_of("g", "b") == "token-b"
            await groups.leave("g", "b")
            assert await groups.owner_of("g", "b") is None
            await groups.join("g", "c", ("orders",), "test", 30.0)
            await groups.note_owner("g", "c", "token-c")
            assert await groups.owner_of("g", "a") == "token-a"
            assert await groups.owner_of("g", "c") == "token-c"
            found = px._blocking.stores.coord.get("owners/g")
            assert found is not None
            assert b"token-b" not in found.value
            await groups.close()
            await asyncio.to_thread(session.close)

    asyncio.run(walk())


def test_a_client_that_joins_while_another_group_is_closed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing, go_on = threading.Event(), threading.Event()
    close = GroupHost.close

    def slow_close(host: GroupHost) -> None:
        closing.set()
        assert go_on.wait(PATIENCE)
        close(host)

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            groups, session = await started(px)
            for group in ("g1", "g2"):
                await groups.join(group, "a", ("orders",), "test", 30.0)
                await groups.leave(group, "a")
            monkeypatch.setattr(GroupHost, "close", slow_close)
            sweep = asyncio.create_task(groups._close_empty())
            await asyncio.to_thread(closing.wait, PATIENCE)
            await groups.join("g2", "b", ("orders",), "test", 30.0)
            go_on.set()
            await sweep
            assert groups.held == 1
            await groups.close()
            session.close()

    asyncio.run(walk())
