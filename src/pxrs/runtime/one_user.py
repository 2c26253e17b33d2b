"""An object that one thread uses at a time: the second is refused, not served by chance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pxrs.errors import InvalidRequest


class OneUser:
    """Two who ask a consumer for messages would each count as handled what the other works on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The block is for one. Not for the same thread again either, as in a callback."""
        if not self._lock.acquire(blocking=False):
            raise InvalidRequest(
                "somebody waits for messages of this consumer already: another thread, or the "
                "call that called this callback; a consumer is for one thread"
            )
        try:
            yield
        finally:
            self._lock.release()
