"""Notices that more processes use the same place of an engine than it serves, to warn of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pxrs.clock import Clock


class Crowding:
    """Counts the steps of one handle, and those in which other processes were in its way.

    If the share of these among the last `sample` steps is `most` or more, it calls `warn` with the
    share, but not again for `again` seconds.
    """

    def __init__(
        self,
        clock: Clock,
        warn: Callable[[float], None],
        *,
        sample: int,
        most: float,
        again: float,
    ) -> None:
        self._clock = clock
        self._warn = warn
        self._sample = sample
        self._most = most
        self._again = again
        self._lock = threading.Lock()
        self._steps = self._crowded = 0
        self._warned: float | None = None

    def note(self, *, crowded: bool) -> None:
        """Count one step; any thread may call it."""
        with self._lock:
            self._steps += 1
            self._crowded += crowded
            if self._steps < self._sample:
                return
            share, self._steps, self._crowded = self._crowded / self._steps, 0, 0
            now = self._clock.monotonic()
            if share < self._most:
                return
            if self._warned is not None and now - self._warned < self._again:
                return
            self._warned = now
        self._warn(share)
