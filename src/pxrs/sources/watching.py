"""A watch on a source that sends no notifications of new rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

# Seconds between looks: soon after something happened, and when it is quiet.
SOON, QUIET = 0.005, 0.25


class PollingWatch:
    """See `Watch`. Calls `changes` until its value differs, less often while it is quiet.

    Between two calls it waits for `soon` seconds at first, for `quiet` seconds at most.
    """

    def __init__(
        self, changes: Callable[[], object], soon: float = SOON, quiet: float = QUIET
    ) -> None:
        self._changes = changes
        self._soon = soon
        self._quiet = quiet
        self._woken = threading.Event()
        self._closed = False
        self._pause = soon
        # When it asks next: at once, as whoever was handed the watch has not read yet.
        self._look_at = 0.0
        self._seen = changes()

    def wait(self, timeout: float | None = None) -> bool:
        """See `Watch`. The pauses go on from one call to the next.

        Otherwise those who wait for a moment each time, such as the member of a quiet group,
        would ask as often as if something had just come. A change between two waits is noticed as
        late as one during a wait.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while not self._closed:
            if self._woken.is_set():
                self._woken.clear()
                return True
            now = monotonic()
            if now >= self._look_at:
                found = self._changes()
                if found != self._seen:
                    self._seen = found
                    self._pause, self._look_at = self._soon, now + self._soon
                    return True
                self._look_at = now + self._pause
                self._pause = min(self._pause * 2, self._quiet)
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                return False
            pause = max(0.0, self._look_at - monotonic())
            self._woken.wait(pause if left is None else min(pause, left))
        return True

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        self._woken.set()
