"""The rules of a `Source`: rows by rising offset, each final when it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import Closed, InvalidRequest, OffsetOutOfRange
from pxrs.sources.api import Source, SourceRead
from pxrs.testing.conformance.lab import Violation
from pxrs.testing.conformance.tools import (
    close_must_wake,
    must_wake,
    raises,
    require,
    same,
    together,
)
from pxrs.types import Row

# The most that "a few megabytes" may be, and a number of rows that together have more.
_MOST_BYTES = 8 * 2**20
_LARGE, _LARGE_ROWS = 500_000, 40
_EVENING = 1_700_000_000_000
_PLENTY = 10_000


class NewRow(NamedTuple):
    """A row as a program would write it. The default timestamp is the time of writing."""

    key: str
    value: str
    timestamp: int | None = None


@runtime_checkable
class SourceWriter(Protocol):
    """A program that writes the rows that the source reads, and does not know of the source.

    Several may write at once. The lab closes them.
    """

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        """Write the rows in this order. They can be read when it returns."""
        ...


class HiddenRows(Protocol):
    """Rows that have their offsets and can't be seen yet."""

    def commit(self) -> None:
        """Make them visible."""
        ...

    def abandon(self) -> None:
        """Discard them: they never become visible."""
        ...


@runtime_checkable
class HoldsRows(Protocol):
    """A `SourceWriter` whose rows get offsets before they are visible: mostly to tables."""

    def hold(self, rows: Sequence[NewRow]) -> HiddenRows:
        """Write the rows but keep them invisible, while others write."""
        ...


@runtime_checkable
class TrimsRows(Protocol):
    """A `SourceWriter` that can remove the oldest rows."""

    def trim(self) -> None:
        """Remove some of the oldest rows, not all."""
        ...


class SourceLab(Protocol):
    """One empty stream, or several, made anew for every check."""

    @property
    def patience(self) -> float:
        """Seconds after which a check gives up waiting for something that must happen: 10, say."""
        ...

    def open(self) -> Source:
        """Another handle on the same stream, as another process would have; the lab closes it."""
        ...

    def writer(self) -> SourceWriter:
        """Another program that writes; the lab closes it."""
        ...

    def close(self) -> None:
        """Close handles and writers, and remove the data."""
        ...


SourceRule = Callable[[SourceLab], None]


# Helpers


def _rows(first: int, count: int) -> list[NewRow]:
    return [
        NewRow(f"key-{number % 3}", f"value-{number}") for number in range(first, first + count)
    ]


def _contents(rows: Sequence[Row]) -> list[tuple[bytes | None, bytes | None]]:
    return [(row[2], row[3]) for row in rows]


def _expected(rows: Sequence[NewRow]) -> list[tuple[bytes, bytes]]:
    return [(row.key.encode(), row.value.encode()) for row in rows]


def _offsets(rows: Sequence[Row]) -> list[int]:
    return [row[0] for row in rows]


def _read(
    source: Source, offset: int, limit: int = _PLENTY, until: int | None = None, stream: int = 0
) -> SourceRead:
    """One read, whose answer must be consistent by itself."""
    answer = source.read(stream, offset, limit, until)
    rows, following = answer[:2]
    where = f"read({stream}, {offset}, {limit}, {until})"
    require(len(rows) <= limit, f"{where} returned {len(rows)} rows")
    require(following >= offset, f"{where} goes back: `next` is {following}")
    places = [offset - 1, *_offsets(rows)]
    rising = all(one < two for one, two in pairwise(places))
    require(rising, f"{where}: the offsets do not rise from there: {places[1:]}")
    require(places[-1] < following, f"{where}: `next` is {following} and not above its last row")
    if until is not None and until > offset:
        require(following <= until, f"{where}: `next` is {following}")
    size = sum(len(row[2] or b"") + len(row[3] or b"") for row in rows)
    require(size <= _MOST_BYTES or len(rows) == 1, f"{where} returned {size} bytes")
    return answer


def _read_to(
    source: Source, offset: int, limit: int = _PLENTY, until: int | None = None, stream: int = 0
) -> tuple[list[Row], int]:
    """Rows from an offset on, read until nothing comes, and the offset where that is."""
    found: list[Row] = []
    while until is None or offset < until:
        final = source.final(stream)
        rows, following = _read(source, offset, limit, until, stream)[:2]
        if following == offset:
            require(final is None or final <= offset, f"a read at {offset} came to nothing")
            break
        end = source.bounds(stream).end
        require(following <= end, f"`next` is {following}, above the end, {end}")
        found += rows
        offset = following
    return found, offset


