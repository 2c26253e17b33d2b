"""Watches: commits of this process wake them at once, those of other processes by polling.

These databases announce no changes. One thread per store polls the revision, often while things
change and four times a second when they don't. It starts with the first watch.

Whatever goes wrong in the thread, it goes on: waiting callers would never learn of its end. After
an error it wakes all watches.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from pxrs.loop import Loop
from pxrs.stores.mysql import statements as sql
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.queues.statements import WATCHED
from pxrs.stores.mysql.sessions import Sessions
from pxrs.stores.wakeups import KEY, QUEUE, LocalWatch, Wakeups, Wanted, named

_SOON = 0.02
_LATE = 0.25


class ChangeListener:
    """Wakes the watches of one store; ends the sessions that it finds to be over."""

    def __init__(self, database: Database, sessions: Sessions) -> None:
        self._database = database
        self._sessions = sessions
        self._lock = threading.RLock()
        self._wakeups: dict[str, Wakeups[str]] = {
            kind: Wakeups(self._lock) for kind in (KEY, QUEUE)
        }
        self._stop = threading.Event()
        self._loop = Loop("pxrs-sql", self._step)
        self._is_looking = False
        self._pause = _SOON
        self._seen: tuple[int, int] | None = None
        # For each queue that is watched: its number, and how often it has changed.
        self._seen_queues: dict[str, tuple[int, int] | None] = {}
        self._queue_lock = threading.Lock()
        database.origin.on_fork(self._abandon)

    def watch(self, kind: str, names: Collection[str]) -> LocalWatch:
        """A watch, armed on return: the state before it is known, so any later commit wakes it."""
        watch = self._wakeups[kind].watch(Wanted(kind, names))
        try:
            self._start()
            if kind == QUEUE:
                found = self._read_queues(set(names) - set(self._seen_queues))
                with self._queue_lock:
                    self._seen_queues = {**found, **self._seen_queues}
        except BaseException:
            watch.close()
            raise
        return watch

    def _start(self) -> None:
        with self._lock:
            if not self._is_looking and not self._stop.is_set():
                self._look()
                self._loop.start()
                self._is_looking = True

    def ring(self, kind: str, names: Collection[str]) -> None:
        """Wake the watches of these: this process changed them, or items may have become free."""
        if names:
            self._wakeups[kind].ring([kind + name for name in names])
            self._look_soon()

    def ring_all(self) -> None:
        """Wake all watches: anything may have changed."""
        self._wake_all()
        self._look_soon()

    def _wake_all(self) -> None:
        for wakeups in self._wakeups.values():
            wakeups.wake(lambda wants: True)

    def _look_soon(self) -> None:
        # A loop that does not run would keep every wake-up.
        if self._is_looking:
            self._loop.wake()

    def close(self) -> None:
        self._stop.set()
        self._look_soon()
        if self._database.usable:
            self._loop.join()
        for wakeups in self._wakeups.values():
            wakeups.close()

    def _abandon(self) -> None:
        """In a forked child: the thread is gone, and locks may be held by threads of the parent."""
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        for wakeups in self._wakeups.values():
            wakeups.abandon(self._lock)
        self._stop = threading.Event()
        self._stop.set()

    def _step(self) -> float | None:
        # This pause lets one look find several commits.
        if self._stop.wait(_SOON):
            return None
        try:
            changed = self._look()
            changed = self._look_at_queues() or changed
            self._pause = _SOON if changed else min(2 * self._pause, _LATE)
        except Exception:  # noqa: BLE001 - see above: the thread must go on
            # Changes may be missed meanwhile: the next look wakes all watches.
            self._seen = None
            self._sessions.observer.out_of_touch()
            self._pause = _LATE
        return self._pause

    def _look(self) -> bool:
        """Wake watches of what changed since the last look; returns whether anything did."""
        sent = self._sessions.clock.monotonic()
        ((revision, removals, suspects),) = self._database.read(sql.LOOK)
        if suspects:
            self._sessions.look()
        else:
            self._sessions.observer.judge((), sent)
        before, self._seen = self._seen, (revision, removals)
        if before is None or before[1] != removals or revision < before[0]:
            # A record is gone, or a session with what it held; or a crash of the server has lost
            # commits.
            self._wake_all()
            return True
        if before[0] != revision:
            changed = self._database.read(sql.CHANGED, since=before[0])
            self._wakeups[KEY].ring([KEY + row[0] for row in changed])
        return before != self._seen or bool(suspects)

    def _look_at_queues(self) -> bool:
        """Wake watches of queues that changed since the last look; returns whether any did."""
        found = self._read_queues({word[1:] for word in named(self._wakeups[QUEUE].wanted())})
        with self._queue_lock:
            before, self._seen_queues = self._seen_queues, found
        changed = [name for name in found if name not in before or before[name] != found[name]]
        self._wakeups[QUEUE].ring([QUEUE + name for name in changed])
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
