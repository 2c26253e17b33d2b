"""The log as other rooms see it: blocking calls, run by an event loop in a separate thread.

The NATS client is for asyncio only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import NatsSettings
from pxrs.errors import Closed, OutcomeUnknown, PxrsError
from pxrs.forks import Origin
from pxrs.stores.findings import Finding
from pxrs.stores.jetstream.appending import Appending
from pxrs.stores.jetstream.ends import Ends
from pxrs.stores.jetstream.looks import Looks
from pxrs.stores.jetstream.reading import Reading
from pxrs.stores.jetstream.streams import Streams
from pxrs.stores.jetstream.topics import Part, Topics
from pxrs.stores.jetstream.turns import Turns
from pxrs.stores.jetstream.watches import ChangeListener, LogWatch
from pxrs.stores.jetstream.wire import Wire
from pxrs.types import Append, Appended, Bounds, Fetched, LogPartition

T = TypeVar("T")

_CANCEL_AGAIN = 0.2


class ClosedMeanwhile(Closed):
    """The loop was closed under a coroutine: some of its work may be done."""


class LoopThread:
    """Runs coroutines for any thread. After a fork only the parent can use it."""

    def __init__(self, name: str) -> None:
        self._origin = Origin("log")
        self._lock = threading.Lock()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine; returns its result. An interrupt of the caller cancels it."""
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
        """Cancel running coroutines and end the thread."""
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
            # Again, where a task took the first one for the end of a time limit of its own.
            while left := asyncio.all_tasks(self.loop):
                for task in left:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_AGAIN))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class JetStreamLog:
    """A `LogStore` on NATS JetStream. Thread-safe; can't be used after a fork."""

    def __init__(self, settings: NatsSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._identity: Callable[[], str] | None = None
        self._thread = LoopThread("pxrs-nats")
        try:
            self._thread.run(self._open(settings, clock))
        except BaseException:
            self._thread.close()
            raise

    async def _open(self, settings: NatsSettings, clock: Clock) -> None:
        self._settings = settings
        self._wire = Wire(settings)
        await self._wire.open()
        streams = Streams(self._wire, settings)
        self._topics = Topics(streams, settings, clock)
        ends = Ends(streams, self._topics)
        self._reading = Reading(streams, ends)
        self._looks = Looks(streams, self._reading)
        self._turns = Turns(self._wire, self._topics.hint_prefix, settings.timeout, clock)
        self._appending = Appending(streams, self._topics, ends, self._turns, clock)
        self._listener = ChangeListener(self._run, streams, self._topics)

    def create(self, topic_id: str, partitions: int) -> None:
        self._run(self._topics.create(topic_id, partitions, self._identity_or_none()))

    def _identity_or_none(self) -> str | None:
        # It may call another engine, so it is not called in the loop's thread.
        return None if self._identity is None else self._identity()

    def owned_by(self, identity: Callable[[], str]) -> None:
        self._identity = identity

    def owner(self) -> str:
        return self._identity_or_none() or ""

    def held(self) -> dict[str, str]:
        return self._run(self._topics.held())

    def drop(self, topic_id: str) -> None:
        self._run(self._topics.drop(topic_id, self._identity_or_none()))
        self._run(self._forget(topic_id))

    async def _forget(self, topic_id: str) -> None:
        self._looks.forget(topic_id)
        await self._turns.forget(topic_id)

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        try:
            return self._run(self._appending.append(appends))
        except ClosedMeanwhile as error:
            raise OutcomeUnknown("the log was closed while batches were on their way") from error

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        return self._in_part(where, lambda part: self._reading.fetch(part, offset, max_bytes))

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        return self._run(self._topics.using(topic_id, self._looks.bounds))

    def size(self, where: LogPartition) -> int:
        return self._in_part(where, self._reading.size)

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        return self._in_part(where, lambda part: self._reading.batch_at(part, timestamp))

    def trim(self, where: LogPartition, before: int) -> int:
        return self._in_part(where, lambda part: self._reading.trim(part, before))

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        return self._in_part(
            where,
            lambda part: self._reading.expire(part, before_timestamp, max_bytes),
        )

    def watch(self, *where: LogPartition) -> LogWatch:
        return self._listener.watch(frozenset(where))

    def findings(self) -> list[Finding]:
        """Examine the servers for `pxrs doctor`."""
        from pxrs.stores.jetstream.doctor import examine

        return self._run(examine(self._wire, self._settings))

    def close(self) -> None:
        if not self._thread.usable:
            return
        self._listener.close()
        self._thread.run(self._turns.close())
        self._thread.run(self._wire.close())
        self._thread.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def _in_part(self, where: LogPartition, use: Callable[[Part], Awaitable[T]]) -> T:
        return self._run(self._topics.using_part(where, use))
