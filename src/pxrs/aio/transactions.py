"""The unit of work and the consumer's transaction for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from pxrs.aio.kv import TransactionKeys
from pxrs.aio.queue_waiters import QueueWaiters
from pxrs.aio.threads import Calls, awaiting, own_thread, signed_as, waited_out, wrapping
from pxrs.consuming import transactions as consuming
from pxrs.core.retry import Backoff
from pxrs.errors import Closed, InvalidRequest
from pxrs.queues import unit_of_work as blocking
from pxrs.queues.item import Item, PutItem
from pxrs.queues.unit_of_work import CAREFUL_WAIT
from pxrs.stores.connections import own_side
from pxrs.types import Value

T = TypeVar("T")


class Surroundings(NamedTuple):
    """Makes a transaction's calls, and notifies it of items.

    `submit` has a thread make a blocking call. `one_thread`: all calls are made by the same one,
    as locks require. And by no other: then other threads may use the transaction, and the loop's
    own must not wait for them.
    """

    submit: Callable[[Callable[[], Any]], Future[Any]]
    waiters: QueueWaiters
    one_thread: bool = False


class UnitOfWork(Generic[Value]):
    """Take and put items, send messages and run SQL, all or nothing. See `pxrs.UnitOfWork`.

    `async with px.transaction() as tx`, or `tx = await px.begin()`. Waiting for an item takes no
    thread. From its first `execute` on a transaction has a thread of its own, as locks belong to
    threads; then await nothing slow: it holds up all others that write to the store.

    Every call that is cancelled is over, done or not, when the cancelled task goes on. An item
    that was taken for it meanwhile goes back; a commit may have been done.
    """

    def __init__(
        self, begin: Callable[[], blocking.UnitOfWork[Value]], around: Surroundings
    ) -> None:
        self._begin = begin
        self._around = around
        # The blocking unit of work, and its unseen items, once it has begun.
        self._begun: blocking.UnreportedItems[Value] | None = None
        self._own: Calls | None = None
        self._calls = 0
        self._ran_sql = False
        self._end_own: weakref.finalize[..., UnitOfWork[Value]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor rolled back."""
        return self._blocking.is_open

    @property
    def in_hand(self) -> int:
        """The number of items it holds."""
        return self._blocking.in_hand

    # Taking and putting

    @signed_as(blocking.UnitOfWork.take)
    async def take(self, queue: Any, *args: Any, **kwargs: Any) -> Item[Value] | None:
        """The next item of the queue; None if none came in time. See `pxrs.UnitOfWork.take`."""
        items = await self.take_many(queue, 1, *args, **kwargs)
        return items[0] if items else None

    @signed_as(blocking.UnitOfWork.take_many)
    async def take_many(
        self, queue: Any, max_items: Any, timeout: Any, *, retry: Any, lock_for: Any
    ) -> list[Item[Value]]:
        """Take what there is, up to `max_items`; waits for the first. See `pxrs.UnitOfWork`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        attempt = partial(self._attempt, queue, max_items, retry, lock_for)
        items, _ = await attempt()
        if items or (timeout is not None and timeout <= 0):
            return items
        waiter = self._around.waiters.waiter(queue)
        try:
            await self._call(waiter.open)
            while True:
                # Cleared first, then a look: an item that comes in between is noticed.
                waiter.clear()
                items, due = await attempt()
                left = None if deadline is None else deadline - loop.time()
                if items or (left is not None and left <= 0):
                    return items
                await waiter.wait(min(w for w in (left, due, CAREFUL_WAIT) if w is not None))
        finally:
            waiter.close()

    async def _attempt(
        self, queue: str, count: int, retry: Backoff, lock_for: float | None
    ) -> tuple[list[Item[Value]], float | None]:
        unseen = self._running()
        taking = self._start(partial(unseen.take, queue, count, retry, lock_for))
        try:
            items, due = await self._done(taking, taking.cancel)
        except asyncio.CancelledError:
            if not taking.cancelled() and taking.exception() is None and taking.result()[0]:
                with suppress(Closed):
                    await self._done(self._start(partial(unseen.give_back, taking.result()[0])))
            raise
        unseen.seen(items)
        return items, due

    # Not wrapped: that would take a quarter more of its time.
    @signed_as(blocking.UnitOfWork[Value].put)
    async def put(self, *args: Any, **options: Any) -> PutItem:
        """Put an item when, and only if, this transaction commits. See `pxrs.UnitOfWork.put`."""
        return await self._note(partial(self._blocking.put, *args, **options))

    @wrapping(blocking.UnitOfWork[Value].put_many)
    async def put_many(self, put: partial[list[PutItem]]) -> list[PutItem]:
        """Put several items of one kind. See `pxrs.UnitOfWork.put_many`."""
        return await self._note(put)

    async def _note(self, put: Callable[[], T]) -> T:
        if self._calls or self._around.one_thread:
            return await self._call(put)
        return put()  # only notes it: no other can have the transaction's lock

    extend = awaiting(blocking.UnitOfWork.extend)

    # Messages and SQL

    @wrapping(blocking.UnitOfWork[Value].send)
    async def send(self, send: partial[None]) -> None:
        """Send a message when, and only if, this transaction commits."""
        await self._call(send)

    @property
    def kv(self) -> TransactionKeys:
        """Keys and values, written when, and only if, this transaction commits."""
        return TransactionKeys(self._blocking.kv, self._call)

    @property
    def connection(self) -> Any:
        """The database connection that will commit, once `execute` has been awaited.

        Before that there is none: to get it can take a while.
        """
        if not self._ran_sql:
            raise InvalidRequest("await tx.execute(…) first: that begins the database transaction")
        return own_side(self._blocking.connection)

    @wrapping(blocking.UnitOfWork.execute)
    async def execute(self, execute: partial[Any]) -> Any:
        """Run a statement of the caller's in this transaction. Take items before."""
        if self._own is None and not self._around.one_thread:
            self._own = own_thread()
            self._end_own = weakref.finalize(self, self._own.end)
        result = await self._call(execute)
        self._ran_sql = True
        return result

    # Ending

    async def commit(self) -> None:
        """Remove what was taken and do everything else, in one commit. See `pxrs.UnitOfWork`."""
        await self._end(self._blocking.commit)

    async def finish(self) -> None:
        """Commit, unless the transaction has ended already."""
        await self._end(self._blocking.finish)

    @wrapping(blocking.UnitOfWork.rollback)
    async def rollback(self, roll_back: partial[None]) -> None:
        """Give back everything taken and forget everything else. It succeeds in the end."""
        # Once the store is closed nothing is held any more.
        with suppress(Closed):
            await self._end(roll_back)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._begun is None:
            self._begun = blocking.UnreportedItems(await self._call(self._begin))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._end(partial(self._blocking.__exit__, kind, error, trace))
        except Closed:
            if error is None:
                raise

    async def _end(self, how: Callable[[], None]) -> None:
        """End it; cancellation does not stop that before it has begun: it gives items back."""
        try:
            await self._done(self._start(partial(self._running().end, how)))
        finally:
            if self._end_own is not None:
                self._end_own()
                self._own = self._end_own = None

    # Calls

    async def _call(self, work: Callable[[], T]) -> T:
        """Make a call; returns its result. A cancellation is passed on once the thread is done."""
        future = self._start(work)
        return await self._done(future, future.cancel)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        submit = self._around.submit if self._own is None else self._own.submit
        return submit(work)

    async def _done(self, future: Future[T], give_up: Callable[[], object] | None = None) -> T:
        self._calls += 1
        try:
            return await waited_out(future, give_up)
        finally:
            self._calls -= 1

    @property
    def _blocking(self) -> blocking.UnitOfWork[Value]:
        return self._running().work

    def _running(self) -> blocking.UnreportedItems[Value]:
        if self._begun is None:
            raise InvalidRequest("`async with` the transaction, or `await` it, before it is used")
        return self._begun