def _await(
    lab: SourceLab, source: Source, count: int, offset: int | None = None, stream: int = 0
) -> list[Row]:
    """`count` rows from an offset on, read as they come, woken by a watch."""
    offset = source.bounds(stream).start if offset is None else offset
    found: list[Row] = []
    deadline = SYSTEM_CLOCK.monotonic() + lab.patience
    watch = source.watch()
    try:
        while True:
            more, offset = _read_to(source, offset, stream=stream)
            found += more
            if len(found) >= count:
                same(len(found), count, "the number of rows")
                return found
            left = deadline - SYSTEM_CLOCK.monotonic()
            if left <= 0 or not watch.wait(left):
                raise Violation(f"{len(found)} of {count} rows came")
    finally:
        watch.close()


# Reading


def check_empty(lab: SourceLab) -> None:
    """An empty stream has nothing to read, and valid bounds."""
    source = lab.open()
    for stream in range(source.streams):
        start, end = source.bounds(stream)
        require(0 <= start <= end, f"the bounds are {start} to {end}")
        same(_read_to(source, start, stream=stream)[0], [], "what is in it")


def check_rows_come_as_they_were_written(lab: SourceLab) -> None:
    """Rows come in the order of their writing, with rising offsets, keys and values."""
    source, written = lab.open(), _rows(0, 25)
    lab.writer().append(written[:10])
    lab.writer().append(written[10:])
    found = _await(lab, source, 25)
    same(_contents(found), _expected(written), "the rows")
    require(all(isinstance(row[1], int) and row[1] >= 0 for row in found), "a time is no integer")


def check_next_is_where_to_go_on(lab: SourceLab) -> None:
    """With any limit, `next` leads over all rows once."""
    source = lab.open()
    lab.writer().append(_rows(0, 20))
    found = _await(lab, source, 20)
    for limit in (1, 2, 7, 20, _PLENTY):
        same(_read_to(source, found[0][0], limit)[0], found, f"rows by {limit}")


def check_reading_from_any_offset(lab: SourceLab) -> None:
    """A read begins with the first row at the offset or above, also if the offset is in a gap."""
    source = lab.open()
    lab.writer().append(_rows(0, 12))
    found = _await(lab, source, 12)
    for place in (11, 5, 0, 8, 7):
        offset = found[place][0]
        same(_read_to(source, offset, 5)[0], found[place:], f"rows from {offset}")
        same(_read_to(source, offset + 1, 5)[0], found[place + 1 :], f"rows from {offset + 1}")


def check_until_is_not_passed(lab: SourceLab) -> None:
    """Rows stop below `until`, and `next` reaches it when they are final."""
    source = lab.open()
    lab.writer().append(_rows(0, 12))
    found = _await(lab, source, 12)
    for until in (3, 11, 7):
        rows, reached = _read_to(source, found[0][0], 4, found[until][0])
        same(rows, found[:until], "rows below the offset of another")
        same(reached, found[until][0], "how far it is known that these are all")


def check_the_end_is_where_more_comes(lab: SourceLab) -> None:
    """A read at the end finds nothing, and later the rows that were written since."""
    source, writer = lab.open(), lab.writer()
    writer.append(_rows(0, 3))
    found = _await(lab, source, 3)
    rows, following = _read_to(source, found[-1][0] + 1)
    same(rows, [], "what is behind the last row")
    writer.append(_rows(3, 2))
    later = _await(lab, source, 2, following)
    same(_contents(later), _expected(_rows(3, 2)), "what came later")
    same(_await(lab, source, 5), found + later, "all of it")


def check_large_rows_come_in_small_reads(lab: SourceLab) -> None:
    """The rows of one read are a few megabytes together, however many there are."""
    source = lab.open()
    written = [NewRow("key", f"{number:06}" + "x" * _LARGE) for number in range(_LARGE_ROWS)]
    for first in range(0, _LARGE_ROWS, 10):
        lab.writer().append(written[first : first + 10])
    same(_contents(_await(lab, source, _LARGE_ROWS)), _expected(written), "the rows")
    same(len(_await(lab, lab.open(), _LARGE_ROWS)), _LARGE_ROWS, "the rows of another handle")


