"""One SQLite transaction across the coordination store, the log and the caller's own tables."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pxrs.errors import CommitConflict, NotAtomic, PxrsError
from pxrs.stores.block import LentBlock, commit_as_caller
from pxrs.stores.connections import Loan, no_transaction
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.failures import DRIVER_ERRORS, is_old_snapshot, translate
from pxrs.stores.sqlite.log import SqliteLog
from pxrs.stores.sqlite.queues.store import SqliteQueues
from pxrs.types import Conflict

# sqlite3.LEGACY_TRANSACTION_CONTROL, which Python 3.11 does not name.
_AS_EVER = -1


class SqliteAtomic(LentBlock[Turn]):
    """See `pxrs.stores.api.Atomic`.

    Where the caller commits, pxrs does not wake other processes: they notice the commit within a
    quarter of a second. A caller that ends the transaction inside the block gets an error, and
    nothing of what the block collected is applied: it would not be atomic any more.
    """

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        log: SqliteLog,
        queues: SqliteQueues,
        connection: Any,
    ) -> None:
        super().__init__(coord.limits, queues.limits, connection)
        self._database = database
        self._coord = coord
        self._log = log
        self._queues = queues
        # Ends what the database notes of a transaction that the caller began.
        self._part: Callable[[], object] | None = None

    @property
    def is_exclusive(self) -> bool:
        """False inside a transaction of the caller's, which may not have the writer yet."""
        return not self._is_older

    @property
    def connection(self) -> sqlite3.Connection:
        turn = self._running()
        self._set_mark(turn)
        return turn.connection

    def __enter__(self) -> SqliteAtomic:
        self._require_new()
        if self._loan is None:
            self._enter(self._database.begin())
        else:
            try:
                self._enter(self._begin_on(self._loan))
            except BaseException as error:
                if self._part is not None:
                    self._part()
                if self._loan.began:
                    self._loan.rollback()
                if isinstance(error, sqlite3.Error):
                    raise translate(error, self._database.path) from error
                raise
        return self

    def _begin_on(self, loan: Loan) -> Turn:
        turn = self._begin_lent(loan) if self._lent else self._join(loan)
        self._set_mark(turn)
        return turn

    def _join(self, loan: Loan) -> Turn:
        connection = loan.join()
        self._refuse_other_file(connection)
        self._part = self._database.join(self)
        self._is_older = True
        if not connection.in_transaction:
            _begin_as_the_driver_would(connection)
        return Turn(connection)

    def _begin_lent(self, loan: Loan) -> Turn:
        connection = loan.open()
        self._refuse_other_file(connection)
        if loan.began and connection.in_transaction and _begins_when_told(connection):
            # Nothing has happened in it yet. pxrs' own transaction takes its turn among writers.
            connection.execute("ROLLBACK")
        if not connection.in_transaction:
            return self._database.begin(connection)
        self._part = self._database.join(self)
        self._is_older = True
        return Turn(connection)

    def _end(self, turn: Turn, error: BaseException | None) -> None:
        try:
            super()._end(turn, error)
        except BaseException as failure:
            error = failure
            raise
        finally:
            # A caller's own statement on an old snapshot is as much a conflict as one of pxrs.
            own = getattr(error, "orig", error)
            if isinstance(own, sqlite3.Error) and is_old_snapshot(own):
                raise translate(own, self._database.path) from error

    def _let_go(self, turn: Turn, error: BaseException | None) -> None:
        try:
            # A connection that the caller has closed has nothing left to roll back.
            with suppress(sqlite3.Error):
                if error is not None and self._lent and self._loan is not None:
                    self._loan.rollback()
                elif error is not None and self._is_older:
                    self._is_marked(turn.connection)
        finally:
            if self._part is not None:
                self._part()
            else:
                self._database.rollback(turn)

    def _refuse_ended(self, turn: Turn) -> None:
        self._database.check_open()
        is_there = self._is_marked(turn.connection)
        self._require_unended(is_there, "executescript() and `with connection` do it, too")

    def _run(self, turn: Turn, statement: str) -> object:
        return turn.connection.execute(statement)

    def _commit(self, turn: Turn) -> None:
        ending = None if self._loan is None else partial(commit_as_caller, self._loan.commit)
        self._database.commit(turn, ending)

    def _committed(self) -> None:
        """Do nothing: the commit has raised the change counters."""

    def _is_marked(self, connection: sqlite3.Connection) -> bool:
        """Whether it is the transaction that the block began with. Call once: it drops the mark."""
        try:
            if self._mark and connection.in_transaction:
                connection.execute(f"RELEASE {self._mark}")
            return connection.in_transaction
        except sqlite3.Error:
            # The savepoint no longer exists, or the caller has closed the connection.
            return False

    def _apply(self, turn: Turn) -> None:
        try:
            with _plain_rows(turn.connection):
                outcome = self._coord.apply(turn, self._checks, self._writes)
                if isinstance(outcome, Conflict):
                    raise CommitConflict(outcome.current)
                self.versions = dict(outcome.versions)
                if self._change is not None:
                    self.queued = self._queues.apply_in(turn, self._change)
                for result in self._log.apply(turn, self._appends) if self._appends else ():
                    if isinstance(result, PxrsError):
                        raise result
                    self.appended.append(result)
        except DRIVER_ERRORS as error:
            raise translate(error, self._database.path) from error

    def _refuse_other_file(self, connection: Any) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise NotAtomic(
                "this store commits on sqlite3 connections, and SQLAlchemy sessions over them, "
                f"not on {type(connection).__name__}"
            )
        try:
            with _plain_rows(connection):
                attached = connection.execute("PRAGMA database_list").fetchall()
        except sqlite3.Error as error:
            raise NotAtomic(f"the connection can't be used here: {error}") from error
        for _, name, path in attached:
            if name == "main" and path and _is_same_file(path, self._database.path):
                return
        raise NotAtomic(f"the connection is not one to {self._database.path}")


def _begin_as_the_driver_would(connection: sqlite3.Connection) -> None:
    """Begin as the driver would before a statement that writes.

    Where the driver would begin nothing, only the caller can: raises `InvalidRequest`.
    """
    if (
        getattr(connection, "autocommit", _AS_EVER) != _AS_EVER
        or connection.isolation_level is None
    ):
        raise no_transaction("BEGIN")
    connection.execute(f"BEGIN {connection.isolation_level}")


def _begins_when_told(connection: Any) -> bool:
    """False if the driver keeps a transaction open at all times, as with `autocommit=False`."""
    return getattr(connection, "autocommit", None) is not False


@contextmanager
def _plain_rows(connection: sqlite3.Connection) -> Iterator[None]:
    """Rows are tuples and text inside, whichever row factory the caller has set."""
    rows, text = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield
    finally:
        connection.row_factory, connection.text_factory = rows, text


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False
