"""A watch on a source that does not tell by itself when something has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

# A look, seconds: soon after something happened, and when it is quiet.
SOON, QUIET = 0.005, 0.25


class PollingWatch:
    """See `Watch`. Asks `changes` for something that differs, less often while it is quiet.

    Between two questions it waits for `soon` seconds at first, for `quiet` seconds at most.
    """

    def __init__(
        self, changes: Callable[[], object], soon: float = SOON, quiet: float = QUIET
    ) -> None:
        self._changes = changes
        self._soon = soon
        self._quiet = quiet
        self._woken = threading.Event()
        self._closed = False
        self._seen = changes()

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        pause = self._soon
        while not self._closed:
            if self._woken.is_set():
                self._woken.clear()
                return True
            now = self._changes()
            if now != self._seen:
                self._seen = now
                return True
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                return False
            self._woken.wait(pause if left is None else min(pause, left))
            pause = min(pause * 2, self._quiet)
        return True

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        self._woken.set()
