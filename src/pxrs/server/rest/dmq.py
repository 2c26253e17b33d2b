"""The groups API of DMQ as its document describes it: `/api/v1/metadata`, `/api/v1/consumer-group`.

A member's id carries its group, because the path of an assignment names none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from pxrs.errors import GroupNotFound, InvalidRequest
from pxrs.server.cluster import Cluster
from pxrs.server.groups.service import AppGroup, GroupService, Registered
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Answer, Call, Need, Route, in_path
from pxrs.server.rest.values import partition_of
from pxrs.server.tokens import Action
from pxrs.types import TopicPartition

_METADATA = "/api/v1/metadata/consumer-groups"
_GROUP = "/api/v1/consumer-group"
# How long a request for an assignment waits for a rebalance to be over.
_REBALANCE_WAIT = 8.0
_IN_GROUP = "~"

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class FindOrCreate(Struct, frozen=True):
    """Which application consumes which topic."""

    topic: Name
    appId: Name  # noqa: N815 - the field's name on the wire


class GroupAnswer(Struct, frozen=True, kw_only=True):
    """A group and the node that coordinates it."""

    groupId: str  # noqa: N815
    topic: str
    appId: str  # noqa: N815
    groupLeaderBrokerId: int  # noqa: N815
    groupLeaderUrl: str  # noqa: N815
    createdAt: int  # noqa: N815
    lastModifiedAt: int  # noqa: N815


class Join(Struct, frozen=True):
    groupId: Name  # noqa: N815
    consumerId: Name  # noqa: N815


class Joined(Struct, frozen=True):
    memberId: str  # noqa: N815
    rebalanceRequired: bool  # noqa: N815


class Assignment(Struct, frozen=True):
    """The partitions, the generation, and from which offset on each is to be read."""

    partitions: list[int]
    generation: int
    offsets: dict[str, int]


class AssignmentQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`wait`: seconds to wait for a rebalance to be over."""

    wait: Annotated[float, Meta(ge=0, le=60)] = _REBALANCE_WAIT


class Heartbeat(Struct, frozen=True):
    groupId: Name  # noqa: N815
    memberId: Name  # noqa: N815
    generation: int | None = None


class Beat(Struct, frozen=True):
    success: bool
    generation: int


class CommitOffsets(Struct, frozen=True):
    """Per partition, the next offset to be read."""

    groupId: Name  # noqa: N815
    memberId: Name  # noqa: N815
    offsets: dict[str, Offset]
    generation: int | None = None


class Leave(Struct, frozen=True):
    groupId: Name  # noqa: N815
    memberId: Name  # noqa: N815


class Success(Struct, frozen=True):
    success: bool


class DeleteQuery(Struct, frozen=True):
    brokerId: int | None = None  # noqa: N815


