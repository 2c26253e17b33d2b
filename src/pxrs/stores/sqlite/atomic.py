"""One SQLite transaction across the coordination store, the log and the caller's own tables."""

from __future__ import annotations

import os
import sqlite3
from types import TracebackType

from pxrs.errors import CommitConflict, InvalidRequest, NotAtomic, PxrsError
from pxrs.log.sqlite import SqliteLog
from pxrs.stores.api import validate_batch, validate_commit
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.stores.sqlite.failures import translate
from pxrs.types import Append, Appended, Batch, Check, Conflict, LogPartition, Write


class SqliteAtomic:
    """See `pxrs.stores.api.Atomic`.

    Three ways to run: on pxrs' own connection; on the caller's, which pxrs begins and commits;
    or inside a transaction that the caller began and will commit. Then no bell can be rung
    after the commit, and other processes notice within a quarter of a second.
    """

    def __init__(
        self,
        database: Database,
        coord: SqliteCoord,
        log: SqliteLog,
        connection: sqlite3.Connection | None,
    ) -> None:
        self._database = database
        self._coord = coord
        self._log = log
        self._given = connection
        self._joined = False
        self._turn: Turn | None = None
        self._checks: list[Check] = []
        self._writes: list[Write] = []
        self._appends: list[Append] = []
        self.versions: dict[str, int] = {}
        self.appended: list[Appended] = []

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

    def __enter__(self) -> SqliteAtomic:
        if self._given is not None:
            self._refuse_other_file(self._given)
            self._joined = self._given.in_transaction
        if self._joined and self._given is not None:
            self._turn = Turn(self._given)
        else:
            self._turn = self._database.begin(self._given)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        turn, self._turn = self._running(), None
        if self._joined:
            if error is None:
                self._apply_in_savepoint(turn)
            return
        if error is not None:
            self._database.rollback(turn)
            return
        try:
            self._apply(turn)
        except BaseException:
            self._database.rollback(turn)
            raise
        self._database.commit(turn)

    def _running(self) -> Turn:
        if self._turn is None:
            raise InvalidRequest("use atomic() as a context manager, and only inside its block")
        return self._turn

    def _apply(self, turn: Turn) -> None:
        validate_commit(self._checks, self._writes, self._coord.limits)
        try:
            outcome = self._coord.apply(turn, self._checks, self._writes)
            if isinstance(outcome, Conflict):
                raise CommitConflict(outcome.current)
            self.versions = dict(outcome.versions)
            for result in self._log.apply(turn, self._appends) if self._appends else ():
                if isinstance(result, PxrsError):
                    raise result
                self.appended.append(result)
        except sqlite3.Error as error:
            raise translate(error, self._database.path) from error

    def _apply_in_savepoint(self, turn: Turn) -> None:
        turn.connection.execute("SAVEPOINT pxrs")
        try:
            self._apply(turn)
        except BaseException:
            turn.connection.execute("ROLLBACK TO pxrs")
            raise
        finally:
            turn.connection.execute("RELEASE pxrs")

    def _refuse_other_file(self, connection: sqlite3.Connection) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise NotAtomic(
                f"this store commits on sqlite3 connections, not on {type(connection).__name__}"
            )
        for _, name, path in connection.execute("PRAGMA database_list").fetchall():
            if name == "main" and path and os.path.samefile(path, self._database.path):
                return
        raise NotAtomic(f"the connection is not one to {self._database.path}")
