"""Handlers that worker processes can import."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from pxrs import Item, UnitOfWork, aio
from support.child import PATIENCE

# Long enough for a thread of the same process that is not held back.
A_MOMENT = 0.5

_innocent_is_at_work, _killer_is_at_work = threading.Event(), threading.Event()


async def pass_on(item: Item, tx: aio.UnitOfWork) -> None:
    """Awaits something, and puts what it got elsewhere: in its own transaction."""
    await asyncio.sleep(0)
    await tx.put("outbox", f"{item.value} done")


def pass_on_at_once(item: Item, tx: UnitOfWork) -> None:
    """The same, without waiting."""
    tx.put("outbox", item.value)


def kill_beside_the_innocent(item: Item, tx: object) -> None:
    """The killer kills its process while the innocent is in hand there, if it can be."""
    if item.value == "killer":
        _killer_is_at_work.set()
        _innocent_is_at_work.wait(A_MOMENT)
        os.kill(os.getpid(), signal.SIGKILL)
    _innocent_is_at_work.set()
    if _killer_is_at_work.wait(A_MOMENT):
        threading.Event().wait(PATIENCE)


async def kill_beside_the_innocent_awaited(item: Item, tx: object) -> None:
    """The same, on a loop of the worker's thread."""
    kill_beside_the_innocent(item, tx)
