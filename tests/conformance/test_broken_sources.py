"""Sources with one rule broken each: the suite finds every one of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pxrs.errors import Closed, OffsetOutOfRange
from pxrs.sources import SourceRead
from pxrs.sources.rows import first_within
from pxrs.stores.api import Watch
from pxrs.stores.wakeups import Wakeups
from pxrs.testing.conformance import NewRow, SourceWriter, run_suite, source_checks
from pxrs.types import Bounds, Row

pytestmark = pytest.mark.engine("memory")


class Stream:
    """Rows that have their offsets before they can be seen. Offsets have gaps: odd ones only."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wakeups: Wakeups[str] = Wakeups(self.lock)
        self.top = -1
        self.start = 0
        self.rows: dict[int, Row] = {}
        # Offsets that were given to writers who have not ended.
        self.held: set[int] = set()

    def take(self, rows: Sequence[NewRow]) -> list[Row]:
        with self.lock:
            taken = []
            for row in rows:
                self.top += 2
                key, value = row.key.encode(), row.value.encode()
                taken.append(Row(self.top, row.timestamp or self.top, key, value))
                self.held.add(self.top)
            return taken

    def end(self, taken: Sequence[Row], *, seen: bool) -> None:
        with self.lock:
            self.held -= {row.offset for row in taken}
            if seen:
                self.rows |= {row.offset: row for row in taken}
            self.wakeups.ring([""])

    @property
    def final(self) -> int:
        return min(self.held, default=self.top + 1)


class Writer:
    """See `SourceWriter`, `HoldsRows` and `TrimsRows`."""

    def __init__(self, stream: Stream, taken: Sequence[Row] = ()) -> None:
        self._stream = stream
        self._taken = taken

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        self.hold(rows).commit()

    def hold(self, rows: Sequence[NewRow]) -> Writer:
        return Writer(self._stream, self._stream.take(rows))

    def commit(self) -> None:
        self._stream.end(self._taken, seen=True)

    def abandon(self) -> None:
        self._stream.end(self._taken, seen=False)

    def trim(self) -> None:
        with self._stream.lock:
            self._stream.start = sorted(self._stream.rows)[3]
            for offset in [each for each in self._stream.rows if each < self._stream.start]:
                del self._stream.rows[offset]


class MemorySource:
    """A source that keeps to all rules."""

    streams = 1

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.closed = False

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        with self.stream.lock:
            if self.closed:
                raise Closed("closed")
            if offset < self.stream.start:
                raise OffsetOutOfRange("memory", 0, offset, *self.bounds(0))
            last = self.last(until)
            found = [row for row in self.sorted() if offset <= row.offset < last]
            rows = found[: self.fitting(found[:limit])] if found else []
            cut = len(rows) < len(found)
            return SourceRead(rows, rows[-1].offset + 1 if cut else max(last, offset))

    def last(self, until: int | None) -> int:
        return self.stream.final if until is None else min(self.stream.final, until)

    def fitting(self, rows: list[Row]) -> int:
        return first_within(rows)

    def sorted(self) -> list[Row]:
        return [self.stream.rows[offset] for offset in sorted(self.stream.rows)]

    def bounds(self, stream: int) -> Bounds:
        with self.stream.lock:
            return Bounds(self.stream.start, self.stream.top + 1)

    def final(self, stream: int) -> int | None:
        with self.stream.lock:
            return self.stream.final

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        with self.stream.lock:
            return next((row.offset for row in self.sorted() if row.timestamp >= timestamp), None)

    def watch(self) -> Watch:
        return self.stream.wakeups.watch(lambda _: True)

    def close(self) -> None:
        self.closed = True


class SkipsLateRows(MemorySource):
    """Reads up to the highest offset that it sees."""

    def last(self, until: int | None) -> int:
        end = max(self.stream.rows, default=-1) + 1
        return end if until is None else min(end, until)


