"""One SQLite file: its connections and its one writer.

Settings that are not a matter of taste (measured in `docs/decisions.md`):

- `wal_autocheckpoint=0`, and every commit and checkpoint happens under the writer lock: SQLite
  3.7.0 to 3.51.2 can damage the file when a checkpoint races with a commit that starts the
  log anew. No `mmap_size`.
- Readers fetch all rows at once: a live cursor pins a snapshot and the log grows without end.

An exception from outside, such as Ctrl-C, must leave nothing here half done: a process that keeps
the writer stops all others. So ending a `Turn` twice does no harm, and a turn that is dropped
without having ended is ended then.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from pxrs.chance import CHANCE
from pxrs.clock import Clock
from pxrs.errors import (
    Closed,
    ConfigError,
    InsideTransaction,
    OutcomeUnknown,
    PxrsError,
    StoreBusy,
    StoreUnavailable,
    quoted,
)
from pxrs.forks import Origin
from pxrs.stores.sqlite import schema
from pxrs.stores.sqlite.beside import check_links, make_database, make_folder_beside
from pxrs.stores.sqlite.change_counters import Control
from pxrs.stores.sqlite.failures import (
    DRIVER_ERRORS,
    is_io_error,
    is_old_snapshot,
    primary_code,
    removed,
    translate,
    translate_os,
)
from pxrs.stores.sqlite.writer_lock import WriterLock

S = TypeVar("S")
T = TypeVar("T")

_UNSYNCED = "NORMAL"
_CHUNK = 5000
_WRITE_SOMETHING = "UPDATE pxrs_meta SET value = value WHERE name = 'schema'"


class Turn:
    """A write transaction: its connection, and what to do once it is committed.

    The commit raises the change counters of `slots`; `weight` is roughly how many bytes it adds to
    the write-ahead log. `since`: the time, by the clock of `Database`, from which no other process
    could write; None if that is not known.
    """

    __slots__ = ("__weakref__", "connection", "since", "slots", "weight")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.since: float | None = None
        self.slots: set[int] = set()
        self.weight = 0


class Database:
    """A file shared by several processes of one host. Thread-safe."""

    def __init__(self, path: str, durability: str, busy_timeout: float, clock: Clock) -> None:
        check_settings(durability, busy_timeout)
        # Every name of the file has to lead to the same locks: SQLite follows links too.
        self.path = os.path.realpath(path)
        self.folder = f"{self.path}-pxrs"
        self.durability = durability
        self._level = self._synced = SYNCHRONOUS[durability]
        self.busy_timeout = busy_timeout
        self._clock = clock
        self._readers: deque[sqlite3.Connection] = deque()
        self._turn = threading.Lock()
        # The running turn. A weak reference: once no caller can end the turn, it must end itself.
        self._running: weakref.ref[Turn] | None = None
        self._running_on: sqlite3.Connection | None = None
        self._writing_thread: int | None = None
        # Threads inside a transaction of their own: a second one would wait for the first. Not
        # their numbers: a new thread can get the number of one that has ended.
        self._joined: set[threading.Thread] = set()
        # A commit failed during its sync. Its pages may lie complete in the log: nothing shows the
        # commit until a crash, which would bring it back. Only the next commit that writes
        # overwrites these pages.
        self._in_doubt = False
        self._closed = ""
        self.origin = Origin()
        self._whereabouts: Whereabouts | None = None
        with ExitStack() as opened:
            check_place(self.path)
            check_links(path, self.path)
            self._make_file()
            self._writer = usable(self.connect(), self.path)
            opened.callback(self._writer.close)
            self._open_folder(opened)
            self._prepare()
            paths = (self.path, self.control.path, self._writer_lock.path)
            self._whereabouts = Whereabouts(paths, clock)
            opened.pop_all()
        self.origin.on_fork(self._abandon)

    # Opening and closing

    def _make_file(self) -> None:
        try:
            make_database(self.path)
        except OSError as error:
            raise translate_os(error, self.path) from error

    def _open_folder(self, opened: ExitStack) -> None:
        try:
            make_folder_beside(self.folder, self.path)
            self.control = Control(self.folder, self.path)
            opened.callback(self.control.close)
            self._log = LogSize(self.control, self.busy_timeout)
            self._writer_lock = WriterLock(self.folder, self.path, self.control, self._clock)
            opened.callback(self._writer_lock.close)
        except OSError as error:
            raise translate_os(error, self.folder) from error

    def connect(self) -> sqlite3.Connection:
        """Open a separate connection, which the caller closes."""
        # SQLite opens its files anew: a link may have been laid since the store was opened.
        check_links(self.path, self.path)
        return connect(self.path, self._synced, self.busy_timeout)

    def _prepare(self) -> None:
        if not is_ready(self._writer, self.path):
            with self._taking_turn():
                make_ready(self._writer, self.path)

    def close(self) -> None:
        """Close all connections.

        The last one to close runs a checkpoint. It does so only when no other process has the file
        open, so it need not wait for its turn.
        """
        if self._closed:
            return
        self._refuse_second_turn()
        if not self._turn.acquire(timeout=self.busy_timeout):
            raise StoreBusy(self._describe_thread())
        try:
            if not self._closed:
                self._closed = "the store was closed"
                self._let_go()
        finally:
            self._turn.release()

    def _let_go(self) -> None:
        self.origin.close()
        self._close_readers()
        self._writer.close()
        self._writer_lock.close()
        self.control.close()

    def _close_readers(self) -> None:
        with suppress(IndexError):
            while True:
                self._readers.pop().close()

    def check_open(self) -> None:
        if self._closed:
            raise Closed(self._closed)

    def _abandon(self) -> None:
        """In a forked child: SQLite's connections must not cross a fork, not even to be closed."""
        self._closed = self.origin.message
        self._running = None
        leave_to_parent(self._writer, *self._readers)
        self._writer_lock.close()

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
        except DRIVER_ERRORS as error:
            raise translate(error, self.path) from error
        finally:
            self._readers.append(connection)
            if self._closed:
                self._close_readers()

    # Writing

    def write(
        self, work: Callable[[Turn], T], patience: float | None = None, *, synced: bool = True
    ) -> T:
        """Run `work` in a write transaction of its own.

        `patience` is how long it waits for the writer, instead of `busy_timeout`. A transaction
        that is not `synced` survives the death of any process; only a power cut may undo it, and
        then everything that was committed after it, too.
        """
        turn = self.begin(patience=patience, synced=synced)
        try:
            result = work(turn)
        except BaseException as error:
            self.rollback(turn)
            if isinstance(error, DRIVER_ERRORS):
                raise translate(error, self.path) from error
            raise
        self.commit(turn)
        return result

    def begin(
        self,
        connection: sqlite3.Connection | None = None,
        patience: float | None = None,
        *,
        synced: bool = True,
    ) -> Turn:
        """Start a write transaction, on the process's writing connection unless one is given."""
        turn = Turn(self._writer if connection is None else connection)
        try:
            self._enter(turn, self.busy_timeout if patience is None else patience)
            if connection is None:
                self._begin_own(turn, patience, self._synced if synced else _UNSYNCED)
            else:
                connection.execute("BEGIN IMMEDIATE")
            turn.since = self._clock.monotonic()
        except BaseException as error:
            self.rollback(turn)
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise
        return turn

    def _begin_own(self, turn: Turn, patience: float | None, level: str) -> None:
        turn.connection = self._running_on = self._writer
        # A block of `atomic` may have changed these before, on the same connection.
        turn.connection.row_factory = None
        turn.connection.text_factory = str
        try:
            if patience is not None:
                turn.connection.execute(f"PRAGMA busy_timeout={int(patience * 1000)}")
            self._set_level(level)
            turn.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            # The caller of `atomic` closed it, or left a cursor open that pins an old snapshot.
            closed = isinstance(error, sqlite3.ProgrammingError)
            if not closed and not is_old_snapshot(error) and not turn.connection.in_transaction:
                raise
            self._replace_writer()
            turn.connection = self._running_on = self._writer
            self._set_level(level)
            turn.connection.execute("BEGIN IMMEDIATE")
        finally:
            if patience is not None:
                turn.connection.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000)}")

    def _set_level(self, level: str) -> None:
        """Set the sync level of the writing connection's next commit."""
        if self._level != level:
            self._level = ""
            self._writer.execute(f"PRAGMA synchronous={level}")
            self._level = level

    def _replace_writer(self) -> None:
        old, self._writer = self._writer, self.connect()
        self._level = self._synced
        old.close()

    def commit(self, turn: Turn, ending: Callable[[], object] | None = None) -> None:
        """Make the transaction durable, raise the counters of its slots and let the next writer in.

        `ending`, if given, commits instead of a COMMIT statement, where the caller's library tracks
        transactions. A transaction that was begun outside has no turn, so the log is not shortened.
        """
        self.check_open()
        try:
            self._make_durable(turn, ending)
            if self._is_running(turn):
                self._log.keep_short(self._writer, turn.weight)
        except sqlite3.Error as error:
            raise self._commit_error(error) from error
        finally:
            self.rollback(turn)

    def _make_durable(self, turn: Turn, ending: Callable[[], object] | None) -> None:
        if self._in_doubt:
            turn.connection.execute(_WRITE_SOMETHING)
        if ending is None:
            turn.connection.execute("COMMIT")
        else:
            ending()
        self._in_doubt = False
        if turn.slots:
            self.control.ring(turn.slots)

    def _commit_error(self, error: sqlite3.Error) -> PxrsError:
        if is_io_error(error):
            self._in_doubt = True
            return OutcomeUnknown(
                f"the disk failed while committing to {self.path}, or its user's quota is used up"
            )
        return translate(error, self.path)

    def rollback(self, turn: Turn) -> None:
        """Undo the transaction, if it was not committed, and let the next writer in.

        A child forked inside of it must touch neither the connection nor the locks.
        """
        if self._is_running(turn):
            self._end(turn.connection)

    def _is_running(self, turn: Turn) -> bool:
        return self._running is not None and self._running() is turn

    def _dropped(self, turn: weakref.ref[Turn]) -> None:
        if self._running is turn and self._running_on is not None:
            self._end(self._running_on)

    def _end(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            # The caller closed it, or the disk fails: a new connection starts from what is stored.
            if connection is self._writer:
                with suppress(PxrsError):
                    self._replace_writer()
        finally:
            self._writer_lock.leave()
            # No call is made between these lines, so no interrupt can come there.
            self._running = self._running_on = self._writing_thread = None
            self._turn.release()

    @contextmanager
    def _taking_turn(self) -> Iterator[None]:
        turn = Turn(self._writer)
        try:
            self._enter(turn, self.busy_timeout)
            yield
        finally:
            self.rollback(turn)

    def _enter(self, turn: Turn, timeout: float) -> None:
        self.check_open()
        self._refuse_second_turn()
        me, running = threading.get_ident(), weakref.ref(turn, self._dropped)
        if not self._turn.acquire(timeout=timeout):
            raise StoreBusy(self._describe_thread())
        try:
            self.check_open()
            if not self._writer_lock.enter(timeout):
                raise StoreBusy(self._writer_lock.describe_holder(self.path))
            if self._whereabouts is not None:
                self._whereabouts.refuse_change()
            self._running, self._running_on, self._writing_thread = running, turn.connection, me
        except BaseException:
            self._writer_lock.give_up()
            self._turn.release()
            raise

    def join(self, block: object) -> Callable[[], object]:
        """Note that this thread works inside a transaction that its caller began.

        Returns what ends that: from any thread, and any number of times. If the block is dropped
        without its end, that ends it, too; else the thread could never write again.
        """
        self.check_open()
        self._refuse_second_turn()
        me = threading.current_thread()
        part = weakref.finalize(block, self._joined.discard, me)
        part.atexit = False
        self._joined.add(me)
        return part

    def _refuse_second_turn(self) -> None:
        joined = self._joined and threading.current_thread() in self._joined
        if joined or self._writing_thread == threading.get_ident():
            raise InsideTransaction(
                "this thread already holds a write transaction on this store; "
                "finish it first, or use the transaction's own methods"
            )

    def _describe_thread(self) -> str:
        return (
            f"another thread of this process has been writing to {self.path} for "
            f"{self.busy_timeout:g} s"
        )


def in_chunks(values: Sequence[S], most: int = _CHUNK) -> Iterator[Sequence[S]]:
    """Split into pieces that fit into one statement: 32 766 variables, usually six a row."""
    for start in range(0, len(values), most):
        yield values[start : start + most]


_abandoned: list[sqlite3.Connection] = []


def leave_to_parent(*connections: sqlite3.Connection) -> None:
    """In a forked child: keep them from being closed by the garbage collector."""
    _abandoned.extend(connections)


SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}
_LONGEST_TIMEOUT = 24 * 3600.0
_LOOK_FOR_A_MOMENT = 0.0002


