"""One PostgreSQL transaction across the coordination store, the log and the caller's own tables."""

from __future__ import annotations

import secrets
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from pxrs.errors import (
    CommitConflict,
    InvalidRequest,
    NotAtomic,
    PxrsError,
)
from pxrs.stores.block import LentBlock, commit_as_caller, savepoint
from pxrs.stores.connections import Loan, no_transaction, own_side
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.coord import PostgresCoord
from pxrs.stores.postgres.database import BEGIN, Database, Pg, is_idle, run
from pxrs.stores.postgres.failures import (
    DRIVER_ERRORS,
    lost_answer,
    translate,
    translate_commit,
    was_cut,
)
from pxrs.stores.postgres.log import PostgresLog
from pxrs.stores.postgres.notifier import place_of
from pxrs.stores.postgres.queues.store import Applied, PostgresQueues
from pxrs.stores.postgres.sessions import Sessions
from pxrs.stores.wakeups import KEY, PARTITION
from pxrs.types import Conflict

# In seconds, if this process holds no session.
_IDLE = 10.0
# The block's name tells at its end whether it is still the same transaction.
_MARK = "SELECT set_config('pxrs.block', %s, true)"
# A process that freezes must not hold anything for longer than its session. A stricter setting of
# the database stays; so do all settings of a transaction that the caller ends.
_MARK_OURS = """SELECT set_config('pxrs.block', %s, true),
    set_config('idle_in_transaction_session_timeout', coalesce(least(nullif(
        extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval) * 1000,
        0), %s::numeric), %s::numeric)::int::text, true)"""
_STILL_IN_IT = "SELECT current_setting('pxrs.block', true) = %s"