class Dmq:
    """The handlers, and the routes that lead to them."""

    def __init__(self, groups: GroupService, cluster: Cluster, session_timeout: float) -> None:
        self._groups = groups
        self._cluster = cluster
        self._session_timeout = session_timeout

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST", path=f"{_METADATA}/find-or-create", handler=self.find_or_create,
                needs=_finding,
                summary="Find or create the group of an application on a topic",
                body=FindOrCreate, answer=GroupAnswer,
            ),
            Route(
                method="GET", path=_METADATA, handler=self.list,
                summary="List the groups of applications", answer=list[GroupAnswer],
            ),
            Route(
                method="GET", path=f"{_METADATA}/{{group}}", handler=self.describe,
                needs=in_path("group", "read"),
                summary="Describe a group", answer=GroupAnswer,
            ),
            Route(
                method="DELETE", path=f"{_METADATA}/{{group}}", handler=self.delete,
                needs=in_path("group", "admin"),
                summary="Delete a group without members", query=DeleteQuery, status=204,
            ),
            Route(
                method="POST", path=f"{_GROUP}/join", handler=self.join,
                needs=_in_body("write"),
                summary="Join a group", body=Join, answer=Joined,
            ),
            Route(
                method="GET", path=f"{_GROUP}/assignment/{{member}}", handler=self.assignment,
                waits=True, needs=_of_member,
                summary="Fetch a member's partitions, once they are settled",
                query=AssignmentQuery, answer=Assignment,
            ),
            Route(
                method="POST", path=f"{_GROUP}/heartbeat", handler=self.heartbeat,
                needs=_in_body("write"),
                summary="Say that a member lives", body=Heartbeat, answer=Beat,
            ),
            Route(
                method="POST", path=f"{_GROUP}/commit-offsets", handler=self.commit,
                needs=_in_body("write"),
                summary="Commit offsets of owned partitions", body=CommitOffsets, answer=Success,
            ),
            Route(
                method="POST", path=f"{_GROUP}/leave", handler=self.leave,
                needs=_in_body("write"),
                summary="Leave a group", body=Leave, answer=Success,
            ),
        ]  # fmt: skip

    # Groups

    async def find_or_create(self, call: Call) -> GroupAnswer:
        return self._group(await self._groups.find_or_create(call.body.topic, call.body.appId))

    async def list(self, call: Call) -> list[GroupAnswer]:
        found = await self._groups.registered()
        return [self._group(it) for it in found if call.may("group", it.name, "read")]

    async def describe(self, call: Call) -> GroupAnswer:
        return self._group(await self._groups.find(call.path["group"]))

    async def delete(self, call: Call) -> None:
        await self._groups.delete(call.path["group"])

    def _group(self, found: Registered) -> GroupAnswer:
        leader = self._cluster.leader_of(found.name) or self._cluster.here
        return GroupAnswer(
            groupId=found.name,
            topic=found.app.topic,
            appId=found.app.app_id,
            groupLeaderBrokerId=leader.number,
            groupLeaderUrl=leader.address,
            createdAt=found.app.created_ms,
            lastModifiedAt=found.app.created_ms,
        )

    # Members

    async def join(self, call: Call) -> Joined:
        asked: Join = call.body
        found = await self._groups.find(asked.groupId)
        client = f"http:{asked.consumerId}"
        await self._groups.join(
            found.name, asked.consumerId, (found.app.topic,), client, self._session_timeout
        )
        standing = await self._groups.heard(found.name, asked.consumerId)
        return Joined(f"{asked.consumerId}{_IN_GROUP}{found.name}", not standing.settled)

    async def assignment(self, call: Call) -> Assignment:
        member = call.path["member"]
        name, group = _split(member)
        told = await self._groups.settled(group, name, call.query.wait)
        parts = sorted(told.owned)
        # The generation before while it is not complete: heartbeats tell no more than a generation,
        # and the next one must send the client here again.
        return Assignment(
            [part.partition for part in parts],
            told.generation if told.complete else max(0, told.generation - 1),
            {str(part.partition): told.owned[part].checkpoint or 0 for part in parts},
        )

    async def heartbeat(self, call: Call) -> Beat:
        asked: Heartbeat = call.body
        member = _member(asked.groupId, asked.memberId)
        return Beat(True, await self._groups.beat(*member, asked.generation))

    async def commit(self, call: Call) -> Answer | Success:
        asked: CommitOffsets = call.body
        group, name = _member(asked.groupId, asked.memberId)
        topic = (await self._groups.find(group)).app.topic
        offsets = {
            TopicPartition(topic, partition_of(text)): offset
            for text, offset in asked.offsets.items()
        }
        result = await self._groups.commit(group, name, offsets)
        if result.refused:
            lost = ", ".join(str(part.partition) for part in sorted(result.refused))
            raise HttpError(
                409, "not_owned", f"not committed, another member owns them now: {lost}"
            )
        # Not the generation that it has fetched: the document sends a client that names an old one
        # to fetch its assignment, and any node can answer from the group alone. It is the one of
        # heartbeats: an older one is old once there is something to fetch.
        if asked.generation is not None and asked.generation < result.generation:
            raise HttpError(
                409,
                "old_generation",
                f"generation {asked.generation} is older than {result.generation}, the group's; "
                "what the member owns was committed; fetch its assignment",
            )
        return Success(True)

    async def leave(self, call: Call) -> Success:
        await self._groups.leave(*_member(call.body.groupId, call.body.memberId))
        return Success(True)


def _split(member: str) -> tuple[str, str]:
    name, _, group = member.partition(_IN_GROUP)
    if not name or not group:
        raise GroupNotFound(member)
    return name, group


def _member(group: str, member: str) -> tuple[str, str]:
    """The group and the member's name, if the two go together."""
    name, of = _split(member)
    if of != group:
        raise InvalidRequest(f"member {member!r} is not of group {group!r}")
    return group, name


def _finding(call: Call) -> list[Need]:
    topic = call.body.topic
    name = AppGroup(topic=topic, app_id=call.body.appId, created_ms=0).name
    return [Need("topic", topic, "read"), Need("group", name, "write")]


def _in_body(action: Action) -> Callable[[Call], list[Need]]:
    return lambda call: [Need("group", call.body.groupId, action)]


def _of_member(call: Call) -> list[Need]:
    return [Need("group", _split(call.path["member"])[1], "write")]
