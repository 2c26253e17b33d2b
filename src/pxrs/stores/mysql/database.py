"""Connections and transactions, and what a driver's errors mean."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import Connection, StaticPool, event, exc

from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import (
    Closed,
    ConfigError,
    OutcomeUnknown,
    PxrsError,
    SchemaMismatch,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.mysql.queues import tables as queue_tables  # noqa: F401 - its tables are made with the others
from pxrs.stores.mysql.schema import PARTITIONS_VIEW, SCHEMA, metadata
from pxrs.stores.mysql.statements import FIRST_META, SCHEMA_VERSION, SET_SCHEMA

T = TypeVar("T")

# A process frozen inside a transaction must not hold a claim's row for longer than this.
_IDLE_SECONDS = 3
# As long as a session usually lasts without being renewed.
_IDLE_IN_BLOCK = 10
_LOCK_WAIT = 10
_TRIES = 20
_DEADLOCK = {1205, 1213}
_FULL = {1021, 1114}
_READ_ONLY = {1290, 1792, 1836}
_GONE = {1927, 1040, 1053, 1152, 1158, 1159, 1160, 1161, 2002, 2003, 2006, 2013, 2055, 0}


class Raced(Exception):  # noqa: N818 - the transaction is run again
    """Somebody else made the same record just now."""


class Database:
    """An engine that writes in short transactions, and one that reads without any.

    Blocks of callers, which may last, have a third with connections of its own: however many of
    them there are, sessions are renewed and items extended.
    """

    def __init__(self, url: str, place: str) -> None:
        self.place = place
        self._pid = os.getpid()
        self._closed = False
        try:
            # Every transaction is ended here: another rollback would be a round trip for nothing.
            self._writing, self._lasting, self._reading = (
                sqlalchemy.create_engine(
                    url, pool_reset_on_return=None, skip_autocommit_rollback=True, **options
                )
                for options in (
                    {"isolation_level": "READ COMMITTED"},
                    # A statement of the caller's can't be repeated on another connection.
                    {"isolation_level": "READ COMMITTED", "pool_pre_ping": True},
                    {"isolation_level": "AUTOCOMMIT", "connect_args": _several_statements(url)},
                )
            )
        except exc.NoSuchModuleError as error:
            raise ConfigError(f"SQLAlchemy knows no such database: {error}") from error
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the driver {error.name} is not installed: pip install {error.name}"
            ) from error
        if self._writing.dialect.name in ("mysql", "mariadb"):
            for engine in self._engines:
                idle = _IDLE_IN_BLOCK if engine is self._lasting else _IDLE_SECONDS
                event.listen(engine, "connect", partial(_set_up_mysql, idle))
        try:
            self._create()
            self.skips_locked = _skips_locked(self._reading.dialect)
        except BaseException:
            self.close()
            raise

    @property
    def _engines(self) -> tuple[sqlalchemy.Engine, ...]:
        return self._writing, self._lasting, self._reading

    def check_open(self) -> None:
        if os.getpid() != self._pid:
            raise Closed("this store was opened before a fork; open another in the child")
        if self._closed:
            raise Closed("the store was closed")

    @property
    def dialect(self) -> str:
        """Which database it is, by SQLAlchemy's name."""
        return str(self._writing.dialect.name)

    def require_skip_locked(self) -> None:
        """Refuse a server on which those who take would wait for each other."""
        if not self.skips_locked:
            raise ConfigError(
                f"{self.place}: queues need SKIP LOCKED, which MariaDB has from 10.6 and MySQL "
                "from 8.0 on"
            )

    @property
    def usable(self) -> bool:
        return not self._closed and os.getpid() == self._pid

    def read(self, statement: Any, **values: Any) -> Sequence[Any]:
        """All rows. Done twice where the connection turned out to be an old one that broke."""
        self.check_open()
        for last in (False, True):
            try:
                with self._reading.connect() as connection:
                    return connection.execute(statement, values).all()
            except exc.DBAPIError as error:
                if last or not error.connection_invalidated:
                    raise self.translated(error) from error
        raise AssertionError("unreachable")

    def write(self, work: Callable[[Connection], T]) -> T:
        """The work in a transaction; again where it was a deadlock's victim or was raced."""
        self.check_open()
        give_up = SYSTEM_CLOCK.monotonic() + _LOCK_WAIT
        for number in range(_TRIES):
            try:
                return self._once(work)
            except (Raced, TransactionConflict) as error:
                why = error
            if SYSTEM_CLOCK.monotonic() > give_up:
                break
            time.sleep(0.001 * number)
        raise TransactionConflict(f"{self.place}: given up after {number + 1} tries: {why}")

    def _once(self, work: Callable[[Connection], T]) -> T:
        committing = False
        try:
            with self._writing.connect() as connection, connection.begin() as transaction:
                result = work(connection)
                if transaction.is_active:
                    committing = True
                    transaction.commit()
                return result
        except exc.DBAPIError as error:
            if isinstance(error, exc.IntegrityError):
                raise Raced(str(error.orig)) from error
            translated = self.translated(error)
            if committing and isinstance(translated, StoreUnavailable):
                raise OutcomeUnknown(
                    f"{self.place}: no answer to a commit: {error.orig}"
                ) from error
            raise translated from error

    @property
    def sends_at_once(self) -> bool:
        """Whether the driver can send several statements together."""
        return self._reading.dialect.driver == "pymysql"

    @contextmanager
    def at_once(self) -> Iterator[Any]:
        """The driver's connection, for several statements that are sent together."""
        self.check_open()
        try:
            connection = self._reading.connect()
            if _is_stale(connection.connection.dbapi_connection):
                connection.invalidate()
            driver = connection.connection.dbapi_connection
        except exc.DBAPIError as error:
            raise self.translated(error) from error
        with connection:
            try:
                yield driver
            except BaseException:
                # It may be anywhere in the middle: nobody else may go on from there.
                connection.invalidate()
                raise

    @contextmanager
    def lasting(self) -> Iterator[Connection]:
        """A connection for a transaction that lasts as long as somebody's block."""
        self.check_open()
        try:
            connection = self._lasting.connect()
        except exc.DBAPIError as error:
            raise self.translated(error) from error
        except exc.TimeoutError as error:
            raise StoreBusy(
                f"all connections of this process to {self.place} are in use by transactions; use "
                "shorter ones, or fewer at once"
            ) from error
        with connection:
            yield connection

    def is_drivers(self, connection: Any) -> bool:
        """Whether it is a connection of the driver that this uses, which has to be PyMySQL."""
        driver = self._writing.dialect.loaded_dbapi
        return self.sends_at_once and isinstance(connection, driver.Connection)

    @contextmanager
    def around(self, driver: Any) -> Iterator[Connection]:
        """SQLAlchemy's connection around one of the caller's, which is neither ended nor closed.

        Closing SQLAlchemy's own would roll back; what it got from its pool is given back instead.
        """
        pool = StaticPool(lambda: _PlainCursors(driver), reset_on_return=None)
        proxied = pool.connect()
        try:
            yield Connection(self._writing, proxied)
        finally:
            proxied.close()

    def close(self) -> None:
        if not self.usable:
            return
        self._closed = True
        for engine in self._engines:
            engine.dispose()

    @property
    def driver_error(self) -> type[Exception]:
        """What the driver's own errors have in common."""
        return self._writing.dialect.loaded_dbapi.Error

    def translated(self, error: BaseException) -> PxrsError:
        """A driver's error, wrapped by SQLAlchemy or not, in the words of pxrs."""
        own = error.orig if isinstance(error, exc.DBAPIError) and error.orig else error
        code = own.args[0] if own.args else None
        text = f"{self.place}: {own}"
        if code in _DEADLOCK:
            return TransactionConflict(text)
        if code in _FULL:
            return StoreFull(text)
        if code in _READ_ONLY:
            return StoreReadOnly(text)
        if getattr(error, "connection_invalidated", False) or code in _GONE:
            return StoreUnavailable(text)
        return StoreError(text)

    def _create(self) -> None:
        """Make the tables if they are missing; several processes may do so at once."""
        try:
            found = self._schema_version()
            if found is None or found < SCHEMA:
                self._create_tables(found)
                with self._reading.connect() as connection:
                    found = connection.execute(SCHEMA_VERSION).scalar_one()
        except exc.DBAPIError as error:
            raise self.translated(error) from error
        if found != SCHEMA:
            raise SchemaMismatch(f"{self.place} has schema {found}; this pxrs knows {SCHEMA}")

    def _create_tables(self, found: int | None) -> None:
        with suppress(exc.DBAPIError), self._writing.begin() as connection:
            metadata.create_all(connection, checkfirst=True)
        self._create_view()
        if found is None:
            with suppress(exc.IntegrityError), self._writing.begin() as connection:
                connection.execute(FIRST_META, {"schema_version": SCHEMA})
        else:
            # A newer version brought new tables, and left the others as they were.
            self._all_tables_or_fail()
            with self._writing.begin() as connection:
                connection.execute(SET_SCHEMA, {"new_version": SCHEMA})

    def _all_tables_or_fail(self) -> None:
        with self._writing.begin() as connection:
            metadata.create_all(connection, checkfirst=True)

    def _schema_version(self) -> int | None:
        """None if there is none yet, or no table for it."""
        with self._reading.connect() as connection:
            try:
                return connection.execute(SCHEMA_VERSION).scalar_one_or_none()
            except (exc.ProgrammingError, exc.DatabaseError) as error:
                if error.connection_invalidated or isinstance(error, exc.OperationalError):
                    raise
                return None

    def _create_view(self) -> None:
        """For people: whoever may not make views does without."""
        if self._writing.dialect.name in ("mysql", "mariadb"):
            with suppress(exc.DBAPIError), self._writing.begin() as connection:
                connection.exec_driver_sql(PARTITIONS_VIEW)


