"""A stream that only offers `subscribe(checkpoint)`, as a source.

A source is read from any offset, by reads that end; a subscription begins somewhere and goes on by
itself. So a thread takes what the iterator yields into a bounded buffer, from which reads are
answered. A read from elsewhere, such as by a partition that fell behind, gets another subscription
from there; the least recently used one ends then.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import (
    Closed,
    InvalidRequest,
    OffsetOutOfRange,
    PxrsError,
    SourceChanged,
    StoreUnavailable,
    quoted,
)
from pxrs.forks import Origin
from pxrs.sources.api import SourceRead
from pxrs.sources.rows import READ_BYTES, as_bytes, first_within
from pxrs.stores.api import Watch
from pxrs.stores.wakeups import Wakeups
from pxrs.types import Bounds, Row

# (offset, key, value), a Row, or None: no row for now.
Item = tuple[int, Any, Any] | Row | None

_BUFFER_ROWS = 10_000
# Subscriptions at a time: where most partitions read, and where one that fell behind does.
_MOST_CURSORS = 2
# Seconds until an iterator that has ended is asked for again: at first, and at most.
_SOON, _QUIET = 0.005, 0.25
# Seconds that a read waits for rows that are known to be there.
_PATIENCE = 5.0
# Seconds that closing waits for an iterator that can't be interrupted.
_CLOSING = 5.0


@dataclasses.dataclass(frozen=True)
class Subscription:
    """A stream that offers nothing but `subscribe(checkpoint)`.

    This returns an iterator of (offset, key, value), or of `pxrs.sources.Row`, from the offset
    `checkpoint` on, by rising offset; keys and values are bytes, text or None. It may be called in
    several threads at a time. Its iterator may block until more comes, or end, and is asked for
    again then. One that blocks should yield None now and then, or have a `cancel()` or `close()`
    that may be called from another thread: otherwise its thread ends only after its next row.

    `end()` returns the offset that the next row will have at least. Without it each process reads
    the stream a second time, to know its end: where the iterator ends, yields None, or has had
    nothing for `quiet` seconds. `start` is the first offset that can be read.

    Functions can't be recorded: each process attaches the source.
    """

    subscribe: Callable[[int], Iterable[Item]]
    end: Callable[[], int] | None = None
    start: int = 0
    quiet: float = 1.0

    partitioner = "xxhash"

    def __post_init__(self) -> None:
        for name in ("subscribe", "end"):
            value = getattr(self, name)
            if not callable(value) and not (name == "end" and value is None):
                raise InvalidRequest(f"{name} must be a function, got {quoted(value)}")
        if type(self.start) is not int or self.start < 0:
            raise InvalidRequest(f"start must be an offset, got {quoted(self.start)}")
        if not (isinstance(self.quiet, int | float) and 0 < self.quiet <= 60):
            raise InvalidRequest(
                f"quiet must be seconds above 0, up to 60, got {quoted(self.quiet)}"
            )

    def settings(self) -> dict[str, Any]:
        """Only that a program gave it: functions can't be recorded."""
        return {"kind": "given", "type": type(self).__name__}

    def open(self, store_url: str) -> OpenSubscription:
        """Return the source; its first read begins a subscription."""
        return OpenSubscription(self)


