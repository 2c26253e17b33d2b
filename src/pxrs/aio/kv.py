"""Keys and values for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from itertools import islice
from typing import Any

from pxrs.aio.threads import Threads, awaiting, outcome, signed_as
from pxrs.errors import Closed
from pxrs.kv import store as blocking
from pxrs.kv import transaction, watch
from pxrs.types import Entry

_PAGE = 500


class KeyValues:
    """Puts, gets, deletes, scans and watches keys. See `pxrs.KeyValues`."""

    def __init__(self, keys: blocking.KeyValues, threads: Threads) -> None:
        self._blocking = keys
        self._threads = threads
        self._call = threads.call

    put = awaiting(blocking.KeyValues.put)
    get = awaiting(blocking.KeyValues.get)
    get_many = awaiting(blocking.KeyValues.get_many)
    delete = awaiting(blocking.KeyValues.delete)

    @signed_as(blocking.KeyValues.scan)
    async def scan(self, *args: Any, **kwargs: Any) -> AsyncIterator[Entry]:
        """The keys of a prefix: `async for entry in px.kv.scan("user:")`."""
        entries: Iterator[Entry] = self._blocking.scan(*args, **kwargs)
        while page := await self._call(partial(_page, entries)):
            for entry in page:
                yield entry

    @signed_as(blocking.KeyValues.watch)
    def watch(self, *args: Any, **kwargs: Any) -> KeyWatch:
        """Watch the keys of a prefix: `async with px.kv.watch("user:") as changes`."""
        return KeyWatch(partial(self._blocking.watch, *args, **kwargs), self._threads)


def _page(entries: Iterator[Entry]) -> list[Entry]:
    return list(islice(entries, _PAGE))


class KeyWatch(AsyncIterator[Entry]):
    """Reports changes of the keys of a prefix: `async for entry in changes`. See `pxrs.KeyWatch`.

    A step that is cancelled loses nothing. For one task at a time.
    """

    def __init__(self, begin: Callable[[], watch.KeyWatch], threads: Threads) -> None:
        self._begin = begin
        self._threads = threads
        self._watch: watch.KeyWatch | None = None
        self._waiting: Any = None
        self._ready: deque[Entry] = deque()

    async def __aenter__(self) -> KeyWatch:
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _opened(self) -> watch.KeyWatch:
        if self._watch is None:
            self._watch = await self._threads.call(self._begin)
            weakref.finalize(self, self._watch.close)
        return self._watch

    def __aiter__(self) -> KeyWatch:
        return self

    async def __anext__(self) -> Entry:
        keys = await self._opened()
        while not self._ready:
            if self._waiting is None:
                self._waiting = self._threads.start(keys.wait)
            # A cancelled step leaves the thread waiting: the next one gets its result.
            try:
                changes = await outcome(self._waiting)
            except asyncio.CancelledError:
                raise
            except Closed:
                raise StopAsyncIteration from None
            except BaseException:
                self._waiting = None
                raise
            self._waiting = None
            self._ready.extend(changes)
        return self._ready.popleft()

    async def close(self) -> None:
        """End the iteration."""
        if self._watch is not None:
            self._watch.close()


class TransactionKeys:
    """`tx.kv`: written when the transaction commits. See `pxrs.TransactionKeys`."""

    def __init__(
        self, keys: transaction.TransactionKeys, call: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._blocking = keys
        self._call = call

    put = awaiting(transaction.TransactionKeys.put)
    delete = awaiting(transaction.TransactionKeys.delete)
    get = awaiting(transaction.TransactionKeys.get)
