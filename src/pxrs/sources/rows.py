"""Rows of a source: how foreign values become bytes, and how many rows to read at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import msgspec

from pxrs.types import Row

# About how many bytes are read at a time; a read returns no more, unless it is one row.
READ_BYTES = 4 * 2**20
_FIRST_ROWS, _MOST_ROWS = 64, 20_000
# About how many bytes a row costs beyond its key and value.
_ROW_BYTES = 100
_KEY, _VALUE = itemgetter(2), itemgetter(3)


class RowsPerRead:
    """The number of rows to read next, which follows from the sizes of those before."""

    __slots__ = ("count", "size")

    def __init__(self) -> None:
        self.count = _FIRST_ROWS
        # The size of the rows that fitted the last time: see `size_of`.
        self.size = 0

    def fitting(self, rows: Sequence[Row]) -> int:
        """Returns how many of the rows that were read may be returned together; at least one.

        As many rows as fit are read next time, but not more than four times as many.
        """
        if not rows:
            self.size = 0
            return 0
        size = _bytes_of(rows)
        self.size = size + len(rows) * _ROW_BYTES
        room = READ_BYTES * len(rows) // self.size
        self.count = max(1, min(room, max(self.count, len(rows)) * 4, _MOST_ROWS))
        if size <= READ_BYTES:
            return len(rows)
        fitting = first_within(rows)
        self.size = size_of(rows[:fitting])
        return fitting


def size_of(rows: Sequence[Row]) -> int:
    """Returns about how many bytes of memory the rows take together."""
    return _bytes_of(rows) + len(rows) * _ROW_BYTES


def _bytes_of(rows: Sequence[Row]) -> int:
    """Returns how many bytes their keys and values have; those that are None have none."""
    return _lengths(_KEY, rows) + _lengths(_VALUE, rows)


def _lengths(part: Callable[[Row], bytes | None], rows: Sequence[Row]) -> int:
    try:
        return sum(map(len, map(part, rows)))  # type: ignore[arg-type]
    except TypeError:  # some are None
        return sum(map(len, filter(None, map(part, rows))))


def first_within(rows: Sequence[Row], most: int = READ_BYTES) -> int:
    """Returns how many of the first rows have at most `most` bytes; at least one."""
    size = 0
    for number, row in enumerate(rows):
        size += len(row[2] or b"") + len(row[3] or b"")
        if size > most and number:
            return number
    return len(rows)


def as_bytes(value: object) -> bytes | None:
    """Text and bytes as they are, numbers as their digits, anything else as JSON."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, int):
        return str(int(value)).encode()
    return as_json(value)


def as_json(value: object) -> bytes:
    """The value as JSON; types that JSON does not know become text."""
    return msgspec.json.encode(value, enc_hook=str)


def named(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The fields or columns that `value` of a description names; none if it is None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
