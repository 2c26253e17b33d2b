"""Groups for remote clients: the members that this node holds, and the groups of applications."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from pxrs import metrics as names
from pxrs.aio.app import Pxrs
from pxrs.aio.threads import called, outcome
from pxrs.config import check_group_name, check_member_name, check_topic_name
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.core.records import Head, MemberRecord, decode, head_key, member_key
from pxrs.errors import GroupExists, GroupNotFound, OffsetOutOfRange
from pxrs.server.cluster import Cluster
from pxrs.server.groups.host import CommitResult, Context, GroupHost, MemberNotHere, Told
from pxrs.server.limits import MOST_GROUPS, MOST_MEMBERS, check_room
from pxrs.server.metrics import Metrics
from pxrs.types import Check, Committed, Delete, Put, TopicPartition

_REGISTRY = "apps/"
# How often hosts without members are looked for.
_SWEEP = 10.0
_FEW = 1000

T = TypeVar("T")


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """How groups behave whose members are remote. Seconds."""

    debounce: float = 0.5
    # How long a partition may stay with a client that was told to give it up.
    revoke_timeout: float = 5.0
    strategy: str = "sticky"


class AppGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group by its topic and application, as it is registered."""

    topic: str
    app_id: str
    created_ms: int
    schema: int = 1

    @property
    def name(self) -> str:
        return f"G_{self.topic}_{self.app_id}"


class Registered(NamedTuple):
    """An application's group and its name."""

    name: str
    app: AppGroup


