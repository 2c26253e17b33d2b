"""The listener for asyncio, and handlers that are coroutine functions.

A worker thread takes an item and calls the handler; while that is awaited on the loop, the thread
makes the calls of its transaction. So one thread takes, works and commits, as locks want it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from pxrs.aio.handlers import awaited, runner_of_this_thread
from pxrs.aio.queue_waiters import Ears
from pxrs.aio.signals import stop_on_signals_of_loop
from pxrs.aio.threads import Calls, Threads, fulfil, outcome, waited_out
from pxrs.aio.unit_of_work import Surroundings, UnitOfWork
from pxrs.queues import unit_of_work as blocking_work
from pxrs.queues.cancellable import Unseen
from pxrs.queues.item import Item
from pxrs.running import listener as blocking
from pxrs.running.listener_processes import ProcessListener

T = TypeVar("T")

Handler = Callable[[Item, Any], Any]


class Listener:
    """Workers that handle a queue's items until they are stopped. See `pxrs.Listener`."""

    def __init__(
        self,
        listener: blocking.Listener | ProcessListener,
        threads: Threads,
        abandon: Callable[[], None],
        stop_all: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._threads = threads
        self._abandon = abandon
        self._stop_all = stop_all

    @property
    def handled(self) -> int | None:
        """How many items were handled; processes count for themselves (None)."""
        return getattr(self._listener, "handled", None)

    @property
    def failed(self) -> int | None:
        """How often the handler failed; processes count for themselves (None)."""
        return getattr(self._listener, "failed", None)

    def start(self) -> Listener:
        """Start the workers again, after a `stop`. Not awaited: it does not wait."""
        self._listener.start()
        return self

    def stop(self) -> None:
        """Take no more items and finish those in hand. Not awaited: it does not wait."""
        self._listener.stop()

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until all workers have finished; whether they have. See `pxrs.Listener.join`.

        On the main thread's loop SIGTERM meanwhile does what `Pxrs.stop` does. SIGINT is
        `asyncio.run`'s, which cancels what is awaited.
        """
        join = partial(copy_context().run, self._listener.join, timeout)
        with stop_on_signals_of_loop(self._stop_all):
            return await outcome(self._threads.start(join))

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the workers finish. A cancellation meanwhile cancels the handlers, too."""
        self._listener.stop()
        with stop_on_signals_of_loop(self._stop_all):
            await waited_out(self._threads.start(self._listener.join), self._abandon)


class OnThisLoop:
    """Calls a coroutine function for worker threads; it is awaited on the caller's loop."""

    def __init__(self, handler: Handler, loop: asyncio.AbstractEventLoop, ears: Ears) -> None:
        self._handler = handler
        self._loop = loop
        self._ears = ears
        self._handling: set[asyncio.Task[None]] = set()
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, item: Item, work: blocking_work.UnitOfWork) -> None:
        calls = Calls()
        tx = UnitOfWork(lambda: work, Surroundings(calls, self._ears, one_thread=True))
        over: Future[None] = Future()
        begin = partial(self._begin, _handle(self._handler, item, tx), over)
        # Not run_coroutine_threadsafe: its future is done when it is cancelled, not when the
        # handler has ended, and that may still use its transaction.
        over.add_done_callback(lambda _: calls.end())
        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            self.stop()  # the loop was closed: nobody is left who could handle anything
            raise
        calls.serve()
        over.result()

    def _begin(self, handling: Coroutine[Any, Any, None], over: Future[None]) -> None:
        task = self._loop.create_task(handling)
        self._handling.add(task)
        task.add_done_callback(partial(self._ended, over))

    def _ended(self, over: Future[None], task: asyncio.Task[None]) -> None:
        self._handling.discard(task)
        error = CancelledError() if task.cancelled() else task.exception()
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    def abandon(self) -> None:
        """Cancel what is awaited: it has failed, and its items go the way of their policy."""
        for task in list(self._handling):
            task.cancel()


class OnOwnLoop(msgspec.Struct, frozen=True):
    """The same in worker processes: every thread has a loop of its own there."""

    handler: Handler

    def __call__(self, item: Item, work: blocking_work.UnitOfWork) -> None:
        around = Surroundings(AtOnce(), Ears(Unseen(work).queues), one_thread=True)
        tx = UnitOfWork(lambda: work, around)
        runner_of_this_thread().run(_handle(self.handler, item, tx))


class AtOnce:
    """Makes calls on the loop's own thread: nobody but one handler is on that loop."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        fulfil(future, work)
        return future


async def _handle(handler: Handler, item: Item, tx: UnitOfWork) -> None:
    await tx
    await awaited(handler(item, tx))
