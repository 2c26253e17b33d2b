"""Wake-ups across processes: one listening thread per open store.

Writers raise change counters after their commit and touch a file; inotify wakes the thread, and it
wakes the watches whose slots have changed. In addition, every 250 ms, the thread checks
`PRAGMA data_version` for commits that raised no counter (a caller's own transaction, a lost event),
and the deadlines of other processes' sessions. Without inotify it reads the counters every few
milliseconds.

Whatever goes wrong in the thread, it goes on: waiting callers would never learn of its end. After
an error it wakes all watches and checks every session.
"""

from __future__ import annotations

import os
import select
import sqlite3
import struct
import threading
import time
from collections.abc import Callable

from pxrs.clock import Clock
from pxrs.errors import Closed, PxrsError
from pxrs.stores.sqlite.change_counters import Control
from pxrs.stores.sqlite.database import Database, leave_to_parent
from pxrs.stores.sqlite.failures import translate_os
from pxrs.stores.sqlite.posix import (
    IN_CLOSE_WRITE,
    IN_DELETE,
    IN_MODIFY,
    IN_MOVED_FROM,
    IN_Q_OVERFLOW,
    add_watch,
    drain,
    open_inotify,
)
from pxrs.stores.sqlite.sessions import SessionFiles, is_session_name
from pxrs.stores.timed_sessions import is_lent
from pxrs.stores.wakeups import LocalWatch

TICK = 0.25
_POLL = 0.004
_PROBE_AGAIN = 0.0005
_EVENT = struct.Struct("iIII")


class SlotWatch(LocalWatch):
    """A watch on change counters."""

    def __init__(
        self,
        changes: ChangeListener,
        control: Control,
        slots: frozenset[int],
        sessions: bool,
        silent: bool,
    ) -> None:
        super().__init__(threading.RLock(), self._look, changes.forget)
        self.sessions = sessions
        self.silent = silent
        self._control = control
        self._slots = tuple(slots)
        control.note_watched(self._slots)
        self._seen = control.counters(self._slots)

    def _look(self) -> None:
        """Read the counters once: a change after this is left to the next look."""
        now = self._control.counters(self._slots)
        if now != self._seen:
            self._seen = now
            self._wakes += 1

    def heard(self) -> bool:
        """Whether a slot has rung since the last look."""
        return self._control.counters(self._slots) != self._seen


