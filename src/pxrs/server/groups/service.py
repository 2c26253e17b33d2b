"""Groups for remote clients: the members that this node holds, and the groups of applications."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
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
from pxrs.core.records import Head, MemberRecord, decode, head_key, member_key, members_prefix
from pxrs.errors import GroupExists, GroupNotFound, OffsetOutOfRange
from pxrs.server.cluster import Cluster
from pxrs.server.groups.fences import Fence
from pxrs.server.groups.host import MOST_MEMBERS as MOST_IN_GROUP
from pxrs.server.groups.host import CommitResult, Context, GroupHost, MemberNotHere, Standing, Told
from pxrs.server.limits import MOST_GROUPS, MOST_MEMBERS, check_room
from pxrs.server.metrics import Metrics
from pxrs.types import Check, Committed, Delete, Put, TopicPartition, Versioned

_REGISTRY = "apps/"
# By group: which token each member has joined with.
_OWNERS = "owners/"
# How often hosts without members are looked for.
_SWEEP = 10.0
_FEW = 1000
# More owners than this in one record: those of members that are gone are removed.
_MANY_OWNERS = 2 * MOST_IN_GROUP

T = TypeVar("T")


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """How groups behave whose members are remote. Seconds."""

    debounce: float = 0.5
    # How long a partition may stay with a client that has to give it up.
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


class HeldElsewhere(Exception):  # noqa: N818 - it names the node to ask
    """Another node has to answer this request: it holds the member, or leads the group."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the node at {address} answers this")
        self.address = address


