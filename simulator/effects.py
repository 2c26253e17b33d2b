"""What transactions have left behind: a message or an item for each message they handled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pxrs.codec.batches import decode, set_base_offset
from pxrs.queues.item import decode_body
from pxrs.types import Append, Fence, Message, QueueChange, StoredBatch
from simulator.account import Broken, Delivery

# The topic and the queue where the effects go. The members read other topics.
OUTPUT = "effects"
# A queue of which transactions take something, besides their messages.
TASKS = "tasks"


class Landed(NamedTuple):
    """What a transaction has done beside its writes, in the same commit."""

    appends: Sequence[Append]
    change: QueueChange | None


class Effect(NamedTuple):
    """A transaction has handled this offset of a partition, as it came after so many seeks."""

    transaction: str
    topic_id: str
    partition: int
    segment: int
    offset: int
    key: bytes

    def encode(self) -> bytes:
        """For the value of a message or an item."""
        return " ".join([*map(str, self[:5]), self.key.hex()]).encode()

    @classmethod
    def decode(cls, value: bytes) -> Effect:
        """From such a value."""
        transaction, topic_id, *numbers, key = value.decode().split()
        partition, segment, offset = map(int, numbers)
        return cls(transaction, topic_id, partition, segment, offset, bytes.fromhex(key))


def effect_of(transaction: str, message: Message, delivery: Delivery) -> Effect:
    """What a transaction does about a message."""
    where = delivery.account.topic_id, message.partition
    return Effect(transaction, *where, delivery.segment, message.offset, message.key)


def effects_in(landed: Landed) -> list[Effect]:
    """The effects in what was appended and put."""
    values = []
    for _, batch in landed.appends:
        data = bytearray(batch.data)
        set_base_offset(data, 0)
        messages = decode(StoredBatch(0, batch.count, bytes(data)), Fence(OUTPUT, 0, 0))
        values += [message.value for message in messages]
    if landed.change is not None:
        values += [decode_body(item.body)[0] for item in landed.change.put]
    return [Effect.decode(value) for value in values]


class Told:
    """What callers were told of their transactions, and whether it was so."""

    def __init__(self) -> None:
        self._applied: set[str] = set()
        self._failed: set[str] = set()
        self._took: dict[str, set[int]] = {}
        self._removed: set[int] = set()

    def took(self, transaction: str, task: int) -> None:
        """It was given this task; whether it has done it, its commit tells."""
        self._took.setdefault(transaction, set()).add(task)

    def removed(self, transactions: Iterable[str], tasks: set[int]) -> None:
        """A commit has removed these tasks: those that its transaction took, and nobody before."""
        taken = {task for each in transactions for task in self._took.get(each, ())}
        if tasks != taken:
            raise Broken(
                f"{sorted(transactions)} took tasks {sorted(taken)}, removed {sorted(tasks)}"
            )
        if twice := tasks & self._removed:
            raise Broken(f"{sorted(transactions)} removed tasks {sorted(twice)} once more")
        self._removed |= tasks

    def tasks_left(self, tasks: set[int], ever: int) -> None:
        """These are in the queue at the end, of so many that ever were."""
        if tasks & self._removed or len(tasks) + len(self._removed) != ever:
            raise Broken(f"{ever} tasks were put, {len(self._removed)} removed, {len(tasks)} left")

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
