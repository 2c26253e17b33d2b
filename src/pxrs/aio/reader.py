"""The reader for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic

from pxrs.aio.threads import Threads, awaiting, outcome, signed_as, wrapping
from pxrs.consuming import reader as blocking
from pxrs.types import Message, Topic, Value


class Reader(Generic[Value]):
    """Reads a topic. See `pxrs.Reader`."""

    def __init__(self, reader: blocking.Reader[Value], threads: Threads) -> None:
        self._blocking = reader
        self._threads = threads
        self._call = threads.call

    @property
    def topic(self) -> Topic:
        """The topic that is read."""
        return self._blocking.topic

    @wrapping(blocking.Reader[Value].read)
    async def read(self, read: partial[list[Message[Value]]]) -> list[Message[Value]]:
        """Messages from `offset` on. See `pxrs.Reader.read`."""
        return await self._call(read)

    bounds = awaiting(blocking.Reader.bounds)
    offset_at = awaiting(blocking.Reader.offset_at)

    @signed_as(blocking.Reader.follow)
    def follow(self, partitions: Any, start: Any, timeout: Any) -> Follow[Value]:
        """Messages as they come. See `pxrs.Reader.follow`.

        `async for message in reader.follow()` fixes its positions when it begins to iterate:
        finding them asks the store, which a call that is not awaited can't do. To have them
        fixed at a point of your choosing, `messages = await reader.follow()` and iterate later.
        """
        follow = partial(blocking.Follower, self._blocking, partitions, start, timeout)
        return Follow(self._threads, follow)


class Follow(AsyncIterator[Message[Value]]):
    """Messages as they come: an asynchronous iterator that can be awaited first.

    A step that is cancelled loses nothing: its thread is let go at once, and the next step,
    if there is one, goes on where it was. For one task at a time.
    """

    def __init__(self, threads: Threads, follow: Callable[[], blocking.Follower]) -> None:
        self._threads = threads
        self._open_follower = follow
        self._follower: blocking.Follower | None = None
        self._taking: Future[list[Message[Value]] | None] | None = None
        self._ready: deque[Message[Value]] = deque()
        self._over = False

    def __await__(self) -> Generator[Any, None, Follow[Value]]:
        return self._opened().__await__()

    async def _opened(self) -> Follow[Value]:
        await self._open()
        return self

    async def _open(self) -> blocking.Follower:
        if self._follower is None:
            self._follower = await self._threads.call(self._open_follower)
            weakref.finalize(self, self._follower.interrupt)
        return self._follower

    def __aiter__(self) -> Follow[Value]:
        return self

    async def __anext__(self) -> Message[Value]:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            found = await self._take(self._follower or await self._open())
            if found is None:
                await self.aclose()
            else:
                self._ready.extend(found)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End it: stop watching. Messages that were read and not handed out are dropped."""
        self._over = True
        self._ready.clear()
        if self._follower is not None:
            self._follower.interrupt()

    async def _take(self, follower: blocking.Follower) -> list[Message[Value]] | None:
        if self._taking is None:
            follower.resume()
            self._taking = self._threads.start(follower.take)
        try:
            found = await outcome(self._taking)
        except asyncio.CancelledError:
            # The thread comes back with its messages; the next step picks them up.
            follower.interrupt()
            raise
        except BaseException:
            self._taking = None
            follower.interrupt()
            raise
        self._taking = None
        return found