def check_settings(durability: str, busy_timeout: float) -> None:
    """Rejects unknown settings, and an SQLite that is too old."""
    if durability not in SYNCHRONOUS:
        raise ConfigError(
            f"durability must be one of {', '.join(SYNCHRONOUS)}; got {quoted(durability)}"
        )
    if sqlite3.sqlite_version_info < schema.OLDEST_SQLITE:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old; pxrs needs 3.35 or newer")
    if not 0 <= busy_timeout <= _LONGEST_TIMEOUT:
        raise ConfigError(f"busy_timeout must be 0 s to a day, got {busy_timeout}")


def connect(path: str, level: str, busy_timeout: float) -> sqlite3.Connection:
    """Open a connection that any thread may use; the caller closes it."""
    with ExitStack() as opened:
        try:
            connection = sqlite3.connect(
                path,
                timeout=busy_timeout,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
            opened.callback(connection.close)
            connection.execute(f"PRAGMA synchronous={level}")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.execute("PRAGMA temp_store=MEMORY")
        except sqlite3.Error as error:
            raise translate(error, path) from error
        opened.pop_all()
    return connection


def check_place(path: str) -> None:
    """Refuse a path where no file can be, before anything is created there."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise StoreUnavailable(f"folder {parent} does not exist; create it first")
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise translate_os(PermissionError(errno.EACCES, "Permission denied"), parent)


def usable(connection: sqlite3.Connection, path: str) -> sqlite3.Connection:
    """Return the connection; if its file can't be used, close it and raise."""
    try:
        schema.check_usable(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise translate(error, path) from error
        raise
    return connection


def is_ready(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file has its write-ahead log and the tables of this version."""
    try:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        return bool(mode == "wal" and schema.found_version(connection) == schema.VERSION)
    except sqlite3.Error as error:
        raise translate(error, path) from error


def make_ready(connection: sqlite3.Connection, path: str) -> None:
    """Give the file its write-ahead log and tables. The caller must hold the turn."""
    try:
        mode = _with_log(connection)
        if mode != "wal":
            raise ConfigError(f"{path} can't have a write-ahead log (its journal mode is {mode})")
        connection.execute("BEGIN IMMEDIATE")
        schema.migrate(connection)
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise translate(error, path) from error


def _with_log(connection: sqlite3.Connection) -> str:
    """Give the file a write-ahead log; returns its journal mode afterwards.

    SQLite refuses that at once while another program has a lock: it does not wait for
    `busy_timeout`, as every other statement does. So this looks for a moment without locks, again
    and again at random times: SQLite's own waits get so long that they always miss the moments
    between the transactions of a program that writes all the time. After an exclusive lock the
    others still sleep until their next try.
    """
    patience = int(connection.execute("PRAGMA busy_timeout").fetchone()[0])
    deadline = time.monotonic() + patience / 1000
    connection.execute("PRAGMA busy_timeout=0")
    try:
        while True:
            try:
                return str(connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                _raise_unless_busy(error, deadline)
            while not _is_without_locks(connection, deadline):
                time.sleep(CHANCE.uniform(0, _LOOK_FOR_A_MOMENT))
    finally:
        connection.execute(f"PRAGMA busy_timeout={patience}")


def _is_without_locks(connection: sqlite3.Connection, deadline: float) -> bool:
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        _raise_unless_busy(error, deadline)
        return False
    connection.execute("COMMIT")
    return True


def _raise_unless_busy(error: sqlite3.OperationalError, deadline: float) -> None:
    if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
        raise error


# How long the write-ahead log gets. A file that still grows is slower to sync (310 against 190 µs
# per small commit), so the log is restarted early where no reader is in the way: at 1 MB, then
# whenever it has doubled. From `WAL_LIMIT` on the writer waits for readers, longer for a longer
# log: on a busy machine a short read takes long, too. With large commits, the log is restarted only
# after a few of them.

WAL_LIMIT = 16 * 2**20
_WAL_LEAST = 2**20
_WAL_STEP = 4 * 2**20
_WAL_COMMITS = 8
# For each `WAL_LIMIT` that the log has, and how often that is counted.
_READERS_PATIENCE_MS = 50
_MOST_PATIENCE = 5
_COMMIT_WEIGHT = 16 * 2**10


class LogSize:
    """Tracks the log's size, together with all processes, and restarts the log in time."""

    def __init__(self, control: Control, busy_timeout: float) -> None:
        self._control = control
        self._busy_timeout_ms = int(busy_timeout * 1000)

    def keep_short(self, writer: sqlite3.Connection, weight: int) -> None:
        """Restart the log if it is time. `weight`: roughly how many bytes the last commit added.

        Call it after that commit and before the next writer's turn.
        """
        before = self._control.wal_bytes
        size = before + weight + _COMMIT_WEIGHT
        if _is_checkpoint_due(before, size, weight):
            patience = _READERS_PATIENCE_MS * min(size // WAL_LIMIT, _MOST_PATIENCE)
            size = 0 if self._checkpoint(writer, patience) else size
        self._control.wal_bytes = size

    def _checkpoint(self, writer: sqlite3.Connection, patience_ms: int) -> bool:
        """Move the log's content into the file and start the log anew, if no reader needs it."""
        try:
            writer.execute(f"PRAGMA busy_timeout={patience_ms}")
            busy = writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0]
            return not busy
        except sqlite3.Error:
            # The commit stands; a checkpoint that fails now is tried again later.
            return False
        finally:
            with suppress(sqlite3.Error):
                writer.execute(f"PRAGMA busy_timeout={self._busy_timeout_ms}")


def _is_checkpoint_due(before: int, size: int, weight: int) -> bool:
    """Whether the log's size has passed one of the marks with the last commit."""
    if size >= WAL_LIMIT:
        return before < WAL_LIMIT or size // _WAL_STEP > before // _WAL_STEP
    if size < _WAL_COMMITS * weight:
        return False
    return (size // _WAL_LEAST).bit_length() > (before // _WAL_LEAST).bit_length()


# Whether the files are still the ones that were opened. SQLite goes on writing to a file that was
# removed or replaced: it would acknowledge what can never be read. And if its folder or the lock in
# it was removed, a process has the lock and sessions for itself, and no other process sees them.

_LOOK_EVERY = 0.25


class Whereabouts:
    """Notices that files were removed or replaced.

    It looks at most a few times a second: each look gives up the interpreter lock.
    """

    def __init__(self, paths: tuple[str, ...], clock: Clock) -> None:
        self._clock = clock
        self._next_look = 0.0
        self._identities = {path: _identity(path) for path in paths}

    def refuse_change(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        for path, identity in self._identities.items():
            if _identity(path) != identity:
                raise removed(path)
        self._next_look = now + _LOOK_EVERY

    def look_now(self) -> None:
        """Look at the next occasion, however recent the last look was."""
        self._next_look = 0.0


def _identity(path: str) -> tuple[int, int] | None:
    """Which file has this path now; None if there is none."""
    with suppress(FileNotFoundError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None
