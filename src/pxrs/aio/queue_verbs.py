"""The queue half of an open store, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from pxrs import app as blocking
from pxrs.aio.listener import Handler, Listener, OnOwnLoop, OnThisLoop
from pxrs.aio.queue_waiters import Ears
from pxrs.aio.queues import Queues
from pxrs.aio.threads import Threads
from pxrs.aio.unit_of_work import Surroundings, UnitOfWork
from pxrs.arguments import check_handler, is_coroutine_function
from pxrs.callers import check_connection, given_connection
from pxrs.options import ListenOptions, takes
from pxrs.running.job import ListenerSettings
from pxrs.serde import Serde
from pxrs.stores.on_loop import lend
from pxrs.types import Header, Queue


class QueueVerbs:
    """What `Pxrs` can do with queues. See `pxrs.Pxrs`."""

    def __init__(self, px: blocking.Pxrs, threads: Threads) -> None:
        self._px = px
        self._threads = threads
        self._ears = Ears(px.stores.queues)

    def transaction(
        self,
        connection: None = None,
        *,
        commits: Any = None,
        join: Any = None,
        serde: Serde | None = None,
        strict: bool = False,
    ) -> UnitOfWork:
        """A unit of work: `async with px.transaction() as tx`. See `pxrs.Pxrs.transaction`.

        A connection of asyncio (psycopg's AsyncConnection, SQLAlchemy's AsyncSession or
        AsyncConnection) is used on its loop. Any other is used by another thread when the block
        ends, and so has to allow that: SQLAlchemy's do, and sqlite3's with
        `check_same_thread=False`.
        """
        given_connection("px.transaction", connection, None, None)
        begin = partial(
            self._px.transaction, commits=lend(commits), join=lend(join), serde=serde, strict=strict
        )
        return UnitOfWork(begin, Surroundings(self._threads, self._ears))

    def begin(
        self,
        connection: None = None,
        *,
        commits: Any = None,
        join: Any = None,
        serde: Serde | None = None,
        strict: bool = False,
    ) -> UnitOfWork:
        """As `transaction`, but `commit()` has to be awaited: leaving the block rolls back.

        `tx = await px.begin()` does without a block.
        """
        given_connection("px.begin", connection, None, None)
        begin = partial(
            self._px.begin, commits=lend(commits), join=lend(join), serde=serde, strict=strict
        )
        return UnitOfWork(begin, Surroundings(self._threads, self._ears))

    async def put(
        self,
        queue: str,
        value: Any,
        *,
        priority: int = 0,
        delay: float = 0.0,
        key: str | None = None,
        headers: Sequence[Header] | None = None,
        dedupe: str | None = None,
        dedupe_window: float = 300.0,
        serde: Serde | None = None,
        connection: Any = None,
    ) -> None:
        """Put one item, durably, or when the caller commits `connection`. See `pxrs.Pxrs.put`."""
        options: dict[str, Any] = {
            "priority": priority,
            "delay": delay,
            "key": key,
            "headers": headers,
            "dedupe": dedupe,
            "dedupe_window": dedupe_window,
        }
        if connection is None:
            await self._threads.call(partial(self._px.put, queue, value, serde=serde, **options))
            return
        # A cancelled one is waited out: the caller's next statement must not overtake it.
        async with self.transaction(join=connection, serde=serde) as work:
            await work.put(queue, value, **options)

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        connection: Any,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
    ) -> None:
        """Send one message when, and only if, the caller commits. See `pxrs.Pxrs.send`."""
        check_connection(connection)
        async with self.transaction(join=connection) as work:
            await work.send(topic, value, key, partition=partition, headers=headers)

    @takes(ListenOptions, defaults=[ListenerSettings])
    def listen(self, queue: str, handler: Handler, **options: Unpack[ListenOptions]) -> Listener:
        """Call `handler(item, tx)` for the queue's items. See `pxrs.Pxrs.listen`.

        With a coroutine function `workers` is how many items are awaited at a time, on this loop,
        and `tx` is awaited, too. A plain function is called by threads, with a blocking `tx`.
        `async with px.listen(…)` stops it and waits for what is in hand; stop it before the loop
        ends.
        """
        check_handler(handler, "item", "tx")
        on_loop = OnThisLoop(handler, asyncio.get_running_loop(), self._ears)
        called: Any = handler
        if is_coroutine_function(handler):
            called = OnOwnLoop(handler) if options.get("processes") else on_loop
        listener = self._px.listen(queue, called, **options)
        on_loop.stop = listener.stop
        return Listener(listener, self._threads, on_loop.abandon, self._px.stop)

    async def create_queue(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue; putting to one that does not exist makes it, too, without `fifo`."""
        return await self._threads.call(partial(self._px.create_queue, name, fifo=fifo))

    @property
    def queues(self) -> Queues:
        """The queues of this store: list, describe, peek, purge; dead letters: redrive, drop."""
        return Queues(self._px.queues, self._threads)
