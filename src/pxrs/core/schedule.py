"""Schedules messages for several workers: which one may be handled next. Pure.

Messages stand in lanes: one per partition, or one per key. Within a lane they are handled one
after the other, in order; lanes run side by side. A lane whose first message failed is parked
until its time comes; the others flow. From then on it goes before all that was not begun, but
only every second time: what fails again and again leaves half of the work to the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Schedule(Generic[T]):
    """Lanes of items. Not thread-safe: callers must lock."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[T]] = {}
        self._ready: deque[Hashable] = deque()
        self._parked: list[tuple[float, int, Hashable]] = []
        self._parkings = 0
        self._took_parked = False
        self._size = 0

    def __len__(self) -> int:
        """Returns the number of items, including those being handled."""
        return self._size

    def put(self, lane: Hashable, item: T) -> None:
        """Add an item at the end of its lane."""
        self._size += 1
        if lane in self._lanes:
            self._lanes[lane].append(item)
        else:
            self._lanes[lane] = deque([item])
            self._ready.append(lane)

    def take(self, now: float) -> tuple[Hashable, T] | None:
        """Take the first item of a free lane; the lane is busy until `done` or `park`."""
        due = bool(self._parked) and self._parked[0][0] <= now
        self._took_parked = due and not (self._took_parked and self._ready)
        if self._took_parked:
            lane = heapq.heappop(self._parked)[2]
        elif self._ready:
            lane = self._ready.popleft()
        else:
            return None
        return lane, self._lanes[lane][0]

    def done(self, lane: Hashable) -> None:
        """Remove the lane's first item, which is finished; the next one may be taken."""
        items = self._lanes[lane]
        items.popleft()
        self._size -= 1
        if items:
            self._ready.append(lane)
        else:
            del self._lanes[lane]

    def park(self, lane: Hashable, until: float) -> None:
        """Let the lane wait until a time: its first item failed and is tried again then."""
        self._parkings += 1
        heapq.heappush(self._parked, (until, self._parkings, lane))

    def hurry(self, wanted: Callable[[T], bool]) -> None:
        """Let parked lanes go on at once whose first item is wanted."""
        now = {entry for entry in self._parked if wanted(self._lanes[entry[2]][0])}
        if now:
            self._ready += [lane for _, _, lane in sorted(now, key=lambda entry: entry[1])]
            self._parked = [entry for entry in self._parked if entry not in now]
            heapq.heapify(self._parked)

    def next_time(self) -> float | None:
        """Returns when the next parked lane is due."""
        return self._parked[0][0] if self._parked else None
