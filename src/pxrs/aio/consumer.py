"""The consumer for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Self, TypeVar

from pxrs.aio.threads import Threads, awaiting, outcome, passing, signed_as, wrapping
from pxrs.aio.transactions import Transaction
from pxrs.arguments import check_timeout, check_whole, refuse_unsaid
from pxrs.consuming import consumer as blocking
from pxrs.consuming import transactions as consuming
from pxrs.consuming.consumer import LOOP_MESSAGES
from pxrs.consuming.in_hand import InFlight
from pxrs.errors import InsideTransaction, InvalidRequest, PxrsError, TransactionConflict
from pxrs.options import CallbackOptions
from pxrs.stores.connections import lend
from pxrs.types import Message, TopicPartition, Value

T = TypeVar("T")

Callback = Callable[[T], Awaitable[None] | None]


class ConsumerOptions(CallbackOptions[Awaitable[None] | None], total=False):
    """As `pxrs.ConsumerOptions`; the callbacks may be coroutine functions."""


class Consumer(Generic[Value]):
    """Consumes topics as a member of a group. See `pxrs.Consumer`. For one task at a time.

    A thread waits and fetches; messages are taken on the loop's own, without awaiting, as the
    last thing that a call does. So a task that is cancelled has either got them or left them.
    """

    def __init__(
        self, consumer: blocking.Consumer[Value], threads: Threads, on_loop: OnLoop
    ) -> None:
        self._blocking = consumer
        self._member = consumer._member
        self._steps = self._member.steps
        self._threads = threads
        self._on_loop = on_loop
        self._in_use = False
        self._waiting: Future[bool] | None = None
        # The task that is in the block of a transaction.
        self._transacting: asyncio.Task[Any] | None = None

    @property
    def member(self) -> str:
        """This member's name in the group."""
        return self._blocking.member

    @property
    def assignment(self) -> set[TopicPartition]:
        """The partitions owned now."""
        return self._blocking.assignment

    health = passing(blocking.Consumer.health)

    @signed_as(blocking.Consumer.poll)
    async def poll(self, max_records: Any, timeout: Any) -> list[Message[Value]]:
        """Return messages of the owned partitions, at most `max_records`; waits for the first.

        The messages of the last call count as handled now. Cancelling it loses nothing.
        """
        check_whole("max_records", max_records, least=1)
        check_timeout(timeout)
        self._refuse_inside()
        self._refuse_another()
        self._steps.finish()
        return self._steps.all_at_once(await self._next(max_records, timeout))

    def __aiter__(self) -> Arriving[Message[Value]]:
        """Messages one by one, without end. One is handled when the next one is asked for."""
        self._refuse_inside()
        self._refuse_another()
        self._steps.finish()
        return Arriving(self._one_by_one)

    @signed_as(blocking.Consumer.batches)
    def batches(self, max_records: Any) -> Arriving[list[Message[Value]]]:
        """Lists of messages, each of one partition. One is handled when the next is asked for."""
        check_whole("max_records", max_records, least=1)
        self._refuse_inside()
        self._refuse_another()
        self._steps.finish()
        return Arriving(partial(self._by_partition, max_records))

    @signed_as(blocking.Consumer.commit)
    def commit(self, message: Any) -> Coroutine[Any, Any, None]:
        """Commit what was handed out so far, or up to and including one message.

        Messages handed out before it is awaited, or while it is, are no part of it. See
        `pxrs.Consumer.commit`.
        """
        self._refuse_inside()
        return self._threads.call(self._member.committing(message))

    def commit_async(self) -> Awaitable[None]:
        """Commit what was handed out so far in the background. It need not be awaited."""
        self._refuse_inside()
        return Going(self._blocking.commit_async())

    @wrapping(blocking.Consumer.transaction)
    def transaction(self, begin: partial[consuming.Transaction]) -> Transaction:
        """Commit the checkpoint of what was handed out together with the caller's writes.

        `async with consumer.transaction() as tx`. See `pxrs.Consumer.transaction`. A connection
        of asyncio (psycopg's AsyncConnection, SQLAlchemy's AsyncSession or AsyncConnection) is
        used on its loop. Any other is used by another thread while the block begins and ends, and
        so has to allow that: SQLAlchemy's do, and sqlite3's with `check_same_thread=False`.
        """
        self._refuse_inside()
        begun = begin(commits=lend(begin.keywords.get("commits")))
        return Transaction(begun, self._transaction_changed)

    @signed_as(blocking.Transacting[Transaction].run_transaction)
    async def run_transaction(
        self, work: Any, *, commits: Any, attempts: Any, connection: Any
    ) -> Any:
        """Run `work(tx)` in a `Transaction`, again on a conflict that may pass; its result.

        `work` may be a coroutine function.
        """
        refuse_unsaid(connection, "consumer.run_transaction(work, commits=connection)")
        self._refuse_inside()
        self._member.require_open()
        for begun in self._member.transactions.attempts(lend(commits), attempts):
            try:
                async with Transaction(begun, self._transaction_changed) as tx:
                    result = work(tx)
                    return await result if inspect.isawaitable(result) else result
            except TransactionConflict:
                if not begun._keeps_on_conflict:
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    seek = awaiting(blocking.Consumer.seek)
    seek_to_time = awaiting(blocking.Consumer.seek_to_time)
    pause = passing(blocking.Consumer.pause)
    resume = passing(blocking.Consumer.resume)

    async def close(self) -> None:
        """Finish: commit what was handled, release everything and leave the group at once."""
        if self._transacting is asyncio.current_task():
            # Another task's block will end; this one's waits for the call.
            self._refuse_inside()
        with suppress(PxrsError):
            await self._calm()
        await outcome(self._threads.start(self._blocking.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _one_by_one(self) -> Iterator[Message[Value]]:
        return self._steps.one_by_one(await self._next(LOOP_MESSAGES, None))

    async def _by_partition(self, most: int) -> Iterator[list[Message[Value]]]:
        return self._steps.by_partition(await self._next(most, None))

    async def _call(self, work: Callable[[], T]) -> T:
        self._refuse_inside()
        await self._calm()
        return await self._threads.call(work)

    def _transaction_changed(self, inside: bool) -> None:
        if inside:
            self._refuse_inside()
        self._transacting = asyncio.current_task() if inside else None

    def _refuse_inside(self) -> None:
        """Raise in the block of a transaction: the call would wait for the block's end."""
        if self._transacting is not None:
            raise InsideTransaction("leave the block of the consumer's transaction first")

    def _refuse_another(self) -> None:
        """Raise for a second task: each would count the other's messages as handled."""
        if self._in_use:
            raise InvalidRequest(
                "this consumer is already polling (in another task, or in the call that invoked "
                "this callback); use one consumer per task"
            )

    async def _next(self, most: int, timeout: float | None) -> list[InFlight]:
        self._refuse_inside()
        self._refuse_another()
        self._in_use = True
        try:
            return await self._arrived(most, timeout)
        finally:
            self._in_use = False

    async def _arrived(self, most: int, timeout: float | None) -> list[InFlight]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        await asyncio.sleep(0)  # full buffers must not keep other tasks from their turn
        await self._calm()
        while True:
            if not self._member.has_news and (flights := self._steps.hand_out(most)):
                return flights
            left = None if deadline is None else deadline - loop.time()
            # Woken, it comes back early: only the time decides.
            if not await self._wait(left) and deadline is not None and loop.time() >= deadline:
                return []

    async def _wait(self, timeout: float | None) -> bool:
        self._waiting = self._threads.start(partial(self._member.wait, timeout))
        try:
            found = await outcome(self._waiting)
        except asyncio.CancelledError:
            self._member.wake()
            raise
        except BaseException:
            self._waiting = None
            raise
        self._waiting = None
        return found

    async def _calm(self) -> None:
        """Wait for the thread that a cancelled call has left waiting.

        Not from inside a callback: the thread waits for that one.
        """
        if self._waiting is None or _callback_of.get() is self._on_loop:
            return
        left = self._waiting
        self._member.wake()
        try:
            await outcome(left)
        finally:
            if left.done():
                self._waiting = None


class Going:
    """A task that runs whether or not it is awaited, and whose error may be ignored."""

    def __init__(self, going: Future[None]) -> None:
        self._going = going

    def __await__(self) -> Generator[Any, None, None]:
        return outcome(self._going).__await__()


class Arriving(AsyncIterator[T], Generic[T]):
    """Iterates over a consumer's messages. Dropping it, by `break` too, gives back the rest."""

    def __init__(self, more: Callable[[], Awaitable[Iterator[T]]]) -> None:
        self._more = more
        self._here: Iterator[T] = iter(())

    def __aiter__(self) -> Arriving[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            for found in self._here:
                return found
            self._here = await self._more()


class OnLoop:
    """Calls functions of the caller on its event loop, from a thread that waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, callback: Callback[T] | None) -> Callable[[T], None] | None:
        """The callback, plain or a coroutine function, for the blocking consumer."""
        if callback is None:
            return None

        def call(parts: T) -> None:
            asyncio.run_coroutine_threadsafe(self._called(callback, parts), self._loop).result()

        return call

    async def _called(self, callback: Callback[T], parts: T) -> None:
        _callback_of.set(self)  # for this call alone: it is a task
        found = callback(parts)
        if inspect.isawaitable(found):
            await found


_callback_of: ContextVar[OnLoop | None] = ContextVar("pxrs_callback_of", default=None)
