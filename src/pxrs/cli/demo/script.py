"""What the demo's messages look like, so that writer, follower and checker agree.

Producer P numbers its messages 0, 1, 2 … and deals them out to its keys in turn. The value
repeats the number up to a hundred bytes: half a value, or somebody else's, is noticed.
"""

from __future__ import annotations

import xxhash

PRODUCERS = 3
KEYS = 32
PARTITIONS = 8
ROUND = 320
VALUE_BYTES = 100

PING = b"ping"
END = b"end"


def key_of(producer: int, number: int) -> bytes:
    return b"p%d-k%02d" % (producer, number % KEYS)


def value_of(number: int) -> bytes:
    text = b"%d|" % number
    return (text * (VALUE_BYTES // len(text) + 1))[:VALUE_BYTES]


def number_in(value: bytes) -> int | None:
    """The number that a whole value repeats; None if it is not whole."""
    digits, bar, _ = value.partition(b"|")
    if not bar or not digits.isdigit() or value_of(int(digits)) != value:
        return None
    return int(digits)


class Digest:
    """Equal for two who have seen the same messages in the same order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, key: bytes, value: bytes) -> None:
        # Lengths keep ("ab", "c") apart from ("a", "bc").
        self._hash.update(b"%d,%d;%b%b" % (len(key), len(value), key, value))

    @property
    def text(self) -> str:
        return str(self._hash.hexdigest())
