"""The log as other rooms see it: plain calls, carried out in the loop's thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import NatsSettings
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.stores.findings import Finding
from pxrs.stores.jetstream.appending import Appending
from pxrs.stores.jetstream.loop import ClosedMeanwhile, LoopThread
from pxrs.stores.jetstream.reading import Reading
from pxrs.stores.jetstream.streams import Streams
from pxrs.stores.jetstream.topics import Part, Topic, Topics
from pxrs.stores.jetstream.watches import Bells, BellWatch
from pxrs.stores.jetstream.wire import Wire
from pxrs.types import Append, Appended, Bounds, Fetched, LogPartition

T = TypeVar("T")


class JetStreamLog:
    """A `LogStore` on NATS JetStream. Thread-safe; can't be used after a fork."""

    def __init__(self, settings: NatsSettings, clock: Clock = SYSTEM_CLOCK) -> None:
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
        self._reading = Reading(streams, self._topics)
        self._appending = Appending(streams, self._topics, self._reading, clock)
        self._bells = Bells(self._thread, streams, self._topics)

    def create(self, topic_id: str, partitions: int) -> None:
        self._run(self._topics.create(topic_id, partitions))

    def drop(self, topic_id: str) -> None:
        self._run(self._topics.drop(topic_id))

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        try:
            return self._run(self._appending.append(appends))
        except ClosedMeanwhile as error:
            raise OutcomeUnknown("the log was closed while batches were on their way") from error

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        return self._in_part(
            where, lambda topic, part: self._reading.fetch(topic, part, offset, max_bytes)
        )

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        return self._run(self._topics.using(topic_id, self._reading.bounds))

    def size(self, where: LogPartition) -> int:
        return self._in_part(where, self._reading.size)

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        return self._in_part(
            where, lambda topic, part: self._reading.batch_at(topic, part, timestamp)
        )

    def trim(self, where: LogPartition, before: int) -> int:
        return self._in_part(where, lambda topic, part: self._reading.trim(topic, part, before))

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        return self._in_part(
            where,
            lambda topic, part: self._reading.expire(topic, part, before_timestamp, max_bytes),
        )

    def watch(self, *where: LogPartition) -> BellWatch:
        return self._bells.watch(frozenset(where))

    def findings(self) -> list[Finding]:
        """What an examination of the engine finds."""
        from pxrs.stores.jetstream.doctor import examine

        return self._run(examine(self._wire, self._settings))

    def close(self) -> None:
        if not self._thread.usable:
            return
        self._bells.close()
        self._thread.run(self._wire.close())
        self._thread.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def _in_part(self, where: LogPartition, use: Callable[[Topic, Part], Awaitable[T]]) -> T:
        return self._run(
            self._topics.using(
                where.topic_id, lambda topic: use(topic, topic.part(where.partition))
            )
        )
