"""Schedules messages for several workers: which one may be handled next. Pure.

Each message has a key: its partition, or its own key in it. Messages of one key are handled one
after the other, in order; keys run side by side. A key whose first message failed is parked until
its time comes; the others flow. From then on it goes before all keys that were not begun, but only
every second time: keys that fail again and again leave half of the work to the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Schedule(Generic[T]):
    """Items by key, each key in order. Not thread-safe: callers must lock."""

    def __init__(self) -> None:
        self._items: dict[Hashable, deque[T]] = {}
        self._ready: deque[Hashable] = deque()
        self._parked: list[tuple[float, int, Hashable]] = []
        self._parkings = 0
        self._took_parked = False
        self._size = 0

    def __len__(self) -> int:
        """Returns the number of items, including those being handled."""
        return self._size

    def put(self, key: Hashable, item: T) -> None:
        """Add an item behind the others of its key."""
        self._size += 1
        if key in self._items:
            self._items[key].append(item)
        else:
            self._items[key] = deque([item])
            self._ready.append(key)

    def take(self, now: float) -> tuple[Hashable, T] | None:
        """Take the first item of a free key; the key is busy until `done` or `park`."""
        due = bool(self._parked) and self._parked[0][0] <= now
        self._took_parked = due and not (self._took_parked and self._ready)
        if self._took_parked:
            key = heapq.heappop(self._parked)[2]
        elif self._ready:
            key = self._ready.popleft()
        else:
            return None
        return key, self._items[key][0]

    def done(self, key: Hashable) -> None:
        """Remove the key's first item, which is finished; the next one may be taken."""
        items = self._items[key]
        items.popleft()
        self._size -= 1
        if items:
            self._ready.append(key)
        else:
            del self._items[key]

    def park(self, key: Hashable, until: float) -> None:
        """Let the key wait until a time: its first item failed and is tried again then."""
        self._parkings += 1
        heapq.heappush(self._parked, (until, self._parkings, key))

    def hurry(self, wanted: Callable[[T], bool]) -> None:
        """Let parked keys whose first item is wanted go on at once."""
        now = {entry for entry in self._parked if wanted(self._items[entry[2]][0])}
        if now:
            self._ready += [key for _, _, key in sorted(now, key=lambda entry: entry[1])]
            self._parked = [entry for entry in self._parked if entry not in now]
            heapq.heapify(self._parked)

    def next_time(self) -> float | None:
        """Returns when the next parked key is due."""
        return self._parked[0][0] if self._parked else None