class OpenSubscription:
    """See `Source`."""

    streams = 1

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._wakeups: Wakeups[None] = Wakeups(self._lock)
        # The most recently used one is last.
        self._cursors: list[_Cursor] = []
        self._retired: list[_Cursor] = []
        # Follows the end of the stream if there is no `end` function.
        self._tail: _Cursor | None = None
        self._seen = subscription.start
        self._closed = False

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        self._refuse()
        if offset < self._subscription.start:
            raise OffsetOutOfRange("a subscription", 0, offset, *self.bounds(stream))
        found = None
        while found is None:
            found = self._read(self._cursor(offset), offset, limit, until)
        return found

    def _read(
        self, cursor: _Cursor, offset: int, limit: int, until: int | None
    ) -> SourceRead | None:
        """Reads what is there; waits for rows below the end, which are on their way.

        An iterator that begins and ends after the end was read has no others: the last rows were
        deleted. None: the cursor was needed elsewhere, or another thread has read on with it, and
        what was below is not in its buffer any more.
        """
        with self._lock:
            if cursor.start > offset:
                return None
            found = self._take(cursor, offset, limit, until)
        if found.next > offset or (until is not None and until <= offset):
            return found
        end = self._end()
        laps = cursor.laps
        deadline = SYSTEM_CLOCK.monotonic() + _PATIENCE
        with self._lock:
            while not cursor.ended and cursor.start <= offset:
                found = self._take(cursor, offset, limit, until)
                if found.next > offset or offset >= end or cursor.laps > laps + 1:
                    return found
                left = deadline - SYSTEM_CLOCK.monotonic()
                if left <= 0 or not cursor.changed.wait(left):
                    return found
        self._refuse()
        return None

    def _take(self, cursor: _Cursor, offset: int, limit: int, until: int | None) -> SourceRead:
        """Reads the buffer. Rows from before a failure come first; then the failure, once."""
        found = cursor.read(offset, limit, until)
        if found.next == offset and cursor.error is not None:
            self._retire(cursor)
            raise _translated(cursor.error)
        return found

    def _cursor(self, offset: int) -> _Cursor:
        """The subscription that has this offset in its buffer, or will come to it next."""
        with self._lock:
            self._refuse()
            for cursor in self._cursors:
                if cursor.start <= offset <= cursor.next:
                    self._cursors.remove(cursor)
                    self._cursors.append(cursor)
                    return cursor
            while len(self._cursors) >= _MOST_CURSORS:
                self._retire(self._cursors[0])
            self._cursors.append(self._begin(offset, keep=True))
            return self._cursors[-1]

    def _retire(self, cursor: _Cursor) -> None:
        """Drop a subscription; its thread ends as soon as its iterator lets it."""
        self._cursors = [each for each in self._cursors if each is not cursor]
        cursor.end()
        self._retired = [each for each in self._retired if each.is_alive()]
        self._retired.append(cursor)

    def _begin(self, offset: int, *, keep: bool) -> _Cursor:
        return _Cursor(self._subscription.subscribe, offset, self._lock, self._came, keep=keep)

    def _came(self, following: int) -> None:
        """Note progress of a subscription, up to `following`; with the lock held."""
        self._seen = max(self._seen, following)
        self._wakeups.ring([None])

    def bounds(self, stream: int) -> Bounds:
        self._refuse()
        return Bounds(self._subscription.start, self._end())

    def final(self, stream: int) -> int | None:
        self._refuse()
        return self._end()

    def _end(self) -> int:
        if self._subscription.end is None:
            self._follow_the_end()
            return self._seen
        told = self._subscription.end()
        if type(told) is not int:
            raise InvalidRequest(f"end() must return an offset, got {quoted(told)}")
        with self._lock:
            self._seen = max(self._seen, told)
            return self._seen

    def _follow_the_end(self) -> None:
        """Wait until the end is known; from then on it stays known."""
        quiet = self._subscription.quiet
        with self._lock:
            self._refuse()
            if self._tail is not None and self._tail.error is not None:
                failed, self._tail = self._tail, None
                raise _translated(failed.error)
            if self._tail is None:
                self._tail = self._begin(self._seen, keep=False)
            tail = self._tail
            while not (tail.laps or tail.error or self._closed or tail.is_quiet(quiet)):
                tail.changed.wait(quiet)

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        raise InvalidRequest(
            "a subscription begins at an offset; offsets can't be looked up by time"
        )

    def watch(self) -> Watch:
        self._refuse()
        with self._lock:
            watch = self._wakeups.watch(lambda _: True)
            if self._tail is None and not any(cursor.is_drained for cursor in self._cursors):
                # No cursor waits for more, as there is something to read already.
                watch.wake()
            return watch

    def close(self) -> None:
        if self._origin.is_parent:
            return
        with self._lock:
            self._closed = True
            tails = [] if self._tail is None else [self._tail]
            for cursor in (*self._cursors, *tails):
                cursor.end()
            threads = [*self._retired, *self._cursors, *tails]
            self._retired, self._cursors, self._tail = [], [], None
            self._wakeups.ring([None])
        for cursor in threads:
            cursor.join(_CLOSING)

    def _refuse(self) -> None:
        self._origin.refuse_child()
        if self._closed:
            raise Closed("this subscription was closed")


