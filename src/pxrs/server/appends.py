"""Appends the raw batches of all connections; those that wait share one commit of the log."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pxrs.aio.threads import Threads
from pxrs.core.sequences import WINDOW
from pxrs.errors import BufferFull, OutcomeUnknown
from pxrs.stores.api import LogStore
from pxrs.types import Append, Appended, LogPartition

# One commit: long enough to be worth its sync, short enough not to hold up the next one.
_MOST_BYTES = 8 * 2**20
_MOST_BATCHES = 500


class _Waiting(NamedTuple):
    append: Append
    answer: asyncio.Future[Appended]


class Appends:
    """Appends batches that clients encoded themselves. Used by one event loop.

    A batch is tried once: a client that sent it under a producer id may send it again, and the log
    recognises the repeat. While one commit runs, other batches wait and share the next one.
    """

    def __init__(self, log: LogStore, threads: Threads, most_waiting: int) -> None:
        self._log = log
        self._threads = threads
        self._most_waiting = most_waiting
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    async def append(self, append: Append) -> Appended:
        """Append one batch durably; raises the log's error if it refuses the batch."""
        size = len(append.batch.data)
        if self._bytes and self._bytes + size > self._most_waiting:
            raise BufferFull(
                f"{self._bytes} bytes wait to be appended; the limit is {self._most_waiting}"
            )
        self._bytes += size
        waiting = _Waiting(append, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._commit_all())
        return await waiting.answer

    async def _commit_all(self) -> None:
        try:
            while self._waiting:
                await self._commit(self._next_round())
        finally:
            self._task = None

    def _next_round(self) -> list[_Waiting]:
        """The batches of one commit; a log remembers only `WINDOW` batches of a producer."""
        taken: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        counts: Counter[LogPartition] = Counter()
        size = 0
        for waiting in self._waiting:
            where = waiting.append.where
            counts[where] += 1
            fits = not taken or size + len(waiting.append.batch.data) <= _MOST_BYTES
            if fits and len(taken) < _MOST_BATCHES and counts[where] <= WINDOW:
                taken.append(waiting)
                size += len(waiting.append.batch.data)
            else:
                # Later batches of its partition must not overtake it.
                counts[where] = WINDOW
                left.append(waiting)
        self._waiting = left
        return taken

    async def _commit(self, taken: list[_Waiting]) -> None:
        appends = [waiting.append for waiting in taken]
        results: Sequence[Appended | Exception]
        try:
            results = await self._threads.call(partial(self._log.append, appends))
            if len(results) != len(taken):
                raise OutcomeUnknown(f"{len(results)} answers to {len(taken)} batches")
        except Exception as error:  # noqa: BLE001 - each request gets it
            results = [error] * len(taken)
        for waiting, result in zip(taken, results, strict=True):
            self._bytes -= len(waiting.append.batch.data)
            if waiting.answer.done():
                continue  # its client has gone
            if isinstance(result, Exception):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)
