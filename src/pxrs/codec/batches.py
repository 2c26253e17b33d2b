"""Kafka's RecordBatch v2 on `aiokafka.record`'s compiled codec.

The codec is loaded at first use (it costs 0.1 s to import), and no other module imports it. Any
Kafka tool reads batches that were made here, and the other way round.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, Protocol

from pxrs.codec.lengths import lengths_fit
from pxrs.codec.unpacking import unpack
from pxrs.errors import ConfigError, DamagedBatch, InvalidRequest, MessageTooLarge, quoted
from pxrs.types import Batch, Fence, Header, Message, StoredBatch

COMPRESSIONS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

# A record costs at most this much beyond key, value and headers: six varints and a byte.
RECORD_OVERHEAD = 36
HEADER_SIZE = 61
MAX_TIMESTAMP = 2**63 - 1
# The most bytes to which a compressed batch may decompress, so that a few stored bytes can't take
# all memory. A producer's settings keep its batches below this.
MOST_UNPACKED = 65 * 2**20
MOST_PACKED_MESSAGES = 2**19

_HEADER = struct.Struct(">qiibIhiqqqhii")
_BASE_OFFSET = struct.Struct(">q")
_CHECKSUM = struct.Struct(">I")
_CHECKSUM_AT = 17
_CHECKED_FROM = 21
CHECKSUM = slice(_CHECKSUM_AT, _CHECKED_FROM)
_MAX_TIMESTAMP_AND_COUNT = struct.Struct(">35xq14xi")
_PRODUCER = struct.Struct(">qhi")
_PRODUCER_AT = 43
_MAGIC = 2
LARGEST_BATCH = 2**31 - 1
_COMPRESSION_BITS = 0b111
# No varint is longer, and the codec's reader reads at most two of them past the end.
_BEHIND = bytes(32)
# To walk through a record costs as much as to copy this many bytes.
_LARGE_RECORD = 64 * 2**10


class Builder(Protocol):
    """The part of the codec's batch builder that pxrs uses."""

    def append(
        self,
        offset: int,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[Header],
    ) -> Any:
        """Append a record. Returns metadata with its `size`, or None when the batch is full.

        The first record always fits. The timestamp must not be negative: the codec takes -1
        for "none yet" and would shift the times of the records after it.
        """
        ...

    def set_producer_state(self, producer_id: int, epoch: int, sequence: int) -> None: ...

    def build(self) -> bytearray: ...

    def size(self) -> int: ...