class _PlainCursors:
    """A connection of PyMySQL whose rows are tuples, whatever its owner has them made of."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def cursor(self) -> Any:
        from pymysql.cursors import Cursor

        return self._driver.cursor(Cursor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def _skips_locked(dialect: Any) -> bool:
    """Whether the server that was connected to knows SKIP LOCKED; Oracle does."""
    if dialect.name not in ("mysql", "mariadb"):
        return True
    oldest = (10, 6) if dialect.is_mariadb else (8, 0)
    return tuple(dialect.server_version_info[:2]) >= oldest


def _several_statements(url: str) -> dict[str, Any]:
    """For connections that send a whole commit at once; PyMySQL has to be told."""
    if sqlalchemy.make_url(url).get_driver_name() != "pymysql":
        return {}
    from pymysql.constants import CLIENT

    return {"client_flag": CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS}


def _is_stale(driver: Any) -> bool:
    """Whether the server has closed the connection while nobody used it.

    Who sends a commit on such a one would not know what became of it.
    """
    sock = getattr(driver, "_sock", None)
    if not isinstance(sock, socket.socket) or isinstance(sock, ssl.SSLSocket):
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def _set_up_mysql(idle: int, connection: Any, record: Any) -> None:
    """What every transaction goes by. MySQL has no limit for idle ones; MariaDB has."""
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {_LOCK_WAIT}")
        with suppress(Exception):
            cursor.execute(f"SET SESSION idle_transaction_timeout = {idle}")
