"""What users hand to a producer, made ready or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pxrs.errors import InvalidRequest, MessageTooLarge
from pxrs.producing.buffer import RECORD_BYTES
from pxrs.serde import Serde, check_serde, to_bytes
from pxrs.types import Header

NO_HEADERS: list[Header] = []
_CHUNK = 4096


class Checks:
    """What one producer takes: what its serdes can encode, up to a size."""

    def __init__(self, most: int, key_serde: Serde | None, value_serde: Serde | None) -> None:
        check_serde(key_serde, "key_serde")
        check_serde(value_serde, "serde")
        self._most = most
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._serdes = key_serde is not None or value_serde is not None

    def ready(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[bytes | None, bytes | None]]:
        """The pairs as bytes, checked."""
        ready = []
        most, serdes = self._most, self._serdes
        for pair in pairs:
            try:
                key, value = pair
                if type(key) is str and not serdes:
                    key = key.encode()
            except UnicodeEncodeError:
                key = plain(key, "key")
            except (TypeError, ValueError):
                raise InvalidRequest(
                    f"send_many takes pairs (key, value), not {type(pair).__name__}"
                ) from None
            if type(value) is not bytes or type(key) is not bytes or serdes:
                key, value = self.encode(key, value)
                self.size(key, value, None)
            elif len(value) + len(key) > most:
                self.size(key, value, None)
            ready.append((key, value))
        return ready

    def encode(self, key: Any, value: Any) -> tuple[bytes | None, bytes | None]:
        """Key and value as bytes."""
        if self._key_serde is None or key is None:
            key = plain(key, "key")
        else:
            key = encoded(self._key_serde, key, "key")
        if self._value_serde is None:
            return key, plain(value, "value")
        return key, encoded(self._value_serde, value, "value")

    def size(
        self, key: bytes | None, value: bytes | None, headers: Sequence[Header] | None
    ) -> tuple[int, list[Header]]:
        """What the message takes in the buffer, and its headers, if it is not too large."""
        checked = checked_headers(headers) if headers else NO_HEADERS
        size = len(key or b"") + len(value or b"")
        size += sum(len(name.encode()) + len(content or b"") for name, content in checked)
        if size > self._most:
            raise MessageTooLarge(
                f"a message of {size} bytes; the limit is {self._most} "
                "(max_message_bytes of the producer)"
            )
        return size + RECORD_BYTES, checked


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
