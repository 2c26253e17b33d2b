"""Bounds the bytes that a node holds for clients, and shares that room fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pxrs.server.rest.problems import HttpError

# While others wait for room, a transfer must end within this time, and more by its size.
FAIR_SECONDS = 2.0
FAIR_BYTES_PER_SECOND = 4 * 2**20


class Room:
    """Bytes that a node holds for clients at a time: requests, which come in order, and answers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        # Transfers from and to clients, and when each must end while others wait for room.
        self._moving: dict[asyncio.Timeout, float] = {}

    @property
    def is_full(self) -> bool:
        """Whether a request waits for room."""
        return bool(self._waiting)

    def take(self, size: int) -> bool:
        """Take room for a request; false if it has to wait. A lone one of any size fits."""
        if not size:
            return True
        if self._waiting or (self.taken and self.taken + size > self._most):
            return False
        self.taken += size
        return True

    def add(self, size: int) -> None:
        """Count an answer, even past the limit: it exists already, so later requests wait."""
        self.taken += size

    @asynccontextmanager
    async def moving(self, size: int, seconds: float) -> AsyncIterator[None]:
        """The block transfers `size` bytes; `TimeoutError` if that takes too long.

        Otherwise a few slow clients would hold all the room, and no other would be served.
        """
        fair = asyncio.get_running_loop().time() + FAIR_SECONDS + size / FAIR_BYTES_PER_SECOND
        async with asyncio.timeout(seconds) as limit:
            self._moving[limit] = fair
            if self._waiting:
                _shorten(limit, fair)
            try:
                yield
            finally:
                del self._moving[limit]

    async def wait_for(self, size: int, timeout: float) -> None:
        """Wait until there is room, and take it; 503 if that takes too long."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, given))
        for limit, fair in self._moving.items():
            _shorten(limit, fair)
        try:
            async with asyncio.timeout(timeout):
                await given
        except TimeoutError:
            self._take_back(size, given)
            raise HttpError(503, "overloaded", "too many requests are being worked on") from None
        except BaseException:
            self._take_back(size, given)
            raise

    def _take_back(self, size: int, given: asyncio.Future[None]) -> None:
        """Withdraw a request that gave up, even if it was given room in that very moment."""
        if given.done() and not given.cancelled():
            self.give_back(size)
        else:
            given.cancel()
            self._give()

    def give_back(self, size: int) -> None:
        """Free the room of a request that is done."""
        self.taken -= size
        self._give()

    def _give(self) -> None:
        while self._waiting:
            size, given = self._waiting[0]
            if not given.done():
                if self.taken and self.taken + size > self._most:
                    return
                self.taken += size
                given.set_result(None)
            self._waiting.popleft()


def _shorten(limit: asyncio.Timeout, until: float) -> None:
    when = limit.when()
    if not limit.expired() and (when is None or until < when):
        limit.reschedule(until)
