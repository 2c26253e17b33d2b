"""Notices that more processes write the same folders than ZooKeeper serves, and warns of it."""

from __future__ import annotations

import logging
import threading

from pxrs.clock import Clock

# The handle that kazoo logs to does not pass on what it gets.
_LOG = logging.getLogger("pxrs.store")

# Two processes that take from one queue without a pause have a quarter of their commits refused,
# four a half, twelve two thirds; and those twelve do less together than the two.
_SAMPLE = 200
_TOO_MANY = 0.6
_AGAIN = 600.0


class Crowding:
    """Counts the commits of one handle that were done, and that came too late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sent = self._refused = 0
        self._told: float | None = None

    def note(self, *, refused: bool) -> None:
        """Count a commit; warns if most of the last ones were refused, every ten minutes."""
        with self._lock:
            self._sent += 1
            self._refused += refused
            if self._sent < _SAMPLE:
                return
            share, self._sent, self._refused = self._refused / self._sent, 0, 0
            now = self._clock.monotonic()
            if share < _TOO_MANY or (self._told is not None and now - self._told < _AGAIN):
                return
            self._told = now
        _LOG.warning(
            "%.0f %% of the last %d commits to ZooKeeper were refused because other processes "
            "wrote the same folders first: use fewer workers for a queue, let each take several "
            "items, or use PostgreSQL",
            100 * share,
            _SAMPLE,
        )