class BatchHeader(NamedTuple):
    """The fields of a batch's header, in their order on the wire."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # this field, not tuple.count


class _Codec(NamedTuple):
    builder: Any
    reader: Any
    checksum: Any
    damage: tuple[type[Exception], ...]


def check_timestamp(timestamp: object) -> None:
    """Refuses a value that no message can have as its time."""
    if type(timestamp) is not int or not 0 <= timestamp <= MAX_TIMESTAMP:
        raise InvalidRequest(f"timestamp must be milliseconds since 1970, got {quoted(timestamp)}")


_loading = threading.RLock()


@cache
def _load() -> _Codec:
    # The codec's packages import each other: a second thread would get unfinished modules.
    with _loading:
        return _import_codec()


@cache  # a thread that waited for the lock finds it loaded
def _import_codec() -> _Codec:
    from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
    from aiokafka.record._crecords import (  # type: ignore[import-untyped]
        DefaultRecordBatch,
        DefaultRecordBatchBuilder,
        crc32c_cython,
    )
    from cramjam import DecompressionError

    # Errors of the codec and of the decompressors under it for bytes that make no sense.
    damage = (
        KafkaError,
        DecompressionError,
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        OverflowError,
        IndexError,
        ValueError,
    )
    return _Codec(DefaultRecordBatchBuilder, DefaultRecordBatch, crc32c_cython, damage)


def compression_code(name: str) -> int:
    """Returns the code of a compression."""
    try:
        return COMPRESSIONS[name]
    except (KeyError, TypeError):
        raise ConfigError(
            f"compression must be one of {', '.join(COMPRESSIONS)}; got {quoted(name)}"
        ) from None


def new_builder(size: int, compression: int = 0) -> Builder:
    """Makes a builder that refuses further records once the batch would pass `size` bytes."""
    builder: Builder = _load().builder(_MAGIC, compression, 0, -1, -1, -1, size)
    return builder


def seal(
    builder: Builder, producer_id: int = -1, producer_epoch: int = -1, base_sequence: int = -1
) -> Batch:
    """Finish the batch, compress it and compute its checksum. The builder is used up.

    A batch without messages has no offsets of its own, so it is refused.
    """
    if producer_id >= 0:
        builder.set_producer_state(producer_id, producer_epoch, base_sequence)
    data = builder.build()
    max_timestamp, count = _MAX_TIMESTAMP_AND_COUNT.unpack_from(data)
    if count == 0:
        raise InvalidRequest("a batch must have at least one message")
    return Batch(
        data=data,
        count=count,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def encode(
    records: Iterable[tuple[bytes | None, bytes | None, list[Header], int]],
    *,
    compression: str = "none",
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> Batch:
    """Encodes all records, each (key, value, headers, timestamp in ms), as one batch."""
    builder = new_builder(LARGEST_BATCH, compression_code(compression))
    for index, (key, value, headers, timestamp) in enumerate(records):
        check_timestamp(timestamp)
        if builder.append(index, timestamp, key, value, headers) is None:
            raise MessageTooLarge(f"message {index} would take the batch past {LARGEST_BATCH} B")
    return seal(builder, producer_id, producer_epoch, base_sequence)


def renumbered(batch: Batch, producer_id: int, producer_epoch: int, base_sequence: int) -> Batch:
    """Copies a batch under another producer state, with a new checksum."""
    data = bytearray(batch.data)
    _PRODUCER.pack_into(data, _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    checksum = _load().checksum(data[_CHECKED_FROM:])
    _CHECKSUM.pack_into(data, _CHECKSUM_AT, checksum)
    return Batch(
        data=data,
        count=batch.count,
        max_timestamp=batch.max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def filler(count: int) -> bytes:
    """Makes a batch that occupies offsets and is never read: it claims more messages than it has.

    Logs that compare a batch with its offsets find that it fits.
    """
    data = encode([(None, b"trimmed before it was copied", [], 0)]).data
    header = read_header(data)._replace(last_offset_delta=count - 1, count=count)
    _HEADER.pack_into(data, 0, *header)
    return bytes(data)


def read_header(data: bytes | bytearray) -> BatchHeader:
    """Reads the header's fields, unchecked."""
    return BatchHeader(*_HEADER.unpack_from(data))


def read_batch(data: bytes, most: int) -> Batch:
    """Checks a batch that a client encoded, as thoroughly as its readers will, and returns it.

    Every message is decoded once: a batch that readers can't decode would stop them for good.
    `most`: the most bytes to which the batch may decompress.
    """
    if len(data) < HEADER_SIZE:
        raise InvalidRequest(
            f"a record batch must be at least {HEADER_SIZE} bytes, got {len(data)}"
        )
    header = read_header(data)
    if header.length != len(data) - 12:
        raise InvalidRequest("the body must be exactly one record batch; its length does not fit")
    if header.attributes & ~_COMPRESSION_BITS or header.count < 1:
        raise InvalidRequest(
            "the batch must hold messages, without transaction, control or append-time flags"
        )
    if header.producer_id >= 0 and (header.producer_epoch < 0 or header.base_sequence < 0):
        raise InvalidRequest("a batch with a producer id must have an epoch and a sequence")
    base = header.base_offset
    try:
        stored = StoredBatch(base, base + header.count, data)
        messages, _ = decode_sized(stored, Fence("", 0, 0), most)
    except DamagedBatch as error:
        raise InvalidRequest(f"the record batch can't be decoded: {error}") from None
    if [message.offset - base for message in messages] != list(range(header.count)):
        raise InvalidRequest("the offsets inside the batch must be 0, 1, 2, … from its base")
    for message in messages:
        check_timestamp(message.timestamp)
    return Batch(
        data=bytearray(data),
        count=header.count,
        max_timestamp=max(message.timestamp for message in messages),
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )


