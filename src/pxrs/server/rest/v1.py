"""The HTTP API of pxrs itself, under `/v1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct, convert

from pxrs.aio.app import Pxrs
from pxrs.errors import InvalidRequest
from pxrs.server.cluster import Cluster, ClusterView
from pxrs.server.messages import Messages, Page, ProducerState
from pxrs.server.rest.routes import RAW_BATCH, Answer, Call, Need, Route, in_path
from pxrs.server.rest.values import bytes_of, from_base64, partition_of, text_of, to_base64
from pxrs.server.sends import Pair, Placed, Record
from pxrs.types import Header, Message, Topic

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=10_000)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


class NewTopic(Struct, frozen=True, forbid_unknown_fields=True):
    """A topic to be made. `retention` in seconds; absent: for ever."""

    name: str
    partitions: Annotated[int, Meta(ge=1, le=100_000)]
    partitioner: str = "xxhash"
    retention: float | None = None
    retention_bytes: int | None = None


class TopicAnswer(Struct, frozen=True, kw_only=True):
    """A topic as it is recorded."""

    name: str
    id: str
    partitions: int
    partitioner: str
    retention: float | None
    retention_bytes: int | None
    created_ms: int


class TopicList(Struct, frozen=True):
    topics: list[TopicAnswer]


class PartitionAnswer(Struct, frozen=True):
    """The messages of a partition: offsets from `start` up to, not including, `end`."""

    partition: int
    start: int
    end: int
    size: int


class TopicDescription(Struct, frozen=True):
    topic: TopicAnswer
    partitions: list[PartitionAnswer]


class NewMessage(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A message to be sent: text, or bytes in base64. Without a partition its key decides."""

    value: str | None = None
    key: str | None = None
    value_base64: str | None = None
    key_base64: str | None = None
    # Tuples: of a list every message would get one of its own.
    headers: tuple[tuple[str, str | None], ...] = ()
    headers_base64: tuple[tuple[str, str | None], ...] = ()
    partition: int | None = None
    timestamp: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class Produce(Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=10_000)]


