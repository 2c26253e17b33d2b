"""One PostgreSQL database: a few connections, and how their errors are handled.

Every read and every commit is one statement in a transaction of its own, so a connection is
borrowed for one round trip and a process that freezes holds no lock. That works through a pooler
in transaction mode as well, where pxrs never sets anything on a connection.

A write whose connection is lost before the answer arrives may have been done: `OutcomeUnknown`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from pxrs.chance import CHANCE
from pxrs.errors import Closed, StoreBusy, StoreUnavailable
from pxrs.forks import Origin
from pxrs.stores.connections import Awaited
from pxrs.stores.identity import SameStore
from pxrs.stores.postgres import schema as schemas
from pxrs.stores.postgres.arrays import teach
from pxrs.stores.postgres.failures import (
    DRIVER_ERRORS,
    is_overtaken,
    is_victim,
    lost_answer,
    read_conninfo,
    translate,
    was_cut,
)

Pg = psycopg.Connection[Any]
Row = tuple[Any, ...]

# How often a commit is tried that the server chose as a victim; the pause between, in seconds,
# grows.
_TRIES = 50
_GIVE_WAY = 0.001
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
# These notice a peer that can't be reached, even if nothing is sent. In seconds, the last one in
# milliseconds.
_DEFAULTS = {
    "application_name": "pxrs",
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}

# Overrides the setting of the role or the database. A function that has waited for a lock looks
# again, and has to see what was committed meanwhile: at REPEATABLE READ it would not.
_SET_ISOLATION = "SELECT set_config('default_transaction_isolation', 'read committed', false)"
_SET_BOTH = f"""{_SET_ISOLATION}, CASE current_setting('synchronous_commit') WHEN 'off'
    THEN set_config('synchronous_commit', 'on', false) END"""
_WHO = "SELECT pg_backend_pid(), current_setting('default_transaction_isolation')"
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


class Database:
    """Connections to one schema of one database. Thread-safe."""

    def __init__(
        self,
        conninfo: str,
        schema: str = schemas.DEFAULT_SCHEMA,
        *,
        connections: int = 8,
        busy_timeout: float = 10.0,
    ) -> None:
        self.schema = schemas.check_schema_name(schema)
        self._statements: dict[str, str] = {}
        wanted = read_conninfo(conninfo)
        self._conninfo = make_conninfo("", **{**_DEFAULTS, **wanted})
        self._options = str(wanted.get("options", ""))
        self.place = _describe(wanted)
        self.busy_timeout = busy_timeout
        # Blocks of callers may take long: they leave one connection for statements, which are
        # short. It renews sessions and extends holds while blocks have all the others.
        self._room = threading.BoundedSemaphore(connections + 1)
        self._room_for_blocks = threading.BoundedSemaphore(connections)
        self._in_blocks: dict[Pg, weakref.finalize[..., Any]] = {}
        self._dropped: deque[Pg] = deque()
        self._idle: deque[Pg] = deque()
        self._all: set[Pg] = set()
        self._lock = threading.Lock()
        self._closed = ""
        self.origin = Origin()
        self.pooled = False
        # Whether transactions begin at another level than READ COMMITTED, unless BEGIN names it.
        # Only behind a pooler: on its own connections pxrs sets the level.
        self._is_told_otherwise = False
        self.store_id = ""
        self.same = SameStore(self.place)
        # The versions of the schema before and after it was opened.
        self.versions = self._open()
        self.origin.on_fork(self._abandon)

    # Opening and closing

    def _open(self) -> tuple[int, int]:
        connection = self.connect()
        with self._dropped_on_failure(connection):
            # When a connection starts, a pooler reports a backend pid that it made up.
            ((backend, isolation),) = run(connection, _WHO)
            self.pooled = backend != connection.info.backend_pid
            if self.pooled:
                connection.prepare_threshold = None
                self._is_told_otherwise = isolation != "read committed"
            else:
                self._set_up(connection)
            version = schemas.found_version(connection, self.schema)
            schemas.refuse_newer(version, self.schema, self.place)
            versions = (version, version)
            if version < schemas.VERSION:
                versions = schemas.migrate(connection, self.schema, self.place)
            self.store_id = self.read_store_id(connection)
            self.same.compare(self.store_id)
        self._idle.append(connection)
        return versions

    def read_store_id(self, connection: Pg) -> str:
        """Read, on this connection, the id that distinguishes this store from any other."""
        found = self.run_inside(connection, "SELECT value FROM @.pxrs_meta WHERE name = 'id'")
        return str(found[0][0]) if found else ""

    def connect(self) -> Pg:
        """Open a connection outside of the pool; the caller must `drop` it."""
        try:
            connection: Pg = psycopg.connect(self._conninfo, autocommit=True)
        except psycopg.Error as error:
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error
        connection.prepare_threshold = None if self.pooled else 2
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        teach(connection)
        # For the first connection it is not known yet whether it leads to a pooler.
        if self.store_id and not self.pooled:
            self._set_up(connection)
            self._compare(connection)
        with self._lock:
            self._all.add(connection)
        return connection

    def _set_up(self, connection: Pg) -> None:
        """Set what pxrs relies on, over the defaults of the role and the database.

        Only what is on the disk is acknowledged, unless the URL says otherwise. Never behind a
        pooler: it would pass the settings on to others.
        """
        is_told = "synchronous_commit" in self._options
        try:
            connection.execute(_SET_ISOLATION if is_told else _SET_BOTH)
        except psycopg.Error as error:
            self.drop(connection)
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error

    def _compare(self, connection: Pg) -> None:
        """A dropped database has ended all connections, so new ones show that it is another."""
        with self._dropped_on_failure(connection):
            self.same.compare(self.read_store_id(connection))

    @contextmanager
    def _dropped_on_failure(self, connection: Pg) -> Iterator[None]:
        try:
            yield
        except DRIVER_ERRORS as error:
            self.drop(connection)
            raise translate(error, self.place) from error
        except BaseException:
            self.drop(connection)
            raise

    def drop(self, connection: Pg) -> None:
        """Close a connection."""
        with self._lock:
            self._all.discard(connection)
        with suppress(psycopg.Error):
            connection.close()

    def _sql(self, statement: str) -> str:
        """The statement with `@.` replaced by the schema. There are few, so all are cached."""
        found = self._statements.get(statement)
        if found is None:
            found = self._statements[statement] = schemas.in_schema(statement, self.schema)
        return found

    def close(self) -> None:
        """Close all connections; those in use are closed when they are given back."""
        if not self._closed:
            self._closed = "the store was closed"
            self.origin.close()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self.drop(self._idle.pop())

    def check_open(self) -> None:
        if self._closed:
            raise Closed(self._closed)
        self.same.require()

    def _abandon(self) -> None:
        """In a forked child: let go of the sockets, and send nothing to the server.

        A child that kept them open would keep the parent's sessions alive beyond its death. Their
        descriptor numbers stay taken: code that still writes to one must not hit a file of the
        child.
        """
        self._closed = self.origin.message
        self._lock = threading.Lock()
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for connection in self._all:
            with suppress(OSError, psycopg.Error):
                os.dup2(nowhere, connection.fileno(), inheritable=False)
            _abandoned.append(connection)
        os.close(nowhere)
        self._idle = deque()

    # Statements: `@.` in them stands for the schema.

    def run_inside(
        self, connection: Pg, statement: str, parameters: Sequence[object] = ()
    ) -> list[Row]:
        """Rows of a statement, inside the connection's transaction, if it is in one."""
        return run(connection, self._sql(statement), parameters)

    def run(self, connection: Pg, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows of a statement that is a transaction of its own, at READ COMMITTED; one round trip.

        The connection must be in no transaction.
        """
        if not self._is_told_otherwise:
            return self.run_inside(connection, statement, parameters)
        try:
            with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                with connection.pipeline():
                    connection.execute(BEGIN)
                    cursor.execute(self._sql(statement).encode(), parameters or None, binary=True)
                    connection.execute("COMMIT")
                return cursor.fetchall() if cursor.description is not None else []
        finally:
            # A statement that failed was not committed, and has left its transaction open.
            if not was_cut(connection) and not is_idle(connection):
                with suppress(psycopg.Error):
                    connection.rollback()

    def read(self, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows of a statement that changes nothing; repeats it once if its connection was dead."""
        for last in (False, True):
            with self._borrowed() as connection:
                try:
                    return self.run(connection, statement, parameters)
                except DRIVER_ERRORS as error:
                    if last or not was_cut(connection):
                        raise translate(error, self.place) from error
        raise AssertionError

    def write(self, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows of a statement that is a transaction of its own; repeats it if it was a victim."""
        for left in reversed(range(_TRIES)):
            with self._borrowed() as connection:
                try:
                    return self.run(connection, statement, parameters)
                except DRIVER_ERRORS as error:
                    if was_cut(connection):
                        raise lost_answer(error, self.place) from error
                    if not left or not (is_overtaken(error) or is_victim(error)):
                        raise translate(error, self.place) from error
            time.sleep(CHANCE.uniform(0, _GIVE_WAY * (_TRIES - left)))
        raise AssertionError

    def stream(self, statement: str, parameters: Sequence[object]) -> Generator[Row]:
        """Yield rows of a statement that changes nothing, while others are still on their way.

        It is repeated once if its connection was dead. A caller that does not read all rows must
        close the generator.
        """
        for last in (False, True):
            with self._borrowed() as connection:
                came = False
                try:
                    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                        for row in cursor.stream(
                            self._sql(statement).encode(), parameters, binary=True
                        ):
                            came = True
                            yield row
                        return
                except DRIVER_ERRORS as error:
                    if last or came or not was_cut(connection):
                        raise translate(error, self.place) from error

    @contextmanager
    def _borrowed(self) -> Iterator[Pg]:
        connection = self.take()
        try:
            yield connection
        finally:
            self.give_back(connection)

    def take_for_block(self, block: object) -> Pg:
        """A connection for a transaction that lasts as long as its caller's block.

        A block that is dropped without having ended, which an interrupt may cause, ends then.
        """
        self.check_open()
        self._give_back_dropped()
        self._enter(self._room_for_blocks)
        try:
            connection = self.take()
        except BaseException:
            self._room_for_blocks.release()
            raise
        dropped = weakref.finalize(block, self._drop_later, connection)
        dropped.atexit = False
        self._in_blocks[connection] = dropped
        return connection

    def _drop_later(self, connection: Pg) -> None:
        """Called by a destructor, which must not wait for a lock: its own thread may hold it."""
        with suppress(psycopg.Error):
            # The server rolls its transaction back.
            connection.close()
        self._dropped.append(connection)

    def _give_back_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                self.give_back_from_block(self._dropped.popleft())

    def give_back_from_block(self, connection: Pg) -> None:
        """Give back a connection that was taken for a block. A second call does nothing."""
        dropped = self._in_blocks.get(connection)
        if dropped is None:
            return
        try:
            del self._in_blocks[connection]
            dropped.detach()
        finally:
            self._room_for_blocks.release()
            self.give_back(connection)

    def _enter(self, room: threading.BoundedSemaphore) -> None:
        if not room.acquire(timeout=self.busy_timeout):
            raise StoreBusy(
                f"all connections of this process to {self.place} have been in use for "
                f"{self.busy_timeout:g} s; use shorter transactions, or more ?connections="
            )

    def take(self) -> Pg:
        """A connection from the pool, outside of any transaction, for one statement."""
        self.check_open()
        self._enter(self._room)
        try:
            while self._idle:
                with suppress(IndexError):
                    connection = self._idle.pop()
                    if is_fit(connection):
                        return connection
                    self.drop(connection)
            return self.connect()
        except BaseException:
            self._room.release()
            raise

    def give_back(self, connection: Pg) -> None:
        """Give back a connection. Closes it if it is in a transaction or otherwise not reusable."""
        try:
            if connection.closed or self._closed or not is_idle(connection):
                self.drop(connection)
            else:
                self._idle.append(connection)
                if self._closed:
                    self._close_idle()
        finally:
            self._room.release()


def migrate(conninfo: str, schema: str) -> tuple[int, int]:
    """Bring the schema to this version of pxrs; returns the versions before and after."""
    database = Database(conninfo, schema, connections=1)
    database.close()
    return database.versions


def run(connection: Pg | Awaited, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
    """Rows as tuples and in binary form, whatever the connection's own settings are."""
    if isinstance(connection, Awaited):
        found: list[Row] = connection.wait(
            _run_on_loop(connection.asynchronous, statement, parameters)
        )
        return found
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.encode(), parameters or None, binary=True)
        return cursor.fetchall() if cursor.rownumber is not None else []


async def _run_on_loop(
    connection: psycopg.AsyncConnection[Any], statement: str, parameters: Sequence[object]
) -> list[Row]:
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.encode(), parameters or None, binary=True)
        return await cursor.fetchall() if cursor.description is not None else []


def is_fit(connection: Pg) -> bool:
    """Whether the server has not closed the connection, as far as this machine knows."""
    poll = select.poll()
    try:
        poll.register(connection.fileno(), _HUNG_UP)
    except psycopg.OperationalError:
        # This process closed it.
        return False
    return not poll.poll(0)


def hang_up(connection: Pg) -> None:
    """Shut the socket down, so that a thread waiting for the server gets an error."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        other.shutdown(socket.SHUT_RDWR)


def is_idle(connection: Pg) -> bool:
    """Whether it is in no transaction."""
    return connection.info.transaction_status == TransactionStatus.IDLE


def _describe(wanted: dict[str, Any]) -> str:
    """The database as errors may show it: without a password."""
    user = f"{wanted['user']}@" if wanted.get("user") else ""
    port = f":{wanted['port']}" if wanted.get("port") else ""
    host = wanted.get("host") or wanted.get("hostaddr") or ""
    return f"postgresql://{user}{host}{port}/{wanted.get('dbname') or ''}"


_abandoned: list[Pg] = []
