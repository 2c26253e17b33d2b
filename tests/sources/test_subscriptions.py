"""A stream that only offers `subscribe(checkpoint)`, consumed by groups."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pxrs
from pxrs.errors import ConfigError, InvalidRequest, SourceChanged, StoreUnavailable
from pxrs.sources import Row, Subscription
from pxrs.testing.conformance import NewRow
from support.source_lab import Feed

pytestmark = pytest.mark.engine("memory")


def filled(count: int, *, blocks: bool = True) -> Feed:
    feed = Feed(blocks=blocks)
    feed.append([NewRow(f"key-{number % 5}", str(number)) for number in range(count)])
    return feed


def poll(consumer: pxrs.Consumer, count: int) -> list[pxrs.Message]:
    found: list[pxrs.Message] = []
    while len(found) < count:
        more = consumer.poll(max_records=count - len(found), timeout=10)
        assert more
        found += more
    return found


def threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name == "pxrs-subscription"}


@pytest.mark.parametrize("tells_its_end", [True, False])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_group_consumes_it_and_goes_on(blocks: bool, tells_its_end: bool) -> None:
    feed = filled(200, blocks=blocks)
    source = Subscription(feed.subscribe, feed.end if tells_its_end else None)
    with pxrs.connect("memory://") as px:
        px.attach("queue", source, partitions=4)
        with px.consumer("queue", group="billing") as consumer:
            messages = poll(consumer, 150)
            consumer.commit()
        feed.append([NewRow("key-1", "new")])
        with px.consumer("queue", group="billing") as consumer:
            messages += poll(consumer, 51)
        assert sorted(int(message.value) for message in messages if message.value != b"new") == (
            list(range(200))
        )
        for key in range(5):
            own = [m.value for m in messages if m.key == f"key-{key}".encode()]
            numbers = [int(value) for value in own if value != b"new"]
            assert numbers == list(range(key, 200, 5))
    assert threads() == set()


def test_a_process_that_begins_anew_goes_on_at_its_checkpoint() -> None:
    """Its end is not known before somebody has looked, and the checkpoint is not above it."""
    feed = filled(100)
    for count in (60, 40):
        with pxrs.connect("memory://subscriptions") as px:
            px.attach("queue", Subscription(feed.subscribe), partitions=2)
            with px.consumer("queue", group="billing") as consumer:
                assert len(poll(consumer, count)) == count
                consumer.commit()
    assert threads() == set()


def test_the_buffer_is_bounded() -> None:
    taken = 0

    def subscribe(checkpoint: int) -> Iterator[tuple[int, bytes, bytes]]:
        nonlocal taken
        for offset in range(checkpoint, 100_000):
            taken += 1
            yield offset, b"key", b"x" * 1000

    source = Subscription(subscribe, lambda: 100_000).open("")
    place = 0
    while place < 20_000:
        rows, place = source.read(0, place, 500)[:2]
        assert rows
        # What was read stays until it is known to have arrived.
        assert taken - place < 6000
    source.close()


def test_reading_back_begins_another_subscription() -> None:
    feed = filled(100)
    source = Subscription(feed.subscribe, feed.end).open("")
    first: list[Row] = []
    while len(first) < 100:
        first += source.read(0, first[-1].offset + 1 if first else 0, 100).rows
    assert source.read(0, first[-1].offset + 1, 100).rows == []
    assert feed.subscriptions == 1
    for place in (50, 0):
        [row] = source.read(0, first[place].offset, 1).rows
        assert row == first[place]
    # Each from a place that was not in a buffer any more.
    assert feed.subscriptions == 3
    source.close()
    assert threads() == set()


def test_an_iterator_that_blocks_is_interrupted() -> None:
    class Call:
        def __init__(self) -> None:
            self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def __iter__(self) -> Call:
            return self

        def __next__(self) -> tuple[int, str, str]:
            item = self._items.get()
            if item is None:
                raise RuntimeError("cancelled")
            found: tuple[int, str, str] = item
            return found

        def cancel(self) -> None:
            self._items.put(None)

    source = Subscription(lambda checkpoint: Call(), lambda: 0).open("")
    assert source.read(0, 0, 10).rows == []
    source.close()
    assert threads() == set()


def test_trouble_is_told_and_the_next_read_begins_anew() -> None:
    calls = 0

    def subscribe(checkpoint: int) -> Iterator[tuple[int, str, str]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("gone")
        yield from [(offset, "key", "value") for offset in range(checkpoint, checkpoint + 2)]
        if calls == 1:
            raise OSError("gone")

    source = Subscription(subscribe, lambda: 4).open("")
    found: list[Row] = []
    failures = 0
    while len(found) < 4:
        try:
            found += source.read(0, len(found), 10).rows
        except StoreUnavailable:
            failures += 1
    assert [row.offset for row in found] == [0, 1, 2, 3]
    assert failures == 2
    source.close()


@pytest.mark.parametrize(
    ("items", "error", "text"),
    [
        ([(5, "a", "b"), (4, "a", "b")], SourceChanged, "rising offsets, got 4 after 5"),
        ([(5, "a", "b"), (5, "a", "b")], SourceChanged, "rising"),
        (["text"], InvalidRequest, "must yield"),
        ([(1, "a")], InvalidRequest, "must yield"),
        ([("x", "a", "b")], InvalidRequest, "an offset must be"),
        ([(-1, "a", "b")], InvalidRequest, "an offset must be"),
    ],
)
def test_bad_items_are_refused(items: list[Any], error: type[Exception], text: str) -> None:
    source = Subscription(lambda checkpoint: iter(items), lambda: 10).open("")
    watch = source.watch()
    place = 0
    with pytest.raises(error, match=text):
        for _ in range(100):
            place = source.read(0, place, 1).next
            watch.wait(0.1)
    watch.close()
    source.close()


def test_bad_arguments_are_refused() -> None:
    for arguments in ({"subscribe": 1}, {"end": 5}, {"start": -1}, {"start": "0"}, {"quiet": 0}):
        with pytest.raises(InvalidRequest):
            Subscription(**{"subscribe": iter, **arguments})  # type: ignore[arg-type]


def test_every_process_has_to_bring_it(tmp_path: Any) -> None:
    feed = filled(3)
    url = f"sqlite:///{tmp_path}/store.db"
    with pxrs.connect(url) as px, pxrs.connect(url) as other:
        px.attach("queue", Subscription(feed.subscribe, feed.end), partitions=2)
        with pytest.raises(ConfigError, match=r"call px\.attach"):
            other.reader("queue").bounds(0)
        other.attach("queue", Subscription(feed.subscribe, feed.end), partitions=2)
        assert other.reader("queue").bounds(0).end == feed.end()
