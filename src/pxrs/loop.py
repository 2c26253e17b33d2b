"""Threads that do something now and then until there is nothing left to do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue


class Loop:
    """Calls `step`, then waits for the seconds that it returns, or until woken; None ends it.

    It does not keep the step's object alive: when that is dropped, the thread ends.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = weakref.WeakMethod(step)
        # Not an Event: `wake` is called by destructors, which may interrupt `wait` in its thread.
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run. Not from two threads at once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_run, args=(self._step, self._alarm), name=self._name, daemon=True
            )
            self._thread.start()

    def wake(self) -> None:
        """Do the step soon. From anywhere, destructors too."""
        # One alarm that was not taken yet is enough: a loop that does not run takes none.
        if self._alarm.empty():
            self._alarm.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end, for `timeout` seconds at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _run(step: weakref.WeakMethod[Callable[[], float | None]], alarm: SimpleQueue[None]) -> None:
    while (do := step()) is not None:
        pause = do()
        if pause is None:
            return
        del do
        with suppress(Empty):
            alarm.get(timeout=pause)
            while True:
                alarm.get_nowait()
