"""The producer for asyncio, and the handles that it gives out."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Self

import msgspec

from pxrs.aio.threads import Threads, awaiting, called, outcome, signed_as
from pxrs.errors import StoreError
from pxrs.producing import handles as blocking_sent
from pxrs.producing import producer as blocking
from pxrs.producing.handles import PendingBatch
from pxrs.types import Position, Topic, Value


class Producer(Generic[Value]):
    """Sends messages. Use it with `async with`, leaving it flushes. See `pxrs.Producer`.

    Messages go into their batches on the loop's thread, all of them: order is kept per thread,
    and a message that took a detour through another one could be overtaken.
    """

    def __init__(self, producer: blocking.Producer[Value], threads: Threads) -> None:
        self._blocking = producer
        self._buffers = producer._buffers
        self._threads = threads

    # Named: to gather arguments and spread them again would take a fifth of its time.
    @signed_as(blocking.Producer[Value].send)
    async def send(
        self, topic: Any, value: Any, key: Any, *, partition: Any, headers: Any, timestamp: Any
    ) -> Sent:
        """Hand a message over; `await` the `Sent` to wait until it is durable.

        Comes back at once unless the buffer is full. See `pxrs.Producer.send`.
        """
        if not self._buffers.ready(topic):
            await self._prepare(topic)
        return Sent(
            self._blocking.send(
                topic, value, key, partition=partition, headers=headers, timestamp=timestamp
            )
        )

    @signed_as(blocking.Producer[Value].send_many)
    async def send_many(self, topic: Any, messages: Any) -> SentMany:
        """Hand over (key, value) pairs; cheaper than `send` for each.

        See `pxrs.Producer.send_many`. Other tasks have their turn in between, and may send.
        """
        sent = blocking_sent.SentMany([], [])
        await self._prepare(topic)
        with blocking_sent.counted(sent):
            for _ in self._blocking._sending(topic, messages, sent):
                if not self._buffers.ready(topic):
                    await self._prepare(topic)
        return SentMany(sent)

    flush = awaiting(blocking.Producer.flush, waits=True)

    async def close(self) -> None:
        """Flush and stop. Sending afterwards raises `Closed`. See `pxrs.Producer.close`."""
        await self._end(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._end(error)

    async def _end(self, reason: BaseException | None) -> None:
        await outcome(self._threads.start(partial(self._blocking._end, reason)))

    async def _prepare(self, topic: str) -> None:
        """Let other tasks run, then do all waiting for the next message: topic and room."""
        await asyncio.sleep(0)
        while True:
            if not self._buffers.known(topic):
                self._buffers.use(await self._find(topic))
            elif not self._buffers.outbox.has_room:
                await self._room()
            else:
                return

    async def _find(self, topic: str) -> Topic:
        """Look a topic up as `pxrs.Producer` does; waits for a store that is away. Waits between
        tries are on the loop: the threads for short calls are few."""
        patience = self._buffers.patience(topic)
        while True:
            try:
                return await self._threads.call(partial(self._buffers.find, topic))
            except StoreError as error:
                await asyncio.sleep(patience.pause(error))
            self._blocking._refuse_closed()

    async def _room(self) -> None:
        outbox = self._buffers.outbox
        try:
            async with asyncio.timeout(outbox.max_block):
                await called(outbox.when_room)
        except TimeoutError:
            raise outbox.full() from None


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A message that was handed over. `await sent` returns where it was written."""

    _sent: blocking_sent.Sent

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._sent.done()

    @signed_as(blocking_sent.Sent.result)
    async def result(self, timeout: Any) -> Position:
        """Wait until the message is durable.

        It is committed at once, together with all others that are there by then. Raises the error
        that kept it from being appended, or `TimeoutError`; then it may still be appended later,
        and so it may after a cancellation.
        """
        if self._sent.done():
            return self._sent.result()
        pending = self._sent._pending
        pending.waiters.append(None)
        try:
            await _settled([pending], timeout)
            return self._sent.result()
        finally:
            pending.waiters.pop()

    def __await__(self) -> Generator[Any, None, Position]:
        return self.result().__await__()


class SentMany(Sequence[Sent]):
    """The handles of a `send_many`, in the order of its messages."""

    __slots__ = ("_many",)

    def __init__(self, many: blocking_sent.SentMany) -> None:
        self._many = many

    def __len__(self) -> int:
        return len(self._many)

    def __getitem__(self, at: Any) -> Any:
        found = self._many[at]
        return SentMany(found) if isinstance(at, slice) else Sent(found)

    def __iter__(self) -> Iterator[Sent]:
        return map(Sent, self._many)

    def done(self) -> bool:
        """Whether all outcomes are known."""
        return self._many.done()

    @signed_as(blocking_sent.SentMany.result)
    async def result(self, timeout: Any) -> list[Position]:
        """Wait until all are durable; returns where each was written."""
        with self._many._waited_for() as batches:
            await _settled(batches, timeout)
            return self._many.result()

    def __await__(self) -> Generator[Any, None, list[Position]]:
        return self.result().__await__()


async def _settled(batches: Iterable[PendingBatch], timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            for pending in batches:
                if not pending.settled:
                    await called(pending.wake)
    except TimeoutError:
        raise TimeoutError(f"not appended within {timeout:g} s; it is still being tried") from None
