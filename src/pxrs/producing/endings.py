"""What becomes of open producers when the process forks, and when it ends.

At a normal end their threads still run: they are told to hurry, and the thread that ends the
program waits for them, not for ever. It commits nothing itself: a store that hangs would hold it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pxrs.producing.handles import Parcel
from pxrs.producing.undelivered import LOG, described

if TYPE_CHECKING:
    from pxrs.producing.producer import Producer

# How many seconds a program may take to end because of what it left behind.
PATIENCE = 10.0


_open: weakref.WeakSet[Producer] = weakref.WeakSet()


def look_after(producer: Producer) -> None:
    """From here on, until it is gone."""
    _open.add(producer)


def _after_fork_in_child() -> None:
    for producer in list(_open):
        producer._abandon()


def _at_exit() -> None:
    began = time.monotonic()
    left = [(producer, producer._leftovers()) for producer in list(_open)]
    left = [(producer, parcels) for producer, parcels in left if parcels]
    for producer, parcels in left:
        deadline = began + min(PATIENCE, producer._committer.delivery_timeout)
        _await(parcels, deadline)
        producer._committer.rest(max(0.0, deadline - time.monotonic()))
        if lost := [parcel for parcel in parcels if not parcel.settled]:
            LOG.error(
                "not delivered: %s: the program ended before they could be; close the producer "
                "to wait longer, and to be told",
                described(lost),
            )
    # Last: a warning may be turned into an error.
    for producer, parcels in left:
        warnings.warn(
            f"a producer was not closed, and {described(parcels)} had to be flushed when the "
            "program ended; use it in a `with` block, or call its close()",
            ResourceWarning,
            source=producer,
            stacklevel=2,
        )


def _await(parcels: Sequence[Parcel], deadline: float) -> None:
    for parcel in parcels:
        settled = threading.Event()
        parcel.when_settled(settled.set)
        if not settled.wait(max(0.0, deadline - time.monotonic())):
            return


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
