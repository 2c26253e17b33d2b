"""Retention while a producer sends: topics that grow are kept within their limits."""

from __future__ import annotations

from contextlib import suppress

from pxrs.clock import Clock
from pxrs.topics import Topics
from pxrs.types import Topic

_EVERY = 10.0


class Retention:
    """Which topics have grown, and when each was last looked at."""

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics = topics
        self._clock = clock
        self._grown: set[Topic] = set()
        self._retained: dict[str, float] = {}

    def note(self, topic: Topic) -> None:
        """The topic has grown."""
        if topic.retention_ms is not None or topic.retention_bytes is not None:
            self._grown.add(topic)

    def keep_up(self) -> None:
        """Now and then, drop what the topics that have grown no longer keep."""
        now = self._clock.monotonic()
        for topic in list(self._grown):
            if now - self._retained.get(topic.id, -_EVERY) >= _EVERY:
                self._retained[topic.id] = now
                self._grown.discard(topic)
                # Retention is housekeeping: what fails now, however, is done the next time.
                with suppress(Exception):
                    self._topics.retain(topic)
