"""The producer for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from pxrs.aio.sent import Sent, SentMany
from pxrs.aio.threads import Threads, called, outcome
from pxrs.errors import StoreError
from pxrs.producing import handles as blocking_sent
from pxrs.producing import producer as blocking
from pxrs.types import Header, Topic


class Producer:
    """Sends messages. Use it with `async with`, leaving it flushes. See `pxrs.Producer`.

    Messages go into their batches on the loop's thread, all of them: order is kept per thread,
    and a message that took a detour through another one could be overtaken.
    """

    def __init__(self, producer: blocking.Producer, threads: Threads) -> None:
        self._producer = producer
        self._lanes = producer.lanes
        self._threads = threads

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp: int | None = None,
    ) -> Sent:
        """Hand a message over; `await` the `Sent` to wait until it is durable.

        Comes back at once unless the buffer is full. See `pxrs.Producer.send`.
        """
        if not self._lanes.ready(topic):
            await self._prepare(topic)
        return Sent(
            self._producer.send(
                topic, value, key, partition=partition, headers=headers, timestamp=timestamp
            )
        )

    async def send_many(self, topic: str, messages: Iterable[tuple[Any, Any]]) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each.

        See `pxrs.Producer.send_many`. Other tasks have their turn in between, and may send.
        """
        sent = blocking_sent.SentMany([], [])
        await self._prepare(topic)
        with blocking_sent.counted(sent):
            for _ in self._producer.sending(topic, messages, sent):
                if not self._lanes.ready(topic):
                    await self._prepare(topic)
        return SentMany(sent)

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything handed over so far is settled. See `pxrs.Producer.flush`."""
        await outcome(self._threads.start(partial(self._producer.flush, timeout)))

    async def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`. See `pxrs.Producer.close`."""
        await self._end(None)

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end(error)

    async def _end(self, reason: BaseException | None) -> None:
        await outcome(self._threads.start(partial(self._producer._end, reason)))

    async def _prepare(self, topic: str) -> None:
        """Let others run, then wait for whatever the next message would have to wait for."""
        await asyncio.sleep(0)
        while True:
            if not self._lanes.known(topic):
                self._lanes.use(await self._find(topic))
            elif not self._lanes.outbox.has_room:
                await self._room()
            else:
                return

    async def _find(self, topic: str) -> Topic:
        """See `pxrs.Producer`: a store that is away is waited for. Between two tries on the loop:
        the threads for short calls are few."""
        patience = self._lanes.patience(topic)
        while True:
            try:
                return await self._threads.call(partial(self._lanes.find, topic))
            except StoreError as error:
                await asyncio.sleep(patience.pause(error))
            self._producer.refuse_closed()

    async def _room(self) -> None:
        outbox = self._lanes.outbox
        try:
            async with asyncio.timeout(outbox.max_block):
                await called(outbox.when_room)
        except TimeoutError:
            raise outbox.full() from None
