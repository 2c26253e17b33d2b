"""A consumer's watch on the logs of what it owns."""

from __future__ import annotations

import threading

from pxrs.consuming.partition_table import ConsumerDesk
from pxrs.stores.api import LogStore, Watch


class LogWatch:
    """Follows the desk: armed anew when the seats have changed. Wakes come from any thread."""

    def __init__(self, log: LogStore, desk: ConsumerDesk) -> None:
        self._log = log
        self._desk = desk
        self._watch: Watch | None = None
        self._version = -1
        self._closed = False
        # Ends a wait for a store that does not answer: there may be no watch then.
        self._nudge = threading.Event()

    def arm(self) -> None:
        """Before the logs are looked at, so that nothing is missed in between.

        Once closed it stays so: whoever waits comes back at once.
        """
        with self._desk.lock:
            self._nudge.clear()
            if self._closed or (self._watch is not None and self._version == self._desk.version):
                return
            version = self._desk.version
            watch = self._log.watch(*(seat.where for seat in self._desk.owned()))
            if self._watch is not None:
                self._watch.close()
            self._watch, self._version = watch, version

    def wait(self, seconds: float) -> None:
        """Until a log may have grown, somebody wakes it, or the time is over."""
        if self._watch is not None and not self._closed:
            self._watch.wait(seconds)

    def wait_for_store(self, seconds: float) -> None:
        """The same while the store does not answer: only somebody wakes it."""
        if not self._closed:
            self._nudge.wait(seconds)

    def wake(self) -> None:
        """End the wait at hand, or the next one."""
        self._nudge.set()
        watch = self._watch
        if watch is not None:
            watch.wake()

    def close(self) -> None:
        with self._desk.lock:
            self._closed = True
            if self._watch is not None:
                self._watch.close()
        self._nudge.set()
