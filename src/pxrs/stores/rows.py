"""Shared by engines that keep tables: rows of items and batches, versions of records."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    Queue,
    QueueStats,
    StoredBatch,
    StoredItem,
)

READY, DELAYED, HELD, WAITING, DEAD = range(5)
# By number.
STATES = (
    ItemState.READY,
    ItemState.DELAYED,
    ItemState.HELD,
    ItemState.WAITING,
    ItemState.DEAD,
)


def numbers_of(states: Sequence[ItemState]) -> list[int]:
    """Returns the numbers by which these states are stored, each once."""
    return sorted({STATES.index(state) for state in states})


def possible(ids: Sequence[int], end: int = 2**63 - 1) -> list[int]:
    """Returns the ids that an item can have, each once."""
    return [number for number in dict.fromkeys(ids) if 0 < number < end]


def counted(
    counts: Sequence[int], *, overdue: int, oldest: int | None, put: int, done: int
) -> QueueStats:
    """Builds stats from the numbers of items by state.

    Delayed items whose time has come, `overdue`, are ready although not yet marked so.
    """
    ready, delayed, held, waiting, dead = counts
    return QueueStats(
        ready=ready + overdue,
        delayed=delayed - overdue,
        held=held,
        waiting=waiting,
        dead=dead,
        oldest_ms=oldest,
        put=put,
        done=done,
    )


class QueueRow(NamedTuple):
    """A queue and its number in the store."""

    id: int
    info: Queue


class Candidate(NamedTuple):
    """An item that may be handed out."""

    id: int
    deliveries: int
    suspect: bool
    rank: int
    key: str | None
    put_ms: int
    error: str | None
    body: bytes | None
    lane: str | None

    def delivery(self, queue: str, number: int, body: bytes) -> Delivery:
        """The item as it is handed out, with one more delivery than before."""
        return Delivery(
            held=Held(queue, number, self.deliveries + 1),
            body=body,
            key=self.key,
            priority=-self.rank,
            put_ms=self.put_ms,
            error=self.error or "",
        )


def by_queue(held: Iterable[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for each in held:
        found.setdefault(each.queue, []).append(each)
    return found


def stored(columns: Sequence[Any], holder: Holder | None, now_ms: int) -> StoredItem:
    """Builds an item from its number, state, body, key, rank, deliveries, times of its put and last
    take, when it shows, time of its death, and error."""
    number, state, body, key, rank, deliveries, put_ms, taken, shows, dead, error = columns
    is_later = shows is not None and shows > now_ms
    if state == DELAYED and not is_later:
        state = READY
    return StoredItem(
        id=number,
        state=STATES[state],
        body=body,
        key=key,
        priority=-rank,
        deliveries=deliveries,
        put_ms=put_ms,
        taken_ms=taken,
        visible_ms=shows if is_later and state in (DELAYED, WAITING) else None,
        dead_ms=dead,
        error=error or "",
        holder=holder,
    )


def storable(number: int) -> int:
    """The number, or the nearest one that a column can hold: no offset or time lies beyond."""
    return max(-(2**63), min(number, 2**63 - 1))


def up_to_a_hole(rows: Sequence[tuple[int, int, bytes]]) -> list[StoredBatch]:
    """The batches up to the first gap. Those behind a missing one are left to the next fetch."""
    batches = [StoredBatch(*rows[0])]
    for row in rows[1:]:
        if row[0] != batches[-1].next:
            break
        batches.append(StoredBatch(*row))
    return batches


def first_kept(
    rows: Sequence[tuple[int, int, int]], before_timestamp: int | None, max_bytes: int | None
) -> int:
    """The base of the first batch that stays; the newest one always does.

    `rows` are base, newest timestamp and size of all batches, in order.
    """
    total = sum(size for _, _, size in rows)
    for base, newest, size in rows:
        old = before_timestamp is not None and newest < before_timestamp
        over = max_bytes is not None and total > max_bytes
        if not old and not over:
            return base
        total -= size
    return rows[-1][0] if rows else 0


# Versions of records, for engines that keep their counter in a row, that are not used twice even
# after a crash of the server. A crash or a fail-over may lose the last commits, and the counter
# with them. The counter would then give the numbers of lost commits again, and an owner that was
# frozen would take its successor's record for its own. So the length of each step of the counter is
# random: the same number comes again in one of a million such cases.

CHANCE_BITS = 20


def next_step() -> int:
    """Returns by how much one commit raises a counter of versions."""
    return 1 + secrets.randbits(CHANCE_BITS)
