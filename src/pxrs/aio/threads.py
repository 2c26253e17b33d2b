"""Threads for an event loop's blocking calls, and how the loop is notified of their end.

Methods that only make a blocking call are not written out: `describe = awaiting(Groups.describe)`.
Those that do more have its parameters too, by `wrapping` or `signed_as`. Their object has the
blocking one in `_blocking`, and in `_call` how calls are made.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pxrs.errors import Closed, InvalidRequest
from pxrs.options import add_options_help, take_parameters
from pxrs.running.signals import LOOK

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

_SHORT_CALLS = 8


class Threads:
    """The threads of one connection; the loop's own executor is left to the application.

    Calls that end by themselves share a few threads, which also bounds how many connections
    to the store they open. Calls that wait for events (a message, a flush) each have a
    thread for as long as they wait: in a pool, followers would take every place and a call that
    could wake them would queue behind them. These threads are daemons, made anew each time
    (30 µs more than a kept one), so there is nothing to size, to stop, or to hang at exit.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_SHORT_CALLS, thread_name_prefix="pxrs-aio")
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """Do `work`, which takes a moment. Cancelling stops it only if it has not begun."""
        future = self.submit(work)
        try:
            return await outcome(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, which takes a moment; `outcome` waits for it."""
        if self._closed:
            raise Closed("the store was closed")
        return self._pool.submit(work)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, which may take for ever; `outcome` waits for it."""
        future: Future[T] = Future()
        threading.Thread(
            target=fulfil, args=(future, work), name="pxrs-aio-wait", daemon=True
        ).start()
        return future

    def close(self) -> None:
        """Take no more calls; what has begun goes on."""
        self._closed = True
        self._pool.shutdown(wait=False)


class Calls:
    """Calls that are made by one thread, in order: whichever thread serves them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after what was submitted before; `outcome` waits for it."""
        if self._ended:
            raise InvalidRequest("the transaction has ended; begin another")
        future: Future[T] = Future()
        self._calls.put(partial(fulfil, future, work))
        return future

    def end(self) -> None:
        """Let the thread go when it has done all that was submitted."""
        self._ended = True
        self._calls.put(None)

    def serve(self, is_over: Callable[[], bool] | None = None) -> None:
        """Make the calls, in this thread, until the end, or until there are none and `is_over`."""
        while True:
            try:
                call = self._calls.get(timeout=None if is_over is None else LOOK)
            except Empty:
                if is_over is not None and is_over():
                    return
                continue
            if call is None:
                return
            call()


def own_thread() -> Calls:
    """Calls with a thread of their own, a daemon, for as long as they last."""
    calls = Calls()
    threading.Thread(target=calls.serve, name="pxrs-aio-block", daemon=True).start()
    return calls


class Opening(Generic[T]):
    """About to be opened: `await` it and close it, or use it with `async with`.

    `begin` has a thread open an object, and returns the function that wraps it for the loop. If
    the waiting task is gone when it is open, it is closed.
    """

    def __init__(self, begin: Callable[[], tuple[Future[Any], Callable[[Any], T]]]) -> None:
        self._begin = begin
        self._opened: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._open()
        opened: T = self._opened
        return opened

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)

    async def _open(self) -> T:
        opening, wrap = self._begin()
        try:
            return wrap(await outcome(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise


def _close_unwanted(opening: Future[Any]) -> None:
    if opening.exception() is None:
        opening.result().close()


async def outcome(future: Future[T]) -> T:
    """Await the result of a future. Cancelling this leaves the future alone."""
    if not future.done():
        await called(lambda wake: future.add_done_callback(lambda _: wake()))
    return future.result()


async def waited_out(future: Future[T], give_up: Callable[[], object] | None = None) -> T:
    """Await the result of a future. A cancellation is passed on after the future is done.

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
    waiter = asyncio.get_running_loop().create_future()
    register(partial(alarm().ring, partial(_end_wait, waiter)))
    await waiter


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Alarm:
    """Calls back on a loop, many by one call: one commit may settle hundreds of handles."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: `_alarms` keeps this for as long as the loop is there.
        self._loop = weakref.ref(loop)
        self._rung: deque[Callable[[], None]] = deque()
        self._ringing = False

    def ring(self, callback: Callable[[], None]) -> None:
        """Have the loop call it. From any thread."""
        self._rung.append(callback)
        if not self._ringing:
            self._ringing = True
            loop = self._loop()
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._call)
            except RuntimeError:
                # The loop was closed: no task waits any more.
                self._rung.clear()
                self._ringing = False

    def _call(self) -> None:
        self._ringing = False  # first: callbacks that come from here on ring again
        while self._rung:
            self._rung.popleft()()


def alarm() -> Alarm:
    """The alarm of the running loop."""
    loop = asyncio.get_running_loop()
    found = _alarms.get(loop)
    if found is None:
        found = _alarms[loop] = Alarm(loop)
    return found


_alarms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Alarm] = weakref.WeakKeyDictionary()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do `work`, in this thread, and put its result or error into the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the waiting task raises it
        future.set_exception(error)
    else:
        future.set_result(result)


def awaiting(
    method: Callable[Concatenate[Any, P], T], *, waits: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The blocking method, made by a thread and awaited, with its parameters, types and help.

    `waits`: it may take for ever, so it gets a thread of its own.
    """

    @wraps(method)
    async def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        work = partial(getattr(self._blocking, method.__name__), *args, **kwargs)
        return await (outcome(self._threads.start(work)) if waits else self._call(work))

    return forward


def passing(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The blocking method as it is: it does not wait, so it is not awaited."""

    @wraps(method)
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._blocking, method.__name__)(*args, **kwargs)

    return forward


def wrapping(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[[Callable[[Any, partial[T]], R]], Callable[Concatenate[Any, P], R]]:
    """Decorates a method that has the blocking one's parameters, and does more than to await it.

    It gets the call, with the arguments in it. Type checkers know by it which values the result
    has: that of `reader` is a `Reader` of what the serde is for, on both sides.
    """

    def sign(function: Any) -> Any:
        def plain(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = partial(getattr(self._blocking, method.__name__), *args, **kwargs)
            return function(self, call)

        async def awaited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return await plain(self, *args, **kwargs)

        signed = wraps(function)(awaited if inspect.iscoroutinefunction(function) else plain)
        add_options_help(signed, method)
        return shown_as(method)(signed)

    return sign


def signed_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Decorates a method that has the blocking one's parameters, and makes other calls.

    It has to name them, or to take `*args`; types and defaults are those of the blocking method.
    """

    def sign(function: Any) -> Any:
        take_parameters(function, method)
        add_options_help(function, method)
        return function

    return sign


def signed_as_function(
    function: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """`signed_as` for a function."""
    return shown_as(function)


def shown_as(method: Any) -> Callable[[F], F]:
    """`signed_as` for `help` alone, where type checkers know the parameters otherwise."""

    def sign(function: F) -> F:
        signed: Any = function
        own = inspect.signature(function)
        signed.__signature__ = inspect.signature(method).replace(
            return_annotation=own.return_annotation
        )
        return function

    return sign
