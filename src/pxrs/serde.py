"""How keys and values become bytes."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from pxrs.errors import InvalidRequest


class Serde(Protocol):
    """Turns objects into bytes and back. `decode(encode(x))` equals `x`."""

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes) -> Any: ...


class JSON:
    """JSON by msgspec. With a type, what is read is checked against it: `JSON(Order)`."""

    def __init__(self, type: Any = Any) -> None:  # noqa: A002 - the natural name for a reader
        self.encode = msgspec.json.Encoder().encode
        self.decode = msgspec.json.Decoder(type).decode


def check_serde(serde: object, name: str) -> None:
    """Refuse what can't be one, before the first message meets it."""
    verbs = (getattr(serde, verb, None) for verb in ("encode", "decode"))
    if serde is not None and not all(callable(verb) for verb in verbs):
        raise InvalidRequest(
            f"{name}={serde!r}; an object with encode and decode is needed, such as pxrs.JSON()"
        )


def to_bytes(value: object, what: str) -> bytes:
    """Bytes as they are and text as UTF-8; anything else needs a serde."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a {what} that is not valid text ({error}); pass bytes") from None
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise InvalidRequest(
        f"a {what} of type {type(value).__name__}; pass bytes or str, or set a serde such as JSON()"
    )
