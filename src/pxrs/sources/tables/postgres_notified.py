"""A watch that is notified of new rows by the trigger that `prepare` makes.

Notifications are hints: they come when a row is committed, which may not be final yet, and a pooler
in between may lose them. So the table is looked at all the same, less often.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import psycopg
from psycopg import sql

from pxrs.forks import Origin
from pxrs.sources.watching import QUIET, SOON

# Seconds between two looks while notifications come; and until a connection is tried again.
_LISTENING, _AGAIN = 2.0, 5.0


class NotifiedWatch:
    """See `Watch`. It has a connection of its own, which listens."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        channel: str,
        changes: Callable[[], object],
        is_waiting: Callable[[], bool],
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._changes = changes
        self._is_waiting = is_waiting
        self._origin = Origin("watch")
        self._woken_socket, self._wake_socket = socket.socketpair()
        self._woken_socket.setblocking(False)
        self._woken = False
        self._closed = False
        # Held by the thread that waits; a second thread that closes comes after it.
        self._lock = threading.Lock()
        self._db: psycopg.Connection[Any] | None = None
        self._retry_at = 0.0
        self._listen()
        self._seen = changes()

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        pause = SOON
        with self._lock:
            while not self._closed:
                if self._woken:
                    self._woken = False
                    return True
                now = self._changes()
                if now != self._seen:
                    self._seen = now
                    return True
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return False
                if self._pause(pause if left is None else min(pause, left)):
                    pause = SOON
                else:
                    pause = min(pause * 2, self._longest())
        return True

    def _longest(self) -> float:
        """The longest pause. A rollback sends no notification, though rows become final by it."""
        return QUIET if self._db is None or self._is_waiting() else _LISTENING

    def _pause(self, seconds: float) -> bool:
        """Wait `seconds`, or until a notification; returns whether one came."""
        self._listen()
        poll = select.poll()
        poll.register(self._woken_socket, select.POLLIN)
        if self._db is not None:
            poll.register(self._db.fileno(), select.POLLIN)
        ready = poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            self._woken_socket.recv(4096)
        if self._db is not None:
            try:
                for _ in self._db.notifies(timeout=0):
                    pass
            except psycopg.Error:
                self._hang_up()
        return bool(ready)

    def _listen(self) -> None:
        if self._db is not None or monotonic() < self._retry_at:
            return
        self._retry_at = monotonic() + _AGAIN
        with suppress(psycopg.Error):
            self._db = db = self._connect()
            db.autocommit = True
            db.execute("SET application_name = 'pxrs source watch'")
            db.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            return
        self._hang_up()

    def _hang_up(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(psycopg.Error):
                db.close()

    def wake(self) -> None:
        self._woken = True
        with suppress(OSError):
            self._wake_socket.send(b"!")

    def close(self) -> None:
        if self._origin.is_parent:
            return
        self._closed = True
        self.wake()
        with self._lock:
            self._hang_up()
            self._woken_socket.close()
            self._wake_socket.close()
