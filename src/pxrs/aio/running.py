"""`run` and `listen` for asyncio: their handle, and handlers that are coroutine functions.

`run` calls a handler in a worker thread, which waits while it is awaited on the loop. A listener's
worker thread takes an item and calls the handler; while that is awaited on the loop, the thread
makes the calls of its transaction. So one thread takes, works and commits, as locks require.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec

from pxrs.aio.queue_waiters import QueueWaiters
from pxrs.aio.threads import Calls, Threads, fulfil, outcome, passing, waited_out, wrapping
from pxrs.aio.transactions import Surroundings, UnitOfWork
from pxrs.queues import unit_of_work as blocking_work
from pxrs.queues.item import Item
from pxrs.running import handle as blocking
from pxrs.running.handler_results import refuse_unfinished
from pxrs.running.runner import Abandoned
from pxrs.running.signals import LOOK, stop_on_signals
from pxrs.types import Message

T = TypeVar("T")

MessageHandler = Callable[[Message], Any]
ItemHandler = Callable[[Item, Any], Any]


class Running:
    """A handler at work in the background. See `pxrs.Running`; stop it before the loop ends."""

    def __init__(
        self,
        running: blocking.Running,
        threads: Threads,
        abandon: Callable[[], None],
        stop_all: Callable[[], None],
    ) -> None:
        self._blocking = running
        self._threads = threads
        self._abandon = abandon
        self._stop_all = stop_all

    @property
    def handled(self) -> int | None:
        """The number of handled messages or items; None with worker processes."""
        return self._blocking.handled

    @property
    def failed(self) -> int | None:
        """The number of failed attempts; None with worker processes."""
        return self._blocking.failed

    stop = passing(blocking.Running.stop)
    health = passing(blocking.Running.health)

    @wrapping(blocking.Running.join)
    async def join(self, join: partial[bool]) -> bool:
        """Wait until it has ended, for `timeout` seconds at most; returns whether it has.

        Raises the error that made it end by itself. On the main thread's loop SIGTERM meanwhile
        does what `Pxrs.stop` does. SIGINT is left to `asyncio.run`, which cancels its main task.
        Cancelling this ends the waiting, not the work.
        """
        with stop_on_signals_of_loop(self._stop_all):
            return await outcome(self._threads.start(partial(copy_context().run, join)))

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop, and wait for what is in hand. A cancellation meanwhile cancels the handlers.

        Messages of handlers that were cancelled come again; their items have failed.
        """
        leave = partial(self._blocking.__exit__, kind, error, trace)
        with stop_on_signals_of_loop(self._stop_all):
            await waited_out(self._threads.start(leave), self._abandon)


class ItemsOnThisLoop:
    """Calls a coroutine function for worker threads; it is awaited on the caller's loop."""

    def __init__(
        self, handler: ItemHandler, loop: asyncio.AbstractEventLoop, waiters: QueueWaiters
    ) -> None:
        self._handler = handler
        self._loop = loop
        self._waiters = waiters
        self._handling: set[asyncio.Task[None]] = set()
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, item: Item, work: blocking_work.UnitOfWork) -> None:
        calls = Calls()
        tx = UnitOfWork(lambda: work, Surroundings(calls.submit, self._waiters, one_thread=True))
        over: Future[None] = Future()
        handling = _handle(self._handler, item, tx)
        # Not run_coroutine_threadsafe: its future is done when it is cancelled, not when the
        # handler has ended, and that may still use its transaction.
        over.add_done_callback(lambda _: calls.end())
        try:
            self._loop.call_soon_threadsafe(partial(self._begin, handling, over))
            calls.serve(self._loop.is_closed)
            if not over.done():
                raise RuntimeError("the event loop was closed before the handler had ended")
        except RuntimeError:
            # No loop is left that could run the handler.
            _close_unbegun(handling)
            self.stop()
            raise
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
        """Cancel running handlers: their items have failed, and come again by `retry`."""
        for task in list(self._handling):
            task.cancel()