class PostgresAtomic(LentBlock[Pg]):
    """See `pxrs.stores.api.Atomic`.

    Where the caller commits, other processes are not notified: they notice within a second.

    The collected changes are applied last, so no row of pxrs is locked while the caller works.
    """

    def __init__(
        self,
        database: Database,
        coord: PostgresCoord,
        log: PostgresLog,
        queues: PostgresQueues,
        changes: ChangeListener,
        sessions: Sessions,
        connection: Any,
    ) -> None:
        super().__init__(coord.limits, queues.limits, connection)
        self._database = database
        self._coord = coord
        self._log = log
        self._queues = queues
        self._changes = changes
        self._sessions = sessions
        self._block = secrets.token_hex(8)
        self._applied = Applied()

    @property
    def connection(self) -> Pg:
        return self._running()

    def lost(self, error: BaseException) -> PxrsError | None:
        if isinstance(error, psycopg.Error) and was_cut(self._running()):
            return translate(error, self._database.place)
        return None

    def __enter__(self) -> PostgresAtomic:
        self._require_new()
        database = self._database
        connection = database.take_for_block(self) if self._loan is None else self._lend(self._loan)
        try:
            self._begin(connection)
            self._enter(connection)
        except BaseException as error:
            self._let_go(connection, error)
            if isinstance(error, DRIVER_ERRORS):
                raise translate(error, self._database.place) from error
            raise
        return self

    def _lend(self, loan: Loan) -> Pg:
        try:
            connection = loan.open() if self._lent else loan.join()
            self._refuse_other_connection(connection)
            self._refuse_other_database(connection)
        except BaseException:
            if loan.began:
                loan.rollback()
            raise
        return connection  # type: ignore[no-any-return]

    def _begin(self, connection: Pg) -> None:
        self._is_older = self.joined or not is_idle(connection)
        if self.joined:
            run(connection, _MARK, (self._block,))
            return
        if connection.autocommit and not self._is_older:
            connection.execute(BEGIN)
        idle = int(1000 * (self._sessions.shortest_ttl or _IDLE))
        run(connection, _MARK_OURS, (self._block, idle, idle))

    def _end(self, connection: Pg, error: BaseException | None) -> None:
        self._database.origin.refuse_child()
        super()._end(connection, error)

    def _finish(self, connection: Pg) -> None:
        try:
            super()._finish(connection)
        except DRIVER_ERRORS as error:
            raise translate(error, self._database.place) from error

    def _run(self, connection: Pg, statement: str) -> object:
        return run(connection, statement)

    def _committed(self) -> None:
        self._changes.ring(KEY, [write.key for write in self._writes])
        self._changes.ring(PARTITION, {place_of(append.where) for append in self._appends})
        self._queues.committed(self._applied)

    def _apply(self, connection: Pg) -> None:
        outcome = self._coord.apply(connection, self._checks, self._writes)
        if isinstance(outcome, Conflict):
            raise CommitConflict(outcome.current)
        self.versions = dict(outcome.versions)
        if self._change is not None:
            self._applied = self._queues.apply_on(connection, self._change)
            self.queued = self._applied.numbers
        for result in self._log.apply(connection, self._appends):
            if isinstance(result, PxrsError):
                raise result
            self.appended.append(result)

    def _commit(self, connection: Pg) -> None:
        """Commit. If no answer comes, only data in the database can show the outcome.

        The number of the transaction can't: if its commit was never flushed to disk, the server
        gives the same number to another one after a crash.
        """
        try:
            if self._loan is not None:
                commit_as_caller(self._loan.commit)
            else:
                connection.execute("COMMIT")
        except DRIVER_ERRORS as error:
            if was_cut(connection):
                raise lost_answer(error, self._database.place) from error
            raise translate_commit(error, self._database.place) from error

    def _let_go(self, connection: Pg, error: BaseException | None) -> None:
        try:
            with suppress(psycopg.Error):
                if error is not None and self._loan is None and not was_cut(connection):
                    connection.rollback()
                elif error is not None and self._loan is not None and self._lent:
                    self._loan.rollback()
        finally:
            if self._loan is None:
                self._database.give_back_from_block(connection)

    def _refuse_ended(self, connection: Pg) -> None:
        self._database.check_open()
        still = not connection.closed and (
            connection.info.transaction_status == TransactionStatus.INTRANS
        )
        if still:
            ((still,),) = run(connection, _STILL_IN_IT, (self._block,))
        if connection.info.transaction_status == TransactionStatus.INERROR:
            raise InvalidRequest(
                "a statement of the block failed, so PostgreSQL will not commit it; let its error "
                "leave the block, or guard the statement with a savepoint"
            )
        self._require_unended(still)

    def _refuse_other_connection(self, connection: Any) -> None:
        own = own_side(connection)
        if not isinstance(own, psycopg.Connection) and connection is own:
            raise NotAtomic(
                "this store commits on psycopg connections, and SQLAlchemy sessions over them "
                f"(those of asyncio through pxrs.aio), not on {type(own).__name__}"
            )
        if connection is not own and not isinstance(own, psycopg.AsyncConnection):
            raise NotAtomic(
                "this store commits on psycopg's AsyncConnection, and on SQLAlchemy's async "
                f"sessions over it (postgresql+psycopg), not on {type(own).__name__}"
            )
        if connection.closed:
            raise NotAtomic("the connection can't be used here: it is closed")
        if connection.info.transaction_status not in (
            TransactionStatus.IDLE,
            TransactionStatus.INTRANS,
        ):
            raise InvalidRequest("the connection is busy, or its transaction has failed")
        if self.joined and connection.autocommit and is_idle(connection):
            raise no_transaction("with connection.transaction()")

    def _refuse_other_database(self, connection: Any) -> None:
        was_idle = is_idle(connection)
        found = ""
        try:
            with nullcontext() if was_idle else savepoint(partial(run, connection)):
                found = self._database.read_store_id(connection)
        except psycopg.Error as error:
            if was_cut(connection):
                raise translate(error, self._database.place) from error
            raise NotAtomic(
                f"the connection does not see schema {self._database.schema!r}: {error}"
            ) from error
        finally:
            # If this query itself began the transaction, that is empty: nothing is lost with it.
            is_wanted = self.joined and found == self._database.store_id
            if was_idle and not is_wanted and not connection.closed:
                connection.rollback()
        if found != self._database.store_id:
            raise NotAtomic(f"the connection is not one to {self._database.place}")
