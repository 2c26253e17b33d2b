"""A process that is busy: its threads get the interpreter once in a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pxrs.clock import SYSTEM_CLOCK


def _as_long_as(seconds: float) -> int:
    """Of which power of 3 it takes so long to compute it, in one step of the interpreter."""
    exponent = 100_000
    while True:
        began = SYSTEM_CLOCK.monotonic()
        pow(3, exponent)
        took = SYSTEM_CLOCK.monotonic() - began
        if took >= seconds:
            return exponent
        exponent = int(exponent * max(1.1, min(4.0, seconds / took)))


@contextmanager
def busy(seconds: float, rest: float) -> Iterator[None]:
    """Let a thread keep the interpreter for so many seconds at a time, with rests in between."""
    exponent, stop = _as_long_as(seconds), threading.Event()

    def compute() -> None:
        while not stop.wait(rest):
            pow(3, exponent)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
