"""`connect` for asyncio, and what it opens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from pxrs import app as blocking
from pxrs import options as blocking_options
from pxrs import signatures
from pxrs.aio.admin import Groups, Queues, Sources, Topics
from pxrs.aio.client import Client
from pxrs.aio.consumer import Consumer, ConsumerOptions, OnLoop
from pxrs.aio.kv import KeyValues
from pxrs.aio.producer import Producer
from pxrs.aio.queue_waiters import QueueWaiters
from pxrs.aio.reader import Reader
from pxrs.aio.running import (
    ItemHandler,
    ItemsOnOwnLoop,
    ItemsOnThisLoop,
    MessageHandler,
    MessagesOnOwnLoop,
    MessagesOnThisLoop,
    Running,
)
from pxrs.aio.threads import (
    Opening,
    Threads,
    awaiting,
    outcome,
    passing,
    shown_as,
    signed_as,
    signed_as_function,
    wrapping,
)
from pxrs.aio.transactions import Surroundings, UnitOfWork
from pxrs.arguments import check_connection, check_handler, is_coroutine_function
from pxrs.config import ConsumerSettings
from pxrs.consuming import consumer as blocking_consumer
from pxrs.consuming import reader as blocking_reader
from pxrs.errors import DeliveryFailed, OutcomeUnknown
from pxrs.options import MemberOptions, takes
from pxrs.producing import producer as blocking_producer
from pxrs.queues import unit_of_work as blocking_work
from pxrs.running import handle as blocking_running
from pxrs.stores.connections import lend
from pxrs.types import Plain, Read


@signed_as_function(blocking.connect)
def connect(*args: Any, **kwargs: Any) -> Opening[Pxrs]:
    """Open a store: `px = await connect(url)` or `async with connect(url) as px`.

    For the URLs see `pxrs.connect`.
    """

    def begin() -> tuple[Future[blocking.Pxrs], Callable[[blocking.Pxrs], Pxrs]]:
        threads = Threads()
        opening = threads.start(partial(blocking.connect, *args, **kwargs))
        return opening, lambda px: Pxrs(px, threads)

    return Opening(begin)


class Pxrs:
    """An open store. Bound to no event loop; `await` its `close`, or use it with `async with`.

    Every method is that of `pxrs.Pxrs`, awaited. Cancelling a call does not undo it.
    """

    def __init__(self, px: blocking.Pxrs, threads: Threads) -> None:
        self._blocking = px
        self._threads = threads
        self._call = threads.call
        self._waiters = QueueWaiters(px.stores.queues)
        self._closing: Future[None] | None = None

    @property
    def url(self) -> str:
        """The URL that opens this store again, in another process, too; with its password."""
        return self._blocking.url

    @wrapping(blocking.Pxrs.producer)
    def producer(self, make: partial[blocking_producer.Producer[Plain]]) -> Producer[Plain]:
        """A producer, for `async with`. See `pxrs.Pxrs.producer`."""
        return Producer(make(), self._threads)

    @wrapping(blocking.Pxrs.reader)
    async def reader(self, find: partial[blocking_reader.Reader[Read]]) -> Reader[Read]:
        """Read a topic without a group."""
        return Reader(await self._call(find), self._threads)

    @takes(
        MemberOptions,
        blocking_options.ConsumerOptions,
        ConsumerOptions,
        defaults=[ConsumerSettings],
    )
    @wrapping(signatures.Consuming[Awaitable[None] | None].consumer)
    def consumer(self, join: partial[blocking_consumer.Consumer[Read]]) -> Opening[Consumer[Read]]:
        """Consume topics as a member of a group: `async with px.consumer(…) as consumer`.

        See `pxrs.Pxrs.consumer`. The callbacks run on the event loop, while a call for messages
        is awaited; they may be coroutine functions.
        """

        def begin() -> tuple[
            Future[blocking_consumer.Consumer[Read]],
            Callable[[blocking_consumer.Consumer[Read]], Consumer[Read]],
        ]:
            on_loop = OnLoop(asyncio.get_running_loop())
            names = ("on_assigned", "on_revoked", "on_lost")
            told = {name: on_loop(join.keywords.get(name)) for name in names}
            joining = self._threads.start(partial(join, **told))
            return joining, lambda got: Consumer(got, self._threads, on_loop)

        return Opening(begin)

    @signatures.run
    @shown_as(blocking.Pxrs.run)
    def run(self, handler: MessageHandler, **options: Any) -> Running:
        """Call `handler(message)` for every message of the group's share. See `pxrs.Pxrs.run`.

        It starts at once: `await px.run(…).join()` waits until it is stopped, and leaving
        `async with px.run(…):` stops it. The handler may be a coroutine function: then `workers`
        is how many messages are awaited at a time, on this loop. A plain function is called by
        threads.
        """
        check_handler(handler, "message")
        on_loop = MessagesOnThisLoop(handler, asyncio.get_running_loop())
        called = MessagesOnOwnLoop(handler) if options.get("processes") else on_loop
        running = self._blocking.run(called, **options)
        on_loop.stop = running.stop
        return Running(running, self._threads, on_loop.abandon, self._blocking.stop)

    # Work queues

    @wrapping(blocking.Pxrs.transaction)
    def transaction(self, begin: partial[blocking_work.UnitOfWork[Plain]]) -> UnitOfWork[Plain]:
        """A unit of work: `async with px.transaction() as tx`. See `pxrs.Pxrs.transaction`.

        A connection of asyncio (psycopg's AsyncConnection, SQLAlchemy's AsyncSession or
        AsyncConnection) is used on its loop. Any other is used by another thread when the block
        ends, and so has to allow that: SQLAlchemy's do, and sqlite3's with
        `check_same_thread=False`.
        """
        return self._unit_of_work(begin)

    @wrapping(blocking.Pxrs.begin)
    def begin(self, begin: partial[blocking_work.UnitOfWork[Plain]]) -> UnitOfWork[Plain]:
        """As `transaction`, but `commit()` must be awaited: leaving the block rolls back.

        `tx = await px.begin()` does without a block.
        """
        return self._unit_of_work(begin)

    def _unit_of_work(self, begin: partial[blocking_work.UnitOfWork[Plain]]) -> UnitOfWork[Plain]:
        begin()  # begins nothing yet, but raises errors about the arguments
        lent = {name: lend(begin.keywords.get(name)) for name in ("commits", "join")}
        return UnitOfWork(partial(begin, **lent), Surroundings(self._threads.submit, self._waiters))

    @signatures.put
    @shown_as(blocking.Pxrs.put)
    async def put(self, *args: Any, **options: Any) -> int | None:
        """Put one item, durably, or when the caller commits `connection`. See `pxrs.Pxrs.put`."""
        if options.get("connection") is None:
            return await self._call(partial(self._blocking.put, *args, **options))
        async with self._joining(options) as work:
            item = await work.put(*args, **options)
        return item.id

    @signatures.put_many
    @shown_as(blocking.Pxrs.put_many)
    async def put_many(self, *args: Any, **options: Any) -> list[int | None]:
        """Put several items, all or none, in one commit. See `pxrs.Pxrs.put_many`."""
        if options.get("connection") is None:
            return await self._call(partial(self._blocking.put_many, *args, **options))
        async with self._joining(options) as work:
            items = await work.put_many(*args, **options)
        return [item.id for item in items]

    def _joining(self, options: dict[str, Any]) -> UnitOfWork[Any]:
        """A unit of work for one change in the caller's transaction, whose options it takes out.

        A cancelled change is waited out: the caller's next statement must not overtake it.
        """
        return self.transaction(join=options.pop("connection"), serde=options.pop("serde", None))

    @signed_as(blocking.Pxrs.send)
    async def send(self, *args: Any, connection: Any, **options: Any) -> None:
        """Send one message when, and only if, the caller commits. See `pxrs.Pxrs.send`."""
        check_connection(connection)
        async with self.transaction(join=connection) as work:
            await work.send(*args, **options)

    @signatures.listen
    @shown_as(blocking.Pxrs.listen)
    def listen(self, queue: str, handler: ItemHandler, **options: Any) -> Running:
        """Call `handler(item, tx)` for every item of the queue. See `pxrs.Pxrs.listen`.

        It starts at once: `await px.listen(…).join()` waits until it is stopped, and leaving
        `async with px.listen(…):` stops it. With a coroutine function `workers` is how many items
        are awaited at a time, on this loop, and `tx` is awaited, too. A plain function is called
        by threads, with a blocking `tx`.
        """
        check_handler(handler, "item", "tx")
        on_loop = ItemsOnThisLoop(handler, asyncio.get_running_loop(), self._waiters)
        called: Any = handler
        if is_coroutine_function(handler):
            called = ItemsOnOwnLoop(handler) if options.get("processes") else on_loop
        running = self._blocking.listen(queue, called, **options)
        on_loop.stop = running.stop
        return Running(running, self._threads, on_loop.abandon, self._blocking.stop)

    @property
    def queues(self) -> Queues:
        """The queues of this store: list, describe, peek, purge; dead letters: redrive, drop."""
        return Queues(self._blocking.queues, self._threads)

    # Existing streams

    attach = awaiting(blocking.Pxrs.attach)

    @wrapping(blocking.Pxrs.relay)
    async def relay(self, begin: partial[blocking_running.Running]) -> Running:
        """Copy a source into a topic, each message once: `async with await px.relay(…)`.

        See `pxrs.Pxrs.relay`.
        """
        running = await self._call(begin)
        return Running(running, self._threads, running.stop, self._blocking.stop)

    @property
    def sources(self) -> Sources:
        """The virtual topics of this store: list, describe, prepare and detach them."""
        return Sources(self._blocking.sources, self._threads)

    @property
    def kv(self) -> KeyValues:
        """The keys and values of this store: put, get, delete, scan and watch them."""
        return KeyValues(self._blocking.kv, self._threads)

    @property
    def client(self) -> Client:
        """The nodes behind a `pxrs://` URL: their list, the leaders of slots, and statistics."""
        return Client(self._blocking.client, self._threads)

    # All that runs

    stop = passing(blocking.Pxrs.stop)
    health = passing(blocking.Pxrs.health)

    @property
    def topics(self) -> Topics:
        """The topics of this store: make, list, describe, delete; dead letters: look, redrive."""
        return Topics(self._blocking.topics, self._threads)

    @property
    def groups(self) -> Groups:
        """The groups of this store: list, describe, explain, reset and delete them."""
        return Groups(self._blocking.groups, self._threads)

    async def close(self) -> None:
        """Stop every listener and run, close every consumer, flush every producer, close the store.

        Tasks that follow, poll or take get `Closed`. Raises as `pxrs.Pxrs.close` does.
        """
        await self._end(None)

    async def _end(self, reason: BaseException | None) -> None:
        """Close because of an error that is being raised: see `pxrs.Producer._end`."""
        if self._closing is None:
            # In this context: a handler that closes the store must not wait for itself.
            end = partial(self._blocking._end, reason)
            self._closing = self._threads.start(partial(copy_context().run, end))
            self._threads.close()
            self._waiters.close()
            await outcome(self._closing)
        elif (
            not self._blocking._is_around_here
        ):  # else the closing task waits for this very handler
            with suppress(DeliveryFailed, OutcomeUnknown):  # the first error is the one to raise
                await outcome(self._closing)

    async def __aenter__(self) -> Pxrs:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._end(error)
