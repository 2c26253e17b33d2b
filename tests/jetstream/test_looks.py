"""A look at many partitions costs what has changed, not what there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pxrs.stores.jetstream import topics
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.jetstream.streams import Stored, Streams
from pxrs.testing.conformance.tools import append, batch
from pxrs.types import Bounds, LogPartition
from support.jetstream import opened

pytestmark = pytest.mark.engine("nats")

MANY = 100


@pytest.fixture
def log(url: str) -> Iterator[JetStreamLog]:
    log = opened(url)
    log.create("t-1", MANY)
    yield log
    log.drop("t-1")
    log.close()


class Counting:
    """Counts the requests of a handle."""

    def __init__(self, log: JetStreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self._log = log
        request = log._wire.request

        async def counted(*arguments: Any, **options: Any) -> Any:
            self.asked += 1
            return await request(*arguments, **options)

        monkeypatch.setattr(log._wire, "request", counted)

    def bounds(self) -> tuple[dict[int, Bounds], int]:
        """The bounds, and how many requests it took."""
        before = self.asked
        return self._log.bounds("t-1"), self.asked - before


def test_partitions_ask_for_the_newest_batch_together(
    log: JetStreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, or by a new connection: is it still there? It may be large."""
    append(log, LogPartition("t-1", 0), batch(b"a"))
    monkeypatch.setattr(topics, "_FRESH", 0.0)
    looked_for: list[int] = []
    at = Streams.at

    async def counted(streams: Streams, name: str, seq: int) -> Stored | None:
        looked_for.append(seq)
        return await at(streams, name, seq)

    monkeypatch.setattr(Streams, "at", counted)
    assert len(log.bounds("t-1")) == MANY
    assert len(looked_for) == 1


def test_a_look_at_what_has_not_changed_is_one_request(
    log: JetStreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(log, monkeypatch)
    nothing = dict.fromkeys(range(MANY), Bounds(0, 0))
    assert counting.bounds()[0] == nothing
    assert counting.bounds() == (nothing, 1)


def test_a_look_asks_the_partitions_that_have_changed(
    log: JetStreamLog, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(log, monkeypatch)
    expected, _ = counting.bounds()
    other = opened(url)
    for number in (3, 70, 3):
        append(other, LogPartition("t-1", number), batch(b"a", b"b"))
    expected |= {3: Bounds(0, 4), 70: Bounds(0, 2)}
    found, asked = counting.bounds()
    assert found == expected
    assert asked < MANY / 4
    other.trim(LogPartition("t-1", 3), 2)
    append(other, LogPartition("t-1", 3), batch(b"c"))
    other.trim(LogPartition("t-1", 70), 2)
    expected |= {3: Bounds(2, 5), 70: Bounds(2, 2)}
    found, asked = counting.bounds()
    assert found == expected
    assert asked < MANY / 4
    for number in range(MANY):
        append(other, LogPartition("t-1", number), batch(b"d"))
    found, _ = counting.bounds()
    assert found == {number: Bounds(held.start, held.end + 1) for number, held in expected.items()}
    other.close()


def test_a_look_at_a_topic_that_was_made_again(log: JetStreamLog, url: str) -> None:
    append(log, LogPartition("t-1", 5), batch(b"a"))
    assert log.bounds("t-1")[5] == Bounds(0, 1)
    other = opened(url)
    other.drop("t-1")
    other.create("t-1", MANY)
    assert log.bounds("t-1") == dict.fromkeys(range(MANY), Bounds(0, 0))
    other.close()
