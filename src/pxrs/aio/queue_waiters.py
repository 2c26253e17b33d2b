"""Waiting for queues: one thread for each queue that tasks wait for, however many they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pxrs.aio.threads import called
from pxrs.stores.api import QueueStore, Watch


class QueueWaiters:
    """The watches of one connection, shared by all tasks that wait for a queue. Thread-safe."""

    def __init__(self, queues: QueueStore) -> None:
        self._queues = queues
        self._lock = threading.Lock()
        self._watched: dict[str, WatchedQueue] = {}

    def waiter(self, queue: str) -> QueueWaiter:
        """Makes a waiter for one task; it has to be opened, and closed."""
        return QueueWaiter(self, queue)

    def join(self, waiter: QueueWaiter) -> None:
        """Notify it from now on. Asks the store, so it is not for the loop's thread."""
        with self._lock:
            found = self._watched.get(waiter.queue)
            if found is None:
                found = WatchedQueue(self._queues.watch(waiter.queue))
                self._watched[waiter.queue] = found
                threading.Thread(
                    target=self._listen,
                    args=(waiter.queue, found),
                    name="pxrs-aio-queue",
                    daemon=True,
                ).start()
            found.waiters.add(waiter)

    def leave(self, waiter: QueueWaiter) -> None:
        """Do not notify it any more; the last one to leave ends the thread."""
        with self._lock:
            found = self._watched.get(waiter.queue)
            if found is None:
                return
            found.waiters.discard(waiter)
            if not found.waiters:
                del self._watched[waiter.queue]
                found.watch.close()

    def close(self) -> None:
        """Notify all of them, for the last time."""
        with self._lock:
            found, self._watched = list(self._watched.values()), {}
        for each in found:
            each.watch.close()

    def _listen(self, queue: str, watched: WatchedQueue) -> None:
        while True:
            watched.watch.wait()
            with self._lock:
                waiters = list(watched.waiters)
                over = self._watched.get(queue) is not watched
            for waiter in waiters:
                waiter.notify()
            if over:
                return


class WatchedQueue:
    """A watch and the waiters that it wakes."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.waiters: set[QueueWaiter] = set()


class QueueWaiter:
    """One task's wake-up: a change before it waits ends the wait at once."""

    def __init__(self, waiters: QueueWaiters, queue: str) -> None:
        self.queue = queue
        self._waiters = waiters
        self._lock = threading.Lock()
        self._notified = False
        self._wake: Callable[[], None] | None = None

    def open(self) -> None:
        """Begin to watch. Not for the loop's thread."""
        self._waiters.join(self)

    def clear(self) -> None:
        """Forget what has happened so far: its owner is about to look."""
        self._notified = False

    async def wait(self, timeout: float | None) -> None:
        """Wait until there may be an item, or for `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await called(self._on_notice)
        except TimeoutError:
            return

    def notify(self) -> None:
        """End the wait, or the next one at once. From any thread."""
        with self._lock:
            self._notified = True
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def close(self) -> None:
        """Watch no more. It does not wait."""
        self._waiters.leave(self)

    def _on_notice(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if not self._notified:
                self._wake = wake
                return
        wake()
