"""An object that one thread uses at a time: the second is refused, not served by chance."""

from __future__ import annotations

import threading
from typing import Any

from pxrs.errors import InsideTransaction, InvalidRequest


class OneUser:
    """Two who ask a consumer for messages would each count as handled what the other works on.

    A block is noted by its thread, not locked: an interrupt may come before or after any line of
    this, and the thread that was interrupted has to be able to go on.
    """

    def __init__(self) -> None:
        self._user: int | None = None
        # Whether a callback runs, from which nobody may ask for messages.
        self.in_callback = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._user not in (None, me) or self.in_callback:
            raise InvalidRequest(
                "somebody waits for messages of this consumer already: another thread, or the "
                "call that called this callback; a consumer is for one thread"
            )
        self._user = me

    def __exit__(self, *_: object) -> None:
        self._user = None


def refuse_interrupted(*locks: Any) -> None:
    """Raise in a signal handler that has interrupted its own thread inside of these locks.

    Whoever would be waited for there may wait for them, and they are freed after the handler.
    """
    if any(lock._is_owned() for lock in locks):
        raise InsideTransaction(
            "a signal handler can't close the consumer whose call it has interrupted; let it set "
            "a flag, or call consumer.wake(), and close afterwards"
        )
