"""From stored batches to messages: the codec, then the caller's serdes."""

from __future__ import annotations

from typing import Any

from pxrs.codec.batches import MAX_TIMESTAMP, decode
from pxrs.errors import OffsetOutOfRange
from pxrs.serde import Serde, check_serde
from pxrs.stores.api import LogStore
from pxrs.types import Fence, LogPartition, Message, StoredBatch


class Decoder:
    """Decodes batches, and keys and values if there are serdes for them."""

    def __init__(self, key_serde: Serde | None = None, value_serde: Serde | None = None) -> None:
        check_serde(key_serde, "key_serde")
        check_serde(value_serde, "serde")
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._plain = key_serde is None and value_serde is None

    def decode(self, batch: StoredBatch, fence: Fence) -> list[Message]:
        """All messages of the batch; `DamagedBatch` if it is not whole."""
        messages = decode(batch, fence)
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
                batch = log.fetch(where, base, 1).batches[0]
            except OffsetOutOfRange:
                # Retention has just removed it: look again.
                continue
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


def cut(messages: list[Message], offset: int) -> list[Message]:
    """The messages from `offset` on."""
    base = messages[0].offset
    return messages[offset - base :] if offset > base else messages


def _decoded(serde: Serde | None, data: Any) -> Any:
    return data if serde is None or data is None else serde.decode(data)
