"""Handlers that worker processes can import."""

from __future__ import annotations

import asyncio

from pxrs import Item, UnitOfWork, aio


async def pass_on(item: Item, tx: aio.UnitOfWork) -> None:
    """Awaits something, and puts what it got elsewhere: in its own transaction."""
    await asyncio.sleep(0)
    await tx.put("outbox", f"{item.value} done")


def pass_on_at_once(item: Item, tx: UnitOfWork) -> None:
    """The same, without waiting."""
    tx.put("outbox", item.value)
