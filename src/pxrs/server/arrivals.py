"""Wakes fetches that wait at the end of a partition, with one watch and one thread per topic.

A fetch that found nothing registers here, looks once more, and then sleeps: an append between its
two looks wakes it. The thread of a topic asks the log for the ends of all its partitions when the
watch wakes it, and wakes the fetches whose partition has grown.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from pxrs.errors import PxrsError
from pxrs.server.limits import MOST_WATCHED_TOPICS, check_room
from pxrs.stores.api import LogStore
from pxrs.types import Bounds, LogPartition, Topic

# A topic that no fetch waits for keeps its watch this long: the next fetch may come soon.
_IDLE = 5.0
# How long a watch that failed pauses; the fetches that waited with it have gone to the store.
_PAUSE = 1.0
_LOG = logging.getLogger("pxrs.serve")


class Arrival:
    """One fetch that waits for messages at or after an offset."""

    def __init__(self, offset: int, seconds: float) -> None:
        self.offset = offset
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + seconds
        self._woken = loop.create_future()

    def wake(self) -> None:
        """End the wait. On the event loop."""
        if not self._woken.done():
            self._woken.set_result(None)

    async def wait(self) -> None:
        """Return when there may be messages, or when its time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.deadline):
                await self._woken


class Arrivals:
    """All fetches of a node that wait for messages. Used by one event loop."""

    def __init__(self, log: LogStore) -> None:
        self._log = log
        self._topics: dict[str, _TopicWatch] = {}
        self._closed = False

    @asynccontextmanager
    async def expect(
        self, topic: Topic, partition: int, offset: int, seconds: float
    ) -> AsyncIterator[Arrival]:
        """Register a fetch for `seconds`; an append that commits inside the block wakes it.

        If the store arms no watch in that time, the fetch only waits.
        """
        arrival = Arrival(offset, seconds)
        if self._closed:
            arrival.wake()
            yield arrival
            return
        watch = self._topics.get(topic.id)
        if watch is None:
            check_room("topics that are waited for", len(self._topics), MOST_WATCHED_TOPICS)
            watch = self._topics[topic.id] = _TopicWatch(self._log, topic, self._end_idle)
        watch.waiting[partition].add(arrival)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(arrival.deadline):
                    await asyncio.shield(watch.armed)
            yield arrival
        finally:
            watch.waiting[partition].discard(arrival)

    @property
    def waiting(self) -> int:
        """How many fetches wait."""
        return sum(
            len(arrivals) for watch in self._topics.values() for arrivals in watch.waiting.values()
        )

    def close(self) -> None:
        """Wake every fetch that waits or comes to wait."""
        self._closed = True
        for watch in self._topics.values():
            watch.close()
        self._topics.clear()

    def _end_idle(self, watch: _TopicWatch) -> bool:
        """Ends a watch that no fetch waits for; returns whether it did."""
        if any(watch.waiting.values()):
            return False
        self._topics.pop(watch.topic_id, None)
        return True


class _TopicWatch:
    """Watches all partitions of one topic, in a thread of its own."""

    def __init__(
        self, log: LogStore, topic: Topic, end_idle: Callable[[_TopicWatch], bool]
    ) -> None:
        self.topic_id = topic.id
        self.waiting: defaultdict[int, set[Arrival]] = defaultdict(set)
        self._loop = asyncio.get_running_loop()
        self.armed: asyncio.Future[None] = self._loop.create_future()
        self._log = log
        self._places = [LogPartition(topic.id, number) for number in range(topic.partitions)]
        self._end_idle = end_idle
        self._closed = threading.Event()
        self._wake_up: Callable[[], None] = self._closed.set
        self._is_rearmed = False
        threading.Thread(target=self._run, name="pxrs-arrivals", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._wake_up()
        self._wake_all()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except Exception as error:  # noqa: BLE001 - a thread that dies in silence is worse
                # Fetches would go on registering with a watch that nothing wakes any more.
                if not isinstance(error, PxrsError):
                    _LOG.exception("a watch on topic %s failed", self.topic_id)
                # The fetches that wait ask the store themselves, and report its error.
                self._on_loop(self._wake_all)
                self._closed.wait(_PAUSE)
                if self._ask_loop(self._end_idle):
                    return

    def _follow(self) -> None:
        watch = self._log.watch(*self._places)
        try:
            self._wake_up = watch.wake
            if self._is_rearmed:
                # Fetches that came while no watch was armed took the former one for armed.
                self._on_loop(self._wake_grown, self._log.bounds(self.topic_id))
            self._is_rearmed = True
            self._on_loop(self._note_armed)
            while not self._closed.is_set():
                if watch.wait(_IDLE):
                    self._on_loop(self._wake_grown, self._log.bounds(self.topic_id))
                elif self._ask_loop(self._end_idle):
                    return
        finally:
            self._wake_up = self._closed.set
            watch.close()

    # On the event loop

    def _note_armed(self) -> None:
        if not self.armed.done():
            self.armed.set_result(None)

    def _wake_grown(self, bounds: Mapping[int, Bounds]) -> None:
        for partition, arrivals in self.waiting.items():
            held = bounds.get(partition)
            for arrival in arrivals:
                # The fetch itself reports a partition that is not there any more.
                if held is None or arrival.offset < held.end:
                    arrival.wake()

    def _wake_all(self) -> None:
        self._note_armed()
        for arrivals in self.waiting.values():
            for arrival in arrivals:
                arrival.wake()

    # From the thread

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: no fetch waits any more
            self._loop.call_soon_threadsafe(call, *args)

    def _ask_loop(self, question: Callable[[_TopicWatch], bool]) -> bool:
        answered = threading.Event()

        def answer() -> None:
            if question(self):
                self._closed.set()
            answered.set()

        self._on_loop(answer)
        return answered.wait(_IDLE) and self._closed.is_set()
