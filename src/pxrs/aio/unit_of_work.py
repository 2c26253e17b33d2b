"""The unit of work for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from pxrs.aio.queue_waiters import Ears
from pxrs.aio.threads import Calls, own_thread, waited_out
from pxrs.core.delivery import Policy
from pxrs.errors import Closed, InvalidRequest
from pxrs.queues import unit_of_work as blocking
from pxrs.queues.cancellable import Unseen
from pxrs.queues.item import Item
from pxrs.queues.unit_of_work import _FOREVER, CAREFUL_WAIT
from pxrs.stores.connections import own_side
from pxrs.types import Header

T = TypeVar("T")


class Place(Protocol):
    """Where blocking calls are made."""

    def submit(self, work: Callable[[], T]) -> Future[T]: ...


class Surroundings(NamedTuple):
    """Where a transaction's calls are made, and how it hears of items.

    `one_thread`: all calls are made by the same one, as locks want it. And by nobody else: other
    threads may use the transaction then, and the loop's own must not wait for them.
    """

    place: Place
    ears: Ears
    one_thread: bool = False


class Running(NamedTuple):
    """A transaction that has begun."""

    work: blocking.UnitOfWork
    unseen: Unseen


class UnitOfWork:
    """Take and put items, send messages and run SQL, all or nothing. See `pxrs.UnitOfWork`.

    `async with px.transaction() as tx`, or `tx = await px.begin()`. Waiting for an item takes no
    thread. From its first `execute` on a transaction has a thread of its own, as locks belong to
    threads; then await nothing slow, it holds up everybody who writes to the store.

    Every call that is cancelled is over, one way or the other, when the cancelled task goes on. An
    item that was taken for it meanwhile goes back; a commit may have been done.
    """

    def __init__(self, begin: Callable[[], blocking.UnitOfWork], around: Surroundings) -> None:
        self._begin = begin
        self._around = around
        self._begun: Running | None = None
        self._own: Calls | None = None
        self._calls = 0
        self._ran_sql = False
        self._end_own: weakref.finalize[..., UnitOfWork] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor rolled back."""
        return self._running().work.is_open

    @property
    def in_hand(self) -> int:
        """How many items it holds."""
        return self._running().work.in_hand

    # Taking and putting

    async def take(
        self,
        queue: str,
        timeout: float | None = None,
        *,
        policy: Policy = _FOREVER,
        lock_for: float | None = None,
    ) -> Item | None:
        """The next item of the queue; None if none came in time. See `pxrs.UnitOfWork.take`."""
        items = await self.take_many(queue, 1, timeout, policy=policy, lock_for=lock_for)
        return items[0] if items else None

    async def take_many(
        self,
        queue: str,
        max_items: int,
        timeout: float | None = None,
        *,
        policy: Policy = _FOREVER,
        lock_for: float | None = None,
    ) -> list[Item]:
        """What there is, `max_items` at most; waits for the first. See `pxrs.UnitOfWork`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        attempt = partial(self._attempt, queue, max_items, policy, lock_for)
        items, _ = await attempt()
        if items or (timeout is not None and timeout <= 0):
            return items
        ear = self._around.ears.ear(queue)
        try:
            await self._call(ear.open)
            while True:
                # Quiet first, then looked: what comes in between rings.
                ear.quiet()
                items, due = await attempt()
                left = None if deadline is None else deadline - loop.time()
                if items or (left is not None and left <= 0):
                    return items
                await ear.heard(min(w for w in (left, due, CAREFUL_WAIT) if w is not None))
        finally:
            ear.close()

    async def _attempt(
        self, queue: str, count: int, policy: Policy, lock_for: float | None
    ) -> tuple[list[Item], float | None]:
        unseen = self._running().unseen
        taking = self._start(partial(unseen.take, queue, count, policy, lock_for))
        try:
            items, due = await self._done(taking, taking.cancel)
        except asyncio.CancelledError:
            if not taking.cancelled() and taking.exception() is None and taking.result()[0]:
                with suppress(Closed):
                    await self._done(self._start(partial(unseen.give_back, taking.result()[0])))
            raise
        unseen.seen(items)
        return items, due

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
    ) -> None:
        """Put an item when, and only if, this transaction commits. See `pxrs.UnitOfWork.put`."""
        put = partial(
            self._running().work.put,
            queue,
            value,
            priority=priority,
            delay=delay,
            key=key,
            headers=headers,
            dedupe=dedupe,
            dedupe_window=dedupe_window,
        )
        if self._calls or self._around.one_thread:
            await self._call(put)
        else:
            put()  # only notes it: nobody else can have the transaction's lock

    async def extend(self, seconds: float) -> None:
        """Hold on to everything taken for so many seconds from now. Raises `Fenced` if lost."""
        await self._call(partial(self._running().work.extend, seconds))

    # Messages and SQL

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
    ) -> None:
        """Send a message when, and only if, this transaction commits."""
        await self._call(
            partial(
                self._running().work.send, topic, value, key, partition=partition, headers=headers
            )
        )

    @property
    def connection(self) -> Any:
        """The database connection that will commit, once `execute` has been awaited.

        Before that there is none: to get it can take a while.
        """
        if not self._ran_sql:
            raise InvalidRequest("await tx.execute(…) first: that begins the database transaction")
        return own_side(self._running().work.connection)

    async def execute(self, statement: str, parameters: Any = ()) -> Any:
        """Run a statement of the caller's in this transaction. Take items before."""
        work = self._running().work
        if self._own is None and not self._around.one_thread:
            self._own = own_thread()
            self._end_own = weakref.finalize(self, self._own.end)
        result = await self._call(partial(work.execute, statement, parameters))
        self._ran_sql = True
        return result

    # Ending

    async def commit(self) -> None:
        """Remove what was taken and do everything else, in one commit. See `pxrs.UnitOfWork`."""
        await self._end(self._running().work.commit)

    async def finish(self) -> None:
        """Commit, unless the transaction has ended already."""
        await self._end(self._running().work.finish)

    async def rollback(self, error: str = "") -> None:
        """Give back everything taken and forget everything else. It succeeds in the end."""
        # When the store was closed nothing is held any more.
        with suppress(Closed):
            await self._end(partial(self._running().work.rollback, error))

    def __await__(self) -> Generator[Any, None, UnitOfWork]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> UnitOfWork:
        if self._begun is None:
            work = await self._call(self._begin)
            self._begun = Running(work, Unseen(work))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._end(partial(self._running().work.__exit__, kind, error, trace))
        except Closed:
            if error is None:
                raise

    async def _end(self, how: Callable[[], None]) -> None:
        """Not to be given up before it has begun, either: it gives back what is held."""
        try:
            await self._done(self._start(partial(self._running().unseen.end, how)))
        finally:
            if self._end_own is not None:
                self._end_own()
                self._own = self._end_own = None

    # Calls

    async def _call(self, work: Callable[[], T]) -> T:
        """Its result. A cancellation is passed on once the thread is done with it."""
        future = self._start(work)
        return await self._done(future, future.cancel)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        return (self._own or self._around.place).submit(work)

    async def _done(self, future: Future[T], give_up: Callable[[], object] | None = None) -> T:
        self._calls += 1
        try:
            return await waited_out(future, give_up)
        finally:
            self._calls -= 1

    def _running(self) -> Running:
        if self._begun is None:
            raise InvalidRequest("`async with` the transaction, or `await` it, before it is used")
        return self._begun
