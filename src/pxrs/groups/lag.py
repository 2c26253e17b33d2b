"""Computes the lag of a group, in messages and in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from pxrs.clock import Clock
from pxrs.core.records import Claim
from pxrs.decoding import Decoder, cut
from pxrs.errors import DamagedBatch, OffsetOutOfRange, TopicNotFound
from pxrs.groups.info import GroupPartition
from pxrs.stores.api import LogStore
from pxrs.topics import Topics
from pxrs.types import Bounds, Fence, LogPartition, Topic

_NO_CLAIM = Claim()


class LagMeter:
    """Compares claims with what the log holds."""

    def __init__(self, log: LogStore, topics: Topics, clock: Clock) -> None:
        self._log = log
        self._topics = topics
        self._clock = clock
        self._decoder = Decoder()

    def partitions(
        self,
        topics: Sequence[Topic],
        claims: Mapping[LogPartition, Claim],
        living: AbstractSet[str],
        *,
        lag_seconds: bool,
    ) -> tuple[GroupPartition, ...]:
        """Every partition of the topics. A claim counts as owned while its owner is `living`."""
        found = []
        for topic in topics:
            try:
                bounds = self._topics.bounds(topic)
            except TopicNotFound:
                continue  # deleted since it was listed
            for number, held in sorted(bounds.items()):
                claim = claims.get(LogPartition(topic.id, number), _NO_CLAIM)
                found.append(
                    GroupPartition(
                        topic=topic.name,
                        partition=number,
                        owner=claim.name if claim.owner in living else None,
                        epoch=claim.epoch,
                        checkpoint=claim.checkpoint,
                        start=held.start,
                        end=held.end,
                        lag=_behind(claim, held),
                        lag_seconds=self._age(topic, number, claim, held) if lag_seconds else None,
                        metadata=claim.metadata,
                    )
                )
        return tuple(found)

    def _age(self, topic: Topic, number: int, claim: Claim, held: Bounds) -> float | None:
        """Seconds since the first message not handled was sent."""
        offset = _first(claim, held)
        if offset >= held.end:
            return 0.0
        where, fence = LogPartition(topic.id, number), Fence(topic.name, number, claim.epoch)
        try:
            batch = self._log.fetch(where, offset, 1).batches[0]
            message = cut(self._decoder.decode(batch, fence), offset)[0]
        except (DamagedBatch, OffsetOutOfRange, TopicNotFound):
            return None
        return max(0.0, (self._clock.wall_ms() - message.timestamp) / 1000)


def _first(claim: Claim, held: Bounds) -> int:
    """The first offset not handled that is still there."""
    return held.start if claim.checkpoint is None else max(held.start, claim.checkpoint)


def _behind(claim: Claim, held: Bounds) -> int:
    first = _first(claim, held)
    done = sum(max(0, min(end, held.end) - max(start, first)) for start, end in claim.done)
    return max(0, held.end - first - done)
