"""Connections of callers: a driver's own, SQLAlchemy's sessions and connections, Django's.

A caller either lends a connection, and pxrs commits it (`Lent`); or lets pxrs join the transaction
that the caller ends. The state of the connection never decides which.

Two levels of transaction are easily confused. SQLAlchemy "begins" when a session is first used,
which sends nothing to the database; drivers begin by themselves at the first statement, or at the
first one that writes. So a store asks the driver whether the database is in a transaction, and ends
that transaction through the object that the caller uses: a session whose commit happens behind its
back would go on with a state that no longer exists.

SQLAlchemy and Django are never imported here: a caller that has one of their objects has imported
them.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pxrs.errors import InvalidRequest, NotAtomic

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Loan:
    """A caller's connection for the length of one block; here, one of the driver itself."""

    # Whether the caller had begun nothing before `open` or `join`.
    began = False
    # SQLAlchemy's connection, once it is open; None where the caller uses the driver.
    alchemy: Any = None

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def begun(self) -> Any:
        """The driver's connection, if the caller may have begun something on it; else None."""
        return self._connection

    def refuse_block(self) -> None:
        """Raise `InvalidRequest` inside of a block of the caller's that commits by itself."""
        # psycopg's block, in which it allows no commit.
        if getattr(self._connection, "_num_transactions", 0):
            raise _is_in_a_block("connection.transaction()")

    def open(self) -> Any:
        """The driver's connection, on which the block's statements run; pxrs will end them.

        Not where `refuse_block` raises.
        """
        self.refuse_block()
        return self.join()

    def join(self) -> Any:
        """The driver's connection, inside of the transaction that the caller will end.

        If the caller has begun none yet, this begins it, as any statement of the caller's would.
        """
        return self._connection

    def ended(self) -> bool:
        """Whether the caller has ended what `open` found or began."""
        return False

    def flush(self) -> None:
        """Send statements that the caller's side has not sent yet."""

    def commit(self) -> None:
        """Commit, as the caller would. Raises the driver's own errors, unwrapped."""
        self._connection.commit()

    def rollback(self) -> None:
        """Roll back, as the caller would."""
        self._connection.rollback()


class Lent:
    """A connection that pxrs commits and rolls back, even if its transaction is older.

    A block joins any other connection that it is given: the caller commits that one.
    """

    def __init__(self, connection: Any) -> None:
        self.loan = borrow(connection)

    def rollback(self) -> None:
        """Roll back what was begun on it. A block of the caller's ends by itself instead."""
        # A closed or lost connection has nothing left to roll back.
        with suppress(Exception):
            self.loan.refuse_block()
            self.loan.rollback()


def loan_of(connection: Any) -> tuple[Loan | None, bool]:
    """The loan of the connection that a block was given, if any, and whether pxrs commits it."""
    if isinstance(connection, Lent):
        return connection.loan, True
    return (None if connection is None else borrow(connection)), False


def borrow(connection: Any) -> Loan:
    """The loan of a driver's connection, of SQLAlchemy's Session or Connection, or of Django's.

    Connections of asyncio come with their loop (`OnLoop`). Without it, AsyncSession and
    AsyncConnection lend their synchronous side, which can be used only inside their `run_sync`.
    """
    if isinstance(connection, OnLoop):
        side = _sync_side(connection.connection)
        if side is connection.connection:
            return _AwaitedDriver(connection)
        return _AwaitedAlchemy(connection, borrow(side))
    django = _django_side(connection)
    if django is not None:
        return _Django(django)
    alchemy = sys.modules.get("sqlalchemy")
    if alchemy is None:
        return Loan(connection)
    connection = _sync_side(connection)
    orm = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(connection, orm.scoped_session):
        connection = connection()
    if orm is not None and isinstance(connection, orm.Session):
        return _Session(connection, alchemy)
    if isinstance(connection, alchemy.Connection):
        return _Alchemy(connection, alchemy)
    if isinstance(connection, alchemy.PoolProxiedConnection):
        return Loan(connection.driver_connection)
    return Loan(connection)


def is_writing(connection: Any) -> bool:
    """Whether the caller is inside a transaction of SQLite, which has one writer at a time.

    Waiting for that writer in the caller's own thread would never end.
    """
    loan = connection.loan if isinstance(connection, Lent) else borrow(connection)
    driver = loan.begun()
    return isinstance(driver, sqlite3.Connection) and driver.in_transaction


def _sync_side(connection: Any) -> Any:
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is None:
        return connection
    if isinstance(connection, asynchronous.async_scoped_session):
        connection = connection()
    if isinstance(connection, asynchronous.AsyncSession):
        return connection.sync_session
    if isinstance(connection, asynchronous.AsyncConnection):
        return connection.sync_connection
    return connection


def _django_side(connection: Any) -> Any:
    """Django's connection behind `django.db.connection`, which is another one in each thread."""
    base = sys.modules.get("django.db.backends.base.base")
    if base is None:
        return None
    proxy = sys.modules["django.utils.connection"].ConnectionProxy
    if isinstance(connection, proxy):
        connection = sys.modules["django.db"].connections[connection.alias]
    return connection if isinstance(connection, base.BaseDatabaseWrapper) else None


class _Django(Loan):
    """Django's connection. It is joined inside `atomic()`, and never committed by pxrs."""

    def begun(self) -> Any:
        return self._connection.connection

    def refuse_block(self) -> None:
        raise InvalidRequest(
            "Django commits its connection by itself; open transaction.atomic() and pass "
            "join=connection"
        )

    def join(self) -> Any:
        self._connection.ensure_connection()
        if self._connection.get_autocommit() and not self._connection.in_atomic_block:
            raise no_transaction("with transaction.atomic()")
        if self._connection.needs_rollback:
            raise InvalidRequest("this atomic() block has failed and will be rolled back; leave it")
        return self._connection.connection