class WaitsForTheAbandoned(MemorySource):
    """Waits for ever for an offset that is missing."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        stream.end = self.end  # type: ignore[method-assign]

    def end(self, taken: Sequence[Row], *, seen: bool) -> None:
        if seen:
            Stream.end(self.stream, taken, seen=True)


class NextIsTheLastRow(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        rows, following = super().read(stream, offset, limit, until)[:2]
        return SourceRead(rows, rows[-1].offset if rows else following)


class NextPassesTheLimit(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        rows, _ = super().read(stream, offset, limit, until)[:2]
        return SourceRead(rows, max(self.last(until), offset))


class NextIsTheEnd(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        rows, following = super().read(stream, offset, limit, until)[:2]
        return SourceRead(rows, following if rows else max(self.bounds(0).end, offset))


class NextStopsAtGaps(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        rows, _ = super().read(stream, offset, limit, until)[:2]
        return SourceRead(rows, rows[-1].offset + 1 if rows else offset)


class Unordered(MemorySource):
    def sorted(self) -> list[Row]:
        return sorted(super().sorted(), key=lambda row: row.value or b"")


class IgnoresUntil(MemorySource):
    def last(self, until: int | None) -> int:
        return self.stream.final


class ReadsEverythingAtOnce(MemorySource):
    def fitting(self, rows: list[Row]) -> int:
        return len(rows)


class IgnoresTheLimit(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        return super().read(stream, offset, limit + 1, until)


class ReadsBehindTheOffset(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        return super().read(stream, offset if limit > 100 else offset + 1, limit, until)


class EndsAtTheLastRow(MemorySource):
    def bounds(self, stream: int) -> Bounds:
        return Bounds(self.stream.start, max(self.stream.rows, default=0))


class FinalIsTheEnd(MemorySource):
    def final(self, stream: int) -> int | None:
        return self.stream.top + 100


class KeepsItsStart(MemorySource):
    def bounds(self, stream: int) -> Bounds:
        return Bounds(0, self.stream.top + 1)


class ReadsFromWhereItBegins(MemorySource):
    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        return super().read(stream, max(offset, self.stream.start), limit, until)


class FindsTheLastOfATime(MemorySource):
    def offset_at(self, stream: int, timestamp: int) -> int | None:
        found = super().offset_at(stream, timestamp)
        return None if found is None else found + 2


class OffsetsOfItsOwn(MemorySource):
    """Counts from where it was opened."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.base = len(stream.rows)

    def sorted(self) -> list[Row]:
        return [row._replace(offset=row.offset + 2 * self.base) for row in super().sorted()]

    def last(self, until: int | None) -> int:
        return super().last(until) + 2 * self.base


class ArmedAtTheFirstWait(MemorySource):
    def watch(self) -> Watch:
        return _ArmedLate(super().watch)


class _ArmedLate:
    def __init__(self, watch: object) -> None:
        self._make = watch
        self._watch: Watch | None = None

    def wait(self, timeout: float | None = None) -> bool:
        self._watch = self._watch or self._make()  # type: ignore[operator]
        return self._watch.wait(timeout)

    def wake(self) -> None:
        self._watch = self._watch or self._make()  # type: ignore[operator]
        self._watch.wake()

    def close(self) -> None:
        self._watch = self._watch or self._make()  # type: ignore[operator]
        self._watch.close()


class ReadsOnWhenClosed(MemorySource):
    def close(self) -> None:
        pass


BROKEN: list[tuple[type[MemorySource], str]] = [
    (SkipsLateRows, "check_held_rows_are_not_skipped"),
    (WaitsForTheAbandoned, "check_abandoned_rows_hold_up_nobody"),
    (NextIsTheLastRow, "check_rows_come_as_they_were_written"),
    (NextPassesTheLimit, "check_next_is_where_to_go_on"),
    (NextIsTheEnd, "check_held_rows_are_not_skipped"),
    (NextStopsAtGaps, "check_until_is_not_passed"),
    (Unordered, "check_rows_come_as_they_were_written"),
    (IgnoresUntil, "check_until_is_not_passed"),
    (ReadsEverythingAtOnce, "check_large_rows_come_in_small_reads"),
    (IgnoresTheLimit, "check_next_is_where_to_go_on"),
    (ReadsBehindTheOffset, "check_reading_from_any_offset"),
    (EndsAtTheLastRow, "check_bounds"),
    (FinalIsTheEnd, "check_final_is_below_the_end"),
    (KeepsItsStart, "check_removed_rows"),
    (ReadsFromWhereItBegins, "check_removed_rows"),
    (FindsTheLastOfATime, "check_offset_of_a_time"),
    (OffsetsOfItsOwn, "check_handles_agree"),
    (ArmedAtTheFirstWait, "check_a_new_row_wakes"),
    (ReadsOnWhenClosed, "check_close"),
]


class MemorySourceLab:
    def __init__(self, kind: type[MemorySource] = MemorySource, patience: float = 10.0) -> None:
        self.patience = patience
        self._kind = kind
        self._stream = Stream()

    def open(self) -> MemorySource:
        return self._kind(self._stream)

    def writer(self) -> SourceWriter:
        return Writer(self._stream)

    def close(self) -> None:
        self._stream.wakeups.close()


def test_one_that_keeps_to_the_rules_passes() -> None:
    assert run_suite(source_checks(), MemorySourceLab) == []


@pytest.mark.parametrize(
    ("broken", "check"), BROKEN, ids=lambda each: getattr(each, "__name__", each)
)
def test_is_caught(broken: type[MemorySource], check: str) -> None:
    rules = [rule for rule in source_checks() if rule.__name__ == check]
    failures = run_suite(rules, lambda: MemorySourceLab(broken, patience=0.3))
    assert [failure.check for failure in failures] == [check]