class ItemsOnOwnLoop(msgspec.Struct, frozen=True):
    """Calls a coroutine function in worker processes, where every thread has its own loop."""

    handler: ItemHandler

    def __call__(self, item: Item, work: blocking_work.UnitOfWork) -> None:
        around = Surroundings(_at_once, QueueWaiters(work._context.stores.queues), one_thread=True)
        tx = UnitOfWork(lambda: work, around)
        runner_of_this_thread().run(_handle(self.handler, item, tx))


def _at_once(work: Callable[[], T]) -> Future[T]:
    """Make the call on the loop's own thread: only one handler is on that loop."""
    future: Future[T] = Future()
    fulfil(future, work)
    return future


async def _handle(handler: ItemHandler, item: Item, tx: UnitOfWork) -> None:
    await tx
    await awaited(handler(item, tx))


class MessagesOnThisLoop:
    """Calls a handler for worker threads; what it returns is awaited on the caller's loop."""

    def __init__(self, handler: MessageHandler, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._loop = loop
        self._lock = threading.Lock()
        self._in_flight: set[Future[Any]] = set()
        self._abandoned = False
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, message: Message) -> None:
        found = self._handler(message)
        if not inspect.isawaitable(found):
            refuse_unfinished(found)
            return
        handling = _unless_cancelled(found)
        with self._lock:
            try:
                awaiting = asyncio.run_coroutine_threadsafe(handling, self._loop)
            except RuntimeError:
                raise self._leave(handling, found) from None
            self._in_flight.add(awaiting)
            if self._abandoned:
                awaiting.cancel()
        try:
            while not _is_done(awaiting):
                if self._loop.is_closed() and not awaiting.done():
                    raise self._leave(handling, found)
            awaiting.result()
        except CancelledError:
            if self._abandoned:
                raise Abandoned from None
            raise
        finally:
            self._in_flight.discard(awaiting)

    def _leave(self, *unawaited: Any) -> Abandoned:
        """The error after the loop was closed: no loop is left that could run the handler."""
        _close_unbegun(*unawaited)
        self.stop()
        return Abandoned()

    def abandon(self) -> None:
        """Cancel running handlers; their messages are neither handled nor failed."""
        with self._lock:
            self._abandoned = True
            for awaiting in list(self._in_flight):
                awaiting.cancel()


def _is_done(awaiting: Future[Any]) -> bool:
    """Wait for it, but not for ever: a loop that has ended never begins the work it was given."""
    try:
        awaiting.exception(LOOK)
    except TimeoutError:
        return False
    return True


def _close_unbegun(*awaitables: Any) -> None:
    """Close coroutines that will not be awaited; one that has begun is its task's to close."""
    for each in awaitables:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


async def _unless_cancelled(found: Any) -> Any:
    """Await it. A loop that ends cancels what it awaits: its message has not failed."""
    try:
        return await found
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise Abandoned from None
        raise


class MessagesOnOwnLoop(msgspec.Struct, frozen=True):
    """Calls a handler in worker processes, where every thread has its own loop."""

    handler: MessageHandler

    def __call__(self, message: Message) -> None:
        found = self.handler(message)
        if inspect.isawaitable(found):
            runner_of_this_thread().run(awaited(found))
        else:
            refuse_unfinished(found)


_loops = threading.local()


def runner_of_this_thread() -> asyncio.Runner:
    """The runner of the calling thread, made at its first call."""
    if not hasattr(_loops, "runner"):
        _loops.runner = asyncio.Runner()
    runner: asyncio.Runner = _loops.runner
    return runner


async def awaited(found: Any) -> Any:
    """An awaitable of any kind, as a coroutine."""
    return await found


@contextmanager
def stop_on_signals_of_loop(stop: Callable[[], None]) -> Iterator[None]:
    """As `stop_on_signals`, for a block that awaits: the loop has to wake up now and then."""
    loop = asyncio.get_running_loop()
    next_look: asyncio.TimerHandle

    def look() -> None:
        nonlocal next_look
        next_look = loop.call_later(LOOK, look)

    look()
    try:
        with stop_on_signals(stop):
            yield
    finally:
        next_look.cancel()
