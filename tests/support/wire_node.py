"""What a node has for members of DMQ's clients, without HTTP and with a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from pxrs import aio
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.server.groups.host import Context, GroupHost
from pxrs.server.groups.service import GroupRules, GroupService
from pxrs.server.metrics import Metrics
from pxrs.server.node_session import NodeSession
from pxrs.server.rest.dmq import Dmq
from pxrs.server.rest.dmq_wire import NOTICE, DmqWire, GroupReply, Heartbeat, Join
from pxrs.server.settings import ServeSettings
from pxrs.testing.clock import VirtualClock

T = TypeVar("T")

GROUP = "G_orders_app"
# Nothing is given up for having waited, only for having been asked.
LONG = 3600.0
PATIENT = GroupRules(debounce=0.01, revoke_timeout=LONG)


class WireNode:
    """A node's groups, and the handlers of both of DMQ's APIs."""

    def __init__(
        self,
        px: aio.Pxrs,
        name: str,
        notice: float,
        rules: GroupRules = PATIENT,
        session_timeout: float = LONG,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        coord, topics = px._blocking.stores.coord, px._blocking.topics
        self.session = NodeSession(coord, 10.0)
        cluster: Any = SimpleNamespace(leader_of=lambda group: None)
        context = Context(coord, topics, clock, self.session, name)
        self.groups = GroupService(px, context, cluster, Metrics(SYSTEM_CLOCK), rules)
        nothing: Any = None
        self.documented = Dmq(self.groups, cluster, session_timeout)
        self.wire = DmqWire(
            px, nothing, self.groups, clock, cluster, session_timeout, 0.0, notice, nothing
        )

    async def join(self, name: str) -> GroupReply:
        return await self.wire.join(call(Join(name, GROUP)))

    async def beat(self, name: str, offsets: dict[str, int] | None = None) -> GroupReply:
        """A heartbeat; `offsets`: how far it has fetched in each partition."""
        return await self.wire.heartbeat(call(Heartbeat(name, GROUP, offsets)))

    async def until_stable(self, name: str) -> GroupReply:
        while True:
            reply = await self.beat(name)
            if reply.rebalance_state == "STABLE":
                return reply
            await asyncio.sleep(0)

    async def die(self) -> None:
        await self.groups.close()
        await asyncio.to_thread(self.session.close)


class SteppedNode(WireNode):
    """A node with the defaults, whose time passes when a test says so."""

    def __init__(self, px: aio.Pxrs, monkeypatch: pytest.MonkeyPatch) -> None:
        # The thread of the group would wait for real time.
        monkeypatch.setattr(GroupHost, "_run", lambda host: None)
        self.clock = VirtualClock()
        session_timeout = ServeSettings().session_timeout
        super().__init__(px, "node:1", NOTICE, GroupRules(), session_timeout, self.clock)

    async def join(self, name: str) -> GroupReply:
        return await self.looking(super().join(name))

    async def looking(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to, which waits for the group."""
        task = asyncio.create_task(work)
        while not task.done():
            self.look()
            await asyncio.sleep(0)
        return await task

    def look(self) -> float | None:
        """What the thread of the group does when it wakes; when it would wake by itself."""
        host = self.groups._hosts.get(GROUP)
        return None if host is None else host._step()

    def pass_time(self, until: float) -> None:
        for _ in range(1000):
            due, now = self.look(), self.clock.monotonic()
            if due is None or due > until:
                self.clock.advance(until - now)
                self.look()
                return
            self.clock.advance(max(0.0, due - now))
        raise AssertionError("the group does not come to rest")


def call(body: object = None, **more: object) -> Any:
    """A request as handlers get it."""
    return SimpleNamespace(body=body, identity=None, **more)
