"""Partitioners: which partition or shard a key belongs to.

All of these are published algorithms; `tests/unit/golden/routing.json` pins their values, so
that a key never silently moves to another partition with a new release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from xxhash import xxh64_intdigest

from pxrs.errors import InvalidRequest, quoted

Partitioner = Callable[[bytes, int], int]

# The slots that nodes share among themselves: each group, partition and shard has one.
SLOTS = 64

_MASK64 = (1 << 64) - 1
_JUMP_MULTIPLIER = 2862933555777941757
_JUMP_BUCKETS = (1 << 31) - 1


def xxhash(key: bytes, partitions: int) -> int:
    """XXH64 (seed 0) modulo the number of partitions: the default for topics."""
    return xxh64_intdigest(key) % partitions


def murmur2(key: bytes, partitions: int) -> int:
    """Kafka's default partitioner, for topics shared with Kafka producers."""
    return (murmur2_hash(key) & 0x7FFFFFFF) % partitions


def md5(key: bytes, partitions: int) -> int:
    """The first 32 bits of MD5, modulo the number of partitions: databases can compute it, too."""
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest()[:4]) % partitions


def jump_shard(key: bytes, shards: int) -> int:
    """Jump consistent hash of XXH64 (seed 0): the shard of a key-value key."""
    return jump(xxh64_intdigest(key), shards)


def jump(key: int, buckets: int) -> int:
    """Lamping and Veach's jump consistent hash of a 64-bit key.

    When `buckets` grows by one, one key in `buckets + 1` moves, always to the new bucket.
    """
    if not 1 <= buckets <= _JUMP_BUCKETS:
        raise InvalidRequest(f"buckets must be 1 to {_JUMP_BUCKETS}, got {buckets}")
    if not 0 <= key <= _MASK64:
        raise InvalidRequest(f"key must be an unsigned 64-bit integer, got {key}")
    bucket, candidate = -1, 0
    while candidate < buckets:
        bucket = candidate
        key = (key * _JUMP_MULTIPLIER + 1) & _MASK64
        # As published: a quotient of doubles, then a product, then cut to an integer. With 31-bit
        # bucket counts the product stays below 2^62, where a C int64 would hold the same.
        candidate = int((bucket + 1) * (float(1 << 31) / float((key >> 33) + 1)))
    return bucket


def murmur2_hash(data: bytes) -> int:
    """The 32-bit MurmurHash2 variant of Kafka's Java client, as an unsigned number."""
    multiplier = 0x5BD1E995
    length = len(data)
    result = (0x9747B28C ^ length) & 0xFFFFFFFF
    whole = length & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little")
        word = (word * multiplier) & 0xFFFFFFFF
        word ^= word >> 24
        word = (word * multiplier) & 0xFFFFFFFF
        result = ((result * multiplier) & 0xFFFFFFFF) ^ word
    if length > whole:
        result ^= int.from_bytes(data[whole:], "little")
        result = (result * multiplier) & 0xFFFFFFFF
    result ^= result >> 13
    result = (result * multiplier) & 0xFFFFFFFF
    return result ^ (result >> 15)


DEFAULT_PARTITIONER = "xxhash"
PARTITIONERS: dict[str, Partitioner] = {
    "xxhash": xxhash,
    "murmur2": murmur2,
    "jump": jump_shard,
    "md5": md5,
}


def hasher(name: str, partitions: int) -> Callable[[bytes], int]:
    """Returns a function of the key whose value modulo `partitions` is the key's partition.

    The default is then a single call into the compiled hash, which is half of its cost.
    """
    if name == "xxhash":
        return xxh64_intdigest
    return partial(_swapped, partitioner(name), partitions)


def _swapped(function: Partitioner, partitions: int, key: bytes) -> int:
    return function(key, partitions)


def partitioner(name: str) -> Partitioner:
    """Returns the partitioner of this name."""
    try:
        return PARTITIONERS[name]
    except (KeyError, TypeError):
        raise InvalidRequest(
            f"partitioner must be one of {', '.join(PARTITIONERS)}; got {quoted(name)}"
        ) from None
