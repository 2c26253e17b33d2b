"""The messages every contestant handles: 100-byte values, 10,000 keys, 8 partitions."""

from __future__ import annotations

from collections import Counter

from xxhash import xxh64_intdigest

TOPIC = "orders"
PARTITIONS = 8

Pair = tuple[bytes, bytes]

PAIRS: list[Pair] = [(b"account-%05d" % i, b"%05d" % i * 20) for i in range(10_000)]


def rounded(messages: int) -> int:
    """The nearest number of messages that is a whole number of passes over `PAIRS`."""
    return max(1, round(messages / len(PAIRS))) * len(PAIRS)


def passes(messages: int) -> int:
    """How often to go over `PAIRS` for that many messages."""
    return messages // len(PAIRS)


def ends(messages: int) -> list[int]:
    """The end offset of each partition once all messages are in an empty log."""
    per_pass = Counter(xxh64_intdigest(key) % PARTITIONS for key, _ in PAIRS)
    return [per_pass[partition] * passes(messages) for partition in range(PARTITIONS)]
