"""What a virtual topic keeps of its source for partitions that are behind others: not all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.core.routing import hasher
from pxrs.sources import Row, virtual
from pxrs.sources.api import SourceRead
from pxrs.sources.virtual import VirtualLog
from pxrs.types import Bounds, LogPartition, Topic
from support.lines_source import Lines

PARTITIONS = 4
ROWS = 2000


class Counted(Lines):
    """Its rows have keys of all partitions, in turn; it counts what is read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        partition = hasher("xxhash", PARTITIONS)
        keys: dict[int, bytes] = {}
        number = 0
        while len(keys) < PARTITIONS:
            key = b"%d" % number
            keys.setdefault(partition(key) % PARTITIONS, key)
            number += 1
        self._rows = [Row(n, 0, keys[n % PARTITIONS], b"x" * size) for n in range(ROWS)]
        self.rows_read = 0
        self.times_asked = 0

    def bounds(self, stream: int) -> Bounds:
        self.times_asked += 1
        return super().bounds(stream)

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        found = super().read(stream, offset, limit, until)
        self.rows_read += len(found.rows)
        return found


def new_log(source: Counted) -> VirtualLog:
    topic = Topic(name="t", id="t", partitions=PARTITIONS, partitioner="xxhash", created_ms=0)
    return VirtualLog(topic, source)


def kept_bytes(log: VirtualLog) -> int:
    rows = [row for chunk in log._chunks.values() for found in chunk.rows.values() for row in found]
    return sum(len(row[2] or b"") + len(row[3] or b"") for row in rows)


def read_all(log: VirtualLog, partition: int, offset: int = 0) -> Iterator[list[int]]:
    """The offsets of a partition's rows, fetch by fetch."""
    while batches := log.fetch(LogPartition("t", partition), offset, 2**20).batches:
        [batch] = batches
        yield [row[0] for row in batch.rows]  # type: ignore[attr-defined]
        offset = batch.next


@pytest.fixture(params=["bytes", "chunks"])
def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A source of which only a small part is kept, by one of the two bounds."""
    monkeypatch.setattr(virtual, "_ROWS", 20)
    if request.param == "bytes":
        monkeypatch.setattr(virtual, "_KEPT_BYTES", 50_000)
        return Counted(1000)
    monkeypatch.setattr(virtual, "_MOST_CHUNKS", 3)
    return Counted(1000)


def test_what_is_kept_is_bounded(limited: Counted) -> None:
    """Whether one partition reads alone, or others are behind it all the time."""
    log = new_log(limited)
    most = 0
    slow = read_all(log, 1)
    for number, _ in enumerate(read_all(log, 0)):
        if number % 10 == 0:
            next(slow)
        most = max(most, kept_bytes(log))
        # A chunk has 20 rows of a kilobyte.
        assert most <= 75_000
        assert len(log._chunks) <= 4
        assert log._kept == sum(chunk.size for chunk in log._chunks.values())
    assert most > 0


def test_partitions_that_keep_up_share_one_scan(limited: Counted) -> None:
    log = new_log(limited)
    readers = [read_all(log, partition) for partition in range(PARTITIONS)]
    for _ in range(ROWS // 20):
        for reader in readers:
            next(reader)
    assert limited.rows_read == ROWS


def test_a_chunk_goes_when_all_that_are_read_have_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stopped asking are not waited for, nor those that other processes read."""
    monkeypatch.setattr(virtual, "_ROWS", 20)
    monkeypatch.setattr(virtual, "_MOST_CHUNKS", 3)
    source = Counted(10)
    log = new_log(source)
    readers = [read_all(log, partition) for partition in range(PARTITIONS - 1)]
    for number in range(ROWS // 20 - 1):
        if number == 30:
            readers.pop()
        for reader in readers:
            next(reader)
        if number in range(10, 30) or number > 40:
            assert log._chunks == {}
            assert log._kept == 0
    assert source.rows_read == ROWS - 20


def test_rows_that_do_not_fit_into_one_fetch_are_not_read_again(limited: Counted) -> None:
    """A chunk stays until all rows of a partition were taken."""
    log = new_log(limited)
    offsets = [0] * PARTITIONS
    while min(offsets) < ROWS:
        for partition, offset in enumerate(offsets):
            if offset == min(offsets):
                [batch] = log.fetch(LogPartition("t", partition), offset, 1500).batches
                offsets[partition] = batch.next
    assert limited.rows_read == ROWS


def test_a_slow_one_stalls_nobody_and_misses_nothing(limited: Counted) -> None:
    """Its rows have fallen out of what is kept, and are read again for it."""
    log = new_log(limited)
    slow = read_all(log, 3)
    found = next(slow)
    for partition in range(3):
        fast = [offset for offsets in read_all(log, partition) for offset in offsets]
        assert fast == list(range(partition, ROWS, PARTITIONS))
    before = limited.rows_read
    for offsets in slow:
        found += offsets
        assert kept_bytes(log) <= 75_000
    assert found == list(range(3, ROWS, PARTITIONS))
    assert limited.rows_read - before <= ROWS


@pytest.mark.parametrize(("every", "times"), [(3600.0, 2), (0.0, ROWS // 20 + 1)])
def test_rows_below_a_known_end_are_read_without_asking_for_another(
    limited: Counted, monkeypatch: pytest.MonkeyPatch, every: float, times: int
) -> None:
    """At the end, or some time later, the source is asked again."""
    monkeypatch.setattr(virtual, "_ASK_EVERY", every)
    log = new_log(limited)
    assert sum(map(len, read_all(log, 0))) == ROWS // PARTITIONS
    assert limited.times_asked == times
