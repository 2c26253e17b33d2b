"""Watches: the server announces every batch it has stored, by its headers alone.

JetStream republishes each stored batch's headers on a subject of its own. They are hints: they
wake readers, which then look at the stream. A hint is lost when the connection breaks, and perhaps
right after subscribing in a cluster; so the stream is also polled slowly.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pxrs.errors import Closed, PxrsError
from pxrs.stores.jetstream.entries import SEQUENCE
from pxrs.stores.jetstream.streams import Streams
from pxrs.stores.jetstream.topics import Topics
from pxrs.stores.wakeups import LocalWatch, Wakeups
from pxrs.types import LogPartition

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_POLL = 1.0
# In a cluster the other servers learn of a new subscription a moment later.
_FIRST_LOOK = 0.1


class ChangeListener:
    """All watches of one log."""

    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, None]], None],
        streams: Streams,
        topics: Topics,
    ) -> None:
        # Runs a coroutine in the loop's thread; raises `Closed` if there is none.
        self._run = run
        self._streams = streams
        self._topics = topics
        self._wakeups: Wakeups[LogPartition] = Wakeups(threading.RLock())
        self._heard: Counter[LogPartition] = Counter()
        # For each watched topic, the last sequence for which its watches were woken.
        self._told: dict[str, int] = {}
        self._new = asyncio.Event()
        self._poll: asyncio.Task[None] | None = None
        streams.wire.on_reconnect = self.ring_all

    def watch(self, where: frozenset[LogPartition]) -> LogWatch:
        """An armed watch. Any thread may call it."""
        watch = self._wakeups.watch(where.__contains__)
        try:
            self._run(self._listen(where))
        except BaseException:
            watch.close()
            raise
        return LogWatch(watch, partial(self._release, where))

    def _release(self, where: frozenset[LogPartition]) -> None:
        """Forget a watch on these, which was closed. Any thread may call it."""
        with suppress(Closed):
            self._run(self._ignore(where))

    def ring_all(self) -> None:
        """Wake all watches, because a hint may have been missed."""
        self._wakeups.ring(list(self._heard))

    def close(self) -> None:
        self._wakeups.close()

    async def _listen(self, where: frozenset[LogPartition]) -> None:
        fresh = False
        for each in where:
            self._heard[each] += 1
            if self._heard[each] == 1:
                fresh = True
                self._told.pop(each.topic_id, None)
                await self._streams.wire.listen(
                    self._topics.hints(each), partial(self._on_hint, each)
                )
        if fresh:
            await self._streams.wire.settle()
            self._new.set()
        if self._poll is None and where:
            self._poll = asyncio.create_task(self._look_now_and_then())

    async def _ignore(self, where: frozenset[LogPartition]) -> None:
        for each in where:
            self._heard[each] -= 1
            if not self._heard[each]:
                del self._heard[each]
                await self._streams.wire.ignore(self._topics.hints(each))

    def _on_hint(self, where: LogPartition, message: Msg) -> None:
        """Wake the watches. Offsets in the headers are not used: any program can send them."""
        headers = message.headers or {}
        topic = self._topics.known(where.topic_id)
        seq = headers.get(SEQUENCE, "")
        # A topic that was made again has the same hint subject, but other batches.
        if (
            topic is not None
            and seq.isascii()
            and seq.isdecimal()
            and headers.get("Nats-Subject") == topic.parts[where.partition].batches
        ):
            self._told[where.topic_id] = max(int(seq), self._told.get(where.topic_id, 0))
        self._wakeups.ring((where,))

    async def _look_now_and_then(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_POLL):
                    await self._new.wait()
            except TimeoutError:
                pass
            else:
                self._new.clear()
                await asyncio.sleep(_FIRST_LOOK)
            for topic_id in {each.topic_id for each in self._heard}:
                await self._look(topic_id)

    async def _look(self, topic_id: str) -> None:
        try:
            info = await self._streams.info(self._topics.stream(topic_id))
        except PxrsError:
            return
        last = -1 if info is None or info.state is None else info.state.last_seq
        if last != self._told.get(topic_id):
            self._told[topic_id] = last
            self._wakeups.ring([each for each in self._heard if each.topic_id == topic_id])


class LogWatch:
    """See `pxrs.stores.api.Watch`."""

    def __init__(self, watch: LocalWatch, release: Callable[[], None]) -> None:
        self._watch = watch
        self._release: Callable[[], None] | None = release

    def wait(self, timeout: float | None = None) -> bool:
        return self._watch.wait(timeout)

    def on_wake(self, call: Callable[[], None]) -> None:
        self._watch.on_wake(call)

    def wake(self) -> None:
        self._watch.wake()

    def close(self) -> None:
        self._watch.close()
        release, self._release = self._release, None
        if release is not None:
            release()
