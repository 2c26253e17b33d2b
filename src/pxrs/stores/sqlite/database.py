"""One SQLite file: its connections, its one writer, and its write-ahead log's size.

Settings that are not a matter of taste (measured in `docs/design.md`):

- `wal_autocheckpoint=0`, and every commit and checkpoint happens under the turnstile: SQLite
  3.7.0 to 3.51.2 can damage the file when a checkpoint races with a commit that starts the
  log anew. No `mmap_size`.
- Readers fetch all rows at once: a live cursor pins a snapshot and the log grows without end.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pxrs.clock import Clock
from pxrs.errors import (
    Closed,
    ConfigError,
    InsideTransaction,
    OutcomeUnknown,
    StoreBusy,
    StoreReadOnly,
    StoreUnavailable,
)
from pxrs.stores.sqlite import schema
from pxrs.stores.sqlite.control import Control
from pxrs.stores.sqlite.failures import is_io_error, translate
from pxrs.stores.sqlite.turnstile import Turnstile

T = TypeVar("T")

WAL_LIMIT = 16 * 2**20
_WAL_RETRY = 12 * 2**20
_COMMIT_WEIGHT = 16 * 2**10
_SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}

_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


class Turn:
    """A write transaction: its connection, and what to do once it is committed.

    `slots` of the bell ring; `weight` is how many bytes it adds to the write-ahead log, roughly.
    """

    __slots__ = ("connection", "slots", "weight")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.slots: set[int] = set()
        self.weight = 0


class Database:
    """A file shared by several processes of one host. Thread-safe."""

    def __init__(self, path: str, durability: str, busy_timeout: float, clock: Clock) -> None:
        if durability not in _SYNCHRONOUS:
            raise ConfigError(f"durability {durability!r}; there are {', '.join(_SYNCHRONOUS)}")
        if sqlite3.sqlite_version_info < schema.OLDEST_SQLITE:
            raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 is needed")
        self.path = os.path.abspath(path)
        self.folder = f"{self.path}-pxrs"
        self.durability = durability
        self.busy_timeout = busy_timeout
        self._clock = clock
        self._readers: deque[sqlite3.Connection] = deque()
        self._turn = threading.Lock()
        self._writing_thread: int | None = None
        self._closed = ""
        self._in_fork: list[Callable[[], None]] = []
        self._writer = self._open_file()
        self._prepare()
        _open_databases.add(self)

    # Opening and closing

    def _open_file(self) -> sqlite3.Connection:
        parent = os.path.dirname(self.path)
        if not os.path.isdir(parent):
            raise StoreUnavailable(f"folder {parent} does not exist; create it first")
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.control = Control(self.folder)
            self._turnstile = Turnstile(self.folder, self.control, self._clock)
        except OSError as error:
            raise StoreReadOnly(
                f"{self.folder} can't be written ({error.strerror}); pxrs needs it beside the "
                "database for locks and sessions"
            ) from error
        return self.connect()

    def connect(self) -> sqlite3.Connection:
        """A connection of its own, for the caller to close."""
        try:
            connection = sqlite3.connect(
                self.path,
                timeout=self.busy_timeout,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
            connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS[self.durability]}")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.execute("PRAGMA temp_store=MEMORY")
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        return connection

    def _prepare(self) -> None:
        try:
            mode = self._writer.execute("PRAGMA journal_mode").fetchone()[0]
            if mode == "wal" and schema.found_version(self._writer) == schema.VERSION:
                return
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        with self._taking_turn():
            try:
                # Only a new file takes it: batches in larger pages are a quarter faster to write.
                self._writer.execute("PRAGMA page_size=8192")
                self._writer.execute("PRAGMA journal_mode=WAL")
                self._writer.execute("BEGIN IMMEDIATE")
                schema.migrate(self._writer, self.path)
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                raise translate(error, self.path) from error
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def close(self) -> None:
        """Close all connections. The last one to close checkpoints, so it waits for its turn."""
        if self._closed:
            return
        with self._taking_turn():
            self._closed = "the store was closed"
            while self._readers:
                self._readers.pop().close()
            self._writer.close()
        self._turnstile.close()
        self.control.close()
        _open_databases.discard(self)

    def check_open(self) -> None:
        if self._closed:
            raise Closed(self._closed)

    def on_fork(self, release: Callable[[], None]) -> None:
        """Call `release` in a forked child, to let go of what only the parent may hold."""
        self._in_fork.append(release)

    def abandon(self) -> None:
        """In a forked child: SQLite's connections must not cross a fork, not even to be closed."""
        self._closed = "this store was opened before a fork; open it again in the child"
        _abandoned.append((self._writer, *self._readers))
        self._turnstile.close()
        for release in self._in_fork:
            release()

    # Reading

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for statements that only read. Fetch all rows before leaving."""
        self.check_open()
        try:
            connection = self._readers.pop()
        except IndexError:
            connection = self.connect()
        try:
            yield connection
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        finally:
            if self._closed:
                connection.close()
            else:
                self._readers.append(connection)

    # Writing

    def write(self, work: Callable[[Turn], T]) -> T:
        """Run `work` in a write transaction of its own."""
        turn = self.begin()
        try:
            result = work(turn)
        except BaseException as error:
            self.rollback(turn)
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise
        self.commit(turn)
        return result

    def begin(self, connection: sqlite3.Connection | None = None) -> Turn:
        """Start a write transaction, on the process's writing connection unless one is given."""
        self._enter()
        turn = Turn(self._writer if connection is None else connection)
        try:
            turn.connection.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            self._leave()
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise
        return turn

    def commit(self, turn: Turn) -> None:
        """Make the transaction durable, ring its slots and let the next writer in."""
        try:
            turn.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback(turn)
            if is_io_error(error):
                raise OutcomeUnknown(f"the disk failed while committing to {self.path}") from error
            raise translate(error, self.path) from error
        try:
            if turn.slots:
                self.control.ring(turn.slots)
            self._keep_log_short(turn.weight)
        finally:
            self._leave()

    def rollback(self, turn: Turn) -> None:
        """Undo the transaction and let the next writer in."""
        try:
            if turn.connection.in_transaction:
                turn.connection.execute("ROLLBACK")
        finally:
            self._leave()

    @contextmanager
    def _taking_turn(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        self.check_open()
        me = threading.get_ident()
        if self._writing_thread == me:
            raise InsideTransaction(
                "this thread already holds a write transaction on this store; "
                "finish it first, or use the transaction's own methods"
            )
        if not self._turn.acquire(timeout=self.busy_timeout):
            raise StoreBusy(
                f"another thread of this process has been writing to {self.path} for "
                f"{self.busy_timeout:g} s"
            )
        try:
            self.check_open()
            if not self._turnstile.enter(self.busy_timeout):
                raise StoreBusy(self._describe_holder())
        except BaseException:
            self._turn.release()
            raise
        self._writing_thread = me

    def _leave(self) -> None:
        self._writing_thread = None
        self._turnstile.leave()
        self._turn.release()

    def _describe_holder(self) -> str:
        holder = self.control.holder
        if holder is None:
            return f"many writers queue for {self.path}; it is over its capacity"
        held = self._clock.monotonic() - holder.since
        return (
            f"the writer of {self.path} has been held for {held:.1f} s by "
            f"pid {holder.pid}{_command_of(holder.pid)}; if that process hangs, end it"
        )

    def _keep_log_short(self, weight: int) -> None:
        size = self.control.wal_bytes + weight + _COMMIT_WEIGHT
        if size > WAL_LIMIT:
            size = 0 if self._checkpoint() else _WAL_RETRY
        self.control.wal_bytes = size

    def _checkpoint(self) -> bool:
        """Move the log's content into the file and start the log anew, if no reader needs it."""
        try:
            self._writer.execute("PRAGMA busy_timeout=50")
            busy = self._writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0]
            return not busy
        except sqlite3.Error:
            # The commit stands; a checkpoint that fails now is tried again later.
            return False
        finally:
            self._writer.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000)}")


_abandoned: list[tuple[sqlite3.Connection, ...]] = []


def _after_fork_in_child() -> None:
    for database in list(_open_databases):
        database.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({words[:80]})" if words else ""
