"""Finds out what happened: the ledger of handled messages, its check, and the group's state.

The producer numbers its messages 0, 1, 2 … and deals them out to its keys in turn. A consumer
enters each message into the ledger: where it stood, its number, and the epoch it was handled
under. The ledger is a table of the store, written in the transaction that commits the checkpoint.
A store behind nodes has no tables for its clients: there it is a topic, in the same transaction.
Where the store can't do that, each consumer writes a file of its own before it commits: at least
once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from pxrs.app import Pxrs
from pxrs.consuming.consumer import Consumer
from pxrs.core.records import claims_prefix, head_key, members_prefix
from pxrs.errors import Fenced, GroupNotFound, InvalidRequest, NotAtomic
from pxrs.groups.info import GroupPartition
from pxrs.types import Topic

KEYS = 64


class Entry(NamedTuple):
    """A line of the ledger. `turn` counts the entries of its consumer, from 0."""

    partition: int
    offset: int
    number: int
    epoch: int
    turn: int


# The ledger


class Table:
    """A ledger in the store's own database. It holds integers only: the same SQL everywhere."""

    once = True

    def __init__(self, px: Pxrs, name: str) -> None:
        self._px = px
        self._name = name
        self.address = f"table:{name}"

    def create(self) -> None:
        columns = ", ".join(f"{field}_ BIGINT" for field in Entry._fields)
        self._execute(f"CREATE TABLE {self._name} ({columns})")

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        """Enters a batch and commits its checkpoint; false if the store refused that."""
        rows = ",".join(f"({','.join(map(str, entry))})" for entry in entries)
        try:
            with consumer.transaction() as tx:
                tx.execute(f"INSERT INTO {self._name} VALUES {rows}")
        except Fenced:
            return False
        return True

    def entries(self) -> list[Entry]:
        with self._px.stores.atomic() as atomic:
            rows = atomic.connection.execute(f"SELECT * FROM {self._name}").fetchall()
        return [Entry(*row) for row in rows]

    def remove(self) -> None:
        self._execute(f"DROP TABLE {self._name}")

    def _execute(self, statement: str) -> None:
        done = False
        try:
            with self._px.stores.atomic() as atomic:
                if atomic.connection is None:
                    raise NotAtomic("the store has no tables")
                atomic.connection.execute(statement)
                done = True
        except InvalidRequest:
            # MariaDB commits such statements by itself, and the block complains about that.
            if not done:
                raise


class Log:
    """A ledger in a topic: a message for each batch."""

    once = True

    def __init__(self, px: Pxrs, topic: str) -> None:
        self._px = px
        self._topic = topic
        self.address = f"topic:{topic}"

    def create(self) -> None:
        with self._px.stores.atomic():
            """Refused with `NotAtomic` where messages and checkpoints lie in different places."""
        self._px.topics.create(self._topic, partitions=1)

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        """Enters a batch and commits its checkpoint; false if the store refused that."""
        # Again, if it was not committed because a node has died.
        entry = msgspec.json.encode(entries)
        try:
            consumer.run_transaction(lambda tx: tx.send(self._topic, entry))
        except Fenced:
            return False
        return True

    def entries(self) -> list[Entry]:
        reader = self._px.reader(self._topic)
        bounds = reader.bounds(0)
        found: list[Entry] = []
        offset = bounds.start
        while offset < bounds.end:
            for message in reader.read(0, offset, 100):
                found += msgspec.json.decode(message.value or b"[]", type=list[Entry])
                offset = message.offset + 1
        return found

    def remove(self) -> None:
        self._px.topics.delete(self._topic)


class Files:
    """A ledger of one file per consumer."""

    once = False

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.address = f"files:{folder}"

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        """Enters a batch and commits its checkpoint; false if the store refused that."""
        text = "".join(f"{','.join(map(str, entry))}\n" for entry in entries)
        with open(self._folder / f"{os.getpid()}.ledger", "ab", buffering=0) as file:
            # One write, so that a kill leaves a batch whole or not at all.
            file.write(text.encode())
        try:
            consumer.commit()
        except Fenced:
            return False
        return True

    def entries(self) -> list[Entry]:
        return [
            Entry(*map(int, line.split(",")))
            for path in sorted(self._folder.glob("*.ledger"))
            for line in path.read_text().splitlines()
        ]

    def remove(self) -> None:
        """Does nothing: the files go with their folder."""


