"""An event loop in a thread of its own, for a client that knows asyncio only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from pxrs.errors import Closed
from pxrs.forks import Origin

T = TypeVar("T")


class ClosedMeanwhile(Closed):
    """The loop was closed under a coroutine: some of its work may be done."""


class LoopThread:
    """Runs coroutines for whichever thread asks. After a fork only the parent can use it."""

    def __init__(self, name: str) -> None:
        self._origin = Origin("log")
        self._lock = threading.Lock()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt of the caller cancels it."""
        try:
            self._origin.refuse_child()
            with self._lock:
                if self._closed:
                    raise Closed("the log was closed")
                future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise ClosedMeanwhile("the log was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    @property
    def usable(self) -> bool:
        return not self._origin.is_parent and not self._closed

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        if self._origin.is_parent:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
