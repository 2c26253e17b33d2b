"""Looks at a topic's partitions: where each begins and ends, asking only for what has changed.

Consumers look once a second, because hints may be lost. With many partitions that must not be a
request for each of them. So the stream is asked first: as long as it describes itself as it did
before the last look, nothing has changed since. If it got a few new messages, their subjects show
which partitions have changed. That misses none: the last message that was appended to a partition
always stays, and so does its last floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pxrs.stores.jetstream.failures import Stale
from pxrs.stores.jetstream.reading import Reading
from pxrs.stores.jetstream.streams import State, Streams
from pxrs.stores.jetstream.topics import Part, Topic
from pxrs.types import Bounds

# Up to this many partitions are asked directly: asking the stream first would only cost time.
_FEW = 16
# Up to this many new messages are read, one after the other, to find out their partitions.
_NEW = 16


class _Looked(NamedTuple):
    """The result of a look, and how the stream described itself before it."""

    state: State
    bounds: dict[int, Bounds]


class Looks:
    """Remembers the last look at each topic."""

    def __init__(self, streams: Streams, reading: Reading) -> None:
        self._streams = streams
        self._reading = reading
        self._last: dict[str, tuple[Topic, _Looked]] = {}

    async def bounds(self, topic: Topic) -> dict[int, Bounds]:
        """Return the offsets of each partition; raises `Stale` if it is another topic by now."""
        if len(topic.parts) <= _FEW:
            return await self._reading.bounds(topic.parts)
        info = await self._streams.info(topic.parts[0].stream)
        if info is None or info.config is None or info.state is None:
            raise Stale(topic.id)
        if info.config.metadata.get("pxrs.root") != topic.root:
            raise Stale(topic.id)
        same, before = self._last.get(topic.id, (None, None))
        if same is topic and before is not None:
            if info.state == before.state:
                return dict(before.bounds)
            changed = await self._changed(topic, before.state, info.state)
            found = before.bounds | await self._reading.bounds(changed)
        else:
            found = await self._reading.bounds(topic.parts)
        self._last[topic.id] = topic, _Looked(info.state, found)
        return dict(found)

    def forget(self, topic_id: str) -> None:
        """Forget a topic that was dropped."""
        self._last.pop(topic_id, None)

    async def _changed(self, topic: Topic, before: State, now: State) -> Iterable[Part]:
        """The partitions whose beginning or end may have changed."""
        if not 0 < now.last_seq - before.last_seq <= _NEW or now.first_seq < before.first_seq:
            return topic.parts
        numbers: set[int] = set()
        seq = before.last_seq
        while seq < now.last_seq:
            stored = await self._streams.next(topic.parts[0].stream, f"{topic.root}.>", seq + 1)
            if stored is None:
                break
            number = stored.subject.removeprefix(f"{topic.root}.").split(".")[1:2]
            if not number or not number[0].isdecimal() or int(number[0]) >= len(topic.parts):
                return topic.parts
            numbers.add(int(number[0]))
            seq = stored.seq
        return [topic.parts[number] for number in sorted(numbers)]