Ledger = Table | Log | Files


@contextmanager
def new_ledger(px: Pxrs, name: str, folder: str, *, transactions: bool) -> Iterator[Ledger]:
    """Creates a ledger for the block: in the store, if its transactions can hold one."""
    ledger: Ledger = Files(folder)
    if transactions:
        for found in (Table(px, name), Log(px, f"{name}-ledger")):
            with suppress(NotAtomic):
                found.create()
                ledger = found
                break
    try:
        yield ledger
    finally:
        ledger.remove()


def open_ledger(px: Pxrs, address: str) -> Ledger:
    """Opens the ledger that another process has created."""
    kind, _, where = address.partition(":")
    if kind == "table":
        return Table(px, where)
    return Log(px, where) if kind == "topic" else Files(where)


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the ledger, and the number of entries that are wrong in each way."""

    entries: int
    lost: int
    repeated: int
    unknown: int
    out_of_order: int


def check(entries: Iterable[Entry], acknowledged: int, *, once: bool) -> Findings:
    """Every number below `acknowledged` must be there, and in order for its key.

    The order is that of the effects: a partition's epochs follow each other, and under an epoch
    its owner counts. A key's numbers are `KEYS` apart, so the next one is known. Where a message
    may be handled again (not `once`) going back is allowed, leaving one out is not.
    """
    found = list(entries)
    numbers = {entry.number for entry in found}
    known = sum(0 <= number < acknowledged for number in numbers)
    by_key: defaultdict[int, list[int]] = defaultdict(list)
    for entry in sorted(found, key=attrgetter("epoch", "turn")):
        by_key[entry.number % KEYS].append(entry.number)
    return Findings(
        entries=len(found),
        lost=acknowledged - known,
        repeated=len(found) - len(numbers),
        unknown=len(numbers) - known,
        out_of_order=sum(
            _out_of_order(numbers, first, once=once) for first, numbers in by_key.items()
        ),
    )


def _out_of_order(numbers: list[int], first: int, *, once: bool) -> int:
    due, wrong = first, 0
    for number in numbers:
        if number > due or (number < due and once):
            wrong += 1
        due = max(due, number + KEYS)
    return wrong


# The group


class Picture(NamedTuple):
    """The group at one moment."""

    state: str
    members: frozenset[str]
    partitions: tuple[GroupPartition, ...]

    @property
    def handled(self) -> int:
        return sum(part.checkpoint or 0 for part in self.partitions)

    @property
    def lag(self) -> int:
        return sum(part.lag for part in self.partitions)

    def owned_by(self, member: str) -> list[int]:
        return [part.partition for part in self.partitions if part.owner == member]


class Observer:
    """Looks at a group from outside, and counts what must never happen."""

    def __init__(self, px: Pxrs, topic: Topic, group: str) -> None:
        self._px = px
        self._group = group
        self._watch = px.stores.coord.watch(
            head_key(group), members_prefix(group), claims_prefix(group)
        )
        # Before the first member joins there is no group: nothing is owned, sent or handled.
        self._last = tuple(
            GroupPartition(
                topic=topic.name, partition=number, owner=None, epoch=0, checkpoint=None,
                start=0, end=0, lag=0, lag_seconds=None, metadata="",
            )
            for number in range(topic.partitions)
        )  # fmt: skip
        self.went_back = 0
        self.looks = 0

    def look(self) -> Picture:
        """Reads the group, and compares epochs and checkpoints with the last look."""
        try:
            info = self._px.groups.describe(self._group, lag_seconds=False)
        except GroupNotFound:
            return Picture("EMPTY", frozenset(), self._last)
        # A group that lost its only member before it claimed anything has no partitions, either.
        partitions = info.partitions or self._last
        self.looks += 1
        for part, before in zip(partitions, self._last, strict=True):
            if part.epoch < before.epoch or (part.checkpoint or 0) < (before.checkpoint or 0):
                self.went_back += 1
        self._last = partitions
        return Picture(info.state, frozenset(each.name for each in info.members), partitions)

    def wait(self, timeout: float) -> None:
        """Waits for the next change of the group, but no longer than `timeout`."""
        self._watch.wait(timeout)

    def close(self) -> None:
        self._watch.close()
