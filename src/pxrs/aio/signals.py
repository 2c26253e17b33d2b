"""`stop_on_signals` for a loop: it has to wake up now and then, see `pxrs.running.signals`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pxrs.running.signals import LOOK, stop_on_signals


@contextmanager
def stop_on_signals_of_loop(stop: Callable[[], None]) -> Iterator[None]:
    """As `stop_on_signals`, for a block that awaits."""
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
