"""Items of work queues as rows: what the engines that keep tables have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pxrs.types import Holder, ItemState, QueueStats, StoredItem

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
    """How these states are written, each once."""
    return sorted({STATES.index(state) for state in states})


def possible(ids: Sequence[int], end: int = 2**63 - 1) -> list[int]:
    """Those that an item can have, each once."""
    return [number for number in dict.fromkeys(ids) if 0 < number < end]


def counted(
    counts: Sequence[int], *, overdue: int, oldest: int | None, put: int, done: int
) -> QueueStats:
    """From the numbers of items by state. Delayed items whose time has come, `overdue`, are ready:
    nobody has noted it yet."""
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


def stored(columns: Sequence[Any], holder: Holder | None, now_ms: int) -> StoredItem:
    """From an item's number, state, body, key, rank, deliveries, times of its put and last take,
    when it shows, time of its death, and error."""
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