def check_streams_are_apart(lab: SourceLab) -> None:
    """Each stream has its own rows, where there are several."""
    source, writer = lab.open(), lab.writer()
    for stream in range(source.streams):
        writer.append(_rows(10 * stream, 3 + stream), stream)
    for stream in range(source.streams):
        found = _await(lab, source, 3 + stream, stream=stream)
        same(_contents(found), _expected(_rows(10 * stream, 3 + stream)), f"stream {stream}")
        require(source.bounds(stream).end > found[-1][0], "the end is not above the last row")


# Bounds


def check_bounds(lab: SourceLab) -> None:
    """All rows are within the bounds, and new ones are not below the end."""
    source, writer = lab.open(), lab.writer()
    writer.append(_rows(0, 4))
    found = _await(lab, source, 4)
    start, end = source.bounds(0)
    require(start <= found[0][0], f"the start {start} is above the first row, {found[0][0]}")
    require(end > found[-1][0], f"the end {end} is not above the last row, {found[-1][0]}")
    writer.append(_rows(4, 4))
    found = _await(lab, source, 8)
    require(found[4][0] >= end, f"a row came at {found[4][0]}, below the end, {end}")
    require(source.bounds(0).end > found[-1][0], "the end did not move")
    same(source.bounds(0).start, start, "the start, though nothing was removed")


def check_final_is_below_the_end(lab: SourceLab) -> None:
    """No row appears below `final`, which is not above the end and finally reaches it."""
    source, writer = lab.open(), lab.writer()
    writer.append(_rows(0, 4))
    found = _await(lab, source, 4)
    final = source.final(0)
    if final is not None:
        require(final <= source.bounds(0).end, "`final` is above the end")
        require(final > found[-1][0], f"`final` is {final}, with a row at {found[-1][0]} read")
    writer.append(_rows(4, 2))
    later = _await(lab, source, 6)[4:]
    require(final is None or later[0][0] >= final, "a row came below `final`")


def check_removed_rows(lab: SourceLab) -> None:
    """After old rows were removed the bounds begin later, and a read below them is refused."""
    source, writer = lab.open(), lab.writer()
    writer.append(_rows(0, 10))
    found = _await(lab, source, 10)
    if not isinstance(writer, TrimsRows):
        return
    writer.trim()
    for handle in (source, lab.open()):
        start = handle.bounds(0).start
        require(found[0][0] < start <= found[-1][0], f"the bounds still begin at {start}")
        left = [row for row in found if row[0] >= start]
        same(_await(lab, handle, len(left)), left, "the rows that are left")
        with raises(OffsetOutOfRange):
            handle.read(0, found[0][0], 5)


def check_offset_of_a_time(lab: SourceLab) -> None:
    """`offset_at` finds the first row of a time or later; `InvalidRequest` without times."""
    source = lab.open()
    times = [_EVENING + 1000 * number for number in (0, 1, 1, 4, 4, 7)]
    lab.writer().append([NewRow("key", str(time), time) for time in times])
    found = _await(lab, source, len(times))
    try:
        first = source.offset_at(0, 0)
    except InvalidRequest:
        return
    same(first, found[0][0], "the first row since 1970")
    stamps = [row[1] for row in found]
    same(stamps, sorted(stamps), "the times of the rows")
    for time in {*stamps, *(stamp - 1 for stamp in stamps)}:
        expected = next(row[0] for row in found if row[1] >= time)
        same(source.offset_at(0, time), expected, f"the first row of {time}")
    same(source.offset_at(0, stamps[-1] + 1), None, "the first row after the last")


# Wake-ups


def check_a_new_row_wakes(lab: SourceLab) -> None:
    """A watch is armed when it is returned, and again by every wait."""
    source, writer = lab.open(), lab.writer()
    offset = _read_to(source, source.bounds(0).start)[1]
    watch = source.watch()
    for number in range(3):
        writer.append(_rows(number, 1))
        must_wake(lab, watch, "a row that was written before the wait")
        offset = _await(lab, source, 1, offset)[0][0] + 1
    watch.close()


def check_a_sleeper_is_woken(lab: SourceLab) -> None:
    """A row that comes during a wait ends the wait of all watches."""
    source, other, writer = lab.open(), lab.open(), lab.writer()
    _read_to(source, source.bounds(0).start)
    _read_to(other, other.bounds(0).start)
    watches = [source.watch(), source.watch(), other.watch()]
    together(
        lab,
        *(lambda watch=watch: must_wake(lab, watch, "a row") for watch in watches),
        lambda: writer.append(_rows(0, 1)),
    )
    for watch in watches:
        watch.close()


def check_wake_ends_a_wait(lab: SourceLab) -> None:
    """`wake` ends the current wait, or the next one."""
    source = lab.open()
    _read_to(source, source.bounds(0).start)
    watch = source.watch()
    watch.wake()
    must_wake(lab, watch, "`wake`")
    watch.close()


