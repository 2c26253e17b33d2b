"""A source in memory, as programs bring their own: a list of values with one stream."""

from __future__ import annotations

import threading

from pxrs.errors import Closed
from pxrs.sources import Row
from pxrs.sources.api import SourceRead
from pxrs.sources.watching import PollingWatch
from pxrs.stores.api import Watch
from pxrs.types import Bounds


class Lines:
    """See `Source`. Says whether it was closed, and whether anybody watches it."""

    streams = 1

    def __init__(self, *values: bytes, key: bytes | None = None) -> None:
        self._rows = [Row(offset, 0, key, value) for offset, value in enumerate(values)]
        self.is_closed = False
        self.watched = threading.Event()
        # How often a watch has looked for something new.
        self.looks = 0

    def append(self, value: bytes) -> None:
        self._rows.append(Row(len(self._rows), 0, None, value))

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        self._refuse()
        end = min(offset + limit, len(self._rows), until or len(self._rows))
        return SourceRead(self._rows[offset:end], max(end, offset))

    def bounds(self, stream: int) -> Bounds:
        self._refuse()
        return Bounds(0, len(self._rows))

    def final(self, stream: int) -> int | None:
        return self.bounds(stream).end

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        return None

    def watch(self) -> Watch:
        self._refuse()
        self.watched.set()
        return PollingWatch(self._look)

    def _look(self) -> object:
        """As the sources of pxrs do: nothing new once it is closed."""
        self.looks += 1
        return None if self.is_closed else len(self._rows)

    def close(self) -> None:
        self.is_closed = True

    def _refuse(self) -> None:
        if self.is_closed:
            raise Closed("the source was closed")
