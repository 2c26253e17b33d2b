"""Decodes mutated batches in this process: `python -m support.batch_fuzz COUNT [SEED]`.

Every batch has the length and the checksum that fit: it is what a faulty or hostile writer could
have stored. Decoding it may return messages or raise `DamagedBatch`, nothing else. Every eighth one
is also read as one that a stranger sends: that may return a batch, which can be decoded then, or
raise `InvalidRequest`. The process has a limit of memory, so that a batch that claims gigabytes
shows.
"""

from __future__ import annotations

import resource
import struct
import sys
from random import Random

from pxrs.codec import batches
from pxrs.errors import DamagedBatch, InvalidRequest
from pxrs.types import Fence, Header, StoredBatch

MOST_MEMORY = 2**30
_CHECKED = 21
_COUNT_AT = 57
# The numbers of the header that the checksum covers: where they are, and how they are written.
_FIELDS = ((21, ">h"), (23, ">i"), (27, ">q"), (35, ">q"), (43, ">q"), (51, ">h"), (53, ">i"))
_ODD_TIMES = (-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1)
_BASES = (-(2**63), -1, 0, 1, 2**62, 2**63 - 2, 2**63 - 1)
_EVERY = 8
_MOST_SENT = 2**24
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
    """A batch with one to six changes behind its header, or in it."""
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


def _set_field(random: Random, data: bytearray) -> None:
    at, written = random.choice(_FIELDS)
    bits = 8 * struct.calcsize(written)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    near = random.choice((*_ODD_TIMES, struct.unpack_from(written, data, at)[0]))
    value = random.choice((near, near + 1, near - 1, random.getrandbits(bits) + lowest))
    struct.pack_into(written, data, at, min(max(value, lowest), highest))


def _flip_attribute(random: Random, data: bytearray) -> None:
    data[_CHECKED + random.randrange(2)] ^= 1 << random.randrange(8)


def _move(random: Random, data: bytearray) -> None:
    struct.pack_into(">q", data, 0, random.choice(_BASES))


_CHANGES = (_flip, _flip, _set, _set, _cut, _put_length, _put_bytes, _claim_count,
            _claim_compression, _set_field, _flip_attribute, _move)  # fmt: skip


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
        try:
            if turn % _EVERY == 0:
                batch = batches.read_batch(data, _MOST_SENT)
                batches.decode(stored(bytes(batch.data)), fence)
        except InvalidRequest:
            pass
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
