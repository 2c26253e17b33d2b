"""Decompresses the records of a batch into a buffer of bounded size.

Nothing here trusts a compressed stream: the buffer is never larger than the bound, and
decompressors write into it instead of allocating the size that the stream claims. If a stream
contains its size (snappy, most of zstd) the buffer has that size; otherwise (lz4, zstd in pieces)
its blocks are counted first, which bounds the size from above; gzip is decompressed as a stream.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEAD = 16

_GZIP_PIECE = 64

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPED = range(0x184D2A50, 0x184D2A60)
_ZSTD_BLOCK = 128 * 2**10
_ZSTD_REPEATED = 1
_ZSTD_DICTIONARY = (0, 1, 2, 4)

_LZ4_MAGIC = 0x184D2204
# No block of lz4 grows by more than this factor.
_LZ4_FACTOR = 255

_INT = struct.Struct("<I")


class Unpacked(NamedTuple):
    """Decompressed records: `size` bytes of the buffer, behind the free bytes before them."""

    buffer: bytearray
    size: int


class TooLargeError(ValueError):
    """The records decompress to more than the bound."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it must decompress to at most {most} bytes")


def unpack(compression: int, packed: memoryview, most: int, room: tuple[int, int]) -> Unpacked:
    """Decompresses the records; raises `TooLargeError` if they are more than `most` bytes.

    `room` is how many free bytes the buffer has before and behind them. Bytes that make no sense
    raise `ValueError`, `zlib.error` or the decompressor's own error.
    """
    if compression == 1:
        return _unpack_gzip(packed, most, room)
    if compression == 2:
        return _unpack_snappy(packed, most, room)
    if compression == 3:
        return _unpack_frames("lz4", packed, most, room)
    if compression == 4:
        return _unpack_frames("zstd", packed, most, room)
    raise ValueError(f"compression {compression} is not known")


def _unpack_gzip(packed: memoryview, most: int, room: tuple[int, int]) -> Unpacked:
    buffer = bytearray(room[0])
    at = 0
    while at < len(packed):
        at = _unpack_member(packed, at, buffer, most + room[0])
        if len(buffer) - room[0] > most:
            raise TooLargeError(most)
    size = len(buffer) - room[0]
    buffer += bytes(room[1])
    return Unpacked(buffer, size)


def _unpack_member(packed: memoryview, at: int, buffer: bytearray, most: int) -> int:
    """Adds a member of gzip to the buffer; returns where the next one begins.

    The stream copies what it was given and did not need. So it is given pieces, each as large as
    all before it: many small members cost no more than one.
    """
    unpacking = zlib.decompressobj(wbits=31)
    piece = _GZIP_PIECE
    while not unpacking.eof and at < len(packed):
        given = packed[at : at + piece]
        at += len(given)
        piece *= 2
        # One byte more than there may be: `decompress` would take 0 for "no limit".
        buffer += unpacking.decompress(given, most + 1 - len(buffer))
        if len(buffer) > most:
            return at
    if not unpacking.eof:
        raise ValueError("the compressed records end too early")
    return at - len(unpacking.unused_data)


def _unpack_snappy(packed: memoryview, most: int, room: tuple[int, int]) -> Unpacked:
    from cramjam import snappy

    blocks = list(_snappy_blocks(packed))
    sizes = [snappy.decompress_raw_len(block) for block in blocks]
    if sum(sizes) > most:
        raise TooLargeError(most)
    buffer = bytearray(room[0] + sum(sizes) + room[1])
    whole, at = memoryview(buffer), room[0]
    for block, size in zip(blocks, sizes, strict=True):
        if size:
            snappy.decompress_raw_into(block, whole[at : at + size])
        at += size
    return Unpacked(buffer, at - room[0])


def _snappy_blocks(packed: memoryview) -> Iterator[memoryview]:
    """The blocks of Kafka's snappy framing, or the one block of plain snappy."""
    if len(packed) <= _XERIAL_HEAD or packed[: len(_XERIAL)] != _XERIAL:
        yield packed
        return
    at = _XERIAL_HEAD
    while at < len(packed):
        (length,) = struct.unpack_from(">i", packed, at)
        at += 4
        if not 0 <= length <= len(packed) - at:
            raise ValueError(f"a snappy block claims {length} bytes of {len(packed) - at}")
        yield packed[at : at + length]
        at += length


