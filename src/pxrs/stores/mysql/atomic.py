"""One transaction across coordination, queues and the caller's own tables.

Callers work through SQLAlchemy: on a session or connection of their own, or on one of pxrs. pxrs
sends its own statements through the same connection, so that SQLAlchemy notices when it is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import pymysql
import sqlalchemy
from pymysql.cursors import Cursor
from sqlalchemy import StaticPool, exc

from pxrs.errors import (
    CommitConflict,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    StoreError,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.block import LentBlock, commit_as_caller
from pxrs.stores.connections import Loan, borrow, no_transaction
from pxrs.stores.mysql.connection import Connection
from pxrs.stores.mysql.coord import SqlCoord, commit, validate
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.failures import Raced, translated
from pxrs.stores.mysql.queues.changes import Applied, Change
from pxrs.stores.mysql.queues.store import SqlQueues
from pxrs.stores.wakeups import KEY
from pxrs.types import Batch, Conflict, LogPartition

# Identifies the server and the database, whatever name they were reached by.
_WHERE = "SELECT @@hostname, @@port, @@datadir, DATABASE()"
_WHERE_ON_ORACLE = """SELECT SYS_CONTEXT('USERENV', 'DB_UNIQUE_NAME'),
    SYS_CONTEXT('USERENV', 'CURRENT_SCHEMA') FROM DUAL"""
# Whether each statement is committed by itself, whether a transaction has begun, its isolation.
_STATE_ON_MARIADB = "SELECT @@autocommit, @@in_transaction, @@tx_isolation"
_STATE_ON_MYSQL = "SELECT @@autocommit, NULL, @@transaction_isolation"
# A flag in every answer of the server: SERVER_STATUS_IN_TRANS.
_IN_TRANSACTION = 1
_OR_THE_SERVER = (
    "DDL ends a transaction, too, and the server itself ends that of a deadlock's victim: let such "
    "an error (1213) leave the block"
)


class Alchemy:
    """Makes SQLAlchemy's connections around the driver's. It pools none."""

    def __init__(self, database: Database) -> None:
        self._database = database
        name = "oracle+oracledb" if database.is_oracle else "mysql+pymysql"
        self._engine = sqlalchemy.create_engine(f"{name}://", creator=self._refuse_another)
        with self.lend() as connection:
            self._engine.dialect.initialize(connection)

    def _refuse_another(self) -> Any:
        # If one is lost, SQLAlchemy would go on with a new one, outside of the transaction.
        raise StoreUnavailable(f"{self._database.place}: the connection of this block was lost")

    @contextmanager
    def lend(self) -> Iterator[sqlalchemy.Connection]:
        """A connection of pxrs for one block. A transaction left open by the block is undone."""
        with self._database.for_block() as ours, self.around(ours.driver) as connection, connection:
            yield connection

    @contextmanager
    def around(self, driver: Any) -> Iterator[sqlalchemy.Connection]:
        """A SQLAlchemy connection around one of the caller's, which is neither ended nor closed.

        Closing the SQLAlchemy connection would roll back; so its pool entry is given back instead.
        """
        pool = StaticPool(lambda: _PlainCursors(driver), reset_on_return=None)
        proxied = pool.connect()
        try:
            yield sqlalchemy.Connection(self._engine, proxied)
        finally:
            proxied.close()


class _PlainCursors:
    """A connection of PyMySQL whose rows are tuples, whatever cursor class its owner has set."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def cursor(self) -> Any:
        return self._driver.cursor(Cursor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class _BlockConnection(Connection):
    """Runs statements of pxrs on SQLAlchemy's connection."""

    def _cursor(self) -> AbstractContextManager[Any]:
        return _AlchemyCursor(self.driver)


class _AlchemyCursor:
    """A cursor for `Connection` that runs statements through SQLAlchemy."""

    def __init__(self, alchemy: sqlalchemy.Connection) -> None:
        self._alchemy = alchemy
        self._result: Any = None
        self.description: Sequence[Any] = ()

    def execute(self, text: str, values: Sequence[Any]) -> None:
        self._result = self._alchemy.exec_driver_sql(text, tuple(values))
        if self._result.returns_rows:
            self.description = self._result.cursor.description

    def executemany(self, text: str, rows: Sequence[Sequence[Any]]) -> None:
        self._alchemy.exec_driver_sql(text, [tuple(row) for row in rows])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def __enter__(self) -> _AlchemyCursor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._result is not None:
            self._result.close()


class PlainConnection:
    """SQLAlchemy's connection, which takes plain text for a statement, too."""

    def __init__(self, connection: sqlalchemy.Connection) -> None:
        self._connection = connection

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement: text as the driver takes it, or one of SQLAlchemy's own."""
        if isinstance(statement, str):
            return self._connection.exec_driver_sql(statement, parameters or None)
        return self._connection.execute(statement, parameters or None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class SqlAtomic(LentBlock[sqlalchemy.Connection]):
    """See `pxrs.stores.api.Atomic`.

    A Session or a Connection of SQLAlchemy can be lent; those, or a connection of PyMySQL, joined.

    The collected changes are applied last, so no row of pxrs is locked while the caller works.
    Messages are kept elsewhere, and can't be part of it.
    """

    def __init__(
        self, coord: SqlCoord, queues: SqlQueues, alchemy: Alchemy, connection: Any
    ) -> None:
        super().__init__(coord.limits, queues.limits, connection)
        self._coord = coord
        self._database = coord.database
        self._queues = queues
        self._alchemy = alchemy
        # Whether plain reads show the state at the beginning of the caller's transaction.
        self._has_snapshot = False
        self._transaction: Any = None
        self._held = ExitStack()
        self._applied: Applied | None = None

    @property
    def connection(self) -> PlainConnection:
        connection = self._running()
        self._set_mark(connection)
        return PlainConnection(connection)

    def lost(self, error: BaseException) -> PxrsError | None:
        if not isinstance(error, exc.SQLAlchemyError):
            return None
        if self._running().invalidated:
            return StoreUnavailable(f"{self._database.place}: the connection was lost: {error}")
        found = translated(error, self._database.place)
        return found if isinstance(found, StoreUnavailable) else None

    def append(self, where: LogPartition, batch: Batch) -> None:
        raise NotAtomic(
            f"{self._database.place} keeps no messages, so none can be sent in its transactions; "
            "put an item into a queue, or send after the commit"
        )

    def __enter__(self) -> SqlAtomic:
        self._require_new()
        if self._loan is None:
            connection = self._held.enter_context(self._alchemy.lend())
            self._loan, self._lent = borrow(connection), True
            self._loan.open()
        else:
            connection = self._borrow(self._loan)
        self._transaction = connection.get_transaction()
        self._enter(connection)
        return self

    def _borrow(self, loan: Loan) -> sqlalchemy.Connection:
        try:
            driver = loan.join() if self.joined else loan.open()
            connection = loan.alchemy or self._around(driver)
            self._look_at(connection, loan)
            self._set_mark(connection)
        except BaseException as error:
            self._held.close()
            if loan.began:
                loan.rollback()
            raise (translated(error, self._database.place) or error) from error
        return connection

    def _around(self, driver: Any) -> sqlalchemy.Connection:
        """SQLAlchemy's connection around one of the driver, for statements of pxrs."""
        if not self.joined or not isinstance(driver, pymysql.Connection):
            raise NotAtomic(
                "this store commits on SQLAlchemy's sessions and connections, and joins those and "
                f"PyMySQL's connections, not {type(driver).__name__}"
            )
        return self._held.enter_context(self._alchemy.around(driver))

    def _look_at(self, connection: sqlalchemy.Connection, loan: Loan) -> None:
        """Find out the state of the caller's transaction; raise if it is in another database."""
        database, ours = self._database, self._on(connection)
        where = _WHERE_ON_ORACLE if database.is_oracle else _WHERE
        names = ("oracle",) if database.is_oracle else ("mysql", "mariadb")
        if connection.dialect.name not in names or ours.rows(where) != database.read(where):
            raise NotAtomic(f"the connection is not one to {database.place}")
        driver = connection.connection.dbapi_connection
        if database.is_oracle:
            autocommits, begun, level = getattr(driver, "autocommit", False), None, None
        else:
            state = _STATE_ON_MARIADB if database.is_mariadb else _STATE_ON_MYSQL
            ((autocommits, begun, level),) = ours.rows(state)
            self._has_snapshot = level != "READ-COMMITTED"
        # MySQL reports with every answer whether a transaction has begun.
        is_begun = getattr(driver, "server_status", 0) & _IN_TRANSACTION if begun is None else begun
        if self.joined and autocommits and not is_begun:
            raise no_transaction("with connection.begin()")
        self._is_older = self.joined or (not loan.began and (begun is None or bool(begun)))

    def _let_go(self, connection: sqlalchemy.Connection, error: BaseException | None) -> None:
        try:
            if error is not None and not self.joined:
                with suppress(exc.SQLAlchemyError):
                    self._given().rollback()
        finally:
            self._held.close()

    def _refuse_ended(self, connection: sqlalchemy.Connection) -> None:
        self._database.check_open()
        is_there = not connection.closed and connection.get_transaction() is self._transaction
        self._require_unended(is_there)
        if self._mark:
            try:
                self._run(connection, f"RELEASE SAVEPOINT {self._mark}")
            except StoreUnavailable:
                raise
            except StoreError:
                self._require_unended(False, _OR_THE_SERVER)

    def _validate(self) -> None:
        validate(self._checks, self._writes)

    def _apply(self, connection: sqlalchemy.Connection) -> None:
        """Apply it all. Locks in order: the holder's session, records, revision, queues, items."""
        ours, changing, latest = self._on(connection), None, self._has_snapshot
        try:
            if self._change is not None:
                changing = Change(ours, self._change, latest=latest)
                changing.require()
            if self._checks or self._writes:
                outcome = commit(ours, self._checks, self._writes, latest=latest)
                if isinstance(outcome, Conflict):
                    raise CommitConflict(outcome.current)
                self.versions = dict(outcome.versions)
            if changing is not None:
                self._applied = changing.run()
                self.queued = self._applied.numbers
        except Raced as error:
            raise TransactionConflict(
                f"another process created the same record or queue just now: {error}"
            ) from error

    def _run(self, connection: sqlalchemy.Connection, statement: str) -> None:
        # Oracle can't release savepoints, so a lost one can't be distinguished from a present one.
        if not (self._database.is_oracle and statement.startswith("RELEASE")):
            self._on(connection).run(statement)

    def _commit(self, connection: sqlalchemy.Connection) -> None:
        try:
            commit_as_caller(self._given().commit)
        except Exception as error:
            found = translated(error, self._database.place)
            if isinstance(found, StoreUnavailable):
                raise OutcomeUnknown(f"no answer to a commit: {found}") from error
            raise (found or error) from error

    def _committed(self) -> None:
        self._coord.changes.ring(KEY, [write.key for write in self._writes])
        if self._change is not None and self._applied is not None:
            self._queues.committed(self._change, self._applied)

    def _on(self, connection: sqlalchemy.Connection) -> Connection:
        database = self._database
        return _BlockConnection(connection, database.place, database.dialect, database.refuse_large)

    def _given(self) -> Loan:
        assert self._loan is not None
        return self._loan
