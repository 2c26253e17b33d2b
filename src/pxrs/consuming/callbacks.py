"""Calls `on_assigned`, `on_revoked` and `on_lost` of a consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pxrs.consuming.partition_table import Change, PartitionTable
from pxrs.errors import InsideTransaction, InvalidRequest, quoted
from pxrs.types import TopicPartition

Parts = set[TopicPartition]


class Callbacks:
    """The user's callbacks, called in the consuming thread between messages, and while closing.

    Their errors are raised to the caller; each change is reported once, whether they raise or not.
    `lost` comes instead of `revoked` when there was no time to ask.
    """

    __slots__ = ("assigned", "lost", "revoked")

    def __init__(
        self,
        assigned: Callable[[dict[TopicPartition, int | None]], None] | None,
        revoked: Callable[[Parts], None] | None,
        lost: Callable[[Parts], None] | None,
    ) -> None:
        for name, callback in (("assigned", assigned), ("revoked", revoked), ("lost", lost)):
            if callback is not None and not callable(callback):
                raise InvalidRequest(f"on_{name} must be a function, got {quoted(callback)}")
        self.assigned = assigned
        self.revoked = revoked
        self.lost = lost

    def tell(self, table: PartitionTable) -> None:
        """Report all changes since the last call."""
        while (change := table.next_change()) is not None:
            try:
                self._tell(change)
            finally:
                if change.kind == "leaving":
                    table.said_goodbye(change.parts)

    def tell_the_end(self, table: PartitionTable, *, alive: bool) -> None:
        """Report what was lost and what is given up now, as the consumer is about to leave."""
        kept, lost = table.forget_told()
        if not alive:
            kept, lost = set(), kept | lost
        try:
            if lost and self.lost:
                self.lost(lost)
        finally:
            if kept and self.revoked:
                self.revoked(kept)

    def _tell(self, change: Change) -> None:
        parts = set(change.parts)
        if change.kind == "assigned" and self.assigned:
            self.assigned(change.parts)
        elif change.kind == "leaving" and self.revoked:
            self.revoked(parts)
        elif change.kind == "lost" and self.lost:
            self.lost(parts)


def refuse_interrupted(*locks: Any) -> None:
    """Raise in a signal handler that has interrupted its own thread inside of these locks.

    The threads to wait for there may wait for these locks, which are freed after the handler.
    """
    if any(lock._is_owned() for lock in locks):
        raise InsideTransaction(
            "a signal handler can't close the consumer whose call it has interrupted; let it set "
            "a flag, or call consumer.wake(), and close afterwards"
        )