class _Alchemy(Loan):
    """SQLAlchemy's Connection."""

    def __init__(self, connection: Any, library: Any) -> None:
        super().__init__(connection)
        self._library = library
        self._transaction: Any = None

    def begun(self) -> Any:
        if not self._connection.in_transaction():
            return None
        return self._begin().connection.dbapi_connection

    def refuse_block(self) -> None:
        """The rest of a `with begin()` block would have no transaction."""
        subject = self._connection
        if subject.in_nested_transaction() or getattr(subject, "_trans_context_manager", None):
            raise _is_in_a_block(f"a begin() block of this {type(subject).__name__}")

    def join(self) -> Any:
        self.began = not self._connection.in_transaction()
        self.alchemy = self._begin()
        self._transaction = self._connection.get_transaction()
        return self.alchemy.connection.driver_connection

    def _begin(self) -> Any:
        """SQLAlchemy's Connection, in a transaction."""
        if not self._connection.in_transaction():
            # Otherwise its commit() would find nothing to commit, and do nothing.
            self._connection.begin()
        return self._connection

    def ended(self) -> bool:
        return self._connection.get_transaction() is not self._transaction

    def commit(self) -> None:
        try:
            self._connection.commit()
        except self._library.exc.DBAPIError as error:
            own = error.orig
            raise (own if isinstance(own, BaseException) else error) from error


class _Session(_Alchemy):
    """SQLAlchemy's Session."""

    def _begin(self) -> Any:
        try:
            return self._connection.connection()
        except self._library.exc.UnboundExecutionError as error:
            raise NotAtomic(f"the session is not bound to one database: {error}") from error

    def flush(self) -> None:
        self._connection.flush()

    def commit(self) -> None:
        super().commit()
        if not self.alchemy.closed and self.alchemy.in_transaction():
            # Bound to a connection whose transaction began outside of it, as in many test suites.
            self.alchemy.rollback()
            raise NotAtomic(
                "the session can't commit: it is bound to a connection that was in a transaction "
                "already. All of it was rolled back; bind the session to an engine"
            )

    def rollback(self) -> None:
        try:
            self._connection.rollback()
        except self._library.exc.InvalidRequestError:
            # Interrupted halfway through its commit, by something that the session calls then.
            self._connection.close()


def no_transaction(how: str) -> InvalidRequest:
    """Builds the error for joining where each statement would be committed by itself."""
    return InvalidRequest(
        "the connection commits every statement by itself and is in no transaction, so there is "
        f"none to join; open one first ({how}), and what pxrs writes lands when it commits"
    )


def _is_in_a_block(which: str) -> InvalidRequest:
    """Builds the error for a block that commits by itself, where pxrs must not."""
    return InvalidRequest(
        f"{which} commits by itself, and pxrs can't commit inside of it; pass join= instead of "
        "commits=, or leave that block out"
    )


# Stores block and work in threads; a connection of asyncio belongs to its loop. So a thread hands
# each statement to the loop and waits for it, while the task that the thread works for awaits the
# thread.


class OnLoop(NamedTuple):
    """A connection, or a session, and the loop that it belongs to."""

    connection: Any
    loop: AbstractEventLoop

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` on the loop and return its result. From any thread but the loop's own."""
        import asyncio  # only programs that have a loop pay for the import

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
    """Add the running loop to a connection that belongs to it; return any other as it is."""
    import asyncio

    alchemy, psycopg = sys.modules.get("sqlalchemy.ext.asyncio"), sys.modules.get("psycopg")
    if alchemy is not None and isinstance(connection, alchemy.async_scoped_session):
        # Which session it stands for depends on the current task.
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
        """The driver's cursor, whose rows must be awaited."""
        return self.wait(self.asynchronous.execute(statement, parameters))

    def rollback(self) -> None:
        self.wait(self.asynchronous.rollback())


def own_side(connection: Any) -> Any:
    """The connection as its owner uses it: the asynchronous one, if there is one."""
    return connection.asynchronous if isinstance(connection, Awaited) else connection


class _AwaitedDriver(Loan):
    """A connection of a driver for asyncio."""

    def __init__(self, lent: OnLoop) -> None:
        super().__init__(lent.connection)
        self._lent = lent

    def begun(self) -> Any:
        return None

    def join(self) -> Awaited:
        return Awaited(self._lent)

    def commit(self) -> None:
        self._lent.wait(self._connection.commit())

    def rollback(self) -> None:
        self._lent.wait(self._connection.rollback())


class _AwaitedAlchemy(Loan):
    """SQLAlchemy's AsyncSession or AsyncConnection: the loan of its synchronous side, awaited.

    Statements are run on the driver's connection: SQLAlchemy's own can't leave its loop.
    """

    def __init__(self, lent: OnLoop, inner: Loan) -> None:
        super().__init__(lent.connection)
        self._lent = lent
        self._inner = inner

    def begun(self) -> Any:
        return None

    def refuse_block(self) -> None:
        self._inner.refuse_block()

    def join(self) -> Awaited:
        try:
            driver = self._wait(self._inner.join)
        finally:
            self.began = self._inner.began
        return Awaited(OnLoop(driver, self._lent.loop))

    def ended(self) -> bool:
        return self._inner.ended()

    def flush(self) -> None:
        self._wait(self._inner.flush)

    def commit(self) -> None:
        self._wait(self._inner.commit)

    def rollback(self) -> None:
        self._wait(self._inner.rollback)

    def _wait(self, work: Callable[[], Any]) -> Any:
        return self._lent.wait(self._connection.run_sync(lambda _: work()))
