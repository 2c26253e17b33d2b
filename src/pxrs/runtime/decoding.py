"""From stored batches to messages: the codec, then the caller's serdes."""

from __future__ import annotations

from typing import Any

from pxrs.log.batches import decode
from pxrs.serde import Serde
from pxrs.stores.api import LogStore
from pxrs.types import Fence, LogPartition, Message, StoredBatch


class Decoder:
    """Decodes batches, and keys and values if there are serdes for them."""

    def __init__(self, key_serde: Serde | None = None, value_serde: Serde | None = None) -> None:
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
        base = log.batch_at(where, timestamp)
        if base is None:
            return None
        for batch in log.fetch(where, base, 1).batches[:1]:
            for message in decode(batch, fence):
                if message.timestamp >= timestamp:
                    return message.offset
        return None

    def deserialize(self, message: Message) -> Message:
        """The message with its key and value as the serdes make them."""
        if self._plain:
            return message
        return Message(
            message.fence,
            message.offset,
            message.timestamp,
            _decoded(self._key_serde, message.key),
            _decoded(self._value_serde, message.value),
            message.headers,
        )


def cut(messages: list[Message], offset: int) -> list[Message]:
    """The messages from `offset` on."""
    base = messages[0].offset
    return messages[offset - base :] if offset > base else messages


def _decoded(serde: Serde | None, data: Any) -> Any:
    return data if serde is None or data is None else serde.decode(data)
