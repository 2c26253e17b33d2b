"""Serves the calls of DMQ's existing client and command line, beside the documented groups API.

Its JSON reader refuses unknown fields, so every answer has exactly the fields that it knows. It
keeps its partitions until an answer has PREPARING_REBALANCE, and commits what it fetched: both
shape `WireMember`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from pxrs.aio.app import Pxrs
from pxrs.clock import Clock
from pxrs.errors import (
    GroupNotFound,
    InvalidRequest,
    MessageTooLarge,
    OffsetOutOfRange,
    PartitionNotFound,
    PxrsError,
    TopicNotFound,
)
from pxrs.server.cluster import Cluster, NodeInfo, slot_of
from pxrs.server.groups.service import GroupService
from pxrs.server.messages import Messages
from pxrs.server.rest.guard import Guard
from pxrs.server.rest.problems import HttpError, told
from pxrs.server.rest.routes import Call, Need, Route, in_path
from pxrs.server.sends import Record
from pxrs.server.tokens import Action
from pxrs.types import Message, Topic, TopicPartition

_TOPICS = "/api/v1/metadata/topics"
_GROUP = "/api/v1/consumer-groups"
_STORAGE = "/api/v1/storage"
# The client sends a heartbeat every three seconds; only the answers to these count for it.
NOTICE = 3.3
_PREPARED_ANSWERS = 2
# How long a client waits for a rebalance to be over: as long as one takes whose members give
# nothing up by themselves (`GroupRules`). Its own patience with a join is ten seconds.
_LONGEST_REBALANCE = 6.0
# How long a heartbeat's answer waits for its commit. The client waits five seconds for the answer.
_COMMIT_WAIT = 2.0
_LOGIN_SECONDS = 86_400
_MOST_WARNED = 1000
_LOG = logging.getLogger("pxrs.serve")

Name = Annotated[str, Meta(min_length=1, max_length=249)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class CreateTopic(Struct, frozen=True, rename="camel"):
    topic_name: Name
    partition_count: Annotated[int, Meta(ge=1, le=100_000)]
    replication_factor: int = 1
    retention_ms: Annotated[int, Meta(le=2**62)] | None = None
    retention_bytes: int | None = None


class Broker(Struct, frozen=True, rename="camel"):
    broker_id: int
    host: str
    port: int
    status: str = "ONLINE"


class TopicConfig(Struct, frozen=True, rename="camel"):
    retention_ms: int | None
    retention_bytes: int | None
    segment_bytes: int | None = None
    compression_type: str | None = None
    min_insync_replicas: int | None = None


class PartitionMetadata(Struct, frozen=True, rename="camel"):
    topic_name: str
    partition_id: int
    leader: Broker
    replicas: list[Broker]
    isr: list[Broker]
    start_offset: int
    end_offset: int


class TopicMetadata(Struct, frozen=True, rename="camel"):
    topic_name: str
    partition_count: int
    replication_factor: int
    created_at: int
    config: TopicConfig
    partitions: list[PartitionMetadata]


class BrokerAnswer(Struct, frozen=True, rename="camel"):
    id: int
    host: str
    port: int
    status: str
    address: str


class Controller(Struct, frozen=True, rename="camel"):
    controller_id: int
    controller_url: str
    controller_term: int
    timestamp: int


class RaftStatus(Struct, frozen=True, rename="camel"):
    node_id: int
    current_term: int
    state: str
    leader: bool
    leader_id: int
    commit_index: int = 0
    last_applied: int = 0


class NewMessage(Struct, frozen=True):
    value: bytes | None = None
    key: str | None = None


class Produce(Struct, frozen=True):
    topic: Name
    partition: Number
    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=10_000)]


class ProduceResult(Struct, frozen=True, rename="camel"):
    offset: int
    timestamp: int
    error_code: str = "NONE"
    error_message: str | None = None


class Produced(Struct, frozen=True, rename="camel"):
    topic: str
    partition: int
    results: list[ProduceResult]
    throttle_time_ms: int
    error_message: str | None
    error_code: str
    success: bool


class Consume(Struct, frozen=True, rename="camel"):
    topic: Name
    partition: Number
    offset: Offset
    max_messages: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_wait_ms: Number | None = None


class Headers(Struct, frozen=True):
    headers: dict[str, str]


class ConsumedMessage(Struct, frozen=True):
    key: str | None
    value: bytes | None
    topic: str
    partition: int
    offset: int
    timestamp: int
    headers: Headers | None


class Consumed(Struct, frozen=True, rename="camel"):
    messages: list[ConsumedMessage]
    high_water_mark: int
    error_message: str | None
    success: bool


class Join(Struct, frozen=True, rename="camel"):
    consumer_id: Name
    group_id: Name


class Heartbeat(Struct, frozen=True, rename="camel"):
    consumer_id: Name
    group_id: Name
    offsets: dict[str, Offset] | None = None


class GroupReply(Struct, frozen=True, rename="camel"):
    """The one answer to join and heartbeat."""

    success: bool
    error_code: str | None
    error_message: str | None
    assigned_partitions: list[int]
    rebalance_state: str
    generation: int


class Login(Struct, frozen=True):
    username: str
    password: str


class LoggedIn(Struct, frozen=True, rename="camel"):
    token: str
    expires_in: int
    username: str


class WireMember:
    """The state of one existing client, as far as a node can know it.

    The client takes over a changed set of partitions only after PREPARING_REBALANCE in an answer
    that it looked at; it does not look at answers to its commits. So PREPARING_REBALANCE is sent
    for longer than the time between two of its heartbeats, and in two answers at least: if the
    first one went to a commit, a heartbeat that is late may bring the next request only after that
    time. The offsets that it reports were fetched, not handled: they count one heartbeat later.

    An answer may be lost. A client that goes on reading has not seen PREPARING_REBALANCE, which is
    sent until its offsets stand still; and to one that reads what it has lost it is sent again.

    A client that waits for a set takes it at once. One that subscribes gives up after ten seconds,
    which a dead member's session and a needless notice would use up.

    If members keep joining, the group is never settled. So a client is told STABLE with what it
    owns by then after `_LONGEST_REBALANCE`: it works meanwhile, and one that joins does not give
    up. Its next set is announced as any other.

    `has_set`: it was stable already when it came here, with a set that this node does not know.
    """

    def __init__(self, notice: float, owner: str = "", *, has_set: bool = False) -> None:
        self._notice = notice
        self._has_set = has_set
        # The token that it joined with.
        self.owner = owner
        self._shown: tuple[int, ...] | None = None
        self._preparing_since: float | None = None
        # How many answers have said so since then.
        self._prepared = 0
        # Whether it was told STABLE though the group was not settled, and still is not.
        self._is_late = False
        self._fetched: dict[int, int] = {}
        # What it has read between its last two heartbeats.
        self._read: frozenset[int] = frozenset()
        # The commit of a heartbeat that may not be over.
        self.committing: asyncio.Task[None] | None = None
        # Whether the last one failed.
        self.commit_failed = False

    def reply(
        self, owned: tuple[int, ...], settled: bool, generation: int, now: float
    ) -> GroupReply:
        """The answer to a heartbeat."""
        self._is_late = self._is_late and not settled
        if self._preparing_since is None:
            if self._read - {*(self._shown or ())}:
                # It has a set from before that one.
                self._has_set = True
            elif owned == self._shown and (settled or self._is_late):
                return _reply("STABLE", owned, generation)
            self._preparing_since, self._prepared = now, 0
        waited = now - self._preparing_since
        is_late = waited >= _LONGEST_REBALANCE and bool(owned)
        told = self._prepared >= _PREPARED_ANSWERS and waited >= self._notice and not self._read
        if (settled or is_late) and (told or (self._shown is None and not self._has_set)):
            # Without a set it waits for one, and takes the first that it is told of.
            self._shown, self._preparing_since = owned or None, None
            self._has_set, self._is_late = False, not settled
            return _reply("STABLE", owned, generation)
        self._prepared += 1
        return _reply("PREPARING_REBALANCE", self._shown or (), generation)

    def handled(self, fetched: dict[int, int]) -> dict[int, int]:
        """The offsets handled when this heartbeat was sent: those that the one before reported."""
        handled, self._fetched = self._fetched, fetched
        moved = fetched.items() - handled.items() if handled else ()
        self._read = frozenset(number for number, _ in moved)
        return handled


class DmqWire:
    """The handlers, and the routes that lead to them."""

    def __init__(
        self,
        px: Pxrs,
        messages: Messages,
        groups: GroupService,
        clock: Clock,
        cluster: Cluster,
        session_timeout: float,
        max_wait: float,
        notice: float,
        guard: Guard,
        scheme: str = "http",
    ) -> None:
        self._scheme = scheme
        self._notice = notice
        self._guard = guard
        self._max_wait = min(max_wait, 30.0)
        self._px = px
        self._messages = messages
        self._groups = groups
        self._clock = clock
        self._session_timeout = session_timeout
        self._cluster = cluster
        self._members: dict[tuple[str, str], WireMember] = {}
        # By client and partition, the end of the partition that was logged last.
        self._warned: dict[tuple[str, TopicPartition], int] = {}

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST", path=_TOPICS, handler=self.create_topic, status=201,
                needs=_new_topic,
                summary="Make a topic", body=CreateTopic, answer=TopicMetadata,
            ),
            Route(
                method="GET", path=_TOPICS, handler=self.list_topics,
                summary="List the names of topics", answer=list[str],
            ),
            Route(
                method="GET", path=f"{_TOPICS}/{{topic}}", handler=self.describe_topic,
                needs=in_path("topic", "read"),
                summary="Describe a topic and where its partitions are led", answer=TopicMetadata,
            ),
            Route(
                method="DELETE", path=f"{_TOPICS}/{{topic}}", handler=self.delete_topic, status=204,
                needs=in_path("topic", "admin"),
                summary="Delete a topic and all its messages",
            ),
            Route(
                method="GET", path="/api/v1/metadata/brokers", handler=self.brokers,
                summary="List the nodes", answer=list[BrokerAnswer], open=True,
            ),
            Route(
                method="GET", path="/api/v1/metadata/controller", handler=self.controller,
                summary="Find the node to ask for metadata", answer=Controller, open=True,
            ),
            Route(
                method="GET", path="/api/v1/raft/status", handler=self.raft_status,
                summary="Say which node leads", answer=RaftStatus, open=True,
            ),
            Route(
                method="POST", path="/api/v1/auth/login", handler=self.login,
                summary="Log in", body=Login, answer=LoggedIn, open=True,
            ),
            Route(
                method="POST", path="/api/v1/auth/refresh", handler=self.refresh,
                summary="Renew a login", answer=LoggedIn, open=True,
            ),
            Route(
                method="POST", path=f"{_STORAGE}/messages", handler=self.produce,
                needs=_topic_in_body("write"),
                summary="Send messages to one partition", body=Produce, answer=Produced,
            ),
            Route(
                method="POST", path=f"{_STORAGE}/consume", handler=self.consume,
                waits=True, needs=_topic_in_body("read"),
                summary="Fetch messages of one partition", body=Consume, answer=Consumed,
            ),
            Route(
                method="POST", path=f"{_GROUP}/join", handler=self.join,
                needs=_group_in_body,
                summary="Join a group", body=Join, answer=GroupReply,
            ),
            Route(
                method="POST", path=f"{_GROUP}/heartbeat", handler=self.heartbeat, late=True,
                needs=_group_in_body,
                summary="Say that a member lives, and what it has fetched",
                body=Heartbeat, answer=GroupReply,
            ),
        ]  # fmt: skip

    # Topics

    async def create_topic(self, call: Call) -> TopicMetadata:
        wanted: CreateTopic = call.body
        keep = wanted.retention_ms
        topic = await self._px.topics.create(
            wanted.topic_name,
            wanted.partition_count,
            retention=None if keep is None or keep < 0 else keep / 1000,
            retention_bytes=wanted.retention_bytes,
        )
        return await self._metadata(topic)

    async def list_topics(self, call: Call) -> list[str]:
        found = await self._px.topics.list()
        return [topic.name for topic in found if call.may("topic", topic.name, "read")]

    async def describe_topic(self, call: Call) -> TopicMetadata:
        return await self._metadata(await self._px.topics.find(call.path["topic"]))

    async def delete_topic(self, call: Call) -> None:
        await self._px.topics.delete(call.path["topic"])

    async def _metadata(self, topic: Topic) -> TopicMetadata:
        view = self._cluster.view
        nodes = [_broker(node) for node in view.nodes]

        def leader(number: int) -> Broker:
            return _broker(view.leader_of(slot_of(f"{topic.name}/{number}")) or self._cluster.here)

        return TopicMetadata(
            topic.name,
            topic.partitions,
            1,
            topic.created_ms,
            TopicConfig(topic.retention_ms, topic.retention_bytes),
            [
                PartitionMetadata(
                    topic.name, number, leader(number), nodes, nodes, held.start, held.end
                )
                for number, held in sorted((await self._px.topics.bounds(topic)).items())
            ],
        )

    # Nodes

    async def brokers(self, call: Call) -> list[BrokerAnswer]:
        return [
            BrokerAnswer(node.number, *node.endpoint, "ONLINE", node.address)
            for node in self._cluster.view.nodes
        ]

    async def controller(self, call: Call) -> Controller:
        here = self._cluster.here
        epoch = self._cluster.view.epoch
        url = f"{self._scheme}://{here.address}"
        return Controller(here.number, url, epoch, self._clock.wall_ms())

    async def raft_status(self, call: Call) -> RaftStatus:
        """Any node answers any request, so each may call itself the leader."""
        here = self._cluster.here.number
        return RaftStatus(here, self._cluster.view.epoch, "LEADER", True, here)

    async def login(self, call: Call) -> LoggedIn:
        """Checks a token's name and secret; the answer has the bearer token to send."""
        bearer = f"pxrs.{call.body.username}.{call.body.password}"
        return await self._logged_in(bearer, call.body.username)

    async def refresh(self, call: Call) -> LoggedIn:
        bearer = call.headers.get("Authorization", "").partition(" ")[2]
        name = "" if call.identity is None else call.identity.name
        return await self._logged_in(bearer, name)

    async def _logged_in(self, bearer: str, name: str) -> LoggedIn:
        if not self._guard.asks:
            # This node needs no tokens: any will do.
            return LoggedIn("none-needed", _LOGIN_SECONDS, name)
        identity = await self._guard.look_up(bearer)
        if identity is None or identity.expired:
            raise HttpError(401, "unauthorized", "the token does not exist, or has another secret")
        seconds = _LOGIN_SECONDS
        if identity.expires_ms is not None:
            left = (identity.expires_ms - self._clock.wall_ms()) // 1000
            seconds = max(0, min(seconds, left))
        return LoggedIn(bearer, seconds, identity.name)

    # Messages

    async def produce(self, call: Call) -> Produced:
        asked: Produce = call.body
        records = [
            Record(each.value, None if each.key is None else each.key.encode(), (), asked.partition)
            for each in asked.messages
        ]
        try:
            places = await self._messages.produce(asked.topic, records)
        except PxrsError as error:
            code = _produce_code(error)
            failed = ProduceResult(-1, 0, code, told(error))
            return Produced(asked.topic, asked.partition, [failed], 0, told(error), code, False)
        now = self._clock.wall_ms()
        results = [ProduceResult(place.offset, now) for place in places]
        return Produced(asked.topic, asked.partition, results, 0, None, "NONE", True)

    async def consume(self, call: Call) -> Consumed:
        asked: Consume = call.body
        most = min(asked.max_messages or 500, 10_000)
        wait = min((asked.max_wait_ms or 0) / 1000, self._max_wait)
        offset = asked.offset
        try:
            try:
                page = await self._messages.fetch(asked.topic, asked.partition, offset, most, wait)
            except OffsetOutOfRange as error:
                if offset >= error.end:
                    self._warn_of_loss("a client", error)
                    return Consumed([], error.end, None, True)
                # Retention has removed this offset: the client goes on with the first one left.
                page = await self._messages.fetch(
                    asked.topic, asked.partition, error.start, most, wait
                )
        except PxrsError as error:
            return Consumed([], 0, told(error), False)
        return Consumed([_consumed(each) for each in page.messages], page.end, None, True)

    def _warn_of_loss(self, client: str, error: OffsetOutOfRange) -> None:
        """Log that a client is past the end: the engine has lost messages that it had read.

        Or the topic was made again. The client has no word for that: past the end it takes nothing
        but an empty answer, and goes on there when the partition has grown so far.
        """
        where = TopicPartition(error.topic, error.partition)
        if self._warned.get((client, where)) == error.end:
            return
        if len(self._warned) >= _MOST_WARNED:
            self._warned.clear()
        self._warned[client, where] = error.end
        _LOG.warning(
            "%s reads topic %r, partition %d, from offset %d, but it ends at %d: the client "
            "was told a wrong offset, messages were lost, or the topic was made again; it will "
            "pass over what comes up to there, so start it anew",
            client, *where, error.offset, error.end,
        )  # fmt: skip

    # Groups

    async def join(self, call: Call) -> GroupReply:
        asked: Join = call.body
        try:
            await self._take_in(asked.group_id, asked.consumer_id)
            member = await self._remember(call, asked.group_id, asked.consumer_id)
            return self._answer(member, asked)
        except PxrsError as error:
            return _failed(error)

    async def heartbeat(self, call: Call) -> GroupReply:
        asked: Heartbeat = call.body
        key = asked.group_id, asked.consumer_id
        known = self._members.get(key)
        who = call.identity
        try:
            if who is not None and who.expired and who.name != await self._owner(key):
                # It can't log in again by itself, so it may stay a member where it is one, and no
                # more.
                raise HttpError(401, "token_expired", "this token has expired")
            if known is None or not self._groups.holds(*key):
                # Its node died, it was silent for too long, or it was with another node meanwhile:
                # it never joins again by itself. What is known of it here may be out of date, and
                # so it is told PREPARING_REBALANCE first, whatever set it has.
                await self._take_in(*key)
                known = await self._remember(call, *key, has_set=True)
            handled = known.handled(_by_partition(asked.offsets or {}))
            if who is None or not who.expired:
                await self._commit(known, key, handled)
            # Nothing comes after it: what it says counts as told.
            return self._answer(known, asked)
        except PxrsError as error:
            if isinstance(error, GroupNotFound):
                self._members.pop(key, None)
            return _failed(error)

    async def _owner(self, key: tuple[str, str]) -> str | None:
        """The token that the member has joined with, here or through another node."""
        known = self._members.get(key)
        if known is not None and self._groups.holds(*key):
            return known.owner
        return await self._groups.owner_of(*key)

    async def _remember(
        self, call: Call, group: str, name: str, *, has_set: bool = False
    ) -> WireMember:
        token = "" if call.identity is None else call.identity.name
        if token:
            await self._groups.note_owner(group, name, token)
        self._groups.forget_others(self._members)
        member = WireMember(self._notice, token, has_set=has_set)
        self._members[group, name] = member
        return member

    async def _take_in(self, group: str, name: str) -> None:
        topic = (await self._groups.find(group)).app.topic
        client = f"dmq:{name}"
        await self._groups.join(group, name, (topic,), client, self._session_timeout, self._notice)

    def _answer(self, member: WireMember, asked: Join | Heartbeat) -> GroupReply:
        told = self._groups.ask_held(asked.group_id, asked.consumer_id)
        owned = tuple(sorted(part.partition for part in told.owned))
        return member.reply(owned, told.settled, told.generation, self._clock.monotonic())

    async def _commit(
        self, member: WireMember, key: tuple[str, str], handled: dict[int, int]
    ) -> None:
        """Commit what was handled in partitions that it owns; it reports those of others, too.

        It fails in the log only, and waits for a while only: the client looks at no state in an
        answer that is no success, or that is late. What was not committed the next heartbeat has.
        """
        former = member.committing
        if handled and (former is None or former.done()):
            member.committing = asyncio.create_task(self._commit_handled(member, key, handled))
            await asyncio.wait({member.committing}, timeout=_COMMIT_WAIT)

    async def _commit_handled(
        self, member: WireMember, key: tuple[str, str], handled: dict[int, int]
    ) -> None:
        group, name = key
        try:
            topic = (await self._groups.find(group)).app.topic
            marks = {TopicPartition(topic, number): at for number, at in handled.items()}
            for error in await self._groups.commit_owned(group, name, marks):
                self._warn_of_loss(f"member {name!r} of group {group!r}", error)
        except GroupNotFound:
            return  # the member is gone, and its answer says so
        except PxrsError as error:
            if not member.commit_failed:
                _LOG.warning(
                    "group %r: what member %r has handled was not committed: %s; its next "
                    "heartbeats try again",
                    group, name, error,
                )  # fmt: skip
            member.commit_failed = True
        except Exception:  # noqa: BLE001 - the answer does not depend on it
            _LOG.exception("group %r: the commit of member %r failed", group, name)
        else:
            member.commit_failed = False