def set_base_offset(data: bytearray, base: int) -> None:
    """Place the batch in its log. The base offset lies outside the checksum."""
    _BASE_OFFSET.pack_into(data, 0, base)


def decode(batch: StoredBatch, fence: Fence) -> list[Message]:
    """Decodes a batch's messages; raises `DamagedBatch` if the checksum or a field is wrong."""
    return decode_sized(batch, fence)[0]


def decode_sized(
    batch: StoredBatch, fence: Fence, most: int | None = None
) -> tuple[list[Message], int]:
    """Decodes a batch's messages, and returns the decompressed size of the batch in bytes.

    A batch that decompresses to more than `most` bytes, or than any batch may, is damaged too: that
    is found out before it takes the memory.
    """
    codec = _load()
    data = batch.data
    try:
        if len(data) < HEADER_SIZE:
            raise _damaged(batch, fence, f"{len(data)} bytes are less than a header")
        header = read_header(data)
        if header.magic != _MAGIC or header.length != len(data) - 12:
            raise _damaged(batch, fence, "its header does not fit its length")
        if header.base_offset != batch.base or header.count != batch.next - batch.base:
            raise _damaged(batch, fence, "its offsets are not those it was stored under")
        reader, size = _reader(codec, header, data, most)
        messages = [
            Message(
                fence,
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                # The codec makes a list per record; millions of them would keep the collector busy.
                tuple(headers) if (headers := record.headers) else (),
            )
            for record in reader
        ]
        return messages, size
    except codec.damage as error:
        raise _damaged(batch, fence, str(error) or type(error).__name__) from error
    except MemoryError:
        # The codec allocates as much memory as a length demands, even if that is near 2^63.
        if lengths_fit(
            _plain(read_header(data), data, most)[HEADER_SIZE:], batch.next - batch.base
        ):
            raise
        raise _damaged(batch, fence, "a length in it goes past its end") from None


def _reader(
    codec: _Codec, header: BatchHeader, data: bytes | bytearray, most: int | None
) -> tuple[Any, int]:
    """The codec's reader of the batch, whose checksum is right, and the decompressed size.

    The reader may look for the end of a number beyond the end of its buffer. So either the buffer
    has a few more bytes, or, where a copy would cost more, all numbers were found to end before.
    """
    if header.attributes & _COMPRESSION_BITS:
        if not codec.reader(data).validate_crc():
            raise ValueError("the checksum is wrong")
        plain = _plain(header, data, most)
        return codec.reader(plain), len(plain)
    large = len(data) > header.count * _LARGE_RECORD
    reader = codec.reader(data if large else _plain(header, data, most))
    if not reader.validate_crc():
        raise ValueError("the checksum is wrong")
    if large and not lengths_fit(memoryview(data)[HEADER_SIZE:], header.count):
        raise ValueError("a length in it goes past its end")
    return reader, len(data)


def _plain(header: BatchHeader, data: bytes | bytearray, most: int | None) -> memoryview:
    """The batch with its records decompressed, and room behind it that the reader may read."""
    compression = header.attributes & _COMPRESSION_BITS
    if not compression:
        return memoryview(b"".join((data, _BEHIND)))[: len(data)]
    if header.count > MOST_PACKED_MESSAGES:
        raise ValueError(f"a compressed batch must have at most {MOST_PACKED_MESSAGES} messages")
    bound = MOST_UNPACKED if most is None else min(most, MOST_UNPACKED)
    packed = memoryview(data)[HEADER_SIZE:]
    unpacked = unpack(compression, packed, bound, (HEADER_SIZE, len(_BEHIND)))
    attributes = header.attributes & ~_COMPRESSION_BITS
    _HEADER.pack_into(unpacked.buffer, 0, *header._replace(attributes=attributes))
    return memoryview(unpacked.buffer)[: HEADER_SIZE + unpacked.size]


def _damaged(batch: StoredBatch, fence: Fence, why: str) -> DamagedBatch:
    return DamagedBatch(fence.topic, fence.partition, batch.base, batch.next, why)
