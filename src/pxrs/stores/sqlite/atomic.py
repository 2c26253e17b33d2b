"""One SQLite transaction across the coordination store, the log and the caller's own tables."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from pxrs.errors import CommitConflict, InvalidRequest, NotAtomic, PxrsError
from pxrs.log.sqlite import SqliteLog
from pxrs.stores.api import validate_batch, validate_commit
from pxrs.stores.queue_rules import require_first, validate_change
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.failures import DRIVER_ERRORS, translate
from pxrs.stores.sqlite.queues import SqliteQueues
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Check,
    Conflict,
    LogPartition,
    QueueChange,
    Write,
)


class SqliteAtomic:
    """See `pxrs.stores.api.Atomic`.

    Three ways to run: on pxrs' own connection; on the caller's, which pxrs begins and commits;
    or inside a transaction that the caller began and will commit. Then no bell can be rung
    after the commit, and other processes notice within a quarter of a second.

    The caller must not end the transaction inside the block. Who does is told, and nothing of
    what the block collected is applied: it would not be atomic any more.
    """

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        log: SqliteLog,
        queues: SqliteQueues,
        connection: sqlite3.Connection | None,
    ) -> None:
        self._database = database
        self._coord = coord
        self._log = log
        self._queues = queues
        self._given = connection
        self.joined = False
        self._used = False
        self._turn: Turn | None = None
        self._checks: list[Check] = []
        self._writes: list[Write] = []
        self._appends: list[Append] = []
        self._change: QueueChange | None = None
        self.versions: dict[str, int] = {}
        self.appended: list[Appended] = []
        self.queued: list[int | None] = []

    @property
    def connection(self) -> sqlite3.Connection:
        return self._running().connection

    def check(self, *checks: Check) -> None:
        self._running()
        self._checks += checks

    def write(self, *writes: Write) -> None:
        self._running()
        self._writes += writes

    def append(self, where: LogPartition, batch: Batch) -> None:
        self._running()
        if batch.producer_id >= 0:
            raise InvalidRequest("a batch inside a transaction carries no producer id")
        validate_batch(batch)
        self._appends.append(Append(where, batch))

    def queue(self, change: QueueChange) -> None:
        self._running()
        require_first(self._change)
        validate_change(change, self._queues.limits)
        self._change = change

    def __enter__(self) -> SqliteAtomic:
        if self._used:
            raise InvalidRequest("a block of atomic() can be used once; call atomic() again")
        if self._given is not None:
            self._refuse_other_file(self._given)
            self.joined = self._given.in_transaction
        if self.joined and self._given is not None:
            self._database.join()
            self._turn = Turn(self._given)
        else:
            self._turn = self._database.begin(self._given)
        self._used = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        turn, self._turn = self._running(), None
        if self.joined:
            self._database.part()
            if error is None:
                self._refuse_ended(turn)
                self._apply_in_savepoint(turn)
            return
        if error is not None:
            self._database.rollback(turn)
            return
        try:
            self._refuse_ended(turn)
            self._apply(turn)
        except BaseException:
            self._database.rollback(turn)
            raise
        self._database.commit(turn)

    def _running(self) -> Turn:
        if self._turn is None:
            raise InvalidRequest("use atomic() as a context manager, and only inside its block")
        return self._turn

    def _refuse_ended(self, turn: Turn) -> None:
        self._database.check_open()
        try:
            ended = not turn.connection.in_transaction
        except sqlite3.ProgrammingError:
            ended = True
        if ended:
            raise InvalidRequest(
                "the transaction was ended inside the block of atomic(); nothing that the block "
                "collected was applied. Leave COMMIT and ROLLBACK to the block; executescript() "
                "and `with connection` commit too"
            )

    def _apply(self, turn: Turn) -> None:
        validate_commit(self._checks, self._writes, self._coord.limits)
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

    def _apply_in_savepoint(self, turn: Turn) -> None:
        connection = turn.connection
        connection.execute("SAVEPOINT pxrs")
        try:
            self._apply(turn)
        except BaseException:
            # Out of space or memory SQLite ends the whole transaction, savepoints included.
            if connection.in_transaction:
                connection.execute("ROLLBACK TO pxrs")
            raise
        finally:
            if connection.in_transaction:
                connection.execute("RELEASE pxrs")

    def _refuse_other_file(self, connection: sqlite3.Connection) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise NotAtomic(
                f"this store commits on sqlite3 connections, not on {type(connection).__name__}"
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


@contextmanager
def _plain_rows(connection: sqlite3.Connection) -> Iterator[None]:
    """Tuples and text, whatever the caller has its own rows made of."""
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
