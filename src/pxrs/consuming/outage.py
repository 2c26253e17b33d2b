"""Logs one line when a store stops answering, and one when it answers again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pxrs.clock import Clock
from pxrs.errors import StoreError

_LOG = logging.getLogger("pxrs.groups")


class Outage:
    """Logs one line when an outage begins and one when it is over, however many calls fail.

    Thread-safe.
    """

    def __init__(self, who: str, clock: Clock, log: logging.Logger = _LOG) -> None:
        self._who = who
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self.since: float | None = None
        self.error: Exception | None = None

    def began(self, error: Exception) -> None:
        """Note that a call has failed in a way that may pass."""
        with self._lock:
            self.error = error
            if self.since is None:
                self.since = self._clock.monotonic()
                self._log.warning("%s: trying again until it works: %s", self._who, error)

    def over(self, asked: float | None = None) -> None:
        """Note that a call has worked that was made at `asked`, or just now.

        A call that was made before the outage began proves nothing: among several threads, its
        answer may be noted late.
        """
        if self.since is None:
            return
        with self._lock:
            if self.since is not None and (asked is None or asked >= self.since):
                lasted = self._clock.monotonic() - self.since
                self._log.warning("%s: it works again, after %.1f s", self._who, lasted)
                self.since = self.error = None

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notes, by how the block ends, whether the store that it calls answers."""
        asked = self._clock.monotonic()
        try:
            yield
        except StoreError as error:
            if error.retryable:
                self.began(error)
            raise
        self.over(asked)
