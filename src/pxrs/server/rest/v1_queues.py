"""Work queues under `/v1`: put, take with a lease, commit, release, dead letters."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

from pxrs.aio.app import Pxrs
from pxrs.aio.transactions import UnitOfWork
from pxrs.core.queue import validate_name
from pxrs.core.retry import Backoff
from pxrs.errors import InvalidRequest
from pxrs.queues.admin import ItemInfo, QueueInfo
from pxrs.queues.item import Item
from pxrs.queues.item import PutItem as QueuedItem
from pxrs.server.leases import Leases
from pxrs.server.rest.routes import Call, Need, Route, in_path
from pxrs.server.rest.v1 import NewMessage, record_of
from pxrs.server.rest.values import bytes_of, text_of
from pxrs.types import Header

_QUEUE = "/v1/queues/{queue}"
_LEASE = "/v1/leases/{lease}"

Name = Annotated[str, Meta(min_length=1, max_length=249)]
Seconds = Annotated[float, Meta(ge=0, le=30 * 24 * 3600)]
LeaseSeconds = Annotated[float, Meta(ge=0.1, le=24 * 3600)]


class NewQueue(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    fifo: bool = False


class QueueList(Struct, frozen=True):
    queues: list[QueueInfo]


class PutItem(Struct, frozen=True, forbid_unknown_fields=True):
    """An item to be put: text, or bytes in base64."""

    value: str | None = None
    value_base64: str | None = None
    key: Annotated[str, Meta(max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    delay: Seconds = 0.0
    headers: list[tuple[str, str | None]] = []
    dedupe: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    dedupe_window: Seconds = 300.0


class PutItems(Struct, frozen=True, forbid_unknown_fields=True):
    items: Annotated[list[PutItem], Meta(min_length=1, max_length=1000)]


class ItemIds(Struct, frozen=True):
    """The ids of the items in the order of the request; null for a duplicate."""

    ids: list[int | None]


class Take(Struct, frozen=True, forbid_unknown_fields=True):
    """`lease`: seconds that the items are held. `attempts`: deliveries until an item is dead."""

    max: Annotated[int, Meta(ge=1, le=1000)] = 1
    lease: LeaseSeconds = 30.0
    wait: Annotated[float, Meta(ge=0, le=60)] = 0.0
    attempts: Annotated[int, Meta(ge=1)] | None = 5
    first_delay: Seconds = 0.5
    longest_delay: Seconds = 60.0


class TakenItem(Struct, frozen=True, omit_defaults=True):
    """An item in hand: text where it is UTF-8, else bytes in base64."""

    id: int
    deliveries: int
    priority: int
    put_ms: int
    key: str | None = None
    value: str | None = None
    value_base64: str | None = None
    headers: list[tuple[str, str | None]] = []
    error: str = ""


class Taken(Struct, frozen=True):
    """The items taken under a lease; without items there is no lease."""

    lease: str | None
    items: list[TakenItem]


class Extend(Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseSeconds


class QueuedPut(PutItem, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue: Name


class TopicSend(NewMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    topic: Name


class CommitLease(Struct, frozen=True, forbid_unknown_fields=True):
    """Items to put and messages to send in the commit that removes the items."""

    put: Annotated[list[QueuedPut], Meta(max_length=1000)] = []
    send: Annotated[list[TopicSend], Meta(max_length=1000)] = []


class Release(Struct, frozen=True, forbid_unknown_fields=True):
    """`error`: what went wrong; it is shown with the item."""

    error: Annotated[str, Meta(max_length=10_000)] = ""


class PeekQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    state: str | None = None
    after: Annotated[int, Meta(ge=0)] | None = None


class DeadQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Which(Struct, frozen=True, forbid_unknown_fields=True):
    """Which dead items: all that fit everything that is given."""

    ids: Annotated[list[int], Meta(max_length=10_000)] | None = None
    key: str | None = None
    error: str | None = None
    dead_for: Seconds | None = None


class ShownItem(Struct, frozen=True, omit_defaults=True):
    id: int
    state: str
    deliveries: int
    priority: int
    put_ms: int
    key: str | None = None
    value: str | None = None
    value_base64: str | None = None
    dead_ms: int | None = None
    error: str = ""


class ShownItems(Struct, frozen=True):
    items: list[ShownItem]


class Count(Struct, frozen=True):
    count: int


class V1Queues:
    """The handlers, and the routes that lead to them."""

    def __init__(self, px: Pxrs, leases: Leases, max_wait: float) -> None:
        self._px = px
        self._leases = leases
        self._max_wait = max_wait

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST", path="/v1/queues", handler=self.create, status=201,
                needs=_new_queue,
                summary="Make a queue", body=NewQueue, answer=QueueInfo,
            ),
            Route(
                method="GET", path="/v1/queues", handler=self.list,
                summary="List queues", answer=QueueList,
            ),
            Route(
                method="GET", path=_QUEUE, handler=self.describe,
                needs=in_path("queue", "read"),
                summary="Describe a queue", answer=QueueInfo,
            ),
            Route(
                method="DELETE", path=_QUEUE, handler=self.delete, status=204,
                needs=in_path("queue", "admin"),
                summary="Delete a queue and all its items",
            ),
            Route(
                method="POST", path=f"{_QUEUE}/items", handler=self.put,
                needs=in_path("queue", "write"),
                summary="Put items, all or none", body=PutItems, answer=ItemIds,
            ),
            Route(
                method="GET", path=f"{_QUEUE}/items", handler=self.peek,
                needs=in_path("queue", "read"),
                summary="Look at items without taking them", query=PeekQuery, answer=ShownItems,
            ),
            Route(
                method="POST", path=f"{_QUEUE}/take", handler=self.take,
                waits=True, needs=in_path("queue", "read"),
                summary="Take items under a lease, waiting for the first", body=Take, answer=Taken,
            ),
            Route(
                method="GET", path=f"{_QUEUE}/dead", handler=self.dead,
                needs=in_path("queue", "read"),
                summary="Look at dead items", query=DeadQuery, answer=ShownItems,
            ),
            Route(
                method="POST", path=f"{_QUEUE}/redrive", handler=self.redrive,
                needs=in_path("queue", "admin"),
                summary="Put dead items back", body=Which, answer=Count,
            ),
            Route(
                method="POST", path=f"{_QUEUE}/drop", handler=self.drop,
                needs=in_path("queue", "admin"),
                summary="Remove dead items for good", body=Which, answer=Count,
            ),
            Route(
                method="POST", path=f"{_LEASE}/extend", handler=self.extend, status=204,
                summary="Hold the items longer", body=Extend,
            ),
            Route(
                method="POST", path=f"{_LEASE}/commit", handler=self.commit,
                needs=_committing,
                summary="Remove the items, put and send, in one commit",
                body=CommitLease, answer=ItemIds,
            ),
            Route(
                method="POST", path=f"{_LEASE}/release", handler=self.release, status=204,
                summary="Give the items back", body=Release,
            ),
        ]  # fmt: skip

    # Queues

    async def create(self, call: Call) -> QueueInfo:
        await self._px.queues.create(call.body.name, fifo=call.body.fifo)
        return await self._px.queues.describe(call.body.name)

    async def list(self, call: Call) -> QueueList:
        found = await self._px.queues.list()
        return QueueList([each for each in found if call.may("queue", each.name, "read")])

    async def describe(self, call: Call) -> QueueInfo:
        return await self._px.queues.describe(_queue(call))

    async def delete(self, call: Call) -> None:
        await self._px.queues.delete(_queue(call))

    async def peek(self, call: Call) -> ShownItems:
        asked: PeekQuery = call.query
        states = (asked.state,) if asked.state is not None else ()
        found = await self._px.queues.peek(
            _queue(call), asked.limit, states=states, after=asked.after
        )
        return ShownItems([_shown(each) for each in found])

    async def dead(self, call: Call) -> ShownItems:
        found = await self._px.queues.dead(_queue(call), call.query.limit)
        return ShownItems([_shown(each) for each in found])

    async def redrive(self, call: Call) -> Count:
        return Count(await self._px.queues.redrive(_queue(call), **asdict(call.body)))

    async def drop(self, call: Call) -> Count:
        return Count(await self._px.queues.drop(_queue(call), **asdict(call.body)))

    # Items

    async def put(self, call: Call) -> ItemIds:
        async with self._px.transaction() as work:
            put = [await work.put(_queue(call), **_put(each)) for each in call.body.items]
        return ItemIds([each.id for each in put])

    async def take(self, call: Call) -> Taken:
        asked: Take = call.body
        retry = Backoff(asked.first_delay, asked.longest_delay, attempts=asked.attempts)
        taken = await self._leases.take(
            _queue(call),
            asked.max,
            asked.lease,
            min(asked.wait, self._max_wait),
            retry,
            _owner(call),
        )
        if taken is None:
            return Taken(None, [])
        return Taken(taken.lease, [_taken(each) for each in taken.items])

    async def extend(self, call: Call) -> None:
        await self._leases.extend(call.path["lease"], _owner(call), call.body.lease)

    async def release(self, call: Call) -> None:
        await self._leases.release(call.path["lease"], _owner(call), call.body.error)

    async def commit(self, call: Call) -> ItemIds:
        asked: CommitLease = call.body
        puts = [(each.queue, _put(each)) for each in asked.put]
        sends = [(each.topic, record_of(each)) for each in asked.send]

        async def add(work: UnitOfWork[Any]) -> list[QueuedItem]:
            for topic, record in sends:
                await work.send(
                    topic,
                    record.value,
                    record.key,
                    partition=record.partition,
                    headers=record.headers,
                    timestamp=record.timestamp,
                )
            return [await work.put(queue, **options) for queue, options in puts]

        put = await self._leases.commit(call.path["lease"], _owner(call), add)
        return ItemIds([each.id for each in put])


def _queue(call: Call) -> str:
    """The queue's name, checked: PostgreSQL fails to look up some that no queue can have."""
    return validate_name(call.path["queue"])


