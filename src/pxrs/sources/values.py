"""Values of strangers as the bytes of a message."""

from __future__ import annotations

import msgspec


def as_bytes(value: object) -> bytes | None:
    """Text and bytes as they are, numbers as their digits, anything else as JSON."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, int):
        return str(int(value)).encode()
    return as_json(value)


def as_json(value: object) -> bytes:
    """The value as JSON; what JSON does not know as text."""
    return msgspec.json.encode(value, enc_hook=str)
