"""Keys and values for remote clients: which node leads a key, and requests that share a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from pxrs.aio.app import Pxrs
from pxrs.core.kv import SHARDS, Change, KeyBatch, Written, slot_of_shard
from pxrs.errors import BufferFull
from pxrs.kv.store import KeyValues
from pxrs.kv.timers import Timers
from pxrs.server.cluster import Cluster, ClusterView
from pxrs.stores.api import TellsTime
from pxrs.types import Entry, Version

# Requests that wait for the store; more are refused.
_MOST_WAITING = 10_000

Work = TypeVar("Work")
Answer = TypeVar("Answer")


class Together(Generic[Work, Answer]):
    """Hands all requests that came during one call to the next, in a thread. For one event loop."""

    def __init__(
        self, px: Pxrs, do: Callable[[Sequence[Work]], Sequence[Answer | BaseException]]
    ) -> None:
        self._call = px._threads.call
        self._do = do
        self._waiting: list[tuple[Work, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, work: Work) -> Answer:
        if len(self._waiting) >= _MOST_WAITING:
            raise BufferFull("too many requests wait for the store; try again later")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                works = [work for work, _ in batch]
                try:
                    answers = await self._call(partial(self._do, works))
                except Exception as error:  # noqa: BLE001 - each request gets it
                    answers = [error] * len(batch)
                for (_, future), answer in zip(batch, answers, strict=True):
                    _settle(future, answer)
        finally:
            self._task = None


def _settle(future: asyncio.Future[Answer], answer: Answer | BaseException) -> None:
    if future.done():
        return  # its client has gone
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class KeyService:
    """Puts, gets and deletes for clients, on the node that leads the key. Used by one event loop.

    Any node could do this: the fence is in the store. But nodes that take turns writing to one
    shard conflict, so each key has one node that writes it.
    """

    def __init__(self, px: Pxrs, cluster: Cluster) -> None:
        self._keys: KeyValues = px._blocking.kv
        self._cluster = cluster
        self._led: frozenset[int] = frozenset()
        self._leading = threading.Lock()
        self._write: Together[Change, Written] = Together(px, self._write_all)
        self._read: Together[tuple[bytes, str], Entry | None] = Together(px, self._read_all)
        self._timers: Timers | None = None
        if not isinstance(px._blocking.stores.coord, TellsTime):
            self._timers = self._keys._keep_time(lambda shard: slot_of_shard(shard) in self._led)
            self._timers.start()
        # First: a view that is published after this look is applied by the cluster's thread.
        cluster.on_change(self.lead)
        self.lead(cluster.view)

    def close(self) -> None:
        """Stop deleting values that expire. Blocks for a moment."""
        if self._timers is not None:
            self._timers.close()

    def lead(self, view: ClusterView) -> None:
        """Note which slots this node leads: the first write to a shard gained raises its term."""
        name = self._cluster.here.name
        with self._leading:
            # Not `view`: another thread may have applied a later one meanwhile.
            slots = self._cluster.view.slots
            led = frozenset(slot for slot, leader in enumerate(slots) if leader == name)
            gained, lost = led - self._led, self._led - led
            self._led = led
            self._keys._lead(
                *(
                    [it for it in range(SHARDS) if slot_of_shard(it) in changed]
                    for changed in (gained, lost)
                )
            )
        if gained and self._timers is not None:
            self._timers.look_again()

    async def put(
        self,
        key: bytes,
        value: bytes,
        if_match: Version | None = None,
        ttl: float | None = None,
        idempotency_key: str | None = None,
    ) -> Version:
        """See `pxrs.KeyValues.put`."""
        change = self.put_change(key, value, if_match, ttl, idempotency_key)
        return (await self.write(change)).version

    async def delete(
        self, key: bytes, if_match: Version | None = None, idempotency_key: str | None = None
    ) -> Written:
        """See `pxrs.KeyValues.delete`; the version of the deletion, and whether there was one."""
        return await self.write(self.delete_change(key, if_match, idempotency_key))

    def put_change(
        self,
        key: bytes,
        value: bytes,
        if_match: Version | None,
        ttl: float | None,
        idempotency_key: str | None,
    ) -> Change:
        """The change that `put` writes, checked."""
        return self._keys._put_change(key, value, if_match, ttl, idempotency_key)

    def delete_change(
        self, key: bytes, if_match: Version | None, idempotency_key: str | None
    ) -> Change:
        """The change that `delete` writes, checked."""
        return self._keys._delete_change(key, if_match, idempotency_key)

    async def write(self, change: Change) -> Written:
        """Writes a checked change, in one commit with others that wait."""
        return await self._write(change)

    async def get(self, key: bytes, consistency: str = "lease") -> Entry | None:
        """See `pxrs.KeyValues.get`."""
        self._keys._check_read(key, consistency)
        return await self._read((key, consistency))

    def _write_all(self, changes: Sequence[Change]) -> list[Written | BaseException]:
        answers = self._keys._do_all([KeyBatch([change]) for change in changes])
        return [it if isinstance(it, BaseException) else it[0] for it in answers]

    def _read_all(self, wanted: Sequence[tuple[bytes, str]]) -> list[Entry | BaseException | None]:
        found: list[Entry | BaseException | None] = []
        for key, consistency in wanted:
            try:
                found.append(self._keys.get(key, consistency=consistency))
            except Exception as error:  # noqa: BLE001 - the request gets it
                found.append(error)
        return found
