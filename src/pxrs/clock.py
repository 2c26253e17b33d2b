"""Clocks that can be passed in, so that tests can move time."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """The time for all code that needs it; nothing else reads the system's clocks."""

    def monotonic(self) -> float:
        """Seconds that only go forward, while the machine sleeps too. For deadlines."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970. For people and for message timestamps, never for leases."""
        ...


class SystemClock:
    """The machine's clocks. CLOCK_BOOTTIME where there is one: a laptop's sleep expires leases."""

    def __init__(self) -> None:
        # Not a method: it is asked once per message, and a call into Python costs as much again.
        self.monotonic = partial(
            time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        )

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