class HeldElsewhere(Exception):  # noqa: N818 - it says where to go on
    """Another node has to answer this request: it holds the member, or leads the group."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the node at {address} answers this")
        self.address = address


class GroupService:
    """What remote members ask for. Used by one event loop."""

    def __init__(
        self,
        px: Pxrs,
        context: Context,
        cluster: Cluster,
        metrics: Metrics,
        rules: GroupRules | None = None,
    ) -> None:
        rules = rules or GroupRules()
        self._px = px
        self._metrics = metrics
        self._call = px._threads.call
        self._context = context
        self._cluster = cluster
        self._coord = context.coord
        self._clock = context.clock
        self._rules = Rules(rules.debounce, rules.revoke_timeout + 0.5, assignor(rules.strategy))
        self._patience = rules.revoke_timeout
        self._hosts: dict[str, GroupHost] = {}
        self._sweeping = asyncio.create_task(self._sweep())

    # Members

    async def join(
        self,
        group: str,
        name: str,
        topics: tuple[str, ...],
        client: str,
        session_timeout: float,
        notice: float = 0.0,
    ) -> None:
        """Become a member of the group under a name of the client's own.

        `notice`: how long the client is told that a partition goes before it is released.
        """
        check_group_name(group)
        check_member_name(name)
        host = self._hosts.get(group)
        if host is None or not host.holds(name):
            await self._call(partial(self._refuse_elsewhere, group, name))
            check_room("members", self.held, MOST_MEMBERS)
        for topic in topics:
            await self._px.topics.find(topic)
        await outcome(self._host(group).join(name, topics, client, session_timeout, notice))

    async def ask(self, group: str, name: str) -> Told:
        """The client lives; what it owns now. A member whose node died is taken over."""
        host = self._hosts.get(group)
        if host is None or not host.holds(name):
            await self._adopt(group, name)
            host = self._host(group)
        return host.ask(name)

    async def settled(self, group: str, name: str, wait: float) -> Told:
        """As `ask`, once the member owns what it shall, or after so many seconds."""
        told = await self.ask(group, name)
        if told.settled or wait <= 0:
            return told
        host = self._host(group)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await called(partial(host.when_settled, name))
        return host.ask(name)

    async def commit(
        self, group: str, name: str, offsets: Mapping[TopicPartition, int]
    ) -> CommitResult:
        """Move checkpoints forward; those of partitions that it does not own are refused."""
        await self.ask(group, name)
        await self._call(partial(self.check_offsets, offsets))
        host = self._host(group)
        with self._metrics.timed(names.COMMIT_SECONDS):
            done = await self._call(partial(host.commit, name, offsets))
        self._metrics.count(names.FENCED, by=len(done.refused))
        return done

    async def commit_owned(
        self, group: str, name: str, offsets: Mapping[TopicPartition, int]
    ) -> None:
        """Commit what it owns of these, as far as there are messages; the rest is left alone."""
        host = self._host(group)
        mine = host.parts(name)
        owned = {part: offset for part, offset in offsets.items() if part in mine}
        if owned:
            await self._call(partial(self.check_offsets, owned))
            await self._call(partial(host.commit, name, owned))

    @property
    def held(self) -> int:
        """How many members this node holds."""
        return sum(host.size for host in self._hosts.values())

    def forget_others(self, known: dict[tuple[str, str], T]) -> None:
        """Drop what is known of members that are not held here any more, once that is much."""
        if len(known) <= 2 * self.held + _FEW:
            return
        for group, name in list(known):
            host = self._hosts.get(group)
            if host is None or not host.holds(name):
                del known[group, name]

    async def leave(self, group: str, name: str) -> None:
        """Leave the group for good."""
        await self.ask(group, name)
        await outcome(self._host(group).leave(name))

    def _host(self, group: str) -> GroupHost:
        host = self._hosts.get(group)
        if host is None:
            check_room("groups", len(self._hosts), MOST_GROUPS)
            host = GroupHost(group, self._context, self._rules, self._patience)
            self._hosts[group] = host
        return host

    async def _adopt(self, group: str, name: str) -> None:
        """Hold a member that waits for its client: the node that held it is gone."""
        check_group_name(group)
        check_member_name(name)
        await self._call(partial(self._refuse_elsewhere, group, name))
        head = await self._call(partial(self._waits_for, group, name))
        await outcome(
            self._host(group).join(
                name, head.subscriptions[name], f"http:{name}", head.static[name]
            )
        )

    def _waits_for(self, group: str, name: str) -> Head:
        """The head of a group that keeps the partitions of this member for it."""
        found = self._coord.get(head_key(group))
        if found is None:
            raise GroupNotFound(group)
        head = decode(found, Head)
        if name not in head.static or name not in head.subscriptions:
            raise MemberNotHere(name, group)
        return head

    def _refuse_elsewhere(self, group: str, name: str) -> None:
        """Raise if another node holds the member, or leads the group that it wants to join.

        Otherwise two nodes would displace each other's member in turn.
        """
        record = self._coord.get(member_key(group, name))
        if record is not None:
            where = decode(record, MemberRecord).node
            if where and where != self._context.node:
                raise HeldElsewhere(where)
            return
        leader = self._cluster.leader_of(group)
        if leader is not None and leader.address != self._context.node:
            raise HeldElsewhere(leader.address)

    def check_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Refuse checkpoints past the end: messages that are still to come would be passed over.

        In a thread.
        """
        topics = self._px._blocking.topics
        for topic in {part.topic for part in offsets}:
            bounds = topics.bounds(topics.find(topic))
            for part, offset in offsets.items():
                if part.topic != topic or part.partition not in bounds:
                    continue
                held = bounds[part.partition]
                if not 0 <= offset <= held.end:
                    raise OffsetOutOfRange(*part, offset, *held)

    # Registry

    async def find_or_create(self, topic: str, app_id: str) -> Registered:
        """The group of an application on a topic."""
        check_topic_name(topic)
        await self._px.topics.find(topic)
        wanted = AppGroup(topic=topic, app_id=app_id, created_ms=self._clock.wall_ms())
        check_group_name(wanted.name)
        return await self._call(partial(self._register, wanted))

    async def registered(self) -> list[Registered]:
        """All groups of applications, by name."""
        found = await self._call(partial(self._coord.list, _REGISTRY))
        return [
            Registered(
                each.key.removeprefix(_REGISTRY), msgspec.json.decode(each.value, type=AppGroup)
            )
            for each in found
        ]

    async def find(self, group: str) -> Registered:
        """The group of this name; `GroupNotFound` if no application has it."""
        check_group_name(group)
        record = await self._call(partial(self._coord.get, _REGISTRY + group))
        if record is None:
            raise GroupNotFound(group)
        return Registered(group, msgspec.json.decode(record.value, type=AppGroup))

    async def delete(self, group: str) -> None:
        """Remove an application's group; it must not have members."""
        await self.find(group)
        with suppress(GroupNotFound):  # nobody may have joined yet
            await self._px.groups.delete(group)
        await self._call(partial(self._coord.commit, [], [Delete(_REGISTRY + group)]))

    def _register(self, wanted: AppGroup) -> Registered:
        key = _REGISTRY + wanted.name
        while True:
            found = self._coord.get(key)
            if found is not None:
                app = msgspec.json.decode(found.value, type=AppGroup)
                if (app.topic, app.app_id) != (wanted.topic, wanted.app_id):
                    raise GroupExists(
                        f"group {wanted.name!r} belongs to topic {app.topic!r} and application "
                        f"{app.app_id!r}; choose another application id"
                    )
                return Registered(wanted.name, app)
            put = Put(key, msgspec.json.encode(wanted))
            if isinstance(self._coord.commit([Check(key, 0)], [put]), Committed):
                return Registered(wanted.name, wanted)

    # Ending

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            for group in [group for group, host in self._hosts.items() if host.is_empty]:
                await self._call(self._hosts.pop(group).close)

    async def close(self) -> None:
        """Let the members go to other nodes: they keep their partitions for a while."""
        self._sweeping.cancel()
        for host in self._hosts.values():
            await self._call(host.close)
        self._hosts.clear()
