"""Handlers of `run` that are coroutine functions, called by threads and other processes."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec

from pxrs.running.handler_results import refuse_unfinished
from pxrs.running.runner import Abandoned
from pxrs.types import Message

Handler = Callable[[Message], Any]


class OnThisLoop:
    """Calls a handler for worker threads; what it returns is awaited on the caller's loop."""

    def __init__(self, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._loop = loop
        self._lock = threading.Lock()
        self._in_flight: set[Future[Any]] = set()
        self._abandoned = False

    def __call__(self, message: Message) -> None:
        found = self._handler(message)
        if not inspect.isawaitable(found):
            refuse_unfinished(found)
            return
        with self._lock:
            awaiting = asyncio.run_coroutine_threadsafe(awaited(found), self._loop)
            self._in_flight.add(awaiting)
            if self._abandoned:
                awaiting.cancel()
        try:
            awaiting.result()
        except CancelledError:
            if self._abandoned:
                raise Abandoned from None
            raise
        finally:
            self._in_flight.discard(awaiting)

    def abandon(self) -> None:
        """Cancel what is awaited now; its messages are neither handled nor failed."""
        with self._lock:
            self._abandoned = True
            for awaiting in list(self._in_flight):
                awaiting.cancel()


class OnOwnLoop(msgspec.Struct, frozen=True):
    """The same in worker processes: every thread has a loop of its own there."""

    handler: Handler

    def __call__(self, message: Message) -> None:
        found = self.handler(message)
        if inspect.isawaitable(found):
            runner_of_this_thread().run(awaited(found))
        else:
            refuse_unfinished(found)


_loops = threading.local()


def runner_of_this_thread() -> asyncio.Runner:
    """Made at the first call, and kept."""
    if not hasattr(_loops, "runner"):
        _loops.runner = asyncio.Runner()
    runner: asyncio.Runner = _loops.runner
    return runner


async def awaited(found: Any) -> Any:
    """An awaitable of any kind, as a coroutine."""
    return await found