class Transaction(UnitOfWork[str | bytes]):
    """`async with consumer.transaction() as tx`. See `pxrs.Transaction`.

    Locks belong to threads, so one thread enters, works and leaves. Anything awaited in the block
    holds up all others that commit checkpoints, and from the first `execute` on all others that
    write to the store: await nothing slow in it. A block that is left by a cancellation is rolled
    back; one that is cancelled while it commits may be committed. Either way nothing is locked any
    more when the cancelled task goes on.
    """

    def __init__(self, tx: consuming.Transaction, on_change: Callable[[bool], None]) -> None:
        self._unreported = blocking.UnreportedItems(tx)
        self._on_change = on_change
        self._thread: Calls | None = None
        waiters = QueueWaiters(tx._context.stores.queues)
        super().__init__(tx.__enter__, Surroundings(self._submit, waiters, one_thread=True))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """All calls are made by the one thread."""
        if self._thread is None:
            raise InvalidRequest("use the transaction with `async with`, inside its block")
        return self._thread.submit(work)

    @property
    def connection(self) -> Any:
        """The database connection that will commit: the caller's, or once `execute` has run."""
        if not self._blocking._has_connection:
            raise InvalidRequest("await tx.execute(…) first: that begins the database transaction")
        return own_side(self._blocking.connection)

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise InvalidRequest("a transaction can be used once; call transaction() again")
        self._on_change(True)
        self._thread = own_thread()
        entering = self._start(self._begin)
        try:
            await self._done(entering)
        except asyncio.CancelledError as error:
            if entering.exception() is None:
                await self._leave(type(error), error, error.__traceback__)
            else:
                self._let_go()
            raise
        except BaseException:
            self._let_go()
            raise
        self._begun = self._unreported
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._begun = None
        await self._leave(kind, error, trace)

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # In its turn: a statement that a cancelled call has left behind is finished first.
            leave = partial(self._unreported.work.__exit__, kind, error, trace)
            await self._done(self._start(partial(self._unreported.end, leave)))
        finally:
            self._let_go()

    async def _end(self, how: Callable[[], None]) -> None:
        """End it; the thread stays: it has to leave the block, too."""
        await self._done(self._start(partial(self._unreported.end, how)))

    def _let_go(self) -> None:
        assert self._thread is not None
        self._thread.end()
        self._on_change(False)
