"""Which workers of one process may have an item in hand: all of them, or one alone.

An item whose holder died may have killed it, and may kill again: a suspect. All items that its
process has in hand beside it would lose a delivery then, and so would the suspect if it is innocent
and another item kills. Deliveries are counted when an item is taken, not when its handler begins.
So no worker waits here with an item in hand: it is alone first, and takes the suspect then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from pxrs.clock import Clock

# Seconds between checks whether the others hold nothing any more, of which no event comes.
_LOOK_EVERY = 0.25
# Seconds until another look: another process may have had the suspect by then.
_LOOK_AGAIN = 1.0


class WorkerTurns:
    """The turns of all listeners' workers under one object. Thread-safe.

    `holds` of a worker with a turn tells whether it holds anything: a handler that has gone on for
    too long has lost its item, and no worker waits for it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._holds: dict[Hashable, Callable[[], bool]] = {}
        self._alone: Hashable | None = None
        self._wanting: set[Hashable] = set()

    def begin(self, who: Hashable, holds: Callable[[], bool], stopping: Callable[[], bool]) -> bool:
        """Wait for a turn beside others: while one is alone or wants to be. False if stopping."""
        with self._changed:
            while not stopping():
                if not self._wanting and not self._is_one_alone():
                    self._holds[who] = holds
                    return True
                self._changed.wait(_LOOK_EVERY)
            return False

    def be_alone(self, who: Hashable, stopping: Callable[[], bool]) -> bool:
        """Wait until no other worker has anything in hand; returns whether the caller is alone now.

        The caller has a turn and nothing in hand. If it is not alone after a while it has its turn
        as before, to check whether it still wants to be alone: until it calls `share` or `end` no
        other worker begins, or the others might take turns for ever. If it is stopping it has no
        turn.
        """
        with self._changed:
            holds = self._holds.pop(who)
            self._wanting.add(who)
            self._changed.notify_all()
            until = self._clock.monotonic() + _LOOK_AGAIN
            while not stopping():
                if not any(each() for each in self._holds.values()):
                    self._holds[who], self._alone = holds, who
                    self._wanting.discard(who)
                    return True
                if self._clock.monotonic() >= until and not self._is_one_alone():
                    self._holds[who] = holds
                    return False
                self._changed.wait(_LOOK_EVERY)
            self._forget(who)
            return False

    def share(self, who: Hashable) -> None:
        """Stop being alone, or waiting for it; the turn goes on."""
        with self._changed:
            self._forget(who)

    def end(self, who: Hashable) -> None:
        """End the turn, if there is one: the worker has nothing in hand."""
        with self._changed:
            self._holds.pop(who, None)
            self._forget(who)

    def wake(self) -> None:
        """Wake all waiters: something is stopping."""
        with self._changed:
            self._changed.notify_all()

    def _forget(self, who: Hashable) -> None:
        self._wanting.discard(who)
        if self._alone == who:
            self._alone = None
        self._changed.notify_all()

    def _is_one_alone(self) -> bool:
        return self._alone is not None and self._holds[self._alone]()