class ChangeListener:
    """Wakes the watches of one store. Its thread starts with the first watch."""

    def __init__(
        self, database: Database, sessions: SessionFiles, clock: Clock, use_inotify: bool = True
    ) -> None:
        self._database = database
        self._control = database.control
        self._sessions = sessions
        self._clock = clock
        self._use_inotify = use_inotify
        # Reentrant: the garbage collector may close a watch in the middle of making another.
        self._lock = threading.RLock()
        self._watches: set[SlotWatch] = set()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stop_read = self._stop_write = -1
        self._inotify: int | None = None
        self._folder_watch: int | None = None
        self._deadlines: dict[str, float] = {}
        self._commits = CommitSpy(database)

    def watch(self, slots: frozenset[int], *, sessions: bool, silent: bool = True) -> SlotWatch:
        """An armed watch on the slots; with `sessions` it wakes on any session's end too.

        `silent`: what it watches can also be changed in callers' own transactions, which raise no
        counter.
        """
        self._database.check_open()
        with self._lock:
            if self._closed:
                raise Closed("the store was closed")
            if self._thread is None:
                self._start()
            watch = SlotWatch(self, self._control, slots, sessions, silent)
            self._watches.add(watch)
        return watch

    def forget(self, watch: LocalWatch) -> None:
        with self._lock:
            self._watches -= {watch}

    def close(self) -> None:
        """Stop listening and wake all waiting threads."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            watches = list(self._watches)
        if thread is not None:
            os.write(self._stop_write, b"x")
            thread.join()
            self._close_files()
        for watch in watches:
            watch.close()

    def abandon(self) -> None:
        """In a forked child: the thread is gone, and so are its descriptors."""
        self._lock = threading.RLock()
        for watch in self._watches:
            watch.abandon(threading.RLock())
        self._watches = set()
        self._commits.abandon()
        if self._thread is not None:
            self._thread = None
            self._close_files()

    def _close_files(self) -> None:
        for fd in (self._stop_read, self._stop_write, self._inotify):
            if fd is not None:
                os.close(fd)
        self._inotify = None

    def _start(self) -> None:
        try:
            self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise translate_os(error, self._control.touched_path) from error
        self._inotify = open_inotify() if self._use_inotify else None
        if self._inotify is not None:
            touched = add_watch(self._inotify, self._control.touched_path, IN_MODIFY)
            self._folder_watch = add_watch(
                self._inotify, self._sessions.path, IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM
            )
            if touched is None or self._folder_watch is None:
                os.close(self._inotify)
                self._inotify = None
        thread = threading.Thread(target=self._listen, name="pxrs-changes", daemon=True)
        try:
            self._note_sessions()
            thread.start()
        except BaseException:
            self._close_files()
            raise
        self._thread = thread

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify, select.POLLIN)
        next_tick = self._clock.monotonic() + TICK
        while True:
            ready = {fd for fd, _ in poll.poll(self._pause(next_tick) * 1000)}
            if self._stop_read in ready:
                self._commits.close()
                return
            try:
                if self._inotify in ready and self._inotify is not None:
                    self._hear(drain(self._inotify))
                self._wake(SlotWatch.heard)
                if self._pause(next_tick) <= 0:
                    self._tick()
                    next_tick = self._clock.monotonic() + TICK
            except Exception:  # noqa: BLE001 - waiting callers would never learn of it
                self._doubt()
                select.select([self._stop_read], [], [], TICK)

    def _doubt(self) -> None:
        """An event was missed: wake all watches, and check every session at the next tick."""
        self._deadlines = dict.fromkeys(self._deadlines, 0.0)
        self._wake(lambda watch: True)

    def _pause(self, next_tick: float) -> float:
        """Seconds until the next tick, or until a session's deadline if that is sooner."""
        due = min(next_tick, *self._deadlines.values(), next_tick)
        left = max(0.0, due - self._clock.monotonic())
        return left if self._inotify is not None else min(left, _POLL)

    def _hear(self, events: bytes) -> None:
        at = 0
        while at + _EVENT.size <= len(events):
            watch, mask, _, length = _EVENT.unpack_from(events, at)
            name = os.fsdecode(events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            if mask & IN_Q_OVERFLOW:
                self._doubt()
            elif watch == self._folder_watch and is_session_name(name):
                self._session_stirred(name)

    def _session_stirred(self, name: str) -> None:
        """A session's file was closed by its writer or removed. The event can precede the unlock.

        A lent session has no lock: its file was closed because it was renewed.
        """
        if not self._sessions.alive(name):
            self._session_ended(name)
            return
        if not is_lent(name):
            time.sleep(_PROBE_AGAIN)
            if not self._sessions.alive(name):
                self._session_ended(name)
                return
        self._deadlines[name] = 0.0

    def _session_ended(self, name: str) -> None:
        self._deadlines.pop(name, None)
        self._wake(lambda watch: watch.sessions)

    def _wake(self, which: Callable[[SlotWatch], bool]) -> None:
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            if which(watch):
                watch.wake()

    def _tick(self) -> None:
        if self._commits.unheard():
            self._wake(lambda watch: True)
        elif self._commits.perhaps_unheard():
            self._wake(lambda watch: watch.silent)
        self._note_sessions()
        now = self._clock.monotonic()
        for name, deadline in list(self._deadlines.items()):
            if deadline <= now or self._inotify is None:
                if self._sessions.alive(name):
                    self._deadlines[name] = self._sessions.deadline(name) or 0.0
                else:
                    self._session_ended(name)

    def _note_sessions(self) -> None:
        """Add new sessions, due at once: one that was not known may be dead already."""
        for name in self._sessions.names():
            self._deadlines.setdefault(name, 0.0)


class CommitSpy:
    """Notices commits that raised no counter, a tick after they happened.

    Among commits that did raise one, it can't tell. Then it reports at every fourth tick, for
    watches on what callers write in transactions of their own.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: sqlite3.Connection | None = None
        self._version = 0
        self._rings = 0
        self._ticks = 0
        self._changed = False

    def unheard(self) -> bool:
        """Whether there were commits but no counter rose: wake all watches. Call it once a tick."""
        self._ticks += 1
        version = self._data_version()
        self._changed = self._changed or version != self._version
        self._version = version
        silent = self._rings == self._database.control.rings
        self._rings = self._database.control.rings
        if self._changed and silent:
            self._changed = False
            return True
        return False

    def perhaps_unheard(self) -> bool:
        """Whether counters rose, and it is time to look for commits that raised none."""
        if self._changed and self._ticks % 4 == 0:
            self._changed = False
            return True
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child: leave the connection to the parent."""
        if self._connection is not None:
            leave_to_parent(self._connection)

    def _data_version(self) -> int:
        try:
            if self._connection is None:
                self._connection = self._database.connect()
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except (sqlite3.Error, PxrsError):
            return self._version
