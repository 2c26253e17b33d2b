"""SIGTERM and SIGINT mean: finish what is in hand, and end.

They are handled while the main thread waits for a run or a listener. A handler that the program
has installed itself is called, too, as if pxrs had none; only Python's defaults are not, which
would end the program before it has finished. When no wait is left, the program's handlers are
restored.

Python runs its handlers when the main thread goes on. A signal that comes just before that thread
falls asleep is noticed when it wakes up: so a wait under `stop_on_signals` wakes up now and then,
as `wait_awake` does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

Stop = Callable[[], None]
# How many seconds a signal may go unnoticed.
LOOK = 0.5
_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Have another thread call `stop` when a signal comes during the block.

    Blocks may overlap, as those of asyncio's tasks do. Only the main thread can handle signals: in
    any other one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _handlers.add(stop)
    try:
        yield
    finally:
        _handlers.remove(stop)


def wait_awake(wait: Callable[[float | None], bool], timeout: float | None) -> bool:
    """Call `wait(seconds)` until it is true, for `timeout` seconds at most; whether it is.

    The main thread wakes up now and then; others have no signals to notice.
    """
    if threading.current_thread() is not threading.main_thread():
        return wait(timeout)
    deadline = None if timeout is None else monotonic() + timeout
    while True:
        left = LOOK if deadline is None else deadline - monotonic()
        if wait(min(LOOK, max(0.0, left))):
            return True
        if left <= 0:
            return False


class _SignalHandlers:
    """Handles signals for all blocks that are open. Only the main thread calls this.

    A second SIGINT does what it always does: a user at a terminal will not wait. A second
    SIGTERM, or one after the other, changes nothing: one signal to a group of processes reaches
    workers twice, as their parent signals them, too.
    """

    def __init__(self) -> None:
        self._stops: list[Stop] = []
        self._before: dict[int, Any] = {}
        self._noted: SimpleQueue[tuple[Stop, ...]] = SimpleQueue()
        self._interrupted = False
        self._installed = self._on_signal  # one object, to be recognised

    def add(self, stop: Stop) -> None:
        self._stops.append(stop)
        if len(self._stops) == 1:
            self._interrupted = False
            self._noted = SimpleQueue()
            threading.Thread(
                target=_stop_each, args=(self._noted,), name="pxrs-signals", daemon=True
            ).start()
            for number in _NUMBERS:
                self._listen_to(number)

    def remove(self, stop: Stop) -> None:
        if len(self._stops) == 1:
            while self._before:
                number, before = self._before.popitem()
                # A handler that the program has installed meanwhile stays.
                if signal.getsignal(number) is self._installed:
                    signal.signal(number, before)
            self._noted.put(())
        self._stops.remove(stop)

    def _listen_to(self, number: int) -> None:
        before = signal.getsignal(number)
        # A handler that was not installed by Python could not be restored: it is left alone.
        if before is not None:
            self._before[number] = before
            signal.signal(number, self._installed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        impatient = number == signal.SIGINT and self._interrupted
        self._interrupted |= number == signal.SIGINT
        # Another thread calls them: they need locks, which this one may hold. `put` needs none.
        self._noted.put(tuple(self._stops))
        if callable(before) and before not in _DEFAULTS:
            before(number, frame)
        elif impatient:
            signal.default_int_handler(number, frame)


def _stop_each(noted: SimpleQueue[tuple[Stop, ...]]) -> None:
    """Call the stop functions for each signal, until no block is open."""
    while stops := noted.get():
        for stop in stops:
            stop()


_handlers = _SignalHandlers()