def _broker(node: NodeInfo) -> Broker:
    return Broker(node.number, *node.endpoint)


def _by_partition(offsets: dict[str, int]) -> dict[int, int]:
    return {int(text): at for text, at in offsets.items() if text.isdecimal() and len(text) <= 9}


def _reply(state: str, partitions: tuple[int, ...], generation: int) -> GroupReply:
    return GroupReply(True, None, None, list(partitions), state, generation)


def _failed(error: PxrsError) -> GroupReply:
    code = "INTERNAL_ERROR"
    if isinstance(error, GroupNotFound):
        code = "REBALANCE_IN_PROGRESS"
    elif isinstance(error, InvalidRequest):
        code = "INVALID_REQUEST"
    return GroupReply(False, code, told(error), [], "PREPARING_REBALANCE", 0)


def _produce_code(error: PxrsError) -> str:
    if isinstance(error, TopicNotFound | PartitionNotFound):
        return "UNKNOWN_TOPIC_OR_PARTITION"
    if isinstance(error, MessageTooLarge):
        return "MESSAGE_TOO_LARGE"
    return "INVALID_REQUEST" if isinstance(error, InvalidRequest) else "TIMEOUT"


def _consumed(message: Message) -> ConsumedMessage:
    key = None if message.key is None else message.key.decode(errors="replace")
    headers = None
    if message.headers:
        text = {name: (it or b"").decode(errors="replace") for name, it in message.headers}
        headers = Headers(text)
    return ConsumedMessage(
        key,
        message.value,
        message.topic,
        message.partition,
        message.offset,
        message.timestamp,
        headers,
    )


def _new_topic(call: Call) -> list[Need]:
    return [Need("topic", call.body.topic_name, "admin")]


def _topic_in_body(action: Action) -> Callable[[Call], list[Need]]:
    return lambda call: [Need("topic", call.body.topic, action)]


def _group_in_body(call: Call) -> list[Need]:
    return [Need("group", call.body.group_id, "write")]