class TextMessage(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A `NewMessage` that has no more than text."""

    value: str | None = None
    key: str | None = None


class ProduceText(Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[TextMessage], Meta(min_length=1, max_length=10_000)]


class Producer(Struct, frozen=True, forbid_unknown_fields=True):
    """Who sends, and the number of the first message: what comes again is appended once."""

    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    epoch: Annotated[int, Meta(ge=0, le=2**15 - 1)]
    sequence: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ProduceOnce(Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=10_000)]
    producer: Producer | None = None


class Produced(Struct, frozen=True):
    """The partition and offset of each message, in the order of the request."""

    positions: list[Placed]


class Appended(Struct, frozen=True):
    """The first message's offset; `duplicate`: the log had the batch already."""

    partition: int
    offset: int
    duplicate: bool


class FetchQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`wait`: seconds to wait for a message if there is none."""

    offset: Offset
    max: Count = 500
    wait: Seconds = 0.0


class RawFetchQuery(Struct, frozen=True, forbid_unknown_fields=True):
    offset: Offset
    max_bytes: Annotated[int, Meta(ge=1, le=64 * 2**20)] = 2**20
    wait: Seconds = 0.0


class MessageAnswer(Struct, frozen=True, gc=False, omit_defaults=True):
    """A message: text where it is UTF-8, else bytes in base64."""

    offset: int
    timestamp: int
    key: str | None = None
    value: str | None = None
    key_base64: str | None = None
    value_base64: str | None = None
    headers: list[tuple[str, str | None]] = []
    headers_base64: list[tuple[str, str | None]] = []


class Fetched(Struct, frozen=True):
    """Messages, the offset to fetch from next, and what the partition holds."""

    messages: list[MessageAnswer]
    next: int
    start: int
    end: int


class TimeQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds since 1970."""

    time: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class OffsetAnswer(Struct, frozen=True):
    partition: int
    offset: int | None


class Offsets(Struct, frozen=True):
    """Per partition, the first message of that time or later; null if there is none yet."""

    offsets: list[OffsetAnswer]


class V1:
    """The handlers, and the routes that lead to them."""

    def __init__(self, px: Pxrs, messages: Messages, cluster: Cluster, max_wait: float) -> None:
        self._px = px
        self._cluster = cluster
        self._messages = messages
        self._max_wait = max_wait

    def routes(self) -> list[Route]:
        topic, partition = "/v1/topics/{topic}", "/v1/topics/{topic}/partitions/{partition}"
        return [
            Route(
                method="POST", path="/v1/topics", handler=self.create_topic, status=201,
                needs=_new_topic,
                summary="Make a topic", body=NewTopic, answer=TopicAnswer,
            ),
            Route(
                method="GET", path="/v1/topics", handler=self.list_topics,
                summary="List topics", answer=TopicList,
            ),
            Route(
                method="GET", path=topic, handler=self.describe_topic,
                needs=in_path("topic", "read"),
                summary="Describe a topic and what its partitions hold", answer=TopicDescription,
            ),
            Route(
                method="DELETE", path=topic, handler=self.delete_topic, status=204,
                needs=in_path("topic", "admin"),
                summary="Delete a topic and all its messages",
            ),
            Route(
                method="POST", path=f"{topic}/messages", handler=self.produce,
                needs=in_path("topic", "write"),
                summary="Send messages", body=Produce, usual=ProduceText, answer=Produced,
            ),
            Route(
                method="GET", path=f"{topic}/offsets", handler=self.offsets,
                needs=in_path("topic", "read"),
                summary="Find offsets by time", query=TimeQuery, answer=Offsets,
            ),
            Route(
                method="POST", path=f"{partition}/messages", handler=self.produce_to,
                needs=in_path("topic", "write"),
                summary="Send messages to one partition, once if they carry a producer",
                body=ProduceOnce, answer=Appended,
            ),
            Route(
                method="GET", path=f"{partition}/messages", handler=self.fetch,
                waits=True, needs=in_path("topic", "read"),
                summary="Fetch messages, waiting for the first one", query=FetchQuery,
                answer=Fetched,
            ),
            Route(
                method="POST", path=f"{partition}/batches", handler=self.append,
                needs=in_path("topic", "write"),
                summary="Append one record batch (Kafka's RecordBatch v2)",
                body=bytes, answer=Appended,
            ),
            Route(
                method="GET", path=f"{partition}/batches", handler=self.fetch_raw,
                waits=True, needs=in_path("topic", "read"),
                summary="Fetch record batches as they are stored", query=RawFetchQuery,
                answer=bytes, content_type=RAW_BATCH,
            ),
            Route(
                method="GET", path="/v1/cluster", handler=self.cluster,
                summary="Which nodes there are, and which one leads each slot", answer=ClusterView,
            ),
        ]  # fmt: skip

    async def cluster(self, call: Call) -> ClusterView:
        return self._cluster.view

    # Topics

    async def create_topic(self, call: Call) -> TopicAnswer:
        wanted: NewTopic = call.body
        made = await self._px.topics.create(
            wanted.name,
            wanted.partitions,
            partitioner=wanted.partitioner,
            retention=wanted.retention,
            retention_bytes=wanted.retention_bytes,
        )
        return _topic(made)

    async def list_topics(self, call: Call) -> TopicList:
        found = await self._px.topics.list()
        return TopicList([_topic(it) for it in found if call.may("topic", it.name, "read")])

    async def describe_topic(self, call: Call) -> TopicDescription:
        found = await self._px.topics.describe(call.path["topic"])
        return TopicDescription(
            _topic(found.topic),
            [
                PartitionAnswer(each.partition, each.start, each.end, each.size)
                for each in found.partitions
            ],
        )

    async def delete_topic(self, call: Call) -> None:
        await self._px.topics.delete(call.path["topic"])

    # Messages

    async def produce(self, call: Call) -> Produced:
        topic, asked = call.path["topic"], call.body
        if isinstance(asked, ProduceText):
            return Produced(await self._messages.produce_pairs(topic, pairs_of(asked)))
        records = [record_of(each) for each in asked.messages]
        return Produced(await self._messages.produce(topic, records))

    async def produce_to(self, call: Call) -> Appended:
        topic, partition = call.path["topic"], partition_of(call.path["partition"])
        asked: ProduceOnce = call.body
        if any(each.partition not in (None, partition) for each in asked.messages):
            raise InvalidRequest(f"all messages must be for partition {partition}")
        records = [record_of(each) for each in asked.messages]
        state = ProducerState(-1, -1, -1)
        if (who := asked.producer) is not None:
            state = ProducerState(who.id, who.epoch, who.sequence)
        done = await self._messages.produce_once(topic, partition, records, state)
        return Appended(partition, done.base, done.duplicate)

    async def append(self, call: Call) -> Appended:
        partition = partition_of(call.path["partition"])
        done = await self._messages.append(call.path["topic"], partition, call.body)
        return Appended(partition, done.base, done.duplicate)

    async def fetch(self, call: Call) -> Fetched:
        asked: FetchQuery = call.query
        page = await self._messages.fetch(
            call.path["topic"],
            partition_of(call.path["partition"]),
            asked.offset,
            asked.max,
            min(asked.wait, self._max_wait),
        )
        return _fetched(page)

    async def fetch_raw(self, call: Call) -> Answer:
        asked: RawFetchQuery = call.query
        page = await self._messages.fetch_raw(
            call.path["topic"],
            partition_of(call.path["partition"]),
            asked.offset,
            asked.max_bytes,
            min(asked.wait, self._max_wait),
        )
        about = {"Next": page.next, "Start": page.start, "End": page.end}
        headers = {f"X-Pxrs-{name}": str(value) for name, value in about.items()}
        return Answer(page.data, 200, RAW_BATCH, headers)

    async def offsets(self, call: Call) -> Offsets:
        found = await self._messages.offsets_at(call.path["topic"], call.query.time)
        return Offsets([OffsetAnswer(number, offset) for number, offset in found.items()])


def _topic(topic: Topic) -> TopicAnswer:
    return convert(topic, TopicAnswer, from_attributes=True)


def pairs_of(asked: ProduceText) -> list[Pair]:
    """The keys and values as the store takes them."""
    return [
        (
            None if (key := it.key) is None else key.encode(),
            None if (value := it.value) is None else value.encode(),
        )
        for it in asked.messages
    ]


def record_of(message: NewMessage) -> Record:
    """The message as the store takes it."""
    return Record(
        bytes_of("value", message.value, message.value_base64),
        bytes_of("key", message.key, message.key_base64),
        _headers_in(message),
        message.partition,
        message.timestamp,
    )


def _headers_in(message: NewMessage) -> Sequence[Header]:
    if not message.headers and not message.headers_base64:
        return ()
    text = [(name, None if it is None else it.encode()) for name, it in message.headers]
    coded = [
        (name, None if it is None else from_base64("headers_base64", it))
        for name, it in message.headers_base64
    ]
    return [*text, *coded]


def _fetched(page: Page) -> Fetched:
    return Fetched([_message(each) for each in page.messages], page.next, page.start, page.end)


def _message(message: Message) -> MessageAnswer:
    raw_key, raw_value = message.key, message.value
    if not message.headers:
        try:
            return MessageAnswer(
                message.offset,
                message.timestamp,
                None if raw_key is None else raw_key.decode(),
                None if raw_value is None else raw_value.decode(),
            )
        except UnicodeDecodeError:
            pass
    key, key_base64 = text_of(raw_key)
    value, value_base64 = text_of(raw_value)
    try:
        headers = [(name, None if it is None else it.decode()) for name, it in message.headers]
        coded: list[tuple[str, str | None]] = []
    except UnicodeDecodeError:
        headers = []
        coded = [(name, None if it is None else to_base64(it)) for name, it in message.headers]
    return MessageAnswer(
        message.offset, message.timestamp, key, value, key_base64, value_base64, headers, coded
    )


def _new_topic(call: Call) -> list[Need]:
    return [Need("topic", call.body.name, "admin")]
