"""The holder's side of sessions that only need to be renewed in time.

When another process may end one is decided in `observer.py`, for engines with rows.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from pxrs.clock import Clock
from pxrs.errors import PxrsError, SessionLost
from pxrs.stores.api import validate_ttl

_LENT = "lent-"
# Separates the owner of a session from the handle that knows it. No host name contains it.
OF_PROCESS = "/"


def require_ttl(ttl: float) -> None:
    """Refuse a session that would end at once, or live for longer than a day."""
    validate_ttl(ttl, 0.05, 86_400)


def lent_name() -> str:
    """Makes the id of a session that is lent. See `pxrs.stores.api.LendsSessions`."""
    return f"{_LENT}{secrets.token_hex(12)}"


def is_lent(session: str) -> bool:
    """Whether a session of this id outlives the process that opened it. Not so on etcd."""
    return session.startswith(_LENT)


def require_lent(session: str) -> None:
    """Refuse to adopt a session that was not lent."""
    if not is_lent(session):
        raise SessionLost(f"session {session!r} is another process's own; open a new one")


def this_process() -> str:
    """Returns the owner of this process's sessions: host and pid."""
    return f"{socket.gethostname()}:{os.getpid()}"


class TimedSession:
    """A session held by this process. See `pxrs.stores.api.Session`.

    `renew` returns whether its row could be renewed, `end` ends it in the store; `holds` returns
    whether it still has what it needs beside its row, such as a lock on a connection.
    """

    def __init__(
        self,
        name: str,
        ttl: float,
        sent: float,
        clock: Clock,
        *,
        renew: Callable[[], bool],
        end: Callable[[], None],
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        self.id = name
        self.ttl = ttl
        self._clock = clock
        self._renew_row = renew
        self._end_row = end
        self._holds = holds
        self._deadline = sent + ttl
        self._over = self._ended = False
        self._renewing = threading.Lock()

    def renew(self) -> None:
        with self._renewing:
            sent = self._clock.monotonic()
            renewed = False
            try:
                renewed = self.remaining() > 0 and self._renew_row()
            except PxrsError:
                # Without what it holds, another process may have noticed the end already.
                if self._holds():
                    raise
            if renewed:
                self._deadline = sent + self.ttl
                return
        self._lose()
        raise SessionLost(f"session {self.id} expired, was ended or has lost its connection")

    def _lose(self) -> None:
        """End a session that could not be renewed, so that other processes need not wait for it."""
        with suppress(PxrsError):
            self.close()

    def remaining(self) -> float:
        if self._over or not self._holds():
            return 0.0
        return max(0.0, self._deadline - self._clock.monotonic())

    def close(self) -> None:
        self._over = True
        if not self._ended:
            self._end_row()
            self._ended = True

    def forget(self) -> None:
        """In a forked child: let go of the session, which is the parent's."""
        self._over = self._ended = True
        self._renewing = threading.Lock()


class AdoptedSession(TimedSession):
    """A session that any process may adopt. See `pxrs.stores.api.LentSession`.

    `renew` fails once another handle has adopted it, and `end_unless_adopted` does nothing then.
    """

    def __init__(
        self,
        name: str,
        ttl: float,
        sent: float,
        clock: Clock,
        *,
        renew: Callable[[], bool],
        end: Callable[[], None],
        end_unless_adopted: Callable[[], None],
    ) -> None:
        super().__init__(name, ttl, sent, clock, renew=renew, end=end)
        self._end_unless_adopted = end_unless_adopted

    def abandon(self) -> None:
        self._over = True
        if not self._ended:
            self._end_unless_adopted()
            self._ended = True

    def _lose(self) -> None:
        """Leave the session in the store: another process may renew it. Only its TTL ends it."""
        self._over = True