def _owner(call: Call) -> str:
    """The owner of a lease: no other token can use it."""
    return "" if call.identity is None else call.identity.name


def _put(item: PutItem) -> dict[str, Any]:
    value: str | bytes | None = item.value
    if item.value_base64 is not None:
        value = bytes_of("value", item.value, item.value_base64)
    if value is None:
        raise InvalidRequest("an item needs a value or a value_base64")
    headers: list[Header] = [
        (name, None if it is None else it.encode()) for name, it in item.headers
    ]
    return {
        "value": value,
        "key": item.key,
        "priority": item.priority,
        "delay": item.delay,
        "headers": headers,
        "dedupe": item.dedupe,
        "dedupe_window": item.dedupe_window,
    }


def _taken(item: Item[Any]) -> TakenItem:
    value, coded = text_of(item.value)
    return TakenItem(
        id=item.id,
        deliveries=item.deliveries,
        priority=item.priority,
        put_ms=item.put_ms,
        key=item.key,
        value=value,
        value_base64=coded,
        headers=[(name, text_of(it)[0]) for name, it in item.headers],
        error=item.error,
    )


def _shown(item: ItemInfo[Any]) -> ShownItem:
    value, coded = text_of(item.value)
    return ShownItem(
        id=item.id,
        state=str(item.state),
        deliveries=item.deliveries,
        priority=item.priority,
        put_ms=item.put_ms,
        key=item.key,
        value=value,
        value_base64=coded,
        dead_ms=item.dead_ms,
        error=item.error,
    )


def _new_queue(call: Call) -> list[Need]:
    return [Need("queue", call.body.name, "admin")]


def _committing(call: Call) -> list[Need]:
    puts = [Need("queue", each.queue, "write") for each in call.body.put]
    return [*puts, *(Need("topic", each.topic, "write") for each in call.body.send)]
