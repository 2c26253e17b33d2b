"""A store that does not answer: since when, and what the program's log says of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pxrs.clock import Clock
from pxrs.errors import StoreError

_LOG = logging.getLogger("pxrs.groups")


class Outage:
    """One line when it begins and one when it is over, however often it is tried."""

    def __init__(self, who: str, clock: Clock) -> None:
        self._who = who
        self._clock = clock
        self.since: float | None = None
        self.error: Exception | None = None

    def began(self, error: Exception) -> None:
        """A call has failed in a way that may pass."""
        self.error = error
        if self.since is None:
            self.since = self._clock.monotonic()
            _LOG.warning("%s: trying again until it works: %s", self._who, error)

    def over(self) -> None:
        """A call has worked."""
        self.error = None
        if self.since is not None:
            _LOG.warning(
                "%s: it works again, after %.1f s", self._who, self._clock.monotonic() - self.since
            )
            self.since = None

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """A block that calls the store: how it ends tells whether the store answers."""
        try:
            yield
        except StoreError as error:
            if error.retryable:
                self.began(error)
            raise
        self.over()
