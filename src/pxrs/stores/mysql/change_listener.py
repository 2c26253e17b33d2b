"""Watches: commits of this process ring at once, those of others are looked for.

These databases announce no changes. One thread per store asks for the revision, often while things
change and four times a second when they don't. It starts with the first watch.

Whatever goes wrong in the thread, it goes on: those who wait would never learn that it had ended.
After trouble all of them are woken.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from pxrs.loop import Loop
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.queues.statements import WATCHED
from pxrs.stores.mysql.sessions import Sessions
from pxrs.stores.wakeups import LocalWatch, Wakeups

_SOON = 0.02
_LATE = 0.25


class ChangeListener:
    """All watches of one store; ends the sessions that it finds to be over."""

    def __init__(self, database: Database, sessions: Sessions) -> None:
        self._database = database
        self._sessions = sessions
        self._lock = threading.RLock()
        self._wakeups: Wakeups[str | None] = Wakeups(self._lock, settle=lambda: None)
        self._queue_wakeups: Wakeups[str | None] = Wakeups(self._lock, settle=lambda: None)
        self._stop = threading.Event()
        self._loop = Loop("pxrs-sql", self._step)
        self._is_looking = False
        self._pause = _SOON
        self._seen: tuple[int, int] | None = None
        # Of each queue that is watched: its number, and how often it has changed.
        self._seen_queues: dict[str, tuple[int, int] | None] = {}
        self._queue_lock = threading.Lock()
        database.origin.on_fork(self._abandon)

    def watch(self, prefixes: tuple[str, ...]) -> LocalWatch:
        """Armed on return: what is committed from now on is after the revision seen here."""
        watch = self._wakeups.watch(lambda key: key is None or key.startswith(prefixes))
        self._arm(watch)
        return watch

    def watch_queues(self, names: tuple[str, ...]) -> LocalWatch:
        """Wakes when there may be something to take from one of the queues. Armed on return."""
        watch = self._queue_wakeups.watch(_Queues(names))
        self._arm(watch)
        try:
            found = self._read_queues(set(names) - set(self._seen_queues))
        except BaseException:
            watch.close()
            raise
        with self._queue_lock:
            self._seen_queues = {**found, **self._seen_queues}
        return watch

    def _arm(self, watch: LocalWatch) -> None:
        with self._lock:
            if self._is_looking or self._stop.is_set():
                return
            try:
                self._look()
            except BaseException:
                watch.close()
                raise
            self._loop.start()
            self._is_looking = True

    def ring(self, keys: Collection[str]) -> None:
        """These were changed by this process."""
        self._wakeups.ring(keys)
        self._look_soon()

    def ring_queues(self, names: Collection[str]) -> None:
        """There may be something to take from these."""
        if names:
            self._queue_wakeups.ring(names)
            self._look_soon()

    def ring_all(self) -> None:
        """Anything may have changed."""
        self._wakeups.ring((None,))
        self._queue_wakeups.ring((None,))
        self._look_soon()

    def _look_soon(self) -> None:
        # A loop that does not run would keep every call of `wake`.
        if self._is_looking:
            self._loop.wake()

    def close(self) -> None:
        self._stop.set()
        self._look_soon()
        if self._database.usable:
            self._loop.join()
        self._wakeups.close()
        self._queue_wakeups.close()

    def _abandon(self) -> None:
        """In a forked child: the thread is gone, and locks may be held by threads of the parent."""
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        self._wakeups.abandon(self._lock)
        self._queue_wakeups.abandon(self._lock)
        self._stop = threading.Event()
        self._stop.set()

    def _step(self) -> float | None:
        # What is committed one after the other is looked at together.
        if self._stop.wait(_SOON):
            return None
        try:
            changed = self._look()
            changed = self._look_at_queues() or changed
            self._pause = _SOON if changed else min(2 * self._pause, _LATE)
        except Exception:  # noqa: BLE001 - see above: the thread must go on
            # What happens meanwhile is not known: everybody looks for themselves.
            self._seen = None
            self._sessions.observer.out_of_touch()
            self._pause = _LATE
        return self._pause

    def _look(self) -> bool:
        """Ring for what has changed since the last look; whether anything had."""
        sent = self._sessions.clock.monotonic()
        ((revision, removals, suspects),) = self._database.read(sql.LOOK)
        if suspects:
            self._sessions.look()
        else:
            self._sessions.observer.judge((), sent)
        before, self._seen = self._seen, (revision, removals)
        if before is None or before[1] != removals or revision < before[0]:
            # A record is gone, or a session with what it held; or a crash has taken commits.
            self._wakeups.ring((None,))
            self._queue_wakeups.ring((None,))
            return True
        if before[0] != revision:
            changed = self._database.read(sql.CHANGED, since=before[0])
            self._wakeups.ring([row[0] for row in changed])
        return before != self._seen or bool(suspects)

    def _look_at_queues(self) -> bool:
        """Ring for the queues that have changed since they were last looked at."""
        wanted = [each.names for each in self._queue_wakeups.wanted() if isinstance(each, _Queues)]
        found = self._read_queues(set[str]().union(*wanted))
        with self._queue_lock:
            before, self._seen_queues = self._seen_queues, found
        changed = [name for name in found if name not in before or before[name] != found[name]]
        self._queue_wakeups.ring(changed)
        return bool(changed)

    def _read_queues(self, names: set[str]) -> dict[str, tuple[int, int] | None]:
        """Returns the state of each queue; None if it does not exist."""
        if not names:
            return {}
        rows = self._database.read(WATCHED, names=sorted(names))
        found: dict[str, tuple[int, int] | None] = dict.fromkeys(names)
        for name, number, changes in rows:
            found[name] = (number, changes)
        return found


class _Queues:
    """Wants changes of some queues."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = frozenset(names)

    def __call__(self, name: str | None) -> bool:
        return name is None or name in self.names
