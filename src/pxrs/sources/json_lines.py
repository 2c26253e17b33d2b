"""A file of JSON lines that programs append to and that is rotated, as a source.

An offset is the number of the file (see `rotation.py`) and a line's place in it, in one integer:
they rise over rotations, and are the same for all processes of a host.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.errors import (
    Closed,
    ConfigError,
    DamagedBatch,
    InvalidRequest,
    OffsetOutOfRange,
    PxrsError,
    SourceChanged,
    StoreBusy,
    StoreUnavailable,
    quoted,
)
from pxrs.forks import Origin
from pxrs.sources.api import SourceRead
from pxrs.sources.rows import READ_BYTES, named
from pxrs.sources.watching import PollingWatch
from pxrs.stores.api import Watch
from pxrs.types import Bounds, Row

if TYPE_CHECKING:
    from pxrs.sources.rotation import LogFile

Result = TypeVar("Result")

# Files of a terabyte, and eight million of them.
_PLACE_BITS = 40
_PLACES = (1 << _PLACE_BITS) - 1
_LONGEST_LINE = 64 * 2**20
_MOST_SECONDS = 24 * 3600.0
# Files that are kept open.
_MOST_OPEN = 4
_LEAST_READ = 2**16
# How often a look is repeated because a file was renamed meanwhile.
_LOOKS = 20
# Seconds between looks at the file: soon after something happened, and when it is quiet.
_SOON, _QUIET = 0.005, 0.25


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """An append-only file with one JSON object per line, which may be rotated by renaming it.

    `key` names the field whose rows stay in order; without it all lines are in one partition.
    `value` is one field, or several, which become an object; without it the whole line. `timestamp`
    is a field with a time (ISO 8601) or a number of seconds or milliseconds since 1970.

    Offsets are bytes: files are numbered in `index`, beside the log unless it is named. A last line
    without a newline waits for it. A line that is not a JSON object stops its readers with
    `DamagedBatch`, which names the offset behind it, or is left out with `on_bad="skip"`; empty
    lines always are. A file that is truncated in place (copytruncate) is refused: `SourceChanged`.

    A rotated file is read to its end, and then the next; it has ended once no process has it open
    for writing. Where the system does not show that (other owners, network disks), it has ended
    once nothing was written to it for `settle` seconds. Compressed files are not read: compress
    them one rotation later.
    """

    path: str
    key: str | None = None
    value: str | Sequence[str] | None = None
    timestamp: str | None = None
    on_bad: Literal["error", "skip"] = "error"
    settle: float | None = None
    index: str | None = None

    partitioner = "xxhash"

    def __post_init__(self) -> None:
        for name in ("path", "index"):
            place = getattr(self, name)
            if isinstance(place, os.PathLike):
                object.__setattr__(self, name, os.fspath(place))
            elif place is None and name == "index":
                continue
            elif not isinstance(place, str) or not place or "\0" in place:
                raise InvalidRequest(f"{name} must be the path of a file, got {quoted(place)}")
        for field in (self.key, self.timestamp, *self.values):
            if field is not None and (not isinstance(field, str) or not field):
                raise InvalidRequest(f"fields must be named by text, got {quoted(field)}")
        if self.on_bad not in ("error", "skip"):
            raise InvalidRequest(f"on_bad must be 'error' or 'skip', got {quoted(self.on_bad)}")
        if self.settle is not None and not (
            isinstance(self.settle, int | float) and 0 <= self.settle <= _MOST_SECONDS
        ):
            raise InvalidRequest(
                f"settle must be seconds from 0 to {_MOST_SECONDS:.0f}, got {quoted(self.settle)}"
            )

    @property
    def values(self) -> tuple[str, ...]:
        return named(self.value)

    def settings(self) -> dict[str, Any]:
        """The settings that are kept with the virtual topic."""
        kept: dict[str, Any] = {
            "kind": "json_lines",
            "path": os.path.abspath(self.path),
            "key": self.key,
            "value": list(self.value) if isinstance(self.value, list | tuple) else self.value,
            "timestamp": self.timestamp,
            "on_bad": self.on_bad,
            "settle": self.settle,
            "index": None if self.index is None else os.path.abspath(self.index),
        }
        return {name: value for name, value in kept.items() if value is not None}

    def open(self, store_url: str) -> OpenJsonLines:
        """Return the source, which opens the file later: it may not exist yet."""
        return OpenJsonLines(self)


class OpenJsonLines:
    """See `Source`. Threads use it in turn."""

    streams = 1

    def __init__(self, lines: JsonLines, clock: Clock = SYSTEM_CLOCK) -> None:
        # Imported here: it needs functions that only POSIX systems have.
        from pxrs.sources.rotation import RotatedFiles

        self.lines = lines
        path = os.path.abspath(lines.path)
        self._files = RotatedFiles(path, os.path.abspath(lines.index or f"{path}.pxrs-index"))
        self._clock = clock
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._row = _maker(lines)
        self._open: OrderedDict[int, int] = OrderedDict()
        # By number: the highest place that a file was seen to have.
        self._reached: dict[int, int] = {}
        self._mean = 256.0
        self._is_waiting = False
        self._closed = False

    def check(self) -> None:
        """Refuse files that can't be read in order."""
        from pxrs.sources.rotation import is_open_for_writing

        try:
            handle = os.open(self._files.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{self._files.path} can't be read: {error.strerror}; is the path right?"
            ) from error
        try:
            tells = is_open_for_writing(handle) is not None
        finally:
            os.close(handle)
        if not tells and self.lines.settle is None:
            raise ConfigError(
                f"the system does not show this user which processes write to {self._files.path}, "
                "so more may come after a rotation: give settle=, for how many seconds"
            )
        self._with_files(self._final)

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        return self._with_files(lambda files: self._read(files, offset, limit, until))

    def _with_files(self, use: Callable[[list[LogFile]], Result]) -> Result:
        """Returns the result of `use`, which is called again if a file was renamed meanwhile."""
        from pxrs.sources.rotation import Renamed

        self._origin.refuse_child()
        with self._lock:
            for _ in range(_LOOKS):
                if self._closed:
                    raise Closed(f"the source over {self.lines.path!r} was closed")
                try:
                    return use(self._files.look())
                except Renamed:
                    continue
                except OSError as error:
                    raise StoreUnavailable(
                        f"{self.lines.path!r} can't be read: {error.strerror}"
                    ) from error
        raise StoreBusy(f"the files of {self.lines.path!r} are renamed all the time; try again")

    def _read(self, files: list[LogFile], offset: int, limit: int, until: int | None) -> SourceRead:
        start = self._start(files)
        if offset < start:
            raise OffsetOutOfRange(self._files.path, 0, offset, start, self._end(files))
        for file in files:
            if file.number < offset >> _PLACE_BITS:
                continue
            rows, offset, is_end = self._read_file(file, offset, limit, until)
            if until is not None and offset >= until:
                return SourceRead(rows, until)
            if rows or not is_end:
                return SourceRead(rows, offset)
        return SourceRead([], offset)

    def _read_file(
        self, file: LogFile, offset: int, limit: int, until: int | None
    ) -> tuple[list[Row], int, bool]:
        """Rows of one file, the offset up to which these are all, and whether the file ends there.

        Whether it is finished is checked first: only then is what is read all that it will have.
        """
        is_finished = self._is_finished(file)
        handle = self._handle(file)
        base = file.number << _PLACE_BITS
        offset = max(offset, base)
        place = self._line_at(handle, offset - base)
        rows: list[Row] = []
        for line, end in self._lines(handle, place, limit, is_finished):
            at = base + place
            if until is not None and at >= until:
                break
            row = self._parsed(line, at, base + end, is_first=not rows)
            if row is None:
                break
            place = end
            if row:
                rows.append(row[0])
                if len(rows) == limit:
                    break
        if is_finished and place >= os.fstat(handle).st_size:
            return rows, base + _PLACES + 1, True
        return rows, max(base + place, offset), False

    def _parsed(self, line: bytes, at: int, end: int, *, is_first: bool) -> list[Row] | None:
        """The row of a line, none if it has no row; None: the rows before it must come first."""
        if not line.strip():
            return []
        try:
            return [self._row(line, at)]
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError) as error:
            if self.lines.on_bad == "skip":
                return []
            if not is_first:
                return None
            raise DamagedBatch(
                self._files.path, 0, at, end, f"not a JSON object as described: {error}"
            ) from error

    def _lines(
        self, handle: int, place: int, limit: int, is_finished: bool
    ) -> Iterator[tuple[bytes, int]]:
        """Lines from a place on, each with the place behind it, a few megabytes at most."""
        size = max(_LEAST_READ, min(READ_BYTES, int(limit * self._mean * 1.1)))
        data = os.pread(handle, size, place)
        while b"\n" not in data and len(data) == size:
            if size >= _LONGEST_LINE:
                raise StoreUnavailable(
                    f"{self._files.path} has a line of more than {_LONGEST_LINE} bytes"
                )
            size *= 4
            data = os.pread(handle, size, place)
        *whole, rest = data.split(b"\n")
        if whole:
            self._mean = max(16.0, (len(data) - len(rest)) / len(whole))
        for line in whole:
            place += len(line) + 1
            yield line, place
        if rest and is_finished and len(data) < size:
            # Its newline will never come.
            yield rest, place + len(rest)

    def _line_at(self, handle: int, place: int) -> int:
        """The beginning of the first line at this place or behind it."""
        if place == 0 or os.pread(handle, 1, place - 1) in (b"\n", b""):
            return place
        while data := os.pread(handle, _LEAST_READ, place):
            found = data.find(b"\n")
            if found >= 0:
                return place + found + 1
            place += len(data)
        return place

    def bounds(self, stream: int) -> Bounds:
        return self._with_files(lambda files: Bounds(self._start(files), self._end(files)))

    def _start(self, files: Sequence[LogFile]) -> int:
        """The first file behind which none is missing."""
        first = self._files.first_unused
        for file in reversed(files):
            if file.number != first - 1 and file is not files[-1]:
                break
            first = file.number
        return first << _PLACE_BITS

    def _end(self, files: Sequence[LogFile]) -> int:
        """The offset behind the last line that has its newline."""
        if not files:
            return self._start(files)
        return self._end_of(files[-1])

    def _end_of(self, file: LogFile) -> int:
        base = file.number << _PLACE_BITS
        handle, place = self._handle(file), file.size
        while place > 0:
            first = max(0, place - _LEAST_READ)
            found = os.pread(handle, place - first, first).rfind(b"\n")
            if found >= 0:
                return base + first + found + 1
            place = first
        return base

    def final(self, stream: int) -> int | None:
        return self._with_files(self._final)

    def _final(self, files: Sequence[LogFile]) -> int:
        for file in files[:-1]:
            if not self._is_finished(file):
                return self._end_of(file)
        return self._end(files)

    def _is_finished(self, file: LogFile) -> bool:
        finished = self._files.is_finished(file, self.lines.settle, self._clock.wall_ms())
        if not finished and not file.is_last:
            self._is_waiting = True
        return finished

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        """Reads the lines, as they need not be in the order of their times."""
        if self.lines.timestamp is None:
            raise InvalidRequest(
                f"{self.lines.path!r} was attached without timestamp=, so offsets can't be looked "
                "up by time"
            )
        offset = self.bounds(stream).start
        while True:
            rows, following = self.read(stream, offset, 10_000)[:2]
            for row in rows:
                if row.timestamp >= timestamp:
                    return row.offset
            if following == offset:
                return None
            offset = following

    def watch(self) -> Watch:
        return PollingWatch(self._changes, _SOON, _QUIET)

    def _changes(self) -> object:
        """A value that differs when there may be more to read; errors are left to reads."""
        with suppress(PxrsError, OSError):
            final = None
            if self._is_waiting:
                self._is_waiting = False
                final = self.final(0)
            status = os.stat(self._files.path)
            return (status.st_dev, status.st_ino, status.st_size, final)
        return None

    def close(self) -> None:
        if self._origin.is_parent:
            return
        with self._lock:
            self._closed = True
            while self._open:
                os.close(self._open.popitem()[1])

    def _handle(self, file: LogFile) -> int:
        """The file, opened; it stays open while it is read, even if it is renamed."""
        from pxrs.sources.rotation import open_file

        if file.number not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[file.number] = open_file(file.path, file.device, file.inode)
        self._open.move_to_end(file.number)
        handle = self._open[file.number]
        size = os.fstat(handle).st_size
        if size < self._reached.get(file.number, 0):
            raise SourceChanged(
                f"{file.path} has {size} bytes, and had {self._reached[file.number]}: it was "
                "truncated in place (copytruncate), and lines may be gone. Rotate it by renaming"
            )
        self._reached[file.number] = size
        return handle


