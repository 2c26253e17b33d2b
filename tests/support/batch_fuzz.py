"""Decodes mutated batches in this process: `python -m support.batch_fuzz COUNT [SEED]`.

Every batch has the length and the checksum that fit: it is what a faulty or hostile writer could
have stored. Decoding it may return messages or raise `DamagedBatch`, nothing else. The process has
a limit of memory, so that a batch that claims gigabytes shows.
"""

from __future__ import annotations

import resource
import struct
import sys
from random import Random

from pxrs.codec import batches
from pxrs.errors import DamagedBatch
from pxrs.types import Fence, Header, StoredBatch

MOST_MEMORY = 2**30
_CHECKED = 21
_COUNT_AT = 57
_LENGTHS = (0, 1, 63, 64, 127, 128, 2**14, 2**31 - 1, 2**31, 2**62, 2**63 - 50, 2**63 - 1)
_Record = tuple[bytes | None, bytes | None, list[Header], int]


def resealed(data: bytearray) -> bytes:
    """Gives the batch a length and a checksum that fit."""
    struct.pack_into(">i", data, 8, len(data) - 12)
    checksum = batches._load().checksum(bytes(data[_CHECKED:]))
    struct.pack_into(">I", data, 17, checksum)
    return bytes(data)


def stored(data: bytes) -> StoredBatch:
    """The batch under the offsets that it claims."""
    header = batches.read_header(data)
    return StoredBatch(header.base_offset, header.base_offset + header.count, data)


def mutated(random: Random, originals: list[bytes]) -> bytes:
    """A batch with one to six changes behind its header, or to its compression and count."""
    data = bytearray(random.choice(originals))
    for _ in range(random.randint(1, 6)):
        random.choice(_CHANGES)(random, data)
    return resealed(data)


def _flip(random: Random, data: bytearray) -> None:
    data[_place(random, data)] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray) -> None:
    data[_place(random, data)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _cut(random: Random, data: bytearray) -> None:
    del data[_place(random, data) + 1 :]


def _put_length(random: Random, data: bytearray) -> None:
    at = _place(random, data)
    length = random.choice(_LENGTHS) - random.randrange(3)
    data[at : at + random.randrange(3)] = _varint(length)


def _put_bytes(random: Random, data: bytearray) -> None:
    at = _place(random, data)
    data[at:at] = random.randbytes(random.randint(1, 9))


def _claim_count(random: Random, data: bytearray) -> None:
    struct.pack_into(">i", data, _COUNT_AT, random.choice((1, 2, 5, 100, 2**20, 2**31 - 1)))


def _claim_compression(random: Random, data: bytearray) -> None:
    struct.pack_into(">h", data, _CHECKED, random.randrange(8))


_CHANGES = (_flip, _flip, _set, _set, _cut, _put_length, _put_bytes, _claim_count,
            _claim_compression)  # fmt: skip


def _place(random: Random, data: bytearray) -> int:
    """A byte behind the header; often one of the first, where compressed streams have theirs."""
    behind = len(data) - batches.HEADER_SIZE
    if behind <= 0:
        data += b"\0"
        behind = 1
    return batches.HEADER_SIZE + random.randrange(min(behind, random.choice((24, behind))))


def _varint(value: int) -> bytes:
    """The number as the batch format writes it; beyond 64 bits it wraps around."""
    left = ((value << 1) ^ (value >> 63)) & (2**64 - 1)
    out = bytearray()
    while left >= 0x80:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def originals(random: Random) -> list[bytes]:
    """Whole batches: of every compression, small and repetitive, with and without headers."""
    kinds: list[list[_Record]] = [
        [(b"key", b"value", [("trace", b"\0\xff"), ("none", None)], 1_700_000_000_000)] * 3,
        [(None, None, [], 5)] * 40,
        [(random.randbytes(8), random.randbytes(60), [], 7) for _ in range(5)],
        [(None, bytes(100_000), [], 9)],
    ]
    return [
        bytes(batches.encode(records, compression=name).data)
        for records in kinds
        for name in batches.COMPRESSIONS
    ]


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Decodes `count` mutated batches; returns how many were read and how many are damaged."""
    random = Random(seed)
    whole = originals(random)
    fence = Fence("fuzz", 0, 0)
    damaged = 0
    for turn in range(count):
        data = mutated(random, whole)
        try:
            batches.decode(stored(data), fence)
        except DamagedBatch:
            damaged += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, batch {turn}: {data[:300].hex()}")
            raise
    return count - damaged, damaged


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    numbers = [int(given) for given in sys.argv[1:]]
    read, refused = fuzz(numbers[0], numbers[1] if len(numbers) > 1 else 1)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{read} read, {refused} damaged, {most} MB at most")
