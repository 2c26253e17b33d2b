"""`Running`, the handle that `px.run` and `px.listen` return, and the threads behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from time import monotonic
from typing import Protocol

from pxrs.consuming.health import Health
from pxrs.errors import HandlerFailed, InvalidRequest
from pxrs.running.dead_letters import words_of
from pxrs.running.signals import stop_on_signals, wait_awake

_LOG = logging.getLogger("pxrs.running")
# How long closing a store waits for handlers.
_PATIENCE = 30.0
# How long stopping waits for handlers before it logs that.
_QUIET = 1.0
# The run or listener whose handler calls this code, if one does: it must not wait for its own end.
# A context, not a thread: what a coroutine awaits on its loop is inside of the handler, too.
_employer: ContextVar[object | None] = ContextVar("pxrs_employer", default=None)


class Work(Protocol):
    """The work of a handle: done by threads of this process, or by worker processes."""

    @property
    def name(self) -> str:
        """Its name in health and logs."""
        ...

    @property
    def handled(self) -> int | None:
        """The number of handled messages or items; None if other processes count them."""
        ...

    @property
    def failed(self) -> int | None:
        """The number of failed attempts; None if other processes count them."""
        ...

    def run(self) -> None:
        """Works until stopped; raises what made it end by itself."""
        ...

    def stop(self) -> None:
        """Finishes what is in hand and ends. From any thread; before `run`, too."""
        ...

    def health(self) -> dict[str, Health]:
        """Return the health of its parts, by name. From any thread."""
        ...


class Running:
    """A handler at work in the background: what `px.run` and `px.listen` return.

    Leaving its `with` block stops it and waits until what is in hand is finished and committed;
    so does closing the store. Once it has ended it can't be started again: call `run` or `listen`.
    """

    def __init__(self, work: Work, stop_all: Callable[[], None]) -> None:
        self._work = work
        self._stop_all = stop_all
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._was_told = False
        self._is_abandoned = False

    def _start(self) -> Running:
        threading.Thread(target=self._run, name="pxrs-running", daemon=True).start()
        return self

    def _run(self) -> None:
        _employer.set(self._work)
        try:
            self._work.run()
        except BaseException as error:  # noqa: BLE001 - `join` raises it
            self._failure = error
            _LOG.error("%s has ended: %s", self._work.name, words_of(error))
        finally:
            self._ended.set()

    @property
    def handled(self) -> int | None:
        """The number of handled messages or items; None with worker processes."""
        return self._work.handled

    @property
    def failed(self) -> int | None:
        """The number of failed attempts; None with worker processes."""
        return self._work.failed

    def stop(self) -> None:
        """Take nothing more and finish what is in hand; does not wait. From any thread."""
        self._work.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, for `timeout` seconds at most; returns whether it has.

        In the main thread SIGTERM and SIGINT meanwhile do what `Pxrs.stop` does: this ends, and
        all else that runs under the same object. A second SIGINT raises `KeyboardInterrupt`, and
        from then on nothing waits for the handlers. Raises the error that made it end by itself,
        such as `HandlerFailed`.
        """
        if self._is_around_here:
            raise InvalidRequest("a handler can't wait for its own end: only stop() it")
        ended = self._wait(timeout)
        if ended and self._failure is not None:
            self._was_told = True
            raise self._failure
        return ended

    def health(self) -> dict[str, Health]:
        """Return its health, by name; nothing once it has ended because it was stopped.

        A run is named after its member in the group (`run:<group>` until it has one), a listener
        is `listen:<queue>`; worker processes are `run:<group>/worker-0` and on.
        """
        if self._failure is not None:
            return {self._work.name: Health("failed", words_of(self._failure))}
        return {} if self._ended.is_set() else self._work.health()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        if self._is_abandoned:
            return
        if error is None:
            self.join()
        else:
            # The caller's own error is the one to raise; the error that ended this is in the log.
            self._wait(None)
            self._was_told = True

    def _wait(self, timeout: float | None) -> bool:
        try:
            # To the very end: a second signal must not cut off what is being finished.
            with stop_on_signals(self._stop_all):
                return wait_awake(self._ended.wait, timeout)
        except KeyboardInterrupt:
            self._is_abandoned = True
            raise

    @property
    def _is_around_here(self) -> bool:
        """Whether the caller is inside of its handler: that can't wait for its end."""
        return _employer.get() is self._work

    @property
    def _is_settled(self) -> bool:
        """Whether it has ended, and its error needs no further report."""
        return self._ended.is_set() and (self._failure is None or self._was_told)

    def _close(self) -> None:
        """Wait for its end, for a while; raises the error that ended it, unless raised before."""
        if not self._is_abandoned and not self._is_settled:
            self.join(_PATIENCE)


class WorkerThreads:
    """The threads of this process that call a handler, for a run or a listener (`owner`).

    `limit`: a thread that has not returned this many seconds after a stop is left behind, because
    a thread can't be killed. `busy`: how many of them are in a handler. `failure` is the error that
    ends the work by itself: the first that was passed to `fail`.
    """

    def __init__(
        self,
        owner: Work,
        count: int,
        work: Callable[[], None],
        busy: Callable[[], int],
        limit: float | None,
    ) -> None:
        self._owner = owner
        self._work = work
        self._busy = busy
        self._limit = limit
        self.failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"pxrs-worker-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start them all."""
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        _employer.set(self._owner)
        self._work()

    def fail(self, error: BaseException) -> None:
        """Stop, and end with this error unless there is one already."""
        self.failure = self.failure or error
        self._owner.stop()

    def fail_handler(self, what: str, error: BaseException) -> None:
        """Stop, and end with `HandlerFailed(what)`, whose cause is this error."""
        failure = HandlerFailed(what)
        failure.__cause__ = error
        self.fail(failure)

    def drain(self, log: logging.Logger) -> None:
        """Wait for handlers to return, after a stop; logs it if that takes a while."""
        quiet = _QUIET if self._limit is None else min(_QUIET, self._limit)
        if not self._end_within(quiet) and (handlers := self._busy()):
            what = "1 handler" if handlers == 1 else f"{handlers} handlers"
            time = "" if self._limit is None else f", up to {self._limit:g} s"
            log.warning("stopping: waiting for %s to return%s", what, time)
        self._end_within(self._limit)

    def raise_failure(self) -> None:
        """Raise the error that has ended the work by itself, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _end_within(self, seconds: float | None) -> bool:
        deadline = None if seconds is None else monotonic() + seconds
        for thread in self._threads:
            if thread.ident is None:
                continue  # the system had no more threads, and the start failed
            thread.join(None if deadline is None else max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