def _maker(lines: JsonLines) -> Callable[[bytes, int], Row]:
    """Returns a function that makes a row of a line, and raises for a bad line."""
    fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
    key, names, timestamp = lines.key, lines.values, lines.timestamp
    single = lines.value if isinstance(lines.value, str) else None

    def row(line: bytes, offset: int) -> Row:
        found = fields.decode(line)
        value: bytes | None = line
        if single is not None:
            value = _text(found.get(single))
        elif names:
            value = msgspec.json.encode({name: found.get(name) for name in names})
        time = 0 if timestamp is None else _milliseconds(found.get(timestamp))
        return Row(offset, time, None if key is None else _text(found.get(key)), value)

    return row


def _text(raw: msgspec.Raw | None) -> bytes | None:
    """Text as it is, anything else as JSON."""
    data = b"null" if raw is None else bytes(raw)
    if data.startswith(b'"'):
        return msgspec.json.decode(data, type=str).encode()
    return None if data == b"null" else data


def _milliseconds(raw: msgspec.Raw | None) -> int:
    value = None if raw is None else msgspec.json.decode(raw, type=str | int | float | None)
    if value is None:
        return 0
    if isinstance(value, str):
        time = datetime.fromisoformat(value)
        return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    return int(value * 1000 if value < 100_000_000_000 else value)
