"""Transactions for asyncio: a thread of their own for as long as they last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from pxrs.aio.threads import OwnThread, outcome, waited_out
from pxrs.errors import InvalidRequest
from pxrs.runtime import transaction as blocking
from pxrs.types import Header

T = TypeVar("T")


class Transaction:
    """A unit of work: `async with consumer.transaction() as tx`. See `pxrs.Transaction`.

    Locks belong to threads, so one thread enters, works and leaves. Whatever is awaited in the
    block holds up everybody who writes to the store: await nothing slow in it. A block that is
    left by a cancellation is rolled back; one that is cancelled while it commits may be committed.
    Either way nothing is locked any more when the cancelled task goes on.
    """

    def __init__(self, tx: blocking.Transaction, on_change: Callable[[bool], None]) -> None:
        self._tx = tx
        self._on_change = on_change
        self._thread: OwnThread | None = None
        self._inside = False

    @property
    def connection(self) -> Any:
        """The database connection that commits, for the caller's own statements."""
        return self._tx.connection

    async def execute(self, statement: str, parameters: Any = ()) -> Any:
        """Run a statement of the caller's in the transaction."""
        return await self._call(partial(self._tx.execute, statement, parameters))

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: list[Header] | None = None,
    ) -> None:
        """Send a message when, and only if, the transaction commits."""
        await self._call(
            partial(self._tx.send, topic, value, key, partition=partition, headers=headers)
        )

    async def __aenter__(self) -> Transaction:
        if self._thread is not None:
            raise InvalidRequest("a transaction can be used once; call transaction() again")
        self._thread = OwnThread()
        self._on_change(True)
        entering = self._thread.start(self._tx.__enter__)
        try:
            await waited_out(entering)
        except asyncio.CancelledError as error:
            if entering.exception() is None:
                await self._leave(type(error), error, error.__traceback__)
            else:
                self._end()
            raise
        except BaseException:
            self._end()
            raise
        self._inside = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(kind, error, trace)

    async def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._inside = False
        try:
            # In its turn: a statement that a cancelled call has left behind is finished first.
            await waited_out(self._thread.start(partial(self._tx.__exit__, kind, error, trace)))
        finally:
            self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.end()
        self._on_change(False)

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None or not self._inside:
            raise InvalidRequest("use the transaction with `async with`, inside its block")
        return await outcome(self._thread.start(work))
