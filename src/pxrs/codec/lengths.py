"""Walks through the records of a batch by their lengths, without trusting any of them.

It is slow: it is used only to find out whether a length is wrong when the codec ran out of memory.
"""

from __future__ import annotations


class _OutOfRangeError(Exception):
    """A number or a length goes past the end."""


def lengths_fit(records: bytes | memoryview, count: int) -> bool:
    """Whether every length in the records, decompressed, stays inside them."""
    at = 0
    try:
        for _ in range(count):
            at = _past_record(records, at)
    except _OutOfRangeError:
        return False
    return at == len(records)


def _past_record(records: bytes | memoryview, at: int) -> int:
    # Length, attributes, timestamp and offset; then key and value.
    for _ in range(4):
        _, at = _number(records, at)
    at = _past_bytes(records, _past_bytes(records, at))
    headers, at = _number(records, at)
    for _ in range(headers):
        at = _past_bytes(records, _past_bytes(records, at))
    return at


def _past_bytes(records: bytes | memoryview, at: int) -> int:
    length, at = _number(records, at)
    if length > len(records) - at:
        raise _OutOfRangeError
    return at + max(0, length)


def _number(records: bytes | memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(records):
            raise _OutOfRangeError
        byte = records[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= 2**64 - 1
            return (value >> 1) ^ -(value & 1), at
    raise _OutOfRangeError