class _Cursor:
    """One subscription, its thread and its buffer. Fields are read with the lock held."""

    def __init__(
        self,
        subscribe: Callable[[int], Iterable[Item]],
        offset: int,
        lock: threading.RLock,
        came: Callable[[int], None],
        *,
        keep: bool,
    ) -> None:
        # Rows from `start` on are in the buffer; `next` is above the last that came.
        self.start = self.next = offset
        self.error: Exception | None = None
        # How often it has come to the end.
        self.laps = 0
        self.changed = threading.Condition(lock)
        self._subscribe = subscribe
        self._came = came
        self._keep = keep
        self._rows: deque[Row] = deque()
        self._size = 0
        self._read_up_to = offset
        self._last = SYSTEM_CLOCK.monotonic()
        self.ended = False
        self._iterator: Iterator[Item] | None = None
        self._thread = threading.Thread(target=self._run, name="pxrs-subscription", daemon=True)
        self._thread.start()

    # The reader's side, with the lock held

    def read(self, offset: int, limit: int, until: int | None) -> SourceRead:
        """The buffered rows from `offset` on. Rows below are not read again."""
        self._drop(offset)
        found: list[Row] = []
        for row in self._rows:
            if len(found) == limit or (until is not None and row.offset >= until):
                break
            found.append(row)
        found = found[: first_within(found)]
        following = found[-1].offset + 1 if found else offset
        if until is not None and len(found) < len(self._rows):
            row = self._rows[len(found)]
            following = until if row.offset >= until else following
        self._read_up_to = max(self._read_up_to, following)
        return SourceRead(found, following)

    def _drop(self, offset: int) -> None:
        full = self._is_full
        while self._rows and self._rows[0].offset < offset:
            self._size -= _size(self._rows.popleft())
        self.start = max(self.start, offset)
        if full:
            self.changed.notify_all()

    @property
    def is_drained(self) -> bool:
        """Whether all rows that came were read, so that it waits for more."""
        return self._read_up_to >= self.next and not self._is_full and self.error is None

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing has come for `seconds`."""
        return SYSTEM_CLOCK.monotonic() - self._last >= seconds

    @property
    def _is_full(self) -> bool:
        return self._size >= READ_BYTES or len(self._rows) >= _BUFFER_ROWS

    def end(self) -> None:
        """Make the thread end."""
        self.ended = True
        self.changed.notify_all()
        # A generator that runs in another thread can't be closed.
        if self._iterator is not None and not inspect.isgenerator(self._iterator):
            _interrupt(self._iterator)

    # Without the lock

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # The thread

    def _run(self) -> None:
        pause = _SOON
        try:
            while not self.ended:
                came = self.next
                self._go_through(iter(self._subscribe(self.next)))
                pause = _SOON if self.next > came else min(2 * pause, _QUIET)
                with self.changed:
                    self._lap()
                    self.changed.wait_for(lambda: self.ended, pause)
        except Exception as error:  # noqa: BLE001 - reads raise it
            with self.changed:
                self.error = error
                self._came(self.next)
                self.changed.notify_all()

    def _go_through(self, iterator: Iterator[Item]) -> None:
        self._iterator = iterator
        try:
            for item in iterator:
                with self.changed:
                    if item is None:
                        self._lap()
                    else:
                        self._take(_row_of(item))
                    if self.ended:
                        return
        except Exception:
            # `end` has interrupted it.
            if not self.ended:
                raise
        finally:
            self._iterator = None
            if inspect.isgenerator(iterator):
                iterator.close()

    def _lap(self) -> None:
        self.laps += 1
        self.changed.notify_all()

    def _take(self, row: Row) -> None:
        if row.offset < self.start and self.next == self.start:
            # The stream begins a little earlier than asked.
            return
        if row.offset < self.next:
            raise SourceChanged(
                f"a subscription must have rising offsets, got {row.offset} after "
                f"{self.next - 1}: rows would be skipped or delivered twice"
            )
        self.changed.wait_for(lambda: self.ended or not self._is_full)
        self.next = row.offset + 1
        self._last = SYSTEM_CLOCK.monotonic()
        if self._keep:
            self._rows.append(row)
            self._size += _size(row)
        self._came(self.next)
        self.changed.notify_all()


def _interrupt(iterator: object) -> None:
    for name in ("cancel", "close"):
        method = getattr(iterator, name, None)
        if callable(method):
            with suppress(Exception):
                method()
            return


def _row_of(item: object) -> Row:
    if isinstance(item, Row):
        row = item
    elif isinstance(item, tuple | list) and len(item) == 3:
        row = Row(item[0], 0, item[1], item[2])
    else:
        raise InvalidRequest(
            f"a subscription must yield (offset, key, value), a Row or None, got {quoted(item)}"
        )
    if type(row.offset) is not int or not 0 <= row.offset < 2**63:
        raise InvalidRequest(f"an offset must be an integer from 0 on, got {quoted(row.offset)}")
    return row._replace(key=as_bytes(row.key), value=as_bytes(row.value))


def _size(row: Row) -> int:
    return len(row.key or b"") + len(row.value or b"")


def _translated(error: Exception | None) -> PxrsError:
    if isinstance(error, PxrsError):
        return error
    failed = StoreUnavailable(f"the subscription failed: {quoted(error)}")
    failed.__cause__ = error
    return failed
