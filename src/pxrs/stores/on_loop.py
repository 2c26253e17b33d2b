"""Connections of asyncio's that callers lend: a driver's own, or SQLAlchemy's.

Stores are blocking and work in threads; such a connection belongs to its loop. So a thread hands
each statement to the loop and waits, while the task that the thread works for awaits the thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pxrs.errors import InvalidRequest
from pxrs.stores.refusals import refuse_drivers_block

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from pxrs.stores.connections import Loan


class OnLoop(NamedTuple):
    """A connection, or a session, and the loop that it belongs to."""

    connection: Any
    loop: AbstractEventLoop

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` gives, done by the loop. From any thread but the loop's own."""
        import asyncio  # only who has a loop pays for it

        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self.loop:
                work.close()
                raise InvalidRequest("a loop can't wait for itself; await this transaction")
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise
        return future.result()


def lend(connection: Any) -> Any:
    """Called in a loop: a connection that belongs to it comes with it, any other as it is."""
    import asyncio

    alchemy, psycopg = sys.modules.get("sqlalchemy.ext.asyncio"), sys.modules.get("psycopg")
    if alchemy is not None and isinstance(connection, alchemy.async_scoped_session):
        # Which one it is depends on the task that asks.
        connection = connection()
    mine = (
        (alchemy.AsyncSession, alchemy.AsyncConnection) if alchemy is not None else (),
        psycopg.AsyncConnection if psycopg is not None else (),
    )
    return (
        OnLoop(connection, asyncio.get_running_loop())
        if isinstance(connection, mine)
        else connection
    )


class Awaited:
    """A driver's connection as another thread uses it. `asynchronous` is the connection itself."""

    def __init__(self, lent: OnLoop) -> None:
        self.asynchronous = lent.connection
        self.wait = lent.wait

    @property
    def closed(self) -> bool:
        return bool(self.asynchronous.closed)

    @property
    def broken(self) -> bool:
        return bool(self.asynchronous.broken)

    @property
    def autocommit(self) -> bool:
        return bool(self.asynchronous.autocommit)

    @property
    def info(self) -> Any:
        return self.asynchronous.info

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """The driver's cursor, whose rows are to be awaited."""
        return self.wait(self.asynchronous.execute(statement, parameters))

    def rollback(self) -> None:
        self.wait(self.asynchronous.rollback())


def own_side(connection: Any) -> Any:
    """A connection as its owner knows it."""
    return connection.asynchronous if isinstance(connection, Awaited) else connection


class AwaitedDriver:
    """The loan of a driver's connection. See `pxrs.stores.connections.Loan`."""

    began = False
    alchemy = None

    def __init__(self, lent: OnLoop) -> None:
        self._lent = lent

    def begun(self) -> Any:
        return None

    def refuse_block(self) -> None:
        refuse_drivers_block(self._lent.connection)

    def open(self) -> Awaited:
        self.refuse_block()
        return self.join()

    def join(self) -> Awaited:
        return Awaited(self._lent)

    def ended(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def commit(self) -> None:
        self._lent.wait(self._lent.connection.commit())

    def rollback(self) -> None:
        self._lent.wait(self._lent.connection.rollback())


class AwaitedAlchemy:
    """The loan of SQLAlchemy's AsyncSession or AsyncConnection: its synchronous side's, awaited."""

    # Statements are run on the driver's connection: SQLAlchemy's own can't leave its loop.
    alchemy = None

    def __init__(self, lent: OnLoop, inner: Loan) -> None:
        self._lent = lent
        self._inner = inner

    @property
    def began(self) -> bool:
        return self._inner.began

    def begun(self) -> Any:
        return None

    def refuse_block(self) -> None:
        self._inner.refuse_block()

    def open(self) -> Awaited:
        return Awaited(OnLoop(self._wait(self._inner.open), self._lent.loop))

    def join(self) -> Awaited:
        return Awaited(OnLoop(self._wait(self._inner.join), self._lent.loop))

    def ended(self) -> bool:
        return self._inner.ended()

    def flush(self) -> None:
        self._wait(self._inner.flush)

    def commit(self) -> None:
        self._wait(self._inner.commit)

    def rollback(self) -> None:
        self._wait(self._inner.rollback)

    def _wait(self, work: Callable[[], Any]) -> Any:
        return self._lent.wait(self._lent.connection.run_sync(lambda _: work()))
