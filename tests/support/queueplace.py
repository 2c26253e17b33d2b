"""A store with queues, seen by one program through faults and by another one as it is."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pxrs import Pxrs
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.queues.item import decode_body
from pxrs.stores.api import Stores
from pxrs.testing.faults import Faults, FaultyStores
from pxrs.types import ItemState
from support.child import PATIENCE

Called = Callable[[str], None]


class Place:
    """`px` is under test, `other` watches. `on_call` hears of each call of `px` to the store."""

    def __init__(self, inner: Stores, ttl: float = 10.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self.inner = inner
        self.on_call: Called | None = None
        self.faults = Faults(Random(7), clock, before_call=self._heard)
        self.px = Pxrs(FaultyStores(inner, self.faults), clock, session_ttl=ttl)
        self.other = Pxrs(inner, clock)

    def _heard(self, who: str, what: str) -> None:
        if self.on_call is not None:
            self.on_call(what)

    def fill(self, queue: str, *values: str) -> None:
        with self.other.transaction() as tx:
            for value in values:
                tx.put(queue, value)

    def values(self, queue: str) -> list[str]:
        """What lies in the queue, whoever holds it; not the dead."""
        return [
            str(decode_body(item.body)[0]) for item in self.inner.queues.peek(queue, limit=1000)
        ]

    def held(self, queue: str) -> int:
        return len(self.inner.queues.peek(queue, [ItemState.HELD]))

    def take_back(self, queue: str, patience: float = PATIENCE) -> str:
        """What `other` can have now, or when it is free; it stays in the queue."""
        with self.other.begin() as tx:
            item = tx.take(queue, patience)
            assert item is not None, f"{queue} is still locked: {self.held(queue)} held"
            return str(item.value)

    def close(self) -> None:
        self.on_call = None
        self.faults.heal()
        self.px.close()
        self.other.close()
