"""Batches that decompress to gigabytes, and mutated ones: refused before they take the memory."""

from __future__ import annotations

import gzip
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cramjam
import pytest

import pxrs
from pxrs.codec import batches
from pxrs.codec.unpacking import unpack
from pxrs.config import MOST_COMPRESSED_BATCH, MOST_COMPRESSED_MESSAGE
from pxrs.errors import DamagedBatch, InvalidRequest
from pxrs.types import Append, Appended, Batch, Fence, LogPartition, StoredBatch
from support.batch_fuzz import resealed, stored

FENCE = Fence("orders", 3, 9)
MILLION = 10**6
TESTS = Path(__file__).parents[1]

RUN_IN_A_PROCESS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from pxrs.codec import batches
from pxrs.errors import DamagedBatch
from pxrs.types import Fence, StoredBatch
count, data = int(sys.argv[1]), bytes.fromhex(sys.stdin.read())
def most():
    # Not `ru_maxrss`: that begins with what the process had that started this one.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])

batches.new_builder(100)
before = most()
try:
    batches.decode(StoredBatch(0, count, data), Fence("t", 0, 0))
except DamagedBatch as error:
    print(error)
print("MB:", (most() - before) // 1024)
"""


def batch_of(packed: bytes, compression: str, count: int = 1) -> bytes:
    """A batch whose packed records are these bytes."""
    data = batches.encode([(None, b"x", [], 0)]).data[: batches.HEADER_SIZE]
    struct.pack_into(">h", data, 21, batches.COMPRESSIONS[compression])
    struct.pack_into(">i", data, 57, count)
    return resealed(data + packed)


def decoded_elsewhere(data: bytes, count: int = 1) -> tuple[str, int]:
    """What a process with little memory says of the batch, and how many MB that took."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_IN_A_PROCESS, str(count)],
        input=data.hex(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said, _, taken = done.stdout.rpartition("MB:")
    return said, int(taken)


def zstd_in_pieces(size: int) -> bytes:
    """Zeros as blocks of one repeated byte, in a frame that does not tell its size."""
    most = 128 * 2**10
    frame = bytearray(bytes.fromhex("28b52ffd 00 58"))
    for left in range(size, 0, -most):
        block = min(left, most)
        frame += ((block << 3) | (1 << 1) | (left <= most)).to_bytes(3, "little") + b"\0"
    return bytes(frame)


def lz4_frame(size: int) -> bytes:
    packing = cramjam.lz4.Compressor(level=9, content_checksum=False, block_linked=False)
    packing.compress(bytes(size))
    return bytes(packing.finish())


def xerial(*blocks: bytes) -> bytes:
    head = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    return head + b"".join(struct.pack(">i", len(block)) + block for block in blocks)


CLAIMS_4_GB = b"\xff\xff\xff\xff\x0f" + b"\0" * 9
BOMBS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "snappy that claims 4 GB": lambda: ("snappy", CLAIMS_4_GB),
    "a block of snappy that claims 4 GB": lambda: ("snappy", xerial(CLAIMS_4_GB)),
    "snappy": lambda: ("snappy", xerial(*[bytes(cramjam.snappy.compress_raw(bytes(2**20)))] * 300)),
    "gzip": lambda: ("gzip", gzip.compress(bytes(300 * MILLION))),
    "gzip of many members": lambda: ("gzip", gzip.compress(bytes(MILLION)) * 300),
    "lz4": lambda: ("lz4", lz4_frame(300 * MILLION)),
    "zstd": lambda: ("zstd", bytes(cramjam.zstd.compress(bytes(300 * MILLION)))),
    "zstd that does not tell": lambda: ("zstd", zstd_in_pieces(3000 * MILLION)),
    "zstd that claims 4 GB": lambda: ("zstd", bytes.fromhex("28b52ffd a0 ffffffff 010000")),
    "zstd that claims 2^64": lambda: ("zstd", bytes.fromhex("28b52ffd e0 ffffffffffffffff 010000")),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_damage_and_takes_little_memory(name: str) -> None:
    compression, packed = BOMBS[name]()
    said, taken = decoded_elsewhere(batch_of(packed, compression))
    assert "is damaged" in said
    # The bound, and a piece of gzip besides.
    assert taken < 150


@pytest.mark.parametrize("count", [batches.MOST_PACKED_MESSAGES + 1, 1])
def test_a_consumer_that_polls_for_one_message_takes_no_bomb(count: int) -> None:
    """14 KB in the log: of millions of messages, or of one that is too large."""
    record = bytes([12, 0, 0, 0, 1, 1, 0])
    plain = record * count if count > 1 else bytes(batches.MOST_UNPACKED + 1)
    packed = bytes(cramjam.zstd.compress(plain))
    assert len(packed) < 14_000
    with pxrs.connect("memory://") as px:
        topic = px.topics.create("t", partitions=1)
        bomb = Batch(bytearray(batch_of(packed, "zstd", count)), count, 0)
        assert px.stores.log.append([Append(LogPartition(topic.id, 0), bomb)]) == [Appended(0)]
        with (
            px.consumer("t", "g", prefetch_bytes=64 * 2**10) as consumer,
            pytest.raises(DamagedBatch, match="at most") as told,
        ):
            consumer.poll(max_records=1, timeout=30.0)
        assert told.value.next_offset == count


def test_75_bytes_that_claim_4_gb() -> None:
    data = batch_of(CLAIMS_4_GB, "snappy")
    assert len(data) == 75
    with pytest.raises(DamagedBatch, match=r"decompress to at most \d+ bytes"):
        batches.decode(StoredBatch(0, 1, data), FENCE)


def test_more_messages_than_a_compressed_batch_may_have_are_damage() -> None:
    count = batches.MOST_PACKED_MESSAGES + 1
    record = bytes([12, 0, 0, 0, 1, 1, 0])
    packed = bytes(cramjam.zstd.compress(record * count))
    said, taken = decoded_elsewhere(batch_of(packed, "zstd", count), count)
    assert f"at most {count - 1} messages" in said
    assert taken < 10


def test_no_batch_that_settings_allow_is_over_the_bounds() -> None:
    builder = batches.new_builder(MOST_COMPRESSED_BATCH, 4)
    count = 0
    while builder.append(count, 0, None, None, []) is not None:
        count += 1
    batch = batches.seal(builder)
    assert MOST_COMPRESSED_BATCH // 10 < count == batch.count <= batches.MOST_PACKED_MESSAGES
    assert batches.decode_sized(StoredBatch(0, count, bytes(batch.data)), FENCE)[1] > 4_190_000
    assert MOST_COMPRESSED_MESSAGE + 2**20 <= batches.MOST_UNPACKED


@pytest.mark.parametrize("size", [0, 1, 300, 5000])
def test_many_members_of_gzip_are_each_looked_at_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decompressors are given, and copy, is a few times what is stored."""
    member = gzip.compress(random.Random(size).randbytes(size))
    packed = member * (10**6 // len(member))
    given = 0

    class Counting:
        def __init__(self, wbits: int) -> None:
            self._inner = decompressobj(wbits=wbits)

        def decompress(self, data: memoryview, most: int) -> bytes:
            nonlocal given
            given += len(data)
            return self._inner.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    unpacked = unpack(1, memoryview(packed), 2 * 10**6, (3, 5))
    assert unpacked.size == size * (10**6 // len(member))
    assert len(unpacked.buffer) == unpacked.size + 8
    assert given <= 4 * len(packed)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_what_is_at_the_bound_is_read(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches.encode([(None, bytes(200_000), [], 0)], compression=compression)
    whole = len(batches.encode([(None, bytes(200_000), [], 0)]).data) - batches.HEADER_SIZE
    there = StoredBatch(0, 1, bytes(batch.data))
    monkeypatch.setattr(batches, "MOST_UNPACKED", whole)
    assert batches.decode_sized(there, FENCE)[1] == whole + batches.HEADER_SIZE
    monkeypatch.setattr(batches, "MOST_UNPACKED", whole - 1)
    with pytest.raises(DamagedBatch, match=f"at most {whole - 1} bytes"):
        batches.decode(there, FENCE)
    with pytest.raises(InvalidRequest, match=f"at most {whole - 1} bytes"):
        batches.read_batch(there.data, 2**30)


def test_zstd_in_blocks_that_do_not_tell_their_size_is_read() -> None:
    records = bytes(batches.encode([(None, bytes(500_000), [], 0)]).data[batches.HEADER_SIZE :])
    head, zeros = records.rstrip(b"\0"), len(records) - len(records.rstrip(b"\0"))
    frame = bytes.fromhex("28b52ffd 00 58")
    frame += (len(head) << 3).to_bytes(3, "little") + head
    frame += zstd_in_pieces(zeros)[6:]
    assert batches.decode(stored(batch_of(frame, "zstd")), FENCE)[0].value == bytes(500_000)


@pytest.mark.parametrize("length", [2**63 - 1, 2**63 - 60, 2**63 - 100, 2**62, 2**31])
def test_a_length_that_no_memory_holds_is_damage(length: int) -> None:
    from support.batch_fuzz import _varint

    record = b"\0\0\0" + _varint(2) + b"kk" + _varint(length) + bytes(120)
    with pytest.raises(DamagedBatch):
        batches.decode(stored(batch_of(_varint(len(record)) + record, "none")), FENCE)


READ_TO_THE_LAST_PAGE = """
import ctypes, mmap, resource, struct, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from pxrs.codec import batches
from pxrs.errors import DamagedBatch
from pxrs.types import Fence, StoredBatch
data = sys.stdin.buffer.read()
size = -len(data) // mmap.PAGESIZE * -mmap.PAGESIZE
pages = mmap.mmap(-1, size + mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
none = ctypes.CDLL(None, use_errno=True).mprotect(
    ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0
)
assert none == 0
there = memoryview(pages)[size - len(data) : size]
there[:] = data
try:
    batches.decode(StoredBatch(0, 1, there), Fence("t", 0, 0))
except DamagedBatch as error:
    print(error)
"""


def test_a_number_that_does_not_end_is_not_looked_for_behind_the_batch() -> None:
    """Of a large one, which is not copied: the memory behind it may be another's, or none."""
    from support.batch_fuzz import _varint

    value = bytes(100_000)
    # How many headers it has is the last number, whose last byte is missing.
    record = b"\0\0\0" + _varint(-1) + _varint(len(value)) + value + b"\x80"
    data = batch_of(_varint(len(record)) + record, "none")
    done = subprocess.run(
        [sys.executable, "-c", READ_TO_THE_LAST_PAGE], input=data, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"is damaged" in done.stdout


def test_memory_that_ran_out_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told that a batch is damaged skips it."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(batches, "Message", no_memory)
    with pytest.raises(MemoryError):
        batches.decode(stored(batch_of(bytes([12, 0, 0, 0, 1, 1, 0]), "none")), FENCE)


def test_no_mutated_batch_kills_the_process_or_raises_a_foreign_error(
    request: pytest.FixtureRequest,
) -> None:
    """`--fuzz 1000000` tries a million."""
    wanted: int = request.config.getoption("--fuzz")
    few = 2_000 if request.config.getoption("--fast") else 10_000
    done = subprocess.run(
        [sys.executable, "-m", "support.batch_fuzz", str(wanted or few), "1"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60 + (wanted or few) / 200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
