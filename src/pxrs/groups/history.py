"""A group's history: from its records to what `explain` tells."""

from __future__ import annotations

from collections.abc import Iterable

from pxrs.core.records import Move, decode
from pxrs.groups.info import CheckpointChange, GroupReset, PartitionMove, Rebalance
from pxrs.groups.resets import Reset, write_of
from pxrs.types import Versioned


def rebalance(move: Move) -> Rebalance:
    """A generation as it was recorded."""
    return Rebalance(
        generation=move.generation,
        at_ms=move.at_ms,
        reason=move.reason,
        coordinator=move.coordinator,
        members=move.members,
        moves=tuple(
            PartitionMove(topic=topic, partition=number, before=before, after=after)
            for topic, number, before, after in move.moves
        ),
    )


def together(records: Iterable[Versioned]) -> list[GroupReset]:
    """Recorded changes of checkpoints in order of time, those made together as one."""
    written: dict[str, list[Versioned]] = {}
    for record in records:
        written.setdefault(write_of(record.key), []).append(record)
    resets = []
    for some in written.values():
        changes = [decode(record, Reset) for record in some]
        reset = GroupReset(
            at_ms=changes[0].at_ms,
            by=changes[0].by,
            why=changes[0].why,
            changes=tuple(
                CheckpointChange(
                    topic=each.topic,
                    partition=each.partition,
                    before=each.before,
                    after=each.after,
                )
                for each in changes
            ),
        )
        resets.append((reset.at_ms, some[0].version, reset))
    # Within a millisecond the store's versions tell, as far as they count over all records.
    return [reset for *_, reset in sorted(resets, key=lambda each: each[:2])]