def _unpack_frames(kind: str, packed: memoryview, most: int, room: tuple[int, int]) -> Unpacked:
    """Decompresses frames of lz4 or zstd, into a buffer as large as they can become."""
    import cramjam

    bound = _lz4_bound(packed) if kind == "lz4" else _zstd_bound(packed)
    # One byte more than there may be, to notice records that are too large.
    length = min(bound, most + 1)
    buffer = bytearray(room[0] + length + room[1])
    decompress_into = cramjam.lz4.decompress_into if kind == "lz4" else cramjam.zstd.decompress_into
    try:
        size = decompress_into(packed, memoryview(buffer)[room[0] : room[0] + length])
    except cramjam.DecompressionError:
        if bound > most:
            raise TooLargeError(most) from None
        raise
    if size > most:
        raise TooLargeError(most)
    return Unpacked(buffer, size)


def _lz4_bound(packed: memoryview) -> int:
    """Returns how many bytes frames of lz4 decompress to at most, by the sizes of their blocks."""
    at, bound = 0, 0
    while at < len(packed):
        magic, flags, sizes = struct.unpack_from("<IBB", packed, at)
        if magic != _LZ4_MAGIC:
            raise ValueError("it is not an lz4 frame")
        at += 7 + (8 if flags & 0b1000 else 0) + (4 if flags & 1 else 0)
        block_most = 1 << (8 + 2 * (sizes >> 4 & 0b111))
        checksum = 4 if flags & 0b10000 else 0
        while (size := _INT.unpack_from(packed, at)[0]) != 0:
            length = size & 0x7FFFFFFF
            bound += min(block_most, length * _LZ4_FACTOR)
            at += 4 + length + checksum
        at += 4 + (4 if flags & 0b100 else 0)
    return bound


def _zstd_bound(packed: memoryview) -> int:
    """Returns how many bytes frames of zstd decompress to at most.

    A frame that contains its size can't become larger: the decompressor refuses that.
    """
    at, bound = 0, 0
    while at < len(packed):
        (magic,) = _INT.unpack_from(packed, at)
        if magic in _ZSTD_SKIPPED:
            at += 8 + int(_INT.unpack_from(packed, at + 4)[0])
            continue
        if magic != _ZSTD_MAGIC:
            raise ValueError("it is not a zstd frame")
        flags = packed[at + 4]
        told, at = _zstd_told(packed, at + 4)
        counted, at = _zstd_counted(packed, at)
        bound += counted if told is None else min(told, counted)
        at += 4 if flags & 0b100 else 0
    return bound


def _zstd_told(packed: memoryview, at: int) -> tuple[int | None, int]:
    """The size in the header of a frame, if it has one, and where its first block begins."""
    flags = packed[at]
    one_segment = bool(flags & 0b100000)
    at += 1 + (not one_segment) + _ZSTD_DICTIONARY[flags & 0b11]
    width = (1 if one_segment else 0, 2, 4, 8)[flags >> 6]
    told = packed[at : at + width]
    if len(told) < width:
        raise ValueError("a zstd frame ends in its header")
    if width == 0:
        return None, at
    return int.from_bytes(told, "little") + (256 if width == 2 else 0), at + width


def _zstd_counted(packed: memoryview, at: int) -> tuple[int, int]:
    """How many bytes the blocks of a frame decompress to at most, and where they end."""
    counted, last = 0, False
    while not last:
        if at + 3 > len(packed):
            raise ValueError("a zstd frame ends before its last block")
        head = packed[at] | packed[at + 1] << 8 | packed[at + 2] << 16
        last, kind, size = bool(head & 1), head >> 1 & 0b11, head >> 3
        counted += size if kind <= _ZSTD_REPEATED else _ZSTD_BLOCK
        at += 3 + (1 if kind == _ZSTD_REPEATED else size)
    return counted, at
