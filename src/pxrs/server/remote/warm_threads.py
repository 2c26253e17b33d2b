"""Threads for short calls; the one that was used last is used first.

Threads keep a connection to the store each. In a pool that takes its threads in turns, every call
finds one that was not used for long, whose cached pages and statements others have made stale.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger("pxrs")
Work = Callable[[], object]


class WarmThreads:
    """At most so many threads, started when they are needed. Thread-safe.

    They are daemons. What is submitted once all are busy waits, in order. With `few`, only so many
    work at a time as long as they get on; see `hurry`.
    """

    def __init__(self, most: int, name: str, few: int | None = None) -> None:
        self._most = most
        self._few = most if few is None else few
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        self._count = 0
        self._busy = 0
        self._waiting: deque[Work] = deque()
        # The work that waited longest when `hurry` was called last.
        self._late: Work | None = None
        self._closed = False

    def submit(self, work: Work) -> None:
        """Have it done. `RuntimeError` once it was closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads take no more work")
            if self._busy >= self._few:
                self._waiting.append(work)
            else:
                self._begin(work)

    def hurry(self) -> None:
        """Begin what waits, if it waited already when this was called last.

        To be called every now and then: work that takes long must not hold up the rest.
        """
        with self._lock:
            first = self._waiting[0] if self._waiting else None
            if first is not None and first is self._late:
                while self._waiting and self._busy < self._most:
                    self._begin(self._waiting.popleft())
                first = None
            self._late = first

    def _begin(self, work: Work) -> None:
        self._busy += 1
        if not self._idle:
            self._count += 1
            self._idle.append(_Thread(self._next, f"{self._name}_{self._count}"))
        self._idle.pop().give(work)

    def close(self) -> None:
        """Take no more work; threads end when they have done what there is."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.give(None)

    def _next(self, thread: _Thread) -> Work | None:
        """The next work of a thread that is free; None once no more will come."""
        with self._lock:
            if self._waiting and self._busy <= self._few:
                return self._waiting.popleft()
            self._busy -= 1
            if self._closed:
                return None
            self._idle.append(thread)
        return thread.wait()


class _Thread:
    def __init__(self, following: Callable[[_Thread], Work | None], name: str) -> None:
        self._next = following
        self._work: Work | None = None
        self._given = threading.Lock()
        self._given.acquire()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, work: Work | None) -> None:
        self._work = work
        self._given.release()

    def wait(self) -> Work | None:
        self._given.acquire()
        return self._work

    def _run(self) -> None:
        work = self.wait()
        while work is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - told, and the thread goes on
                _LOG.exception("work in a thread failed")
            # It may hold much, until there is other work.
            self._work = work = None
            work = self._next(self)
