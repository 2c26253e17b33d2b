"""Watches: commits of this process ring at once, those of others are looked for.

These databases tell nobody of a change. One thread per store asks for the revision, often while
things change and four times a second when they don't, and only while somebody watches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from pxrs.errors import PxrsError
from pxrs.stores.sql import statements as sql
from pxrs.stores.sql.database import Database
from pxrs.stores.wakeups import LocalWatch, Wakeups

_SOON = 0.02
_LATE = 0.25


class Ears:
    """All watches of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Ends the sessions that are past their time.
        self.reap: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._wakeups: Wakeups[str | None] = Wakeups(self._lock, settle=lambda: None)
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: tuple[int, int] | None = None

    def watch(self, prefixes: tuple[str, ...]) -> LocalWatch:
        """Armed on return: what is committed from now on is after the revision seen here."""
        watch = self._wakeups.watch(lambda key: key is None or key.startswith(prefixes))
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                try:
                    self._look()
                except BaseException:
                    watch.close()
                    raise
                self._thread = threading.Thread(target=self._run, name="pxrs-sql", daemon=True)
                self._thread.start()
        return watch

    def ring(self, keys: Collection[str]) -> None:
        """These were changed by this process."""
        self._wakeups.ring(keys)
        self._hurry.set()

    def ring_all(self) -> None:
        """Anything may have changed."""
        self._wakeups.ring((None,))
        self._hurry.set()

    def close(self) -> None:
        self._stop.set()
        self._hurry.set()
        if self._thread is not None and self._database.usable:
            self._thread.join()
        self._wakeups.close()

    def _run(self) -> None:
        wait = _SOON
        while not self._stop.is_set():
            self._hurry.wait(wait)
            self._hurry.clear()
            if self._stop.wait(_SOON):
                return
            try:
                wait = _SOON if self._look() else min(2 * wait, _LATE)
            except PxrsError:
                # What happens meanwhile is not known: everybody looks for themselves.
                self._seen = None
                wait = _LATE

    def _look(self) -> bool:
        """Ring for what has changed since the last look; whether anything had."""
        ((revision, removals, expired),) = self._database.read(sql.LOOK)
        if expired:
            self.reap()
        before, self._seen = self._seen, (revision, removals)
        if before is None:
            self._wakeups.ring((None,))
            return True
        if before[1] != removals:
            self._wakeups.ring((None,))
        elif before[0] != revision:
            changed = self._database.read(sql.CHANGED, since=before[0])
            self._wakeups.ring([row[0] for row in changed])
        return before != self._seen or bool(expired)
