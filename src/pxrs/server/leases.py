"""Items that remote workers hold: a lease is a unit of work that this node keeps for its client.

The client takes items under a lease, and commits or releases it; all that a unit of work promises
holds for it. A lease that is over, or whose node died, gives its items back.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pxrs.aio.app import Pxrs
from pxrs.aio.transactions import UnitOfWork
from pxrs.core.retry import Backoff
from pxrs.errors import Fenced, PxrsError
from pxrs.queues.item import Item
from pxrs.server.cluster import Cluster
from pxrs.server.groups import HeldElsewhere
from pxrs.server.limits import MOST_LEASES, check_room

T = TypeVar("T")

# Kept a little longer than its items: a commit that comes just too late is told so by the store.
_GRACE = 1.0


class LeaseLost(Fenced):
    """The lease is over: its items were given back, or it was ended."""


class Lease:
    """Items in the hands of a remote worker. One request at a time works on it."""

    def __init__(
        self, name: str, owner: str, work: UnitOfWork[Any], items: Sequence[Item[Any]]
    ) -> None:
        self.name = name
        self.owner = owner
        self.work = work
        self.items = items
        self.lock = asyncio.Lock()
        self.expiry: asyncio.TimerHandle | None = None


class Leases:
    """All leases of this node. Used by one event loop."""

    def __init__(self, px: Pxrs, cluster: Cluster, address: str) -> None:
        self._px = px
        self._cluster = cluster
        self._address = address
        self._leases: dict[str, Lease] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def take(
        self, queue: str, count: int, seconds: float, wait: float, retry: Backoff, owner: str
    ) -> Lease | None:
        """Take up to so many items, waiting for the first; None if none came."""
        check_room("leases", len(self._leases), MOST_LEASES)
        work = await self._px.begin()
        try:
            items = await work.take_many(queue, count, wait, retry=retry, lock_for=seconds)
        except BaseException:
            await work.rollback()
            raise
        if not items:
            await work.rollback()
            return None
        lease = Lease(self._new_name(), owner, work, items)
        self._leases[lease.name] = lease
        self._expire_in(lease, seconds)
        return lease

    async def extend(self, name: str, owner: str, seconds: float) -> None:
        """Hold the items for so many seconds from now."""
        lease = self._find(name, owner)
        async with lease.lock:
            self._refuse_ended(lease)
            await lease.work.extend(seconds)
            self._expire_in(lease, seconds)

    async def release(self, name: str, owner: str, error: str) -> None:
        """Give the items back: to be delivered again, or dead if that was their last time."""
        lease = self._find(name, owner)
        async with lease.lock:
            self._refuse_ended(lease)
            self._forget(lease)
            await lease.work.rollback(error)

    async def commit(
        self, name: str, owner: str, add: Callable[[UnitOfWork[Any]], Awaitable[T]]
    ) -> T:
        """Remove the items and do what `add` adds to the unit of work, in one commit.

        If that fails and the lease lives, nothing of what was added is left: it may be committed
        again, with other additions.
        """
        lease = self._find(name, owner)
        async with lease.lock:
            self._refuse_ended(lease)
            try:
                added = await add(lease.work)
                await lease.work.commit()
            finally:
                if lease.work.is_open:
                    lease.work._blocking._forget_changes()
                else:
                    self._forget(lease)
            return added

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._leases)

    async def close(self) -> None:
        """Give everything back."""
        for lease in list(self._leases.values()):
            self._forget(lease)
            with suppress(PxrsError):
                await lease.work.rollback()
        for task in list(self._ending):
            await task

    def _find(self, name: str, owner: str) -> Lease:
        lease = self._leases.get(name)
        if lease is None or lease.owner != owner:
            raise self._elsewhere(name)
        return lease

    def _refuse_ended(self, lease: Lease) -> None:
        if lease.name not in self._leases:
            raise LeaseLost("the lease has ended; take the items again")

    def _elsewhere(self, name: str) -> Exception:
        """A lease of another node that is there is asked for there; any other one is over."""
        _, _, place = name.partition(".")
        with suppress(binascii.Error, UnicodeDecodeError, ValueError):
            address = base64.urlsafe_b64decode(place + "=" * (-len(place) % 4)).decode()
            known = {node.address for node in self._cluster.view.nodes}
            if address in known and address != self._address:
                return HeldElsewhere(address)
        return LeaseLost("the lease is over, or there never was one; take the items again")

    def _new_name(self) -> str:
        place = base64.urlsafe_b64encode(self._address.encode()).decode().rstrip("=")
        return f"{secrets.token_urlsafe(16)}.{place}"

    def _expire_in(self, lease: Lease, seconds: float) -> None:
        if lease.expiry is not None:
            lease.expiry.cancel()
        loop = asyncio.get_running_loop()
        lease.expiry = loop.call_later(seconds + _GRACE, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self._forget(lease)
        task = asyncio.create_task(self._give_back(lease))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_back(self, lease: Lease) -> None:
        async with lease.lock:
            with suppress(PxrsError):
                await lease.work.rollback("its lease ran out")

    def _forget(self, lease: Lease) -> None:
        self._leases.pop(lease.name, None)
        if lease.expiry is not None:
            lease.expiry.cancel()
