"""Clocks for tests: one stands still until a test moves it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from pxrs.clock import Clock


class VirtualClock:
    """A `Clock` moved by `advance`. Safe to share between threads.

    Stores that know such clocks subscribe: sessions expire, and their watches are woken, before
    `advance` returns.
    """

    def __init__(self, monotonic: float = 0.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start = monotonic
        self._now = monotonic
        self._wall_start = wall_ms
        self._numbers = count()
        self._subscribers: dict[int, Callable[[], object]] = {}

    @property
    def subscribers(self) -> int:
        """The number of subscribers that are called when it moves."""
        return len(self._subscribers)

    def monotonic(self) -> float:
        with self._lock:
            return self._now

    def wall_ms(self) -> int:
        with self._lock:
            return self._wall_start + round((self._now - self._start) * 1000)

    def advance(self, seconds: float) -> None:
        """Let this much time pass, then call the subscribers in the order of their subscription."""
        if seconds < 0:
            raise ValueError(f"time can't go back by {-seconds} seconds")
        with self._lock:
            self._now += seconds
            subscribers = list(self._subscribers.values())
        for moved in subscribers:
            moved()

    def subscribe(self, moved: Callable[[], object]) -> Callable[[], None]:
        """Call `moved` after every `advance`; returns a function that ends the subscription."""
        with self._lock:
            number = next(self._numbers)
            self._subscribers[number] = moved

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(number, None)

        return unsubscribe


class ShiftedClock:
    """The clock of another machine: it runs at the same speed and shows another time."""

    def __init__(self, clock: Clock, shift: float) -> None:
        self._clock = clock
        self._shift = shift

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._shift

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + round(self._shift * 1000)
