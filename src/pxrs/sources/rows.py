"""Rows of a source: what values of strangers become, and how many to read at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec

from pxrs.types import Row

# Bytes that are read at a time, about; more are not returned, unless it is one row.
READ_BYTES = 4 * 2**20
_FIRST_ROWS, _MOST_ROWS = 64, 20_000
# What a row costs beyond its key and value, about.
_ROW_BYTES = 100


class RowsPerRead:
    """The number of rows to ask for next. It follows from the sizes of those before."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = _FIRST_ROWS

    def fitting(self, rows: Sequence[Row]) -> int:
        """Returns how many of the rows that were read may be returned together; at least one.

        As many rows as fit are read next time, but not more than four times as many.
        """
        if not rows:
            return 0
        size = bytes_of(rows, 2) + bytes_of(rows, 3)
        room = int(READ_BYTES / (size / len(rows) + _ROW_BYTES))
        self.count = max(1, min(room, max(self.count, len(rows)) * 4, _MOST_ROWS))
        return len(rows) if size <= READ_BYTES else first_within(rows)


def bytes_of(rows: Sequence[Row], field: int) -> int:
    """Returns how many bytes this field of the rows has together; those that are None have none."""
    return sum(map(len, filter(None, map(itemgetter(field), rows))))


def first_within(rows: Sequence[Row], most: int = READ_BYTES) -> int:
    """Returns how many of the first rows have at most so many bytes; at least one."""
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
    """The value as JSON; what JSON does not know as text."""
    return msgspec.json.encode(value, enc_hook=str)


def named(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The fields or columns that `value` of a description names; none if it is None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
