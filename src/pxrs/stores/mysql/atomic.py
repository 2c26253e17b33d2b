"""One transaction across coordination, queues and the caller's own tables."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, exc

from pxrs.errors import (
    CommitConflict,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.block import Block, commit_as_caller, ended_inside, new_mark
from pxrs.stores.connections import Loan, loan_of, no_transaction
from pxrs.stores.mysql.coord import Commit, SqlCoord, validate
from pxrs.stores.mysql.database import Raced
from pxrs.stores.mysql.queues.changes import Applied, Change
from pxrs.stores.mysql.queues.store import SqlQueues
from pxrs.types import Batch, Conflict, LogPartition

# Which server, and which database of it, whatever name it was reached by.
_WHERE = {
    "mysql": "SELECT @@hostname, @@port, @@datadir, DATABASE()",
    "oracle": "SELECT SYS_CONTEXT('USERENV', 'DB_UNIQUE_NAME'), "
    "SYS_CONTEXT('USERENV', 'CURRENT_SCHEMA') FROM DUAL",
}

# A flag of every answer: SERVER_STATUS_IN_TRANS.
_IN_TRANSACTION = 1
_OR_THE_SERVER = (
    "DDL ends a transaction, too, and the server itself ends that of a deadlock's victim: let such "
    "an error (1213) leave the block"
)


class PlainConnection:
    """SQLAlchemy's connection, which takes plain text for a statement, too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement: text as the driver takes it, or one of SQLAlchemy's own."""
        if isinstance(statement, str):
            return self._connection.exec_driver_sql(statement, parameters or None)
        return self._connection.execute(statement, parameters or None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class SqlAtomic(Block[Connection]):
    """See `pxrs.stores.api.Atomic`.

    Three ways to run: on pxrs' own connection; on one that comes as `Lent`, which pxrs commits,
    with what its caller had begun before: a Session or a Connection of SQLAlchemy; or inside a
    transaction that the caller will end: on those, or on a connection of PyMySQL.

    What was collected is applied last, so no row of pxrs is locked while the caller works.
    Messages are kept elsewhere, and can't be part of it.
    """

    def __init__(self, coord: SqlCoord, queues: SqlQueues, connection: Any) -> None:
        super().__init__(coord.limits, queues.limits)
        self._coord = coord
        self._database = coord.database
        self._queues = queues
        self._loan, self._lent = loan_of(connection)
        # Whether the transaction was begun outside.
        self._is_older = False
        self._mark = ""
        # Whether plain reads show what was there when the caller's transaction began.
        self._has_snapshot = False
        self._transaction: Any = None
        self._held = ExitStack()

    @property
    def joined(self) -> bool:
        return self._loan is not None and not self._lent

    @property
    def connection(self) -> PlainConnection:
        connection = self._running()
        if not self._mark:
            self._set_mark(connection)
        return PlainConnection(connection)

    def lost(self, error: BaseException) -> PxrsError | None:
        if not isinstance(error, exc.SQLAlchemyError):
            return None
        if self._running().invalidated:
            return StoreUnavailable(f"{self._database.place}: the connection was lost: {error}")
        translated = self._database.translated(error)
        return translated if isinstance(translated, StoreUnavailable) else None

    def append(self, where: LogPartition, batch: Batch) -> None:
        raise NotAtomic(
            f"{self._database.place} keeps no messages, so none can be sent in its transactions; "
            "put an item into a queue, or send after the commit"
        )

    def __enter__(self) -> SqlAtomic:
        self._require_new()
        if self._loan is None:
            connection = self._held.enter_context(self._database.lasting())
            self._transaction = connection.begin()
        else:
            connection = self._lend(self._loan)
        self._enter(connection)
        return self

    def _lend(self, loan: Loan) -> Connection:
        try:
            driver = loan.open() if self._lent else loan.join()
            connection = loan.alchemy or self._around(driver)
            self._refuse_other_database(connection)
            if self.joined and _commits_each_statement(connection):
                raise no_transaction("with connection.begin()")
            self._is_older = self.joined or _has_begun(connection, loan)
            self._has_snapshot = connection.get_isolation_level() != "READ COMMITTED"
            self._set_mark(connection)
        except BaseException as error:
            self._held.close()
            if loan.began:
                loan.rollback()
            if isinstance(error, exc.DBAPIError):
                raise self._database.translated(error) from error
            raise
        self._transaction = connection.get_transaction()
        return connection

    def _around(self, driver: Any) -> Connection:
        """SQLAlchemy's connection around one of the driver, for statements of ours."""
        if not self.joined or not self._database.is_drivers(driver):
            raise NotAtomic(
                "this store commits on SQLAlchemy's sessions and connections, and joins those and "
                f"PyMySQL's connections, not {type(driver).__name__}"
            )
        return self._held.enter_context(self._database.around(driver))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_over(error):
            return
        connection = self._running()
        try:
            if error is None:
                self._finish(connection)
            else:
                self._undo(connection)
        except BaseException:
            self._undo(connection)
            raise
        finally:
            try:
                self._held.close()
            finally:
                self._leave()

    def _finish(self, connection: Connection) -> None:
        if self._loan is not None and self._lent:
            self._loan.flush()
        self._refuse_ended(connection)
        validate(self._checks, self._writes)
        try:
            apply = self._apply_in_savepoint if self._is_older else self._apply
            versions, applied = apply(connection)
        except (Raced, exc.IntegrityError) as error:
            raise TransactionConflict(f"somebody else made the same just now: {error}") from error
        except exc.DBAPIError as error:
            raise self._database.translated(error) from error
        if not self.joined:
            self._commit()
            self._coord.changes.ring([write.key for write in self._writes])
            if self._change is not None and applied is not None:
                self._queues.committed(self._change, applied)
        self.versions = versions
        self.queued = [] if applied is None else applied.numbers

    def _apply(self, connection: Connection) -> tuple[dict[str, int], Applied | None]:
        """Locks in order: the holder's session, records, the revision, queues, items."""
        changing, latest = None, self._has_snapshot
        if self._change is not None:
            changing = Change(connection, self._change, latest=latest)
            changing.require()
        versions: dict[str, int] = {}
        if self._checks or self._writes:
            outcome = Commit(connection, self._checks, self._writes, latest=latest).run()
            if isinstance(outcome, Conflict):
                raise CommitConflict(outcome.current)
            versions = dict(outcome.versions)
        return versions, None if changing is None else changing.run()

    def _apply_in_savepoint(self, connection: Connection) -> tuple[dict[str, int], Applied | None]:
        savepoint = connection.begin_nested()
        try:
            result = self._apply(connection)
            savepoint.commit()
        except BaseException:
            # After a deadlock the database has rolled back the whole transaction, and that with it.
            with suppress(exc.SQLAlchemyError):
                savepoint.rollback()
            raise
        return result

    def _commit(self) -> None:
        try:
            if self._loan is not None:
                commit_as_caller(self._loan.commit)
            else:
                self._transaction.commit()
        except (exc.DBAPIError, self._database.driver_error) as error:
            translated = self._database.translated(error)
            if isinstance(translated, StoreUnavailable):
                raise OutcomeUnknown(f"no answer to a commit: {translated}") from error
            raise translated from error

    def _undo(self, connection: Connection) -> None:
        """Roll back what pxrs is to end; a transaction of the caller's is left to the caller."""
        with suppress(exc.SQLAlchemyError):
            if self._loan is None:
                connection.rollback()
            elif self._lent:
                self._loan.rollback()

    def _refuse_ended(self, connection: Connection) -> None:
        self._database.check_open()
        ended = connection.closed or connection.get_transaction() is not self._transaction
        if ended or (self._loan is not None and self._loan.ended()):
            raise ended_inside()
        if self._mark and _has_savepoints(connection):
            try:
                connection.exec_driver_sql(f"RELEASE SAVEPOINT {self._mark}")
            except exc.DBAPIError as error:
                translated = self._database.translated(error)
                if isinstance(translated, StoreUnavailable):
                    raise translated from error
                raise ended_inside(_OR_THE_SERVER) from error

    def _set_mark(self, connection: Connection) -> None:
        self._mark = new_mark()
        if _has_savepoints(connection):
            try:
                connection.exec_driver_sql(f"SAVEPOINT {self._mark}")
            except exc.DBAPIError as error:
                raise self._database.translated(error) from error

    def _refuse_other_database(self, connection: Connection) -> None:
        dialect = connection.dialect.name
        query = _WHERE.get("mysql" if dialect == "mariadb" else dialect)
        own = self._database.read(sqlalchemy.text(query)) if query else ()
        there = connection.exec_driver_sql(query).all() if query else None
        if there is None or [tuple(row) for row in own] != [tuple(row) for row in there]:
            raise NotAtomic(f"the connection is not one to {self._database.place}")


def _has_savepoints(connection: Connection) -> bool:
    """Whether a savepoint that is gone can be told from one that is there; not on Oracle."""
    return connection.dialect.name in ("mysql", "mariadb")


def _commits_each_statement(connection: Connection) -> bool:
    """Whether nothing is begun by what is sent next."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))
    if not connection.exec_driver_sql("SELECT @@autocommit").scalar():
        return False
    if getattr(connection.dialect, "is_mariadb", False):
        return not connection.exec_driver_sql("SELECT @@in_transaction").scalar()
    # MySQL tells it with every answer.
    status = getattr(connection.connection.dbapi_connection, "server_status", 0)
    return not status & _IN_TRANSACTION


def _has_begun(connection: Connection, loan: Loan) -> bool:
    """Whether the caller has done something in its transaction. Only MariaDB can be asked."""
    if loan.began or not getattr(connection.dialect, "is_mariadb", False):
        return not loan.began
    return bool(connection.exec_driver_sql("SELECT @@in_transaction").scalar())
