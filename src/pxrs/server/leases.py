"""Items that remote workers hold: a lease is a unit of work that this node keeps for its client.

The client takes items under a lease, and commits or releases it; all that a unit of work promises
holds for it. A lease that is over, or whose node died, gives its items back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pxrs.aio.app import Pxrs
from pxrs.aio.transactions import UnitOfWork
from pxrs.core.retry import Backoff
from pxrs.errors import Fenced, PxrsError
from pxrs.queues.item import Item
from pxrs.server.cluster import Cluster
from pxrs.server.groups.service import HeldElsewhere
from pxrs.server.limits import MOST_LEASED_ITEMS, MOST_LEASES, check_room

T = TypeVar("T")

# A lease is kept a little longer than its items: the store then refuses a commit just too late.
_GRACE = 1.0
# Once the items of a lease have about this many bytes, it takes no more.
_MOST_BYTES = 8 * 2**20
_FIRST_ITEMS = 10


class LeaseLost(Fenced):
    """The lease is over: its items were given back, or it was ended."""


class Lease:
    """Items that a remote worker holds. One request at a time works on it.

    The client has their contents; only their number is kept here.
    """

    def __init__(self, name: str, owner: str, work: UnitOfWork[Any], count: int) -> None:
        self.name = name
        self.owner = owner
        self.work = work
        self.count = count
        self.lock = asyncio.Lock()
        self.expiry: asyncio.TimerHandle | None = None


class Leased(NamedTuple):
    """The name of a lease, and the items under it."""

    lease: str
    items: list[Item[Any]]


class Leases:
    """All leases of this node. Used by one event loop."""

    def __init__(self, px: Pxrs, cluster: Cluster, address: str) -> None:
        self._px = px
        self._cluster = cluster
        self._address = address
        self._leases: dict[str, Lease] = {}
        self._items = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def take(
        self, queue: str, count: int, seconds: float, wait: float, retry: Backoff, owner: str
    ) -> Leased | None:
        """Take up to `count` items, waiting for the first; None if none came.

        Takes fewer if they are large, or if the node is near its limit.
        """
        check_room("leases", len(self._leases), MOST_LEASES)
        check_room("items under leases", self._items, MOST_LEASED_ITEMS)
        work = await self._px.begin()
        try:
            items = await self._take(work, queue, count, wait, retry=retry, lock_for=seconds)
        except BaseException:
            await work.rollback()
            raise
        if not items:
            await work.rollback()
            return None
        lease = Lease(self._new_name(), owner, work, len(items))
        self._leases[lease.name] = lease
        self._items += lease.count
        self._expire_in(lease, seconds)
        return Leased(lease.name, items)

    async def _take(
        self, work: UnitOfWork[Any], queue: str, count: int, wait: float, **how: Any
    ) -> list[Item[Any]]:
        """Takes a few items first: their sizes show how many more will fit."""
        items: list[Item[Any]] = []
        size, largest, piece = 0, 1, _FIRST_ITEMS
        while True:
            asked = min(piece, count - len(items))
            found = await work.take_many(queue, asked, 0.0 if items else wait, **how)
            items += found
            sizes = [len(item.value) for item in found]
            size, largest = size + sum(sizes), max([largest, *sizes])
            if len(found) < asked or len(items) >= count or size >= _MOST_BYTES:
                return items
            piece = max(1, (_MOST_BYTES - size) // largest)

    async def extend(self, name: str, owner: str, seconds: float) -> None:
        """Hold the items for `seconds` from now."""
        lease = self._find(name, owner)
        async with lease.lock:
            self._refuse_ended(lease)
            await lease.work.extend(seconds)
            self._expire_in(lease, seconds)

    async def release(self, name: str, owner: str, error: str) -> None:
        """Give the items back: they are delivered again, or dead after their last attempt."""
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
        """How many leases there are."""
        return len(self._leases)

    async def close(self) -> None:
        """Give the items of all leases back."""
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
        """The error for a lease that is not here: `HeldElsewhere` if a live node has it."""
        _, _, place = name.partition(".")
        with suppress(ValueError):
            address = bytes.fromhex(place).decode()
            known = {node.address for node in self._cluster.view.nodes}
            if address in known and address != self._address:
                return HeldElsewhere(address)
        return LeaseLost("the lease is over, or there never was one; take the items again")

    def _new_name(self) -> str:
        return f"{secrets.token_urlsafe(16)}.{self._address.encode().hex()}"

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
        if self._leases.pop(lease.name, None) is not None:
            self._items -= lease.count
        if lease.expiry is not None:
            lease.expiry.cancel()
