"""Serdes: keys and values to bytes and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

import msgspec

from pxrs.errors import InvalidRequest, quoted
from pxrs.types import Value

if TYPE_CHECKING:
    from types import UnionType
    from typing import _SpecialForm

_CODERS = ("encode", "decode")


class Serde(Protocol[Value]):
    """Turns objects into bytes and back. `decode(encode(x))` equals `x`.

    Type checkers know by it what values are: a consumer with a `Serde[Order]` has `Message[Order]`.
    """

    def encode(self, value: Value, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Value: ...


class JSON(Generic[Value]):
    """JSON by msgspec. With a type, decoded values are checked against it: `JSON(Order)`."""

    encode: Callable[[Value], bytes]
    decode: Callable[[bytes], Value]

    @overload
    def __init__(self: JSON[Any]) -> None: ...
    @overload
    def __init__(self, type: type[Value]) -> None: ...
    @overload
    def __init__(self: JSON[Any], type: UnionType | _SpecialForm) -> None: ...
    def __init__(self, type: Any = Any) -> None:  # noqa: A002 - the natural name for a reader
        self._type = type
        self._make_coders()

    def _make_coders(self) -> None:
        self.encode = msgspec.json.Encoder().encode
        self.decode = msgspec.json.Decoder(self._type).decode

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes: msgspec's coders can't be sent, and are made anew there."""
        return {name: value for name, value in vars(self).items() if name not in _CODERS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_coders()


def check_serde(serde: object, name: str) -> None:
    """Rejects a value that is no serde, before the first message meets it."""
    verbs = (getattr(serde, verb, None) for verb in _CODERS)
    if serde is not None and not all(callable(verb) for verb in verbs):
        raise InvalidRequest(
            f"{name} must have encode and decode, as pxrs.JSON() has, got {quoted(serde)}"
        )


def to_bytes(value: object, what: str) -> bytes:
    """Bytes as they are and text as UTF-8; anything else needs a serde."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{what} is not valid text ({error}); pass bytes") from None
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise InvalidRequest(
        f"{what} must be bytes or str, got {type(value).__name__}; set a serde such as pxrs.JSON()"
    )
