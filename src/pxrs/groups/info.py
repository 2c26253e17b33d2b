"""The answers of `px.groups` about a group and its history: frozen values."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pxrs.core.group import GroupState
from pxrs.core.records import Move, decode
from pxrs.groups.resets import Reset, write_of
from pxrs.types import TopicPartition, Versioned


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list of groups. `members` is how many there are."""

    name: str
    state: GroupState
    generation: int
    members: int


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A connected member, and the partitions it owns now."""

    name: str
    client: str
    topics: tuple[str, ...]
    joined_ms: int
    static: bool
    owned: tuple[TopicPartition, ...]


class GroupPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A group's progress in one partition.

    `owner` is the name of the member that works on it, None if no connected member does.
    `epoch` is 0 before the first claim, `checkpoint` None before the first commit. The log holds
    offsets `start` up to `end`. `lag` counts the messages not handled, from the log's start where
    there is no checkpoint. It is an estimate where `lag_is_exact` is false: far behind in a topic
    over a source, whose offsets have gaps. `lag_seconds` is the age of the first of
    them, 0 if there is none, and None if it is not known or was not asked for.
    """

    topic: str
    partition: int
    owner: str | None
    epoch: int
    checkpoint: int | None
    start: int
    end: int
    lag: int
    lag_seconds: float | None
    metadata: str
    lag_is_exact: bool = True


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group: its members, its partitions, and why they are divided as they are.

    `awaited` are the names of static members that are gone, and for which their partitions wait.
    """

    name: str
    state: GroupState
    generation: int
    reason: str
    coordinator: str
    at_ms: int
    members: tuple[MemberInfo, ...]
    partitions: tuple[GroupPartition, ...]
    awaited: tuple[str, ...] = ()

    @property
    def lag(self) -> int:
        """Messages not handled, in all partitions."""
        return sum(part.lag for part in self.partitions)

    @property
    def lag_is_exact(self) -> bool:
        """Whether `lag` was counted, in all partitions; it is an estimate otherwise."""
        return all(part.lag_is_exact for part in self.partitions)

    @property
    def lag_seconds(self) -> float | None:
        """The age of the oldest message not handled; None if it is not known."""
        ages = [part.lag_seconds for part in self.partitions]
        known = [age for age in ages if age is not None]
        return max(known, default=0.0) if len(known) == len(ages) else None


class PartitionMove(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that a generation gave to another member; None stands for no member."""

    topic: str
    partition: int
    before: str | None
    after: str | None


class Rebalance(msgspec.Struct, frozen=True, kw_only=True):
    """A generation: when and why it began, who computed it, and what it moved."""

    generation: int
    at_ms: int
    reason: str
    coordinator: str
    members: tuple[str, ...]
    moves: tuple[PartitionMove, ...]


class CheckpointChange(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was set by hand; None stands for no checkpoint."""

    topic: str
    partition: int
    before: int | None
    after: int | None


class GroupReset(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints set at one time by one reset, or by one seek of a member.

    `why` is empty if it was asked for by hand.
    """

    at_ms: int
    by: str
    why: str
    changes: tuple[CheckpointChange, ...]


class GroupHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a group, oldest first."""

    name: str
    rebalances: tuple[Rebalance, ...]
    resets: tuple[GroupReset, ...]


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