def check_a_closed_watch_wakes(lab: SourceLab) -> None:
    """Closing a watch wakes the thread that waits with it, and no wait blocks from then on."""
    source = lab.open()
    _read_to(source, source.bounds(0).start)
    close_must_wake(lab, source.watch())


# Several at once


def check_handles_agree(lab: SourceLab) -> None:
    """All handles see the same rows at the same offsets, whenever they were opened."""
    early, writer = lab.open(), lab.writer()
    writer.append(_rows(0, 6))
    found = _await(lab, early, 6)
    late = lab.open()
    same(_await(lab, late, 6), found, "the rows of a later handle")
    writer.append(_rows(6, 6))
    same(_await(lab, late, 12), _await(lab, early, 12), "the rows of both")
    same(_await(lab, lab.open(), 12), _await(lab, early, 12), "the rows of a third")


def check_threads_share_a_handle(lab: SourceLab) -> None:
    """Threads that read at different places do not disturb each other."""
    source = lab.open()
    lab.writer().append(_rows(0, 60))
    found = _await(lab, source, 60)

    def read(place: int) -> None:
        for _ in range(5):
            rows = _await(lab, source, 60 - place, found[place][0])
            same(rows, found[place:], f"rows from {found[place][0]}")

    together(lab, *(lambda place=place: read(place) for place in (0, 20, 40)))


def check_rows_are_final_under_writers(lab: SourceLab) -> None:
    """No row appears below those that were read, though several programs write all the time."""
    source, writers, lots = lab.open(), [lab.writer() for _ in range(3)], 20
    ended = threading.Event()
    found: list[Row] = []
    place = source.bounds(0).start

    def write(number: int) -> None:
        for lot in range(lots):
            written = [NewRow(f"writer-{number}", f"{lot * 5 + each}") for each in range(5)]
            writers[number].append(written)

    def follow() -> None:
        nonlocal place
        watch = source.watch()
        while len(found) < len(writers) * lots * 5:
            more, place = _read_to(source, place, 7)
            found.extend(more)
            require(bool(more) or watch.wait(lab.patience), f"{len(found)} rows came")
        watch.close()
        ended.set()

    together(lab, follow, *(lambda number=number: write(number) for number in range(3)))
    same(found, _await(lab, lab.open(), len(found)), "what was read meanwhile, and what is there")
    for number in range(3):
        own = [row[3] for row in found if row[2] == f"writer-{number}".encode()]
        same(
            own, [str(each).encode() for each in range(lots * 5)], "the order of one writer's rows"
        )


def check_held_rows_are_not_skipped(lab: SourceLab) -> None:
    """A row that has its offset and is committed later is read, before all above it."""
    _hold(lab, lambda rows: rows.commit(), 9)


def check_abandoned_rows_hold_up_nobody(lab: SourceLab) -> None:
    """Offsets of abandoned rows become a gap once that is known, and block nothing."""
    _hold(lab, lambda rows: rows.abandon(), 7)


def _hold(lab: SourceLab, end: Callable[[HiddenRows], None], count: int) -> None:
    writer = lab.writer()
    if not isinstance(writer, HoldsRows):
        return
    source, other = lab.open(), lab.writer()
    other.append(_rows(0, 3))
    found = _await(lab, source, 3)
    hidden = writer.hold(_rows(3, 2))
    other.append(_rows(5, 4))
    early, place = _read_to(source, found[-1][0] + 1)
    late_handle = lab.open()
    also_early, also_place = _read_to(late_handle, found[-1][0] + 1)
    watch = source.watch()
    end(hidden)
    must_wake(lab, watch, "the end of a writer")
    watch.close()
    rest = _await(lab, source, count - 3 - len(early), place)
    also_rest = _await(lab, late_handle, count - 3 - len(also_early), also_place)
    there = _await(lab, lab.open(), count)
    same(found + early + rest, there, "what was read, and what is there")
    same(found + also_early + also_rest, there, "what another read, and what is there")


def check_close(lab: SourceLab) -> None:
    """A source may be closed twice; reads raise `Closed` then, and other handles go on."""
    source, other = lab.open(), lab.open()
    lab.writer().append(_rows(0, 2))
    _await(lab, source, 2)
    source.close()
    source.close()
    with raises(Closed):
        source.read(0, 0, 1)
    same(len(_await(lab, other, 2)), 2, "rows of another handle")
