"""Watches of keys: what changed since the last look."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from pxrs.clock import Clock
from pxrs.core import kv
from pxrs.errors import Closed
from pxrs.stores.api import CoordStore
from pxrs.types import ABSENT, Entry, Version

# How long a lost wake-up can go unnoticed.
_CAREFUL_WAIT = 5.0


class KeyWatch:
    """Reports changes of the keys of a prefix. Iterate over it, or call `wait`; then close it.

    The first look reports the keys that are there. After that, a key is reported when its version
    has changed, with the value it has then: of several changes in a row, the last. A key that is
    gone is reported with an empty value and version 0/0. Every look reads the keys of the prefix.
    One thread uses it; any thread may call `close`.
    """

    def __init__(self, coord: CoordStore, prefix: bytes, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock
        self._where = kv.RECORDS + prefix.hex()
        self._known: dict[bytes, Version] = {}
        self._is_first = True
        self._closed = threading.Event()
        self._armed = coord.watch(kv.RECORDS)

    def wait(self, timeout: float | None = None) -> list[Entry]:
        """Wait for changes and return them; an empty list if there were none within `timeout`."""
        ends = None if timeout is None else self._clock.monotonic() + timeout
        while not self._closed.is_set():
            changes = self._look()
            if changes or self._is_first:
                self._is_first = False
                return changes
            left = None if ends is None else ends - self._clock.monotonic()
            if left is not None and left <= 0:
                return []
            self._armed.wait(_CAREFUL_WAIT if left is None else min(left, _CAREFUL_WAIT))
        raise Closed("the watch was closed")

    def __iter__(self) -> Iterator[Entry]:
        while True:
            try:
                changes = self.wait()
            except Closed:
                return
            yield from changes

    def _look(self) -> list[Entry]:
        there = {}
        for stored in self._coord.list(self._where):
            entry = kv.decode_entry(stored, kv.decode_record(stored))
            there[entry.key] = entry
        changes = [it for key, it in there.items() if self._known.get(key) != it.version]
        gone = [Entry(key, b"", ABSENT) for key in self._known if key not in there]
        self._known = {key: entry.version for key, entry in there.items()}
        return [*changes, *gone]

    def close(self) -> None:
        """End the iteration at once, in whichever thread it runs."""
        self._closed.set()
        self._armed.close()

    def __enter__(self) -> KeyWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
