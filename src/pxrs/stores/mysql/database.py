"""One database: a few connections that write in short transactions, and a few that only read."""

from __future__ import annotations

import secrets
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import pymysql
from pymysql.constants import CLIENT

from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import SqlSettings
from pxrs.errors import (
    Closed,
    ConfigError,
    InvalidRequest,
    PxrsError,
    SchemaMismatch,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.forks import Origin
from pxrs.stores.identity import SameStore
from pxrs.stores.mysql import oracle, schema
from pxrs.stores.mysql.connection import MYSQL, Connection, Row
from pxrs.stores.mysql.failures import Raced, translated
from pxrs.stores.mysql.tls import Connecting
from pxrs.urls import about_options

T = TypeVar("T")

# A process frozen inside a transaction must not hold a claim's row for longer than this.
_IDLE_SECONDS = 3
# The usual TTL of a session.
_IDLE_IN_BLOCK = 10
_LOCK_WAIT = 10
_TRIES = 20
# Connections of each kind: how many at most, and how many are kept while idle.
_MOST = 15
_KEPT = 5
_BUSY_SECONDS = 30.0
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Database:
    """Connections to one database. Thread-safe."""

    def __init__(self, settings: SqlSettings) -> None:
        self.place = settings.shown
        self.is_oracle = settings.dialect == "oracle"
        self.dialect = oracle.ORACLE if self.is_oracle else MYSQL
        self._options = settings.options
        self._connecting = Connecting(settings.options, settings.tls, self.place)
        self._url = settings.url
        self.origin = Origin()
        self._closed = False
        self.same = SameStore(self.place)
        self._writers = _Pool(lambda: self._connect(_IDLE_SECONDS), self.place)
        self._readers = _Pool(lambda: self._connect(_IDLE_SECONDS, autocommit=True), self.place)
        # Blocks of callers may take long, and have their own connections: however many blocks there
        # are, there are connections to renew sessions and extend holds.
        self._in_blocks = _Pool(lambda: self._connect(_IDLE_IN_BLOCK), self.place)
        try:
            self._create()
            ((identity,),) = self.read(schema.IDENTITY)
            self.same.compare(identity)
            self.version, self._packet = "Oracle", 0
            if not self.is_oracle:
                self.version, self._packet = self.read(schema.SERVER)[0]
        except BaseException:
            self.close()
            raise

    # Opening and closing

    def _connect(self, idle: int, *, autocommit: bool = False) -> Any:
        """A new connection of the driver. MariaDB ends transactions that are idle for `idle` s."""
        try:
            if self.is_oracle:
                return oracle.connect(self._options, autocommit=autocommit)
            return _connect(self._connecting, self._options, idle, autocommit=autocommit)
        except (TypeError, ValueError) as error:
            said = about_options(self._url, f"the driver does not take an option: {error}")
            raise ConfigError(f"{self.place}: {said}") from None
        except Exception as error:
            raised = translated(error, self.place)
            if raised is None:
                raise
            raise raised from error

    @property
    def usable(self) -> bool:
        return not self._closed and not self.origin.is_parent

    def check_open(self) -> None:
        self.origin.refuse_child()
        if self._closed:
            raise Closed("the store was closed")
        self.same.require()

    def close(self) -> None:
        if self.usable:
            self._closed = True
            self.origin.close()
            for pool in (self._writers, self._readers, self._in_blocks):
                pool.close()

    def _create(self) -> None:
        """Make the tables that are missing; several processes may do so at once."""
        found = self._schema_version()
        if found is None or found < schema.VERSION:
            with self._lent(self._readers) as connection:
                for statement in schema.TABLES if not self.is_oracle else oracle.TABLES:
                    try:
                        connection.run(statement)
                    except StoreError as error:
                        if oracle.THERE_ALREADY not in str(error):
                            raise
                if not self.is_oracle:
                    # A view for people: a user without the right to create views does without it.
                    with suppress(StoreError):
                        connection.run(schema.PARTITIONS_VIEW)
                with suppress(Raced):
                    connection.run(schema.FIRST_IDENTITY, word=secrets.token_hex(8))
                with suppress(Raced):
                    connection.run(schema.FIRST_META)
                # Each newer version added tables, and left the others as they were.
                connection.run(schema.SET_VERSION, old=found or 0, new=schema.VERSION)
            found = self._schema_version()
        if found != schema.VERSION:
            raise SchemaMismatch(
                f"{self.place} has schema {found}; this pxrs knows {schema.VERSION}"
            )

    def _schema_version(self) -> int | None:
        """The version of the tables; None if there is none yet, or no table for it."""
        try:
            found = self.read(schema.FOUND_VERSION)
        except StoreError as error:
            if schema.is_missing_table(error.__cause__):
                return None
            raise
        return found[0][0] if found else None

    # The server's abilities

    @property
    def is_mariadb(self) -> bool:
        return "MariaDB" in self.version

    @property
    def skips_locked(self) -> bool:
        """Whether the server has SKIP LOCKED; Oracle has it."""
        if self.is_oracle:
            return True
        number = tuple(int(part) for part in self.version.split("-")[0].split(".")[:2])
        return number >= ((10, 6) if self.is_mariadb else (8, 0))

    def require_skip_locked(self) -> None:
        """Reject a server on which takes would wait for each other."""
        if not self.skips_locked:
            raise ConfigError(
                f"{self.place}: queues need SKIP LOCKED, which MariaDB has from 10.6 and MySQL "
                "from 8.0 on"
            )

    def refuse_large(self, size: int) -> None:
        """Raise `InvalidRequest` if the server takes no statement of so many bytes.

        Call it after one has failed. A server that can't be asked may just be away.
        """
        if self.is_oracle or size < self._packet:
            return
        try:
            ((_, self._packet),) = self.read(schema.SERVER)
        except PxrsError:
            return
        if size >= self._packet:
            raise InvalidRequest(
                f"{self.place} takes statements of up to {self._packet} bytes "
                f"(max_allowed_packet), got {size}; bytes are sent as two digits each. Make the "
                "value smaller, or raise max_allowed_packet"
            )

    # Statements

    def read(self, statement: str, **values: Any) -> list[Row]:
        """All rows of a query; repeats it once if the connection failed: it may have been old."""
        for last in (False, True):
            with self._lent(self._readers) as connection:
                try:
                    return connection.rows(statement, **values)
                except StoreUnavailable:
                    if last:
                        raise
        raise AssertionError("unreachable")

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run the work in a transaction; repeats it after a deadlock or a race."""
        give_up = SYSTEM_CLOCK.monotonic() + _LOCK_WAIT
        for number in range(_TRIES):
            try:
                with self._lent(self._writers) as connection:
                    result = work(connection)
                    connection.commit()
                    return result
            except (Raced, TransactionConflict) as error:
                why = error
            if SYSTEM_CLOCK.monotonic() > give_up:
                break
            time.sleep(0.001 * number)
        raise TransactionConflict(f"{self.place}: gave up after {number + 1} tries: {why}")

    def at_once(self) -> AbstractContextManager[Connection]:
        """A connection that can send several statements together; not on Oracle."""
        return self._lent(self._readers)

    def for_block(self) -> AbstractContextManager[Connection]:
        """A connection for a transaction that lasts as long as a caller's block."""
        return self._lent(self._in_blocks)

    @contextmanager
    def _lent(self, pool: _Pool) -> Iterator[Connection]:
        self.check_open()
        with pool.lend() as driver:
            yield Connection(driver, self.place, self.dialect, self.refuse_large)


class _Pool:
    """Connections that one thread uses at a time. A few idle ones are kept."""

    def __init__(self, connect: Callable[[], Any], place: str) -> None:
        self._connect = connect
        self._place = place
        self._room = threading.BoundedSemaphore(_MOST)
        self._idle: deque[Any] = deque()
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[Any]:
        """A connection outside of any transaction. Afterwards uncommitted changes are undone."""
        if not self._room.acquire(timeout=_BUSY_SECONDS):
            raise StoreBusy(
                f"all connections of this process to {self._place} have been in use for "
                f"{_BUSY_SECONDS:g} s; use shorter transactions, or fewer at once"
            )
        try:
            driver = self._take()
            try:
                yield driver
            except Exception:
                if _is_rolled_back(driver):
                    self._keep(driver)
                raise
            except BaseException:
                # The connection may be in the middle of an answer: it can't be used again.
                _close(driver)
                raise
            self._keep(driver)
        finally:
            self._room.release()

    def _take(self) -> Any:
        """A connection that is still open: on a closed one a commit's outcome would be unknown."""
        with suppress(IndexError):
            while True:
                driver = self._idle.pop()
                if _is_fit(driver):
                    return driver
                _close(driver)
        return self._connect()

    def _keep(self, driver: Any) -> None:
        if len(self._idle) >= _KEPT or self._closed:
            _close(driver)
            return
        self._idle.append(driver)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are given back."""
        self._closed = True
        with suppress(IndexError):
            while True:
                _close(self._idle.pop())


def _connect(
    connecting: Connecting, options: dict[str, Any], idle: int, *, autocommit: bool
) -> Any:
    """A connection of PyMySQL. MariaDB has a limit for idle transactions, MySQL has none."""
    flags = CLIENT.FOUND_ROWS | (CLIENT.MULTI_STATEMENTS if autocommit else 0)
    flags |= options.get("client_flag", 0)
    driver = connecting.connect(client_flag=flags, autocommit=autocommit)
    with driver.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {_LOCK_WAIT}")
        with suppress(pymysql.Error):
            cursor.execute(f"SET SESSION idle_transaction_timeout = {idle}")
    return driver


def _is_fit(driver: Any) -> bool:
    """Whether the server has not closed the connection, as far as this machine knows."""
    if not isinstance(driver, pymysql.Connection):
        return bool(driver.is_healthy())
    sock = driver._sock
    if not isinstance(sock, socket.socket):
        return False
    poll = select.poll()
    # No query is open, so on a plain connection data can only be the server's farewell. With TLS
    # there may be other messages.
    poll.register(sock, _HUNG_UP | (0 if isinstance(sock, ssl.SSLSocket) else select.POLLIN))
    return not poll.poll(0)


def _is_rolled_back(driver: Any) -> bool:
    try:
        driver.rollback()
    except Exception:  # noqa: BLE001 - after any error, the connection is of no use
        _close(driver)
        return False
    return True


def _close(driver: Any) -> None:
    with suppress(Exception):
        driver.close()
