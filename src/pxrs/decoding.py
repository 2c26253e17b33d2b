"""From stored batches, or rows of a source, to messages: the codec, then the caller's serdes."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import Any

from pxrs.codec.batches import MAX_TIMESTAMP, decode, decode_sized
from pxrs.errors import OffsetOutOfRange
from pxrs.serde import Serde, check_serde
from pxrs.stores.api import LogStore
from pxrs.types import Fence, LogPartition, Message, StoredBatch, StoredRows

_OFFSET = attrgetter("offset")


class Decoder:
    """Decodes batches, and keys and values if there are serdes for them."""

    def __init__(self, key_serde: Serde | None = None, value_serde: Serde | None = None) -> None:
        check_serde(key_serde, "key_serde")
        check_serde(value_serde, "serde")
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._plain = key_serde is None and value_serde is None

    def decode(self, batch: StoredBatch | StoredRows, fence: Fence) -> list[Message]:
        """All messages of the batch; `DamagedBatch` if it is not whole."""
        messages = messages_of(batch, fence)
        return messages if self._plain else [self.deserialize(message) for message in messages]

    def offset_at(
        self, log: LogStore, where: LogPartition, fence: Fence, timestamp: int
    ) -> int | None:
        """Offset of the first message of `timestamp` (ms) or later; None if there is none."""
        while True:
            base = log.batch_at(where, max(0, min(timestamp, MAX_TIMESTAMP)))
            if base is None or timestamp > MAX_TIMESTAMP:
                return None
            try:
                batches = log.fetch(where, base, 1).batches
            except OffsetOutOfRange:
                # Retention has just removed it: look again.
                continue
            if not batches or isinstance(batch := batches[0], StoredRows):
                # A source knows its rows one by one. This one may lie in another partition.
                return base
            return next(
                message.offset for message in decode(batch, fence) if message.timestamp >= timestamp
            )

    def deserialize_into(self, found: list[Message], messages: list[Message]) -> None:
        """Add the messages; those before one that can't be decoded are added."""
        if self._plain:
            found += messages
            return
        for message in messages:
            found.append(self.deserialize(message))

    def deserialize(self, message: Message) -> Message:
        """The message with its key and value as the serdes make them.

        What they raise comes with a note that names the message.
        """
        if self._plain:
            return message
        try:
            return Message(
                message.fence,
                message.offset,
                message.timestamp,
                _decoded(self._key_serde, message.key),
                _decoded(self._value_serde, message.value),
                message.headers,
            )
        except Exception as error:
            error.add_note(
                f"while decoding offset {message.offset} of {message.topic!r} partition "
                f"{message.partition}; to skip it, read from offset {message.offset + 1}"
            )
            raise


def messages_of(batch: StoredBatch | StoredRows, fence: Fence) -> list[Message]:
    """All messages of the batch, before any serde; `DamagedBatch` if it is not whole."""
    return sized_messages_of(batch, fence)[0]


def sized_messages_of(batch: StoredBatch | StoredRows, fence: Fence) -> tuple[list[Message], int]:
    """All messages of the batch, and about how many bytes they take, decompressed."""
    if isinstance(batch, StoredRows):
        return [Message(fence, *row) for row in batch.rows], batch.size
    return decode_sized(batch, fence)


def has_messages(batch: StoredBatch | StoredRows) -> bool:
    """Whether there are any: a source may have none for a partition for a while."""
    return not isinstance(batch, StoredRows) or bool(batch.rows)


def cut(messages: list[Message], offset: int) -> list[Message]:
    """The messages from `offset` on."""
    if not messages or offset <= messages[0].offset:
        return messages
    return messages[_place_of(messages, offset) :]


def _place_of(messages: list[Message], offset: int) -> int:
    """Returns the index of the first message at `offset` or later."""
    dense = offset - messages[0].offset
    if dense < len(messages) and messages[dense].offset == offset:
        return dense
    return bisect_left(messages, offset, key=_OFFSET)


def _decoded(serde: Serde | None, data: Any) -> Any:
    return data if serde is None or data is None else serde.decode(data)
