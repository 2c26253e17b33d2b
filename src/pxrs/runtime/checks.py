"""What users hand to a producer, made ready or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pxrs.errors import InvalidRequest
from pxrs.serde import Serde, to_bytes
from pxrs.types import Header

_CHUNK = 4096


def plain(value: object, what: str) -> bytes | None:
    """Bytes of what needs no serde."""
    return None if value is None else to_bytes(value, what)


def encoded(serde: Serde, value: object, what: str) -> bytes:
    """What the serde makes of it."""
    data = serde.encode(value)
    if not isinstance(data, bytes):
        raise InvalidRequest(f"the serde made a {type(data).__name__} of a {what}, not bytes")
    return data


def chunks(messages: Iterable[tuple[Any, Any]]) -> Iterable[Iterable[tuple[Any, Any]]]:
    """A list in one piece, an iterator in pieces that need not be kept in memory together."""
    if isinstance(messages, list | tuple):
        yield messages
        return
    if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"send_many takes pairs (key, value), not a {type(messages).__name__}; "
            "of a dict that would be its items()"
        )
    rest = iter(messages)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def checked_headers(headers: object) -> list[Header]:
    """The headers as the codec needs them."""
    if not isinstance(headers, list | tuple):
        raise InvalidRequest(
            f"headers are a list of pairs, a str and bytes (or None), not {type(headers).__name__}"
        )
    for header in headers:
        if (
            not isinstance(header, list | tuple)
            or len(header) != 2
            or not isinstance(header[0], str)
            or not isinstance(header[1], bytes | None)
        ):
            raise InvalidRequest(f"a header is a pair of a str and bytes (or None), not {header!r}")
        to_bytes(header[0], "header name")
    return [(name, content) for name, content in headers]
