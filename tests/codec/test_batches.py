"""The record batch codec: Kafka's bytes, nothing lost on the way, damage never read as data."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka.record.util import calc_crc32c  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from pxrs.codec import batches
from pxrs.errors import ConfigError, DamagedBatch, InvalidRequest, MessageTooLarge
from pxrs.types import Batch, Fence, Header, Message, StoredBatch
from support.seeds import few_are_fast

Record = tuple[bytes | None, bytes | None, list[Header], int]

GOLDEN = json.loads((Path(__file__).parent / "golden" / "batches.json").read_text())
FENCE = Fence("orders", 3, 9)
BASE = 4_000_000_000
RECORDS: list[Record] = [
    (b"key", b"value", [("trace", b"\x00\xff"), ("none", None)], 1_700_000_000_000),
    (None, None, [], 1_700_000_000_007),
    (b"", b"", [("", b"")], 1_699_999_999_990),
    ("näh".encode(), b"x" * 70, [], 1_700_000_000_300),
]

LEADER_EPOCH = range(12, 16)
CRC = 17
CHECKED = 21  # the checksum covers all from here on

each_compression = pytest.mark.parametrize("compression", batches.COMPRESSIONS)
# For what is done to every byte of a batch.
any_compression = pytest.mark.parametrize("compression", few_are_fast(batches.COMPRESSIONS))


def stored(data: bytes | bytearray, count: int = len(RECORDS), base: int = BASE) -> StoredBatch:
    placed = bytearray(data)
    batches.set_base_offset(placed, base)
    return StoredBatch(base, base + count, bytes(placed))


def messages(records: list[Record], base: int = BASE) -> list[Message]:
    return [
        Message(FENCE, base + index, timestamp, key, value, tuple(headers))
        for index, (key, value, headers, timestamp) in enumerate(records)
    ]


def outcome(batch: StoredBatch) -> list[Message] | None:
    """The messages, or None for a `DamagedBatch` that says where to go on; nothing else."""
    try:
        return batches.decode(batch, FENCE)
    except DamagedBatch as error:
        where = (error.topic, error.partition, error.offset, error.next_offset)
    assert where == ("orders", 3, batch.base, batch.next)
    return None


def resealed(data: bytearray) -> bytes:
    """With a length and a checksum that fit: what a faulty writer could have stored."""
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">I", data, CRC, calc_crc32c(bytes(data[CHECKED:])))
    return bytes(data)


def flips(data: bytes) -> list[tuple[int, bytearray]]:
    """Every other value of every byte."""
    return [
        (place, bytearray(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]))
        for place in range(len(data))
        for change in range(1, 256)
    ]


def test_bytes_are_those_of_another_implementation() -> None:
    made = batches.encode(RECORDS, producer_id=77, producer_epoch=5, base_sequence=1234)
    expected = bytearray.fromhex(GOLDEN["batches"]["none"])
    # A producer leaves the leader epoch to the broker; we write -1 as the Java client does.
    struct.pack_into(">i", expected, LEADER_EPOCH.start, -1)
    assert made.data.hex() == expected.hex()


@each_compression
def test_batches_of_another_implementation_are_read(compression: str) -> None:
    data = bytes.fromhex(GOLDEN["batches"][compression])
    assert batches.read_header(data).attributes == batches.COMPRESSIONS[compression]
    assert batches.decode(stored(data), FENCE) == messages(RECORDS)


blobs = st.none() | st.binary(max_size=300)
records = st.tuples(
    blobs,
    blobs,
    st.lists(st.tuples(st.text(max_size=20), blobs), max_size=4),
    st.integers(0, 2**63 - 1),
)


@given(
    st.lists(records, min_size=1, max_size=20),
    st.sampled_from(list(batches.COMPRESSIONS)),
    st.integers(0, 2**62),
)
def test_what_goes_in_comes_out(entries: list[Record], compression: str, base: int) -> None:
    batch = batches.encode(entries, compression=compression)
    assert batch.count == len(entries)
    assert batch.max_timestamp == max(entry[3] for entry in entries)
    read = batches.decode(stored(batch.data, len(entries), base), FENCE)
    assert read == messages(entries, base)


def test_a_record_costs_no_more_than_the_overhead() -> None:
    content = bytes(2**20)
    builder = batches.new_builder(2**31 - 1)
    builder.append(0, 2**63 - 1, None, None, [])
    added = builder.append(2**31 - 1, 0, content, content, []).size
    # Only lengths of 128 MiB and more would take the few bytes that are left.
    assert batches.RECORD_OVERHEAD - 8 < added - 2 * len(content) <= batches.RECORD_OVERHEAD


@given(st.integers(0, 2**62), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1))
def test_the_producer_is_in_batch_and_header(producer: int, epoch: int, sequence: int) -> None:
    batch = batches.encode(
        RECORDS, producer_id=producer, producer_epoch=epoch, base_sequence=sequence
    )
    header = batches.read_header(batch.data)
    assert header[-4:-1] == (producer, epoch, sequence)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == header[-4:-1]


def test_a_batch_without_producer_says_so() -> None:
    batch = batches.encode(RECORDS)
    assert batches.read_header(batch.data)[-4:-1] == (-1, -1, -1)
    assert batch == Batch(batch.data, len(RECORDS), 1_700_000_000_300)


def test_the_header_has_its_size() -> None:
    assert batches.HEADER_SIZE == struct.calcsize(">qiibIhiqqqhii") == 61
    header = batches.read_header(batches.encode(RECORDS).data)
    assert (header.magic, header.count, header.last_offset_delta) == (2, 4, 3)


@any_compression
def test_no_changed_byte_is_read_as_data(compression: str) -> None:
    batch = stored(batches.encode(RECORDS, compression=compression).data)
    for place, data in flips(batch.data):
        read = outcome(batch._replace(data=bytes(data)))
        if place in LEADER_EPOCH:
            # A broker writes it after the checksum was made, and it means nothing here.
            assert read == messages(RECORDS)
        else:
            assert read is None, place


@each_compression
def test_no_cut_batch_is_read_as_data(compression: str) -> None:
    batch = stored(batches.encode(RECORDS, compression=compression).data)
    for length in range(len(batch.data)):
        assert outcome(batch._replace(data=batch.data[:length])) is None
    assert outcome(batch._replace(data=batch.data + b"\x00")) is None


@any_compression
def test_contents_that_make_no_sense_are_damage(compression: str) -> None:
    """With the checksum right, other messages may come out, but no other error."""
    batch = stored(batches.encode(RECORDS, compression=compression).data)
    refused = 0
    for place, data in flips(batch.data):
        if place >= CHECKED:
            refused += outcome(batch._replace(data=resealed(data))) is None
    assert refused > 1_000


@each_compression
def test_cut_contents_are_damage(compression: str) -> None:
    batch = stored(batches.encode(RECORDS, compression=compression).data)
    for length in range(batches.HEADER_SIZE, len(batch.data)):
        cut = resealed(bytearray(batch.data[:length]))
        assert outcome(batch._replace(data=cut)) in (None, messages(RECORDS))


def test_an_absurd_length_is_damage() -> None:
    data = batches.encode([(None, b"x", [], 0)]).data[: batches.HEADER_SIZE]
    data += bytes.fromhex("20 00 00 00 feffffffffffffffff01")  # a key of 2^63 - 1 bytes
    assert outcome(stored(resealed(data), 1)) is None


@pytest.mark.parametrize(("base", "following"), [(BASE + 1, BASE + 5), (BASE, BASE + 3)])
def test_a_batch_stored_under_other_offsets_is_damaged(base: int, following: int) -> None:
    batch = stored(batches.encode(RECORDS).data)._replace(base=base, next=following)
    assert outcome(batch) is None


def test_damage_of_less_than_a_header_says_so() -> None:
    with pytest.raises(DamagedBatch, match="60 bytes are less than a header"):
        batches.decode(StoredBatch(0, 1, bytes(60)), FENCE)


def test_damage_says_what_and_where() -> None:
    batch = stored(batches.encode(RECORDS).data)
    with pytest.raises(DamagedBatch) as caught:
        batches.decode(batch._replace(data=batch.data[:-1] + b"!"), FENCE)
    assert str(caught.value) == (
        "the batch at offset 4000000000 of 'orders' partition 3 is damaged "
        "(the checksum is wrong); to continue without it, read from offset 4000000004"
    )


def test_placing_a_batch_keeps_its_checksum() -> None:
    data = batches.encode(RECORDS).data
    before = bytes(data)
    batches.set_base_offset(data, BASE)
    assert batches.read_header(data).base_offset == BASE
    assert data[8:] == before[8:]


def test_a_builder_takes_the_first_record_and_then_keeps_to_its_size() -> None:
    builder = batches.new_builder(100)
    assert builder.append(0, 1, b"key", b"x" * 200, []).size > 200
    assert builder.append(1, 1, b"key", b"x", []) is None
    assert batches.seal(builder).count == 1


def test_a_batch_that_would_be_too_large_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LARGEST_BATCH", 150)
    with pytest.raises(MessageTooLarge, match="message 3"):
        batches.encode(RECORDS)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        batches.encode([])


@pytest.mark.parametrize("timestamp", [-1, -2, 2**63])
def test_times_that_the_codec_would_bend_are_refused(timestamp: int) -> None:
    with pytest.raises(InvalidRequest, match="timestamp"):
        batches.encode([(None, b"x", [], timestamp), (None, b"x", [], 5)])


def test_an_unknown_compression_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="none, gzip, snappy, lz4, zstd; got 'brotli'"):
        batches.encode(RECORDS, compression="brotli")


LOADED_BY_TWO_THREADS = """
import sys, threading
from pxrs.codec.batches import new_builder

failed = []

def load(after):
    while after not in sys.modules:
        pass
    try:
        new_builder(1000)
    except ImportError as error:
        failed.append(error)

threads = [threading.Thread(target=load, args=(name,)) for name in ("sys", "aiokafka.errors")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(failed))
"""


@pytest.mark.long
def test_two_threads_can_load_the_codec() -> None:
    assert subprocess.run([sys.executable, "-c", LOADED_BY_TWO_THREADS], timeout=60).returncode == 0


@pytest.mark.parametrize("compression", sorted(batches.COMPRESSIONS))
def test_a_batch_with_new_numbers_is_as_if_it_were_made_with_them(compression: str) -> None:
    records: list[tuple[bytes | None, bytes | None, list[Header], int]] = [
        (b"k", b"v" * 100, [("h", b"x")], 5),
        (None, None, [], 6),
    ]

    def made(*numbers: int) -> Batch:
        producer, epoch, sequence = numbers
        return batches.encode(
            records,
            compression=compression,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
        )

    assert batches.renumbered(made(7, 1, 9), 2**62 - 1, 2**15 - 1, 2**31 - 1) == made(
        2**62 - 1, 2**15 - 1, 2**31 - 1
    )
