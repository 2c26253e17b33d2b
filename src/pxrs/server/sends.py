"""Sends messages for all connections: requests that come together share a commit and one wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pxrs.aio.producer import Producer
from pxrs.aio.threads import alarm
from pxrs.errors import Closed, OutcomeUnknown, PxrsError
from pxrs.producing.handles import PendingBatch, SentMany
from pxrs.types import Header

_LOG = logging.getLogger("pxrs.serve")
Pair = tuple[bytes | None, bytes | None]

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
    """The place at which a message was written."""

    partition: int
    offset: int


class _Request:
    """The messages of one request: `steps` puts them into batches and adds those to `sent`."""

    __slots__ = ("_batches", "_unsettled", "answer", "sent", "steps")

    def __init__(self, put: Callable[[SentMany], Iterator[None]]) -> None:
        self.sent = SentMany([], [])
        self.steps = put(self.sent)
        self.answer: asyncio.Future[list[Placed]] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def wait(self) -> dict[PendingBatch, None]:
        """All is put: its batches, which are waited for from here on."""
        self._batches = dict.fromkeys(self.sent._batches)
        self._unsettled = len(self._batches)
        for pending in self._batches:
            pending.waiters.append(None)
        return self._batches

    def count_down(self) -> bool:
        """One of its batches is settled; whether that was the last one."""
        self._unsettled -= 1
        return not self._unsettled

    def settle(self) -> None:
        """Answer, now that all batches are settled."""
        try:
            if not self.answer.done():
                self.answer.set_result(self._places())
        except PxrsError as error:
            self.answer.set_exception(error)
        for pending in self._batches:
            # Of the others, too: the client is told of one failure. If it has gone, or was refused
            # before all was put, there is nobody else to tell. A node that stops must not fail
            # because of it.
            pending.told = pending.told or pending.error is not None
            pending.waiters.pop()

    def _places(self) -> list[Placed]:
        return [
            # No call for each message: there may be thousands.
            Placed(at.partition, at.base + index if at.error is None else at.offset(index))
            for at, index in zip(self.sent._batches, self.sent._indexes, strict=True)
        ]


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
    """Puts messages into a producer's batches. Used by one event loop.

    No task is made for a request, and no future but its answer: that would cost as much as to put
    its messages.
    """

    def __init__(self, producer: Producer[Any]) -> None:
        self._producer = producer
        self._blocking = producer._blocking
        self._buffers = producer._buffers
        self._alarm = alarm()
        # Who waits for a batch.
        self._waiting: dict[PendingBatch, list[_Request]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Requests whose messages were put, and that were answered, since the company was told.
        self._came = self._went = 0
        self._telling = False
        self._loop = asyncio.get_running_loop()
        self._company = _Company(producer._blocking._committer.hurry)

    @property
    def is_broken(self) -> bool:
        """Whether the producer's thread was ended by an error: nothing more is committed by it."""
        return self._blocking._committer.broken

    async def end(self) -> None:
        """Append what a broken producer has left; requests of which that fails are told so."""
        try:
            await self.close()
        except Exception as error:  # noqa: BLE001 - the requests get it
            if not isinstance(error, PxrsError):
                _LOG.exception("what a broken producer has left could not be appended")
            lost = OutcomeUnknown("the node failed to do this; its log has the details")
            for requests in self._waiting.values():
                for request in requests:
                    request.fail(lost)

    async def close(self) -> None:
        """Append everything, and end the producer."""
        await self._producer.close()

    def pairs(self, topic: str, pairs: list[Pair]) -> asyncio.Future[list[Placed]]:
        """Send keys and values, checked; the answer comes when all are durable."""
        return self._join(topic, partial(self._blocking._adding, topic, pairs), len(pairs))

    def records(self, topic: str, records: Sequence[Record]) -> asyncio.Future[list[Placed]]:
        """`pairs` for messages that have more than a key and a value, which costs more."""
        return self._join(topic, partial(self._put, topic, records), len(records))

    def _join(
        self, topic: str, put: Callable[[SentMany], Iterator[None]], count: int
    ) -> asyncio.Future[list[Placed]]:
        request = _Request(put)
        if self._fill_at_once(topic, request, count):
            self._wait(request)
        else:
            task = asyncio.create_task(self._fill(topic, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return request.answer

    def _fill_at_once(self, topic: str, request: _Request, count: int) -> bool:
        """Put messages while that neither has to wait nor holds up others; whether all are put."""
        if not self._buffers.known(topic) or not self._buffers.outbox.has_room:
            return False
        try:
            for _ in request.steps:
                if len(request.sent) < count and not self._buffers.ready(topic):
                    return False
        except Exception as error:  # noqa: BLE001 - raised where the request is handled
            request.fail(error)
        return True

    async def _fill(self, topic: str, request: _Request) -> None:
        """Put the request's messages; what keeps them out is told to its client alone."""
        try:
            await self._producer._prepare(topic)
            for _ in request.steps:
                if not self._buffers.ready(topic):
                    await self._producer._prepare(topic)
        except Exception as error:  # noqa: BLE001 - raised where the request is handled
            request.fail(error)
        except asyncio.CancelledError:
            request.answer.cancel()
            raise
        finally:
            self._wait(request)

    def _wait(self, request: _Request) -> None:
        """Have what was put committed, and answer then."""
        batches = request.wait()
        if not batches:
            request.settle()
            return
        for pending in batches:
            waiting = self._waiting.get(pending)
            if waiting is None:
                self._waiting[pending] = [request]
                pending.when_settled(partial(self._alarm.ring, partial(self._settled, pending)))
            else:
                waiting.append(request)
        self._came += 1
        self._tell_company_soon()

    def _settled(self, pending: PendingBatch) -> None:
        for request in self._waiting.pop(pending):
            if request.count_down():
                request.settle()
                self._went += 1
                self._tell_company_soon()

    def _tell_company_soon(self) -> None:
        """In the next turn of the loop: those who come in the same one come together."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell_company)

    def _tell_company(self) -> None:
        came, went = self._came, self._went
        self._came, self._went, self._telling = 0, 0, False
        if went:
            self._company.leave(went)
        if came:
            self._company.join(came)

    def _put(self, topic: str, records: Sequence[Record], sent: SentMany) -> Iterator[None]:
        for value, key, headers, partition, timestamp in records:
            one = self._blocking.send(
                topic, value, key, partition=partition, headers=headers, timestamp=timestamp
            )
            sent._batches.append(one._pending)
            sent._indexes.append(one._index)
            yield
