"""Queues as people look after them, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pxrs.aio.threads import Threads, outcome
from pxrs.queues import admin as blocking
from pxrs.queues.admin import ItemInfo, QueueInfo, QueueRates
from pxrs.serde import Serde
from pxrs.types import Queue


class Queues:
    """Makes, lists, describes, looks into and clears out queues. See `pxrs.Queues`."""

    def __init__(self, queues: blocking.Queues, threads: Threads) -> None:
        self._queues = queues
        self._threads = threads

    async def create(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue. One that is just so is returned; raises `QueueExists` if it differs."""
        return await self._threads.call(partial(self._queues.create, name, fifo=fifo))

    async def list(self) -> list[QueueInfo]:
        """All queues, by name."""
        return await self._threads.call(self._queues.list)

    async def describe(self, name: str) -> QueueInfo:
        """One queue: how much of what it holds, and how old the oldest is."""
        return await self._threads.call(partial(self._queues.describe, name))

    async def rates(self, name: str, seconds: float = 1.0) -> QueueRates:
        """What goes through the queue, watched for so many seconds."""
        return await outcome(self._threads.start(partial(self._queues.rates, name, seconds)))

    async def peek(
        self,
        name: str,
        limit: int = 10,
        *,
        states: Sequence[str] = (),
        after: int | None = None,
        serde: Serde | None = None,
    ) -> Sequence[ItemInfo]:
        """Items as they lie there, oldest first; nothing is taken or counted."""
        return await self._threads.call(
            partial(self._queues.peek, name, limit, states=states, after=after, serde=serde)
        )

    async def purge(self, name: str) -> int:
        """Remove everything that nobody holds and that is not dead; how many items."""
        return await self._threads.call(partial(self._queues.purge, name))

    async def delete(self, name: str) -> None:
        """Remove the queue and all its items. Who holds some is told when it commits."""
        await self._threads.call(partial(self._queues.delete, name))

    # Dead letters

    async def dead(
        self,
        name: str,
        limit: int | None = 100,
        *,
        ids: Sequence[int] | None = None,
        key: str | None = None,
        error: str | None = None,
        dead_for: float | None = None,
        serde: Serde | None = None,
    ) -> Sequence[ItemInfo]:
        """Items that used up their deliveries, with how it ended."""
        return await self._threads.call(
            partial(
                self._queues.dead,
                name,
                limit,
                ids=ids,
                key=key,
                error=error,
                dead_for=dead_for,
                serde=serde,
            )
        )

    async def redrive(
        self,
        name: str,
        *,
        ids: Sequence[int] | None = None,
        key: str | None = None,
        error: str | None = None,
        dead_for: float | None = None,
    ) -> int:
        """Put dead items back at the queue's end with all their deliveries; how many."""
        return await self._threads.call(
            partial(self._queues.redrive, name, ids=ids, key=key, error=error, dead_for=dead_for)
        )

    async def drop(
        self,
        name: str,
        *,
        ids: Sequence[int] | None = None,
        key: str | None = None,
        error: str | None = None,
        dead_for: float | None = None,
    ) -> int:
        """Remove dead items for good; how many."""
        return await self._threads.call(
            partial(self._queues.drop, name, ids=ids, key=key, error=error, dead_for=dead_for)
        )
