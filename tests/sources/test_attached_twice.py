"""Sources that are attached again, while they are read: nobody's is closed under them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import pxrs
from pxrs.errors import PxrsError, TopicExists, TopicNotFound
from pxrs.sources.api import SourceRead
from support.lines_source import Lines

pytestmark = pytest.mark.engine("memory")


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as opened:
        yield opened


def values(px: pxrs.Pxrs, topic: str = "events") -> list[bytes | None]:
    return [message.value for message in px.reader(topic).read(0, 0)]


def test_the_same_object_is_attached_twice(px: pxrs.Pxrs) -> None:
    lines = Lines(b"one")
    px.attach("events", lines, partitions=1)
    px.attach("events", lines, partitions=1)
    assert values(px) == [b"one"]


def test_two_topics_lie_over_one_object(px: pxrs.Pxrs) -> None:
    """Each is let go of by itself; with the last one the object is closed."""
    lines = Lines(b"one")
    px.attach("events", lines, partitions=1)
    px.attach("others", lines, partitions=1)
    px.sources.detach("others")
    assert values(px) == [b"one"]
    px.attach("others", lines, partitions=1)
    px.attach("events", Lines(b"two"), partitions=1)
    assert [values(px), values(px, "others")] == [[b"two"], [b"one"]]
    px.sources.detach("others")
    assert lines.is_closed


@pytest.mark.parametrize(
    ("name", "partitions", "error"), [("real", 1, TopicExists), ("events", 2, TopicExists)]
)
def test_a_refused_attach_closes_no_object_of_the_caller(
    px: pxrs.Pxrs, name: str, partitions: int, error: type[PxrsError]
) -> None:
    lines = Lines(b"one")
    px.topics.create("real", partitions=1)
    px.attach("events", lines, partitions=1)
    with pytest.raises(error):
        px.attach(name, lines, partitions=partitions)
    assert values(px) == [b"one"]


@pytest.mark.parametrize("end", ["replaced", "detached"])
def test_a_read_at_hand_finishes_first(px: pxrs.Pxrs, end: str) -> None:
    lines = Slow(b"one")
    px.attach("events", lines, partitions=1)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(values(px))
        except PxrsError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert lines.begun.wait(30)
    if end == "replaced":
        following = Slow(b"one", b"two")
        following.go_on.set()
        px.attach("events", following, partitions=1)
    else:
        px.sources.detach("events")
    assert not lines.is_closed
    lines.go_on.set()
    thread.join(30)
    # What it still lacks it reads from the new one.
    assert found == [[b"one", b"two"] if end == "replaced" else [b"one"]]
    assert lines.is_closed
    if end == "replaced":
        assert values(px) == [b"one", b"two"]
    else:
        with pytest.raises(TopicNotFound):
            values(px)


class Slow(Lines):
    """Waits in its first read until it is told to go on."""

    def __init__(self, *values: bytes) -> None:
        super().__init__(*values)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        self.begun.set()
        assert self.go_on.wait(30)
        return super().read(stream, offset, limit, until)


@pytest.mark.parametrize("others", [0, 1])
def test_who_waits_is_woken_by_the_new_source(px: pxrs.Pxrs, others: int) -> None:
    """Alone, or on several topics at once; a watch on a closed source never rings."""
    px.attach("events", Lines(), partitions=1)
    topics = ["events"]
    if others:
        px.topics.create("real", partitions=1)
        topics.append("real")
    where = [pxrs.types.LogPartition(px.topics.find(name).id, 0) for name in topics]
    with closing(px._stores.log.watch(*where)) as watch:
        lines = Lines()
        px.attach("events", lines, partitions=1)
        assert watch.wait(30)
        # It may be woken more often than something comes.
        while watch.wait(0):
            pass
        assert lines.watched.wait(30)
        lines.append(b"one")
        assert watch.wait(30)


def test_a_watch_that_was_closed_opens_none_on_the_new_source(px: pxrs.Pxrs) -> None:
    px.attach("events", Lines(), partitions=1)
    where = pxrs.types.LogPartition(px.topics.find("events").id, 0)
    watch = px._stores.log.watch(where)
    lines = Lines()
    watch.close()
    px.attach("events", lines, partitions=1)
    assert watch.wait(30)
    assert not lines.watched.is_set()
