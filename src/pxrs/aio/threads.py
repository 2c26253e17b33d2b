"""Where an event loop's blocking calls go, and how it hears that they are done."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from pxrs.errors import Closed

T = TypeVar("T")

_SHORT_CALLS = 8


class Threads:
    """The threads of one connection; the loop's own executor is left to the application.

    Calls that end by themselves share a few threads, which also bounds how many connections
    to the store they open. Calls that wait for the world (a message, a flush) each have a
    thread for as long as they wait: in a pool, followers would take every place and a call that
    could wake them would queue behind them. These threads are daemons, made anew each time
    (30 µs more than a kept one), so there is nothing to size, to stop, or to hang at exit.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_SHORT_CALLS, thread_name_prefix="pxrs-aio")
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """Do `work`, which takes a moment. Cancelling leaves it unless it has not begun."""
        if self._closed:
            raise Closed("the store was closed")
        future = self._pool.submit(work)
        try:
            return await outcome(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, which may take for ever; `outcome` waits for it."""
        future: Future[T] = Future()
        threading.Thread(
            target=_fulfil, args=(future, work), name="pxrs-aio-wait", daemon=True
        ).start()
        return future

    def close(self) -> None:
        """Take no more calls; what has begun goes on."""
        self._closed = True
        self._pool.shutdown(wait=False)


class OwnThread:
    """One thread for calls that have to be made by the same one, in order. A daemon."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="pxrs-aio-block", daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after what was started before; `outcome` waits for it."""
        future: Future[T] = Future()
        self._calls.put(partial(_fulfil, future, work))
        return future

    def end(self) -> None:
        """Let the thread end when it has done all that was started."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def outcome(future: Future[T]) -> T:
    """What the future holds once it is done. Cancelling this leaves the future alone."""
    if not future.done():
        await called(lambda wake: future.add_done_callback(lambda _: wake()))
    return future.result()


async def waited_out(future: Future[T], give_up: Callable[[], None] | None = None) -> T:
    """What the future holds. A cancellation is passed on, but not before the future is done.

    `give_up` is called when one comes, to hurry the future on.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await called(lambda wake: future.add_done_callback(lambda _: wake()))
        except asyncio.CancelledError as error:
            cancelled = error
            if give_up is not None:
                give_up()
    if cancelled is not None:
        raise cancelled
    return future.result()


async def called(register: Callable[[Callable[[], None]], None]) -> None:
    """Wait until the callback that is handed to `register` is called, from any thread."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    alarm = _alarms.get(loop)
    if alarm is None:
        alarm = _alarms[loop] = _Alarm()
    register(partial(alarm.ring, waiter))
    await waiter


class _Alarm:
    """Wakes many waiters of a loop by one call: one commit settles what hundreds wait for."""

    def __init__(self) -> None:
        self._called: deque[asyncio.Future[None]] = deque()
        self._ringing = False

    def ring(self, waiter: asyncio.Future[None]) -> None:
        """Wake the waiter, from any thread."""
        self._called.append(waiter)
        if not self._ringing:
            self._ringing = True
            try:
                waiter.get_loop().call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop was closed: nobody is left who waits.
                self._called.clear()
                self._ringing = False

    def _wake(self) -> None:
        self._ringing = False  # first: who comes from here on rings again
        while self._called:
            waiter = self._called.popleft()
            if not waiter.done():
                waiter.set_result(None)


_alarms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm] = weakref.WeakKeyDictionary()


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
