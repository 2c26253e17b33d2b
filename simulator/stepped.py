"""The keeper of queue items, without threads of its own."""

from __future__ import annotations

from collections.abc import Callable

from pxrs.clock import Clock
from pxrs.queues.hold_session import Keeper
from pxrs.stores.api import Stores


class SteppedKeeper(Keeper):
    """A keeper whose chores are steps, and whose pauses let the world go on."""

    def __init__(self, stores: Stores, clock: Clock, ttl: float, wait: Callable[[], None]) -> None:
        super().__init__(stores, clock, ttl, threads=False)
        self._wait = wait

    def pause(self, failures: int) -> None:
        self._wait()
