"""The watches that clients have on a node's stores, in one thread for all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue

from pxrs.errors import PxrsError
from pxrs.server.limits import check_room
from pxrs.stores.api import CallsBack, Watch

_LOG = logging.getLogger("pxrs.serve")
# Watches of all clients, and those among them that need a thread: of stores that can't call back.
_MOST_WATCHES = 20_000
_MOST_THREADS = 1000
# What the names have that clients watch, as they were sent.
_MOST_BYTES = 64 * 2**20
# How often some of the watches are looked at that nobody has woken, and how many of them.
_LOOK = 0.25
_LOOKS = 100


class Watched:
    """A watch of a client. `woken` is called, by any thread, when it has been woken."""

    def __init__(self, watch: Watch, woken: Callable[[], None], size: int) -> None:
        self.watch = watch
        self.woken = woken
        self.size = size
        self.is_rung = False
        self.is_closed = False


class Watches:
    """Waits for all watches of all clients. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they were looked at.
        self._all: dict[Watched, None] = {}
        self._threads = 0
        self._bytes = 0
        self._rung: SimpleQueue[Watched | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, arm: Callable[[], Watch], woken: Callable[[], None], size: int) -> Watched:
        """Arm a watch that has names of so many bytes; `NodeFull` if there are too many."""
        with self._lock:
            check_room("watches of clients", len(self._all), _MOST_WATCHES)
            check_room("bytes of watches", self._bytes + size, _MOST_BYTES)
            self._bytes += size
        try:
            watched = Watched(arm(), woken, size)
        except BaseException:
            with self._lock:
                self._bytes -= size
            raise
        with self._lock:
            self._all[watched] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pxrs-v1-watches", daemon=True
                )
                self._thread.start()
        try:
            self._listen(watched)
        except BaseException:
            self.remove(watched)
            raise
        return watched

    def _listen(self, watched: Watched) -> None:
        if isinstance(watched.watch, CallsBack):
            watched.watch.on_wake(lambda: self._ring(watched))
            # It may have been woken in between.
            self._ring(watched)
            return
        with self._lock:
            check_room("watches with a thread each", self._threads, _MOST_THREADS)
            self._threads += 1
        threading.Thread(
            target=self._wait, args=(watched,), name="pxrs-v1-watch", daemon=True
        ).start()

    def remove(self, watched: Watched) -> None:
        """Nobody wants to hear of it any more."""
        watched.is_closed = True
        with self._lock:
            if watched in self._all:
                del self._all[watched]
                self._bytes -= watched.size
        with suppress(PxrsError):
            watched.watch.close()

    def close(self) -> None:
        """End the thread. Watches that are left are of streams that end, too."""
        self._rung.put(None)

    def _ring(self, watched: Watched) -> None:
        """By any thread, under locks of the store. A watch is in the queue once."""
        if not watched.is_rung:
            watched.is_rung = True
            self._rung.put(watched)

    def _run(self) -> None:
        while True:
            try:
                watched = self._rung.get(timeout=_LOOK)
            except Empty:
                self._look_at_some()
                continue
            if watched is None:
                return
            # First: what wakes it after this look rings again.
            watched.is_rung = False
            self._look_at(watched)

    def _look_at_some(self) -> None:
        with self._lock:
            some = list(islice(self._all, _LOOKS))
            for watched in some:
                del self._all[watched]
                self._all[watched] = None
        for watched in some:
            self._look_at(watched)

    def _look_at(self, watched: Watched) -> None:
        if not watched.is_closed and _is_woken(watched.watch, 0) and not watched.is_closed:
            watched.woken()

    def _wait(self, watched: Watched) -> None:
        try:
            while not watched.is_closed:
                if _is_woken(watched.watch, 30.0) and not watched.is_closed:
                    watched.woken()
        finally:
            with self._lock:
                self._threads -= 1


def _is_woken(watch: Watch, seconds: float) -> bool:
    """One that fails may have missed something."""
    try:
        return watch.wait(seconds)
    except PxrsError:
        if seconds:
            threading.Event().wait(1.0)
        return True
    except Exception:  # noqa: BLE001 - the others go on
        _LOG.exception("a watch failed")
        return True
