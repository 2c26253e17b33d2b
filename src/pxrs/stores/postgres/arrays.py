"""Lists whose elements are known to be of one type, as parameters of statements.

The driver looks at every element of a list to find its type, and encodes each by itself. To build
an array of these takes a third of that time, and copies large elements once less. On a connection
without `teach`, which may be a caller's, the driver sends them as the lists that they are.
"""

from __future__ import annotations

from itertools import chain
from struct import Struct, error, pack
from typing import Any

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

# By type: its oid, and that of its arrays.
_INT8, _INT8_ARRAY = 20, 1016
_TEXT, _TEXT_ARRAY = 25, 1009
_BYTEA, _BYTEA_ARRAY = 17, 1001
# Number of dimensions, whether there are NULLs, type; length and first index of the one dimension.
_HEAD = Struct("!iiIii")
_LENGTH = Struct("!i")


class Int8s(list[int]):
    __slots__ = ()


class Texts(list[str]):
    __slots__ = ()


class Byteas(list[bytes]):
    __slots__ = ()


def teach(connection: psycopg.Connection[Any]) -> None:
    """Let a connection of pxrs send these lists as arrays that are built here."""
    adapters = connection.adapters
    adapters.register_dumper(Int8s, _Int8sDumper)
    adapters.register_dumper(Texts, _TextsDumper)
    adapters.register_dumper(Byteas, _ByteasDumper)


class _Int8sDumper(Dumper):
    format = Format.BINARY
    oid = _INT8_ARRAY

    def dump(self, obj: Int8s) -> Buffer:
        elements = chain.from_iterable((8, number) for number in obj)
        try:
            return _head(_INT8, obj) + pack("!" + "iq" * len(obj), *elements)
        except error:
            raise psycopg.errors.NumericValueOutOfRange("bigint out of range") from None


class _TextsDumper(Dumper):
    format = Format.BINARY
    oid = _TEXT_ARRAY

    def __init__(self, cls: type, context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        encoding = None if self.connection is None else self.connection.info.encoding
        # "ascii" means that the database does not care.
        self._encoding = "utf-8" if encoding in (None, "ascii") else encoding

    def dump(self, obj: Texts) -> Buffer:
        return _joined(_TEXT, [text.encode(self._encoding) for text in obj])


class _ByteasDumper(Dumper):
    format = Format.BINARY
    oid = _BYTEA_ARRAY

    def dump(self, obj: Byteas) -> Buffer:
        return _joined(_BYTEA, obj)


def _joined(kind: int, elements: list[bytes]) -> bytes:
    length = _LENGTH.pack
    parts = [_head(kind, elements)]
    for element in elements:
        parts += (length(len(element)), element)
    return b"".join(parts)


def _head(kind: int, elements: list[Any]) -> bytes:
    return _HEAD.pack(1, 0, kind, len(elements), 1)
