"""A consumer's watch on the logs of what it owns."""

from __future__ import annotations

from pxrs.runtime.desk import ConsumerDesk
from pxrs.stores.api import LogStore, Watch


class LogWatch:
    """Follows the desk: armed anew when the seats have changed. Wakes come from any thread."""

    def __init__(self, log: LogStore, desk: ConsumerDesk) -> None:
        self._log = log
        self._desk = desk
        self._watch: Watch | None = None
        self._version = -1
        self._closed = False

    def armed(self) -> Watch:
        """Armed before the logs are looked at, so that nothing is missed in between.

        Once closed it stays so: whoever waits comes back at once.
        """
        with self._desk.lock:
            if self._watch is None or (self._version != self._desk.version and not self._closed):
                if self._watch is not None:
                    self._watch.close()
                self._version = self._desk.version
                self._watch = self._log.watch(*(seat.where for seat in self._desk.owned()))
                if self._closed:
                    self._watch.close()
            return self._watch

    def wake(self) -> None:
        """End the wait at hand, or the next one."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def close(self) -> None:
        with self._desk.lock:
            self._closed = True
            if self._watch is not None:
                self._watch.close()
