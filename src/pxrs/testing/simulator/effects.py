"""What transactions have left behind: one message in another topic for each one they handled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pxrs.log.batches import decode, set_base_offset
from pxrs.testing.simulator.account import Broken, Delivery
from pxrs.types import Append, Fence, Message, StoredBatch

# Where the effects go. The members read topics that begin with another letter.
OUTPUT = "effects"


class Effect(NamedTuple):
    """A transaction has handled this offset of a partition, as it came after so many seeks."""

    transaction: str
    topic_id: str
    partition: int
    segment: int
    offset: int
    key: bytes

    def encode(self) -> bytes:
        """For the value of a message; its key is the effect's."""
        return " ".join(map(str, self[:5])).encode()


def effect_of(transaction: str, message: Message, delivery: Delivery) -> Effect:
    """What a transaction does about a message."""
    where = delivery.account.topic_id, message.partition
    return Effect(transaction, *where, delivery.segment, message.offset, message.key)


def effects_in(appends: Iterable[Append]) -> list[Effect]:
    """The effects in what was appended."""
    found = []
    for _, batch in appends:
        data = bytearray(batch.data)
        set_base_offset(data, 0)
        for message in decode(StoredBatch(0, batch.count, bytes(data)), Fence(OUTPUT, 0, 0)):
            transaction, topic_id, *numbers = message.value.decode().split()
            partition, segment, offset = map(int, numbers)
            found.append(Effect(transaction, topic_id, partition, segment, offset, message.key))
    return found


class Told:
    """What callers were told of their transactions, and whether it was so."""

    def __init__(self) -> None:
        self._applied: set[str] = set()
        self._failed: set[str] = set()

    def applied(self, transactions: Iterable[str]) -> None:
        """They are in the store now."""
        for transaction in transactions:
            if transaction in self._failed:
                raise Broken(
                    f"{transaction} was committed after its caller was told that it was not"
                )
            self._applied.add(transaction)

    def committed(self, transaction: str) -> None:
        """Its block was left without an error."""
        if transaction not in self._applied:
            raise Broken(f"{transaction} was told to be committed, and left no effect")

    def failed(self, transaction: str, why: str) -> None:
        """It raised something that says that nothing was done."""
        if transaction in self._applied:
            raise Broken(f"{transaction} was committed, and its caller was told {why}")
        self._failed.add(transaction)
