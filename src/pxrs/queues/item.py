"""A queue's item as users see it, and the bytes it is stored as.

The first byte says what follows: `t` text, `b` bytes, `h` a header block and then one of the
two. An operator who looks into the table can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import msgspec

from pxrs.errors import InvalidRequest
from pxrs.producing.records import checked_headers, encoded
from pxrs.serde import Serde, to_bytes
from pxrs.types import Delivery, Header, Value

_HEADERS = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]])


class Item(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """An item in hand. `value` is the str or bytes that was put, or what a serde made of it.

    `deliveries` counts this one; `error` is how the one before ended.
    """

    queue: str
    id: int
    value: Value
    key: str | None
    priority: int
    headers: tuple[Header, ...]
    deliveries: int
    put_ms: int
    error: str


class PutItem(msgspec.Struct, frozen=True, gc=False):
    """An item that a transaction puts, if it commits."""

    # Shared with the other items of the transaction, which fills it when it commits.
    _ids: list[int | None]
    _index: int

    @property
    def id(self) -> int | None:
        """The item's id, once its transaction has committed; `InvalidRequest` before that.

        None if no item was put, because it is a duplicate (`dedupe=`). Also None if the store did
        not answer the commit and only confirmed it later: then the item is in the queue, but its id
        was lost with the answer. In a transaction of the caller's (`join=`) it is known when the
        block is left, and valid if the caller commits.
        """
        if not self._ids:
            raise InvalidRequest("the item has no id yet: its transaction has not committed")
        return self._ids[self._index]


def encode_body(value: Any, headers: Sequence[Header] | None, serde: Serde | None) -> bytes:
    """Encodes a value and its headers as an item's body."""
    if serde is not None:
        body = b"b" + encoded(serde, value, "value")
    elif type(value) is bytes:
        body = b"b" + value
    elif isinstance(value, str):
        body = b"t" + to_bytes(value, "value")
    else:
        body = b"b" + to_bytes(value, "value")
    if not headers:
        return body
    block = msgspec.msgpack.encode(checked_headers(headers))
    return b"h" + len(block).to_bytes(4, "big") + block + body


def decode_body(body: bytes, serde: Serde | None = None) -> tuple[Any, tuple[Header, ...]]:
    """Decodes an item's body: the value and the headers."""
    headers: tuple[Header, ...] = ()
    kind, rest = body[:1], body[1:]
    if kind == b"h":
        size = 4 + int.from_bytes(rest[:4], "big")
        headers = tuple(_HEADERS.decode(rest[4:size]))
        kind, rest = rest[size : size + 1], rest[size + 1 :]
    if serde is not None:
        return serde.decode(rest), headers
    if kind == b"t":
        return rest.decode(), headers
    if kind == b"b":
        return rest, headers
    raise InvalidRequest(
        f"the item's body begins with {kind!r}: it was not put by pxrs, or by a newer version of it"
    )


def as_item(delivery: Delivery, serde: Serde[Value] | None) -> Item[Value]:
    """Builds the `Item` that the user gets."""
    value, headers = decode_body(delivery.body, serde)
    return Item(
        queue=delivery.held.queue,
        id=delivery.held.id,
        value=value,
        key=delivery.key,
        priority=delivery.priority,
        headers=headers,
        deliveries=delivery.held.delivery,
        put_ms=delivery.put_ms,
        error=delivery.error,
    )
