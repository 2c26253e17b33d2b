"""Opening a file: what is refused, how a connection is set up, and how the tables come into it."""

from __future__ import annotations

import errno
import os
import sqlite3

from pxrs.errors import ConfigError, StoreUnavailable
from pxrs.stores.sqlite import schema
from pxrs.stores.sqlite.failures import translate, translate_os

SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}
_LONGEST_TIMEOUT = 24 * 3600.0


def check_settings(durability: str, busy_timeout: float) -> None:
    """Refuse what can't be, also of this SQLite."""
    if durability not in SYNCHRONOUS:
        raise ConfigError(f"durability {durability!r}; there are {', '.join(SYNCHRONOUS)}")
    if sqlite3.sqlite_version_info < schema.OLDEST_SQLITE:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 is needed")
    if not 0 <= busy_timeout <= _LONGEST_TIMEOUT:
        raise ConfigError(f"busy_timeout={busy_timeout}; 0 s to a day can be waited")


def connect(path: str, level: str, busy_timeout: float) -> sqlite3.Connection:
    """A connection that any thread may use, for the caller to close."""
    try:
        connection = sqlite3.connect(
            path,
            timeout=busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute(f"PRAGMA synchronous={level}")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA temp_store=MEMORY")
    except sqlite3.Error as error:
        raise translate(error, path) from error
    return connection


def check_place(path: str) -> None:
    """Refuse a place where no file can be, before anything is put there."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise StoreUnavailable(f"folder {parent} does not exist; create it first")
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise translate_os(PermissionError(errno.EACCES, "Permission denied"), parent)


def usable(connection: sqlite3.Connection, path: str) -> sqlite3.Connection:
    """The connection, unless its file can't be used: then it is closed."""
    try:
        schema.check_usable(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise translate(error, path) from error
        raise
    return connection


def is_ready(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file has its log and the tables of this version."""
    try:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        return bool(mode == "wal" and schema.found_version(connection) == schema.VERSION)
    except sqlite3.Error as error:
        raise translate(error, path) from error


def make_ready(connection: sqlite3.Connection, path: str) -> None:
    """Give it those. For whoever holds the turn."""
    try:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise ConfigError(f"{path} can't have a write-ahead log (it has: {mode})")
        connection.execute("BEGIN IMMEDIATE")
        schema.migrate(connection)
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise translate(error, path) from error
