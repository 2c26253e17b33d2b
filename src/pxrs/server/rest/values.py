"""Values in requests. Bytes in JSON are text where they are UTF-8, else base64 (RFC 4648)."""

from __future__ import annotations

import base64
import binascii

from pxrs.errors import InvalidRequest, quoted


def bytes_of(name: str, text: str | None, coded: str | None) -> bytes | None:
    """The bytes that a request has in `name` or in `name_base64`."""
    if coded is None:
        return None if text is None else text.encode()
    if text is not None:
        raise InvalidRequest(f"{name} and {name}_base64 must not both be given")
    return from_base64(f"{name}_base64", coded)


def from_base64(name: str, text: str) -> bytes:
    """The bytes; raises `InvalidRequest` with the field's name."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{name} must be base64 (RFC 4648, padded)") from None


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def text_of(data: str | bytes | None) -> tuple[str | None, str | None]:
    """Data as text, or in base64: one of the two is None."""
    if data is None or isinstance(data, str):
        return data, None
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return None, to_base64(data)


def partition_of(text: str) -> int:
    """The number of a partition in a path or in the name of a field."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidRequest(f"a partition must be a number, got {quoted(text)}")
    return int(text)
