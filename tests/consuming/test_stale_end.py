"""A log whose bounds are a moment old: nothing that stays is decided by its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.errors import OffsetOutOfRange
from pxrs.server.groups.service import GroupService
from pxrs.stores.api import LogStore, Stores
from pxrs.testing.forwarding import Forwarding
from pxrs.types import Bounds, TopicPartition
from support.child import PATIENCE

HERE = TopicPartition("t", 0)
OLD, END = 5, 10
LATE = 10**12


class StaleLog(Forwarding, seam=LogStore):
    """A `LogStore` whose bounds were true some messages ago; it fetches what there is now."""

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        found: dict[int, Bounds] = self._inner.bounds(topic_id)
        return {number: Bounds(start, min(end, OLD)) for number, (start, end) in found.items()}


class StaleStores(Forwarding, seam=Stores):
    def __init__(self, inner: Stores) -> None:
        super().__init__(inner)
        self.log = StaleLog(inner.log)


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://stale-end") as now:
        now.topics.create("t", partitions=1)
        with now.producer() as producer:
            for number in range(END):
                producer.send("t", b"x", timestamp=number + 1).result()
        with now.consumer("t", "g", auto_commit=False) as consumer:
            seen = 0
            while seen < END:
                seen += len(consumer.poll(timeout=PATIENCE))
            consumer.commit()
        yield pxrs.Pxrs(StaleStores(now.stores))


def checkpoint(px: pxrs.Pxrs) -> int | None:
    return px.groups.describe("g").partitions[0].checkpoint


def test_a_reset(px: pxrs.Pxrs) -> None:
    """Neither to the end, nor to a time after it, does it go back behind what was handled."""
    px.groups.reset("g", "t", to="latest")
    assert checkpoint(px) == END
    px.groups.reset("g", "t", timestamp_ms=LATE)
    assert checkpoint(px) == END
    px.groups.reset("g", "t", to=OLD + 2)
    assert checkpoint(px) == OLD + 2
    with pytest.raises(OffsetOutOfRange) as told:
        px.groups.reset("g", "t", to=END + 1)
    assert (told.value.topic, told.value.end) == ("t", END)


def test_a_seek(px: pxrs.Pxrs) -> None:
    with px.consumer("t", "g", auto_commit=False, debounce=0.0) as consumer:
        while not consumer.assignment:
            consumer.poll(timeout=0.01)
        consumer.seek("t", 0, OLD + 2)
        assert checkpoint(px) == OLD + 2
        consumer.seek_to_time(LATE)
        assert checkpoint(px) == END
        with pytest.raises(OffsetOutOfRange) as told:
            consumer.seek("t", 0, END + 1)
        assert told.value.end == END


def test_a_start_that_is_given(px: pxrs.Pxrs) -> None:
    with px.consumer("t", "new", start={"t": OLD + 2}, debounce=0.0) as consumer:
        assert consumer.poll(timeout=PATIENCE)[0].offset == OLD + 3
    assert next(px.reader("t").follow(start=OLD + 2, timeout=PATIENCE)).offset == OLD + 2
    with pytest.raises(OffsetOutOfRange):
        px.reader("t").follow(start=END + 1)


def test_a_commit_of_a_remote_member(px: pxrs.Pxrs) -> None:
    class Asked:
        _blocking = px

    service = GroupService.__new__(GroupService)
    service._px = Asked  # type: ignore[assignment]
    service.check_offsets({HERE: OLD + 2})
    service.check_offsets({HERE: END})
    with pytest.raises(OffsetOutOfRange) as told:
        service.check_offsets({HERE: END + 1})
    assert told.value.end == END
