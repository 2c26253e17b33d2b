"""Sends messages for all connections: requests that come together share a commit and one wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pxrs.aio.producer import Producer
from pxrs.aio.threads import called
from pxrs.errors import Closed, PxrsError
from pxrs.producing.handles import SentMany
from pxrs.types import Header

Pair = tuple[bytes | None, bytes | None]

# Requests that come once a round has so many messages begin another: nobody waits for all of them.
_MOST_MESSAGES = 1000
# How long a commit waits for company at most; less if commits take less.
_LONGEST_WAIT = 0.005


class Record(NamedTuple):
    """A message to be sent."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] = ()
    partition: int | None = None
    timestamp: int | None = None


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a message was written."""

    partition: int
    offset: int


class _Request:
    """The messages of one request: `put` adds them to `sent`, in steps."""

    __slots__ = ("answer", "put", "sent")

    def __init__(self, put: Callable[[SentMany], Iterator[None]]) -> None:
        self.put = put
        self.sent = SentMany([], [])
        self.answer: asyncio.Future[list[Placed]] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def settle(self) -> None:
        """Answer, now that all batches are settled."""
        if self.answer.done():
            # It failed, or its client has gone: there is nobody else to tell of what was put
            # before. A node that stops must not fail because of it.
            for pending in self.sent._batches:
                pending.told = pending.told or pending.error is not None
            return
        try:
            places = [
                # No call for each message: there may be thousands.
                Placed(at.partition, at.base + index if at.error is None else at.offset(index))
                for at, index in zip(self.sent._batches, self.sent._indexes, strict=True)
            ]
        except PxrsError as error:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(places)


class _Round:
    """Requests for one topic that came in the same turn of the loop."""

    __slots__ = ("messages", "requests")

    def __init__(self) -> None:
        self.requests: list[_Request] = []
        self.messages = 0


class _Company:
    """Says when to commit: at once, or when as many requests are there as the last time.

    Clients that wait for their answers come back soon after a commit. To begin the next one with
    the first of them would let the others wait for two.
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit = commit
        self._loop = asyncio.get_running_loop()
        # Requests that were put and not answered; the most there were since a commit began.
        self._here = self._most = 0
        self._expected = 0
        self._began: float | None = None
        self._patience = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, count: int) -> None:
        """So many requests were put."""
        self._here += count
        self._most = max(self._most, self._here)
        self._commit_or_wait()

    def leave(self, count: int) -> None:
        """So many requests were answered. The first ones end the commit that was begun."""
        if self._began is not None:
            self._patience = min(self._loop.time() - self._began, _LONGEST_WAIT)
            self._began = None
            self._expected = self._most
        self._here -= count
        self._most = self._here
        self._commit_or_wait()

    def _commit_or_wait(self) -> None:
        if not self._here or self._began is not None:
            return
        if self._here >= self._expected:
            self._begin()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._patience, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._here and self._began is None:
            self._began = self._loop.time()
            with suppress(Closed):  # whoever comes from now on is told that
                self._commit()


class Sends:
    """Puts messages into a producer's batches. Used by one event loop."""

    def __init__(self, producer: Producer[Any]) -> None:
        self._producer = producer
        self._blocking = producer._blocking
        self._ready = producer._buffers.ready
        self._open: dict[str, _Round] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._company = _Company(producer._blocking._committer.hurry)

    def pairs(self, topic: str, pairs: list[Pair]) -> asyncio.Future[list[Placed]]:
        """Send keys and values, checked; the answer comes when all are durable."""
        return self._join(topic, partial(self._blocking._adding, topic, pairs), len(pairs))

    def records(self, topic: str, records: Sequence[Record]) -> asyncio.Future[list[Placed]]:
        """`pairs` for messages that have more than a key and a value, which costs more."""
        return self._join(topic, partial(self._put, topic, records), len(records))

    def _join(
        self, topic: str, put: Callable[[SentMany], Iterator[None]], count: int
    ) -> asyncio.Future[list[Placed]]:
        found = self._open.get(topic)
        if found is None or found.messages >= _MOST_MESSAGES:
            found = self._open[topic] = _Round()
            # It begins in the next turn of the loop: what comes in this one joins it.
            task = asyncio.create_task(self._send(topic, found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        request = _Request(put)
        found.requests.append(request)
        found.messages += count
        return request.answer

    async def _send(self, topic: str, round_: _Round) -> None:
        if self._open.get(topic) is round_:
            del self._open[topic]
        try:
            for request in round_.requests:
                await self._fill(topic, request)
            await self._settle(round_.requests)
        finally:
            for request in round_.requests:
                request.answer.cancel()

    async def _settle(self, requests: list[_Request]) -> None:
        """Have what was put committed, and answer."""
        together = [batch for request in requests for batch in request.sent._batches]
        with SentMany(together, [])._waited_for() as batches:
            self._company.join(len(requests))
            try:
                for pending in batches:
                    if not pending.settled:
                        await called(pending.when_settled)
                for request in requests:
                    request.settle()
            finally:
                self._company.leave(len(requests))

    async def _fill(self, topic: str, request: _Request) -> None:
        """Put the request's messages; what keeps them out is told to its client alone."""
        try:
            if not self._ready(topic):
                await self._producer._prepare(topic)
            for _ in request.put(request.sent):
                if not self._ready(topic):
                    await self._producer._prepare(topic)
        except Exception as error:  # noqa: BLE001 - raised where the request is handled
            request.fail(error)

    def _put(self, topic: str, records: Sequence[Record], sent: SentMany) -> Iterator[None]:
        for value, key, headers, partition, timestamp in records:
            one = self._blocking.send(
                topic, value, key, partition=partition, headers=headers, timestamp=timestamp
            )
            sent._batches.append(one._pending)
            sent._indexes.append(one._index)
            yield