class GroupService:
    """Serves the requests of remote members. Used by one event loop."""

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
        """Become a member of the group under a name that the client chose.

        `notice`: how long before its release answers announce that a partition goes.
        """
        check_group_name(group)
        check_member_name(name)
        again = self.holds(group, name)
        if not again:
            await self._call(partial(self._refuse_elsewhere, group, name))
            check_room("members", self.held, MOST_MEMBERS)
        for topic in topics:
            await self._px.topics.find(topic)
        host = self._host(group)
        await outcome(host.join(name, topics, client, session_timeout, notice))
        if again:
            # Its client may have started anew, and continues from the checkpoints that it is told.
            await self._call(partial(host.read_checkpoints, name))

    async def ask(self, group: str, name: str) -> Told:
        """Note a request of a client that has seen the answers before; what it owns now.

        Takes over a member whose node died, as the other requests do.
        """
        return (await self._holding(group, name)).ask(name)

    async def beat(self, group: str, name: str, generation: int | None) -> int:
        """Note a sign of life; the answer is a generation and tells of no partition.

        `generation`: the one that the client has fetched, if it says so.
        """
        return (await self._holding(group, name)).beat(name, generation)

    async def heard(self, group: str, name: str) -> Standing:
        """Note a sign of life that the client may have sent before it saw the last answer."""
        return (await self._holding(group, name)).heard(name)

    async def _holding(self, group: str, name: str) -> GroupHost:
        """The host of a member, which is taken over if its node died."""
        host = self._hosts.get(group)
        if host is None or not host.holds(name):
            await self._adopt(group, name)
            host = self._host(group)
        return host

    def holds(self, group: str, name: str) -> bool:
        """Whether this node holds the member."""
        host = self._hosts.get(group)
        return host is not None and host.holds(name)

    def ask_held(self, group: str, name: str) -> Told:
        """As `ask`, but `MemberNotHere` for a member that this node does not hold.

        Who was told how long partitions stay (`notice`) must join again to be told it once more:
        a member that is taken over by `ask` has none.
        """
        return self._host_of(group, name).ask(name)

    def _host_of(self, group: str, name: str) -> GroupHost:
        """The host of a member that is held here; `MemberNotHere` for any other."""
        host = self._hosts.get(group)
        if host is None or not host.holds(name):
            raise MemberNotHere(name, group)
        return host

    async def settled(self, group: str, name: str, wait: float) -> Told:
        """As `ask`, once the member owns its target, or after `wait` seconds.

        At once if it has to give up a partition: the answer that says so must not wait until others
        have it. No answer waits for so long that the client would count as gone.
        """
        told = await self.ask(group, name)
        if told.settled or told.has_news or wait <= 0:
            return told
        host = self._host_of(group, name)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait, host.patience(name))):
                await called(partial(host.when_settled, name))
        # Not asked again: the client has sent one request, and does not know what it was told.
        return host.tell(name)

    async def commit(
        self, group: str, name: str, offsets: Mapping[TopicPartition, int]
    ) -> CommitResult:
        """Move checkpoints forward; refuses those of partitions that the member does not own.

        Raises `OffsetOutOfRange` if one is past its end, once the others are committed.
        """
        await self.heard(group, name)
        done, wrong = await self._commit(group, name, offsets)
        if wrong:
            raise wrong[0]
        return done

    async def commit_owned(
        self, group: str, name: str, offsets: Mapping[TopicPartition, int]
    ) -> list[OffsetOutOfRange]:
        """Commit offsets of partitions that the member owns; ignores all others.

        Returns those past the end of their partition: they hold back no other, and are left out.
        """
        mine = self._host_of(group, name).parts(name)
        owned = {part: offset for part, offset in offsets.items() if part in mine}
        return (await self._commit(group, name, owned))[1]

    async def _commit(
        self, group: str, name: str, offsets: Mapping[TopicPartition, int]
    ) -> tuple[CommitResult, list[OffsetOutOfRange]]:
        wrong = await self._call(lambda: list(self._past_end(offsets)))
        past_end = {(error.topic, error.partition) for error in wrong}
        good = {part: offset for part, offset in offsets.items() if part not in past_end}
        host = self._host_of(group, name)
        if not good:
            nothing: frozenset[TopicPartition] = frozenset()
            return CommitResult(nothing, nothing, host.announced(name)), wrong
        with self._metrics.timed(names.COMMIT_SECONDS):
            done = await self._call(partial(host.commit, name, good))
        self._metrics.count(names.FENCED, by=len(done.refused))
        return done, wrong

    def committed(self, group: str, checkpoints: Mapping[Fence, int | None]) -> None:
        """Note what members that are held here have committed with fences."""
        host = self._hosts.get(group)
        for fence, checkpoint in checkpoints.items():
            if host is not None and checkpoint is not None:
                host.committed(fence.owner, {fence.part: checkpoint})

    @property
    def held(self) -> int:
        """How many members this node holds."""
        return sum(host.size for host in self._hosts.values())

    def forget_others(self, known: dict[tuple[str, str], T]) -> None:
        """Remove members that are not held here from `known`, once it has grown large."""
        if len(known) <= 2 * self.held + _FEW:
            return
        for group, name in list(known):
            if not self.holds(group, name):
                del known[group, name]

    async def leave(self, group: str, name: str) -> None:
        """Leave the group for good."""
        await outcome((await self._holding(group, name)).leave(name))

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

    async def note_owner(self, group: str, name: str, token: str) -> None:
        """Remember the token that a member has joined with, for all nodes and over restarts."""
        await self._call(partial(self._note_owner, group, name, token))

    def _note_owner(self, group: str, name: str, token: str) -> None:
        while True:
            found, owners = self._owners(group)
            if owners.get(name) == token:
                return
            if len(owners) >= _MANY_OWNERS:
                # Read after the owners: each of them was a member before it was noted.
                here = self._names(group)
                owners = {each: owner for each, owner in owners.items() if each in here}
            put = Put(_OWNERS + group, msgspec.json.encode({**owners, name: token}))
            check = Check(put.key, 0 if found is None else found.version)
            if isinstance(self._coord.commit([check], [put]), Committed):
                return

    async def owner_of(self, group: str, name: str) -> str | None:
        """The token that a member has joined with; None if the group has no such member."""
        return await self._call(partial(self._owner_of, group, name))

    def _owner_of(self, group: str, name: str) -> str | None:
        check_group_name(group)
        return self._owners(group)[1].get(name) if name in self._names(group) else None

    def _owners(self, group: str) -> tuple[Versioned | None, dict[str, str]]:
        found = self._coord.get(_OWNERS + group)
        if found is None:
            return None, {}
        return found, msgspec.json.decode(found.value, type=dict[str, str])

    def _names(self, group: str) -> set[str]:
        """The names of its members, and of those whose partitions it keeps for them."""
        found = self._coord.get(head_key(group))
        kept = set() if found is None else set(decode(found, Head).static)
        prefix = members_prefix(group)
        return kept | {each.key.removeprefix(prefix) for each in self._coord.list(prefix)}

    def check_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Refuse checkpoints past the end: messages that are still to come would be skipped.

        Blocks; call it in a thread.
        """
        for error in self._past_end(offsets):
            raise error

    def _past_end(self, offsets: Mapping[TopicPartition, int]) -> Iterator[OffsetOutOfRange]:
        topics = self._px._blocking.topics
        for topic in {part.topic for part in offsets}:
            found = topics.find(topic)
            bounds = topics.bounds(found)
            for part, offset in offsets.items():
                if part.topic != topic or part.partition not in bounds:
                    continue
                held = bounds[part.partition]
                if offset > held.end:
                    held = topics._confirmed_bounds(found, part.partition)
                if not 0 <= offset <= held.end:
                    yield OffsetOutOfRange(*part, offset, *held)

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
        with suppress(GroupNotFound):  # no member may have joined yet
            await self._px.groups.delete(group)
        deleted = [Delete(_REGISTRY + group), Delete(_OWNERS + group)]
        await self._call(partial(self._coord.commit, [], deleted))

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
            await self._close_empty()

    async def _close_empty(self) -> None:
        """Closes the hosts without members."""
        for group, host in list(self._hosts.items()):
            # Asked anew for each: a client may have joined while the one before was closed. Nothing
            # is awaited between this question and the removal, so no join comes in between.
            if host.is_empty:
                del self._hosts[group]
                await self._call(host.close)

    async def close(self) -> None:
        """Let the members go to other nodes: they keep their partitions for a while."""
        self._sweeping.cancel()
        for host in list(self._hosts.values()):
            await self._call(host.close)
        self._hosts.clear()
