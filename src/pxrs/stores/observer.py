"""Decides when a session of another process may be ended by time, for engines with rows.

A session's row has its deadline, by the server's clock. Past that moment its holder can neither
renew it nor write with it. Other processes still do not end it at once: if the server stood still,
no process could renew, and all would be declared dead together. An observer ends the session

- if the observer has been in touch with the server for one whole TTL: the holder could have been,
  too. In touch means that no two answers lie further apart than `OUT_OF_TOUCH`;
- or if the observer knows for one whole TTL that the row has not changed. This needs no steady
  contact: a process that is too busy to look often would otherwise never end a session.

A deadline further ahead than one TTL was written before the server's clock was set back. A living
holder renews it within the TTL, and it is right again. A deadline that has not changed one TTL
after the observer first saw it has no living holder.

Only this process's monotonic clock counts here, so a server's clock that jumps changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from pxrs.clock import Clock

# How often sessions of others are looked at, and how far apart two answers may be.
TICK = 0.25
OUT_OF_TOUCH = 3.0


class Suspect(NamedTuple):
    """A session whose deadline has passed, or lies further ahead than it can.

    `deadline` is only compared for equality: a different one means that the session was renewed.
    """

    id: str
    ttl: float
    deadline: Hashable
    is_late: bool


class Observer:
    """Tracks one process's contact with a server, and the suspects it saw. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Since when the server has answered, and when it last did.
        self._since = 0.0
        self._last: float | None = None
        self._server: Hashable = None
        # When each suspect was first seen with its present deadline.
        self._first_seen: dict[tuple[str, Hashable], float] = {}

    @property
    def is_due(self) -> bool:
        """Whether the last look was a while ago."""
        last = self._last
        return last is None or self._clock.monotonic() - last >= TICK

    def out_of_touch(self) -> None:
        """Note that the server did not answer: the contact begins anew with its next answer."""
        with self._lock:
            self._last = None

    def judge(self, suspects: Iterable[Suspect], sent: float, server: Hashable = None) -> list[str]:
        """Return the suspects that have to be ended.

        `suspects` are all that the server has just listed; the request was made at the time `sent`.
        `server` identifies one run of the server: after a restart the contact begins anew.
        """
        with self._lock:
            now = self._clock.monotonic()
            is_away = self._last is None or now - self._last > OUT_OF_TOUCH
            if is_away or server != self._server:
                self._since = now
            self._last, self._server = now, server
            known, self._first_seen = self._first_seen, {}
            over = []
            for suspect in suspects:
                state = (suspect.id, suspect.deadline)
                first = self._first_seen[state] = known.get(state, now)
                since = min(first, self._since) if suspect.is_late else first
                if since + suspect.ttl <= sent:
                    over.append(suspect.id)
            return over

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
