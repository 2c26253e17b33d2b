"""A consumer's transaction for asyncio: a thread of its own for as long as it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from pxrs.aio.queue_waiters import Ears
from pxrs.aio.threads import Calls, own_thread
from pxrs.aio.unit_of_work import Running, Surroundings, UnitOfWork
from pxrs.consuming import transactions as blocking
from pxrs.errors import InvalidRequest
from pxrs.queues.cancellable import Unseen
from pxrs.stores.connections import own_side


class Transaction(UnitOfWork):
    """`async with consumer.transaction() as tx`. See `pxrs.Transaction`.

    Locks belong to threads, so one thread enters, works and leaves. Whatever is awaited in the
    block holds up everybody who commits checkpoints, and from the first `execute` on everybody
    who writes to the store: await nothing slow in it. A block that is left by a cancellation is
    rolled back; one that is cancelled while it commits may be committed. Either way nothing is
    locked any more when the cancelled task goes on.
    """

    def __init__(self, tx: blocking.Transaction, on_change: Callable[[bool], None]) -> None:
        self._tx = tx
        self._unseen = Unseen(tx)
        self._on_change = on_change
        self._thread: Calls | None = None
        super().__init__(tx.__enter__, Surroundings(self, Ears(self._unseen.queues), True))

    def submit(self, work: Callable[[], Any]) -> Any:
        """See `pxrs.aio.unit_of_work.Place`: all calls are made by the one thread."""
        if self._thread is None:
            raise InvalidRequest("use the transaction with `async with`, inside its block")
        return self._thread.submit(work)

    @property
    def connection(self) -> Any:
        """The database connection that will commit: the caller's, or once `execute` has run."""
        if not self._running().work.has_connection:
            raise InvalidRequest("await tx.execute(…) first: that begins the database transaction")
        return own_side(self._running().work.connection)

    async def __aenter__(self) -> Transaction:
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
        self._begun = Running(self._tx, self._unseen)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._begun = None
        await self._leave(kind, error, trace)

    async def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # In its turn: a statement that a cancelled call has left behind is finished first.
            leave = partial(self._tx.__exit__, kind, error, trace)
            await self._done(self._start(partial(self._unseen.end, leave)))
        finally:
            self._let_go()

    async def _end(self, how: Callable[[], None]) -> None:
        """The thread stays: it has to leave the block, too."""
        await self._done(self._start(partial(self._unseen.end, how)))

    def _let_go(self) -> None:
        assert self._thread is not None
        self._thread.end()
        self._on_change(False)
