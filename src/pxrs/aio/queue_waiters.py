"""Waiting for queues: a thread for each queue that somebody waits for, however many wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pxrs.aio.threads import called
from pxrs.stores.api import QueueStore, Watch


class Ears:
    """The watches of one connection, shared by all who wait for the same queue. Thread-safe."""

    def __init__(self, queues: QueueStore) -> None:
        self._queues = queues
        self._lock = threading.Lock()
        self._listening: dict[str, Listening] = {}

    def ear(self, queue: str) -> Ear:
        """For one who is going to wait; it has to be opened, and closed."""
        return Ear(self, queue)

    def join(self, ear: Ear) -> None:
        """Ring it from now on. Asks the store, so it is not for the loop's thread."""
        with self._lock:
            found = self._listening.get(ear.queue)
            if found is None:
                found = Listening(self._queues.watch(ear.queue))
                self._listening[ear.queue] = found
                threading.Thread(
                    target=self._listen, args=(ear.queue, found), name="pxrs-aio-ear", daemon=True
                ).start()
            found.ears.add(ear)

    def leave(self, ear: Ear) -> None:
        """Do not ring it any more; the last one to leave ends the thread."""
        with self._lock:
            found = self._listening.get(ear.queue)
            if found is None:
                return
            found.ears.discard(ear)
            if not found.ears:
                del self._listening[ear.queue]
                found.watch.close()

    def close(self) -> None:
        """Ring all of them, for the last time."""
        with self._lock:
            found, self._listening = list(self._listening.values()), {}
        for each in found:
            each.watch.close()

    def _listen(self, queue: str, listening: Listening) -> None:
        while True:
            listening.watch.wait()
            with self._lock:
                ears = list(listening.ears)
                over = self._listening.get(queue) is not listening
            for ear in ears:
                ear.ring()
            if over:
                return


class Listening:
    """A watch and those who want to hear of it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.ears: set[Ear] = set()


class Ear:
    """One task's part in it: what rings before it waits ends the wait at once."""

    def __init__(self, ears: Ears, queue: str) -> None:
        self.queue = queue
        self._ears = ears
        self._lock = threading.Lock()
        self._rung = False
        self._wake: Callable[[], None] | None = None

    def open(self) -> None:
        """Begin to listen. Not for the loop's thread."""
        self._ears.join(self)

    def quiet(self) -> None:
        """Forget what has rung so far: its owner is about to look."""
        self._rung = False

    async def heard(self, timeout: float | None) -> None:
        """Wait until there may be something, or for so many seconds."""
        try:
            async with asyncio.timeout(timeout):
                await called(self._on_ring)
        except TimeoutError:
            return

    def ring(self) -> None:
        """Wake who waits, or let the next wait end at once. From any thread."""
        with self._lock:
            self._rung = True
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def close(self) -> None:
        """Listen no more. It does not wait."""
        self._ears.leave(self)

    def _on_ring(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if not self._rung:
                self._wake = wake
                return
        wake()
