"""Groups under `/v1`: members that a node holds, commits fenced by partition, descriptions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from pxrs import metrics as names
from pxrs.aio.app import Pxrs
from pxrs.server.groups import fences
from pxrs.server.groups.fences import Fence
from pxrs.server.groups.host import Told
from pxrs.server.groups.service import GroupService
from pxrs.server.metrics import Metrics
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Call, Need, Route, in_path

_GROUP = "/v1/groups/{group}"
_MEMBER = "/v1/groups/{group}/members/{member}"

Name = Annotated[str, Meta(min_length=1, max_length=249)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class JoinGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to join. The client chooses `member`, and joins again under it, on any node."""

    member: Name
    topics: Annotated[list[Name], Meta(min_length=1, max_length=100)]
    session_timeout: Annotated[float, Meta(ge=1, le=300)] = 10.0


class OwnedPartition(Struct, frozen=True):
    """A partition to work on: the checkpoint to continue from, and the fence to commit with."""

    topic: str
    partition: int
    checkpoint: int | None
    epoch: int
    fence: str


class MemberAssignment(Struct, frozen=True):
    """The partitions that a member owns. Until it is `settled`, more may come, or some go."""

    generation: int
    settled: bool
    partitions: list[OwnedPartition]


class AssignmentWait(Struct, frozen=True, forbid_unknown_fields=True):
    """`wait`: seconds to wait until the assignment is settled, or a partition is to be given up.

    The answer comes after half of the session timeout at the latest.
    """

    wait: Annotated[float, Meta(ge=0, le=60)] = 0.0


class FencedOffset(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything before `offset` is handled, in the partition of the fence."""

    fence: Annotated[str, Meta(max_length=2000)]
    offset: Offset


class Commit(Struct, frozen=True, forbid_unknown_fields=True):
    commits: Annotated[list[FencedOffset], Meta(min_length=1, max_length=10_000)]


class CommitAnswer(Struct, frozen=True):
    """The checkpoint as it stands; `fenced`: another member owns the partition now."""

    topic: str
    partition: int
    checkpoint: int | None
    fenced: bool


class Commits(Struct, frozen=True):
    commits: list[CommitAnswer]


class GroupLine(Struct, frozen=True):
    name: str
    state: str
    generation: int
    members: int


class GroupLines(Struct, frozen=True):
    groups: list[GroupLine]


class V1Groups:
    """The handlers, and the routes that lead to them."""

    def __init__(self, px: Pxrs, groups: GroupService, metrics: Metrics) -> None:
        self._px = px
        self._metrics = metrics
        self._groups = groups
        self._coord = px._blocking.stores.coord
        self._clock = px._blocking._clock
        self._call = px._threads.call

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET", path="/v1/groups", handler=self.list,
                summary="List groups", answer=GroupLines,
            ),
            Route(
                method="GET", path=_GROUP, handler=self.describe,
                needs=in_path("group", "read"),
                summary="Describe a group: members, partitions, checkpoints, lag", answer=Any,
            ),
            Route(
                method="GET", path=f"{_GROUP}/history", handler=self.explain,
                needs=in_path("group", "read"),
                summary="Explain a group's last rebalances and resets", answer=Any,
            ),
            Route(
                method="DELETE", path=_GROUP, handler=self.delete, status=204,
                needs=in_path("group", "admin"),
                summary="Delete a group without members",
            ),
            Route(
                method="POST", path=f"{_GROUP}/members", handler=self.join, status=201,
                needs=_joining,
                summary="Join a group", body=JoinGroup, answer=MemberAssignment,
            ),
            Route(
                method="GET", path=_MEMBER, handler=self.assignment,
                waits=True, needs=in_path("group", "write"),
                summary="Say that a member lives, and fetch what it owns",
                query=AssignmentWait, answer=MemberAssignment,
            ),
            Route(
                method="DELETE", path=_MEMBER, handler=self.leave, status=204,
                needs=in_path("group", "write"),
                summary="Leave a group",
            ),
            Route(
                method="POST", path=f"{_GROUP}/commits", handler=self.commit,
                needs=in_path("group", "write"),
                summary="Commit offsets, each fenced by itself", body=Commit, answer=Commits,
            ),
        ]  # fmt: skip

    # Looking

    async def list(self, call: Call) -> GroupLines:
        found = await self._px.groups.list()
        return GroupLines(
            [
                GroupLine(each.name, each.state, each.generation, each.members)
                for each in found
                if call.may("group", each.name, "read")
            ]
        )

    async def describe(self, call: Call) -> Any:
        return await self._px.groups.describe(call.path["group"])

    async def explain(self, call: Call) -> Any:
        return await self._px.groups.explain(call.path["group"])

    async def delete(self, call: Call) -> None:
        await self._px.groups.delete(call.path["group"])

    # Members

    async def join(self, call: Call) -> MemberAssignment:
        group, wanted = call.path["group"], call.body
        topics = tuple(sorted(set(wanted.topics)))
        client = f"http:{wanted.member}"
        await self._groups.join(group, wanted.member, topics, client, wanted.session_timeout)
        return self._answer(group, await self._groups.ask(group, wanted.member))

    async def assignment(self, call: Call) -> MemberAssignment:
        group, member = call.path["group"], call.path["member"]
        told = await self._groups.settled(group, member, call.query.wait)
        return self._answer(group, told)

    async def leave(self, call: Call) -> None:
        await self._groups.leave(call.path["group"], call.path["member"])

    def _answer(self, group: str, told: Told) -> MemberAssignment:
        return MemberAssignment(
            told.generation,
            told.settled,
            [
                OwnedPartition(
                    *part, it.checkpoint, it.epoch,
                    Fence(group, part.topic, it.topic_id, part.partition, told.owner, it.epoch)
                    .encode(),
                )
                for part, it in sorted(told.owned.items())
            ],
        )  # fmt: skip

    # Committing

    async def commit(self, call: Call) -> Commits:
        group = call.path["group"]
        offsets = {Fence.decode(each.fence): each.offset for each in call.body.commits}
        if any(fence.group != group for fence in offsets):
            raise HttpError(400, "foreign_fence", f"every fence must be of group {group!r}")
        check = self._groups.check_offsets
        with self._metrics.timed(names.COMMIT_SECONDS):
            done = await self._call(
                partial(fences.commit, self._coord, self._clock, offsets, check)
            )
        self._groups.committed(group, done)
        refused = sum(checkpoint is None for checkpoint in done.values())
        self._metrics.count(names.FENCED, by=refused)
        return Commits(
            [
                CommitAnswer(fence.topic, fence.partition, checkpoint, checkpoint is None)
                for fence, checkpoint in done.items()
            ]
        )


def _joining(call: Call) -> list[Need]:
    topics = [Need("topic", topic, "read") for topic in call.body.topics]
    return [Need("group", call.path["group"], "write"), *topics]
