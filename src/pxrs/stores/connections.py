"""Connections that callers lend: a driver's own, or SQLAlchemy's sessions and connections.

Two levels are easily taken for one. SQLAlchemy "begins" when a session is first used, which sends
nothing to the database; drivers begin by themselves at the first statement, or at the first one
that writes. So a store asks the driver whether the database is in a transaction, and ends that
transaction through whoever the caller uses: a session whose commit happens behind its back would
go on with a state that is not there any more.

SQLAlchemy is never imported here: whoever lends one of its objects has done that.
"""

from __future__ import annotations

import sqlite3
import sys
from typing import Any, Protocol

from pxrs.errors import InvalidRequest, NotAtomic
from pxrs.stores.on_loop import AwaitedAlchemy, AwaitedDriver, OnLoop


class Loan(Protocol):
    """A caller's connection for the length of one block."""

    @property
    def began(self) -> bool:
        """Whether nothing was begun, on the caller's side, before `open`."""
        ...

    @property
    def alchemy(self) -> Any:
        """SQLAlchemy's connection, once it is open; None where the caller uses the driver."""
        ...

    def begun(self) -> Any:
        """The driver's connection, if the caller may have begun something on it; else None."""
        ...

    def open(self) -> Any:
        """The driver's connection, on which the block's statements run."""
        ...

    def ended(self) -> bool:
        """Whether the caller has ended what `open` found or began."""
        ...

    def flush(self) -> None:
        """Send what the caller's side holds back."""
        ...

    def commit(self) -> None:
        """Commit, as the caller would. Raises the driver's errors, not those around them."""
        ...

    def rollback(self) -> None:
        """Roll back, as the caller would."""
        ...


class Lent:
    """A connection that pxrs commits and rolls back, even if its transaction is older."""

    def __init__(self, connection: Any) -> None:
        self.loan = borrow(connection)


def loan_of(connection: Any) -> tuple[Loan | None, bool]:
    """The loan of what a block was given, if it was, and whether pxrs ends what is older."""
    if isinstance(connection, Lent):
        return connection.loan, True
    return (None if connection is None else borrow(connection)), False


def borrow(connection: Any) -> Loan:
    """The loan of a driver's connection, or of SQLAlchemy's Session or Connection.

    Those of asyncio come with their loop. Without it AsyncSession and AsyncConnection lend their
    synchronous side, which can be used only inside their `run_sync`.
    """
    if isinstance(connection, OnLoop):
        side = _sync_side(connection.connection)
        if side is connection.connection:
            return AwaitedDriver(connection)
        return AwaitedAlchemy(connection, borrow(side))
    alchemy = sys.modules.get("sqlalchemy")
    if alchemy is None:
        return _Driver(connection)
    connection = _sync_side(connection)
    orm = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(connection, orm.scoped_session):
        connection = connection()
    if orm is not None and isinstance(connection, orm.Session):
        return _Session(connection, alchemy)
    if isinstance(connection, alchemy.Connection):
        return _Connection(connection, alchemy)
    if isinstance(connection, alchemy.PoolProxiedConnection):
        return _Driver(connection.driver_connection)
    return _Driver(connection)


def is_writing(connection: Any) -> bool:
    """Whether the caller is inside a transaction of SQLite's, which has one writer.

    Whoever waits for that writer in the caller's own thread waits for ever.
    """
    driver = borrow(connection).begun()
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


class _Driver:
    """A connection of the driver itself."""

    began = False
    alchemy = None

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def begun(self) -> Any:
        return self._connection

    def open(self) -> Any:
        return self._connection

    def ended(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class _Connection:
    """SQLAlchemy's Connection."""

    def __init__(self, connection: Any, alchemy: Any) -> None:
        self._connection = connection
        self._alchemy = alchemy
        self._transaction: Any = None
        self.began = False

    @property
    def alchemy(self) -> Any:
        return self._connection

    def begun(self) -> Any:
        if not self._connection.in_transaction():
            return None
        return self._connection.connection.dbapi_connection

    def open(self) -> Any:
        _refuse_block(self._connection)
        self.began = not self._connection.in_transaction()
        # Otherwise its commit() would find nothing to commit, and do nothing.
        self._transaction = (
            self._connection.begin() if self.began else self._connection.get_transaction()
        )
        return self._connection.connection.driver_connection

    def ended(self) -> bool:
        return self._connection.get_transaction() is not self._transaction

    def flush(self) -> None:
        pass

    def commit(self) -> None:
        try:
            self._connection.commit()
        except self._alchemy.exc.DBAPIError as error:
            raise _drivers_own(error) from error

    def rollback(self) -> None:
        self._connection.rollback()


class _Session:
    """SQLAlchemy's Session."""

    def __init__(self, session: Any, alchemy: Any) -> None:
        self._session = session
        self._alchemy = alchemy
        self._transaction: Any = None
        self._connection: Any = None
        self.began = False

    @property
    def alchemy(self) -> Any:
        return self._connection

    def begun(self) -> Any:
        if not self._session.in_transaction():
            return None
        return self._session.connection().connection.dbapi_connection

    def open(self) -> Any:
        _refuse_block(self._session)
        self.began = not self._session.in_transaction()
        try:
            self._connection = self._session.connection()
        except self._alchemy.exc.UnboundExecutionError as error:
            raise NotAtomic(
                f"the session does not say which database it is for: {error}"
            ) from error
        self._transaction = self._session.get_transaction()
        return self._connection.connection.driver_connection

    def ended(self) -> bool:
        return self._session.get_transaction() is not self._transaction

    def flush(self) -> None:
        self._session.flush()

    def commit(self) -> None:
        try:
            self._session.commit()
        except self._alchemy.exc.DBAPIError as error:
            raise _drivers_own(error) from error
        if not self._connection.closed and self._connection.in_transaction():
            # Bound to a connection whose transaction somebody else began: as in many test suites.
            self._connection.rollback()
            raise NotAtomic(
                "the session can't commit: it is bound to a connection that was in a transaction "
                "already. All of it was rolled back; bind the session to an engine"
            )

    def rollback(self) -> None:
        try:
            self._session.rollback()
        except self._alchemy.exc.InvalidRequestError:
            # Left halfway through its commit, by something that it calls then.
            self._session.close()


def _refuse_block(subject: Any) -> None:
    """Committing inside of somebody's `with begin()` would leave the rest of it without one."""
    if subject.in_nested_transaction() or getattr(subject, "_trans_context_manager", None):
        raise InvalidRequest(
            f"this {type(subject).__name__} is inside a begin() block, which commits by itself; "
            "a transaction of pxrs begins and commits too: use it without that block"
        )


def _drivers_own(error: Any) -> BaseException:
    own = error.orig
    return own if isinstance(own, BaseException) else error
