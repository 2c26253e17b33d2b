"""Whether the files are still the ones that were opened.

SQLite goes on writing to a file that was removed or replaced: it would acknowledge what nobody
will ever read. And without its folder a process queues and holds sessions by itself.
"""

from __future__ import annotations

import os

from pxrs.clock import Clock
from pxrs.errors import StoreError

_LOOK_EVERY = 0.25


class Whereabouts:
    """Looks a few times a second at most: each look gives up the interpreter lock."""

    def __init__(self, paths: tuple[str, ...], clock: Clock) -> None:
        self._paths = paths
        self._clock = clock
        self._next_look = 0.0
        self._identities = self._look()

    def refuse_change(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        try:
            changed = self._look() != self._identities
        except FileNotFoundError:
            changed = True
        if changed:
            raise StoreError(
                f"{' or '.join(self._paths)} was removed or replaced while this process used it; "
                "start the process again"
            )
        self._next_look = now + _LOOK_EVERY

    def look_now(self) -> None:
        """Look at the next occasion, however short ago the last one was."""
        self._next_look = 0.0

    def _look(self) -> list[tuple[int, int]]:
        found = [os.stat(path) for path in self._paths]
        return [(each.st_dev, each.st_ino) for each in found]
