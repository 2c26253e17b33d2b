"""Groups seen from outside: what they are doing, why, and how an operator changes that.

Reading is a handful of lists, not a snapshot: the answer may be out of date. Changing is
compare-and-set on the group's head and on every claim that changes, so no decision rests on
records that have changed meanwhile. A change too large for one commit is made in several, each
guarded by the head: a join in between stops it, unless it is forced.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from pxrs.arguments import check_numbers, check_time, check_whole
from pxrs.clock import Clock
from pxrs.codec.messages import Decoder, cut
from pxrs.config import check_group_name
from pxrs.core import claims
from pxrs.core.claims import Stamp, Step
from pxrs.core.group import GroupState, group_state
from pxrs.core.lag import length, pending
from pxrs.core.records import (
    GROUPS_PREFIX,
    Claim,
    GroupTopic,
    Head,
    MemberRecord,
    Move,
    claim_key,
    claims_prefix,
    decode,
    encode,
    head_key,
    history_prefix,
    members_prefix,
    resets_prefix,
)
from pxrs.core.relaying import relays_prefix
from pxrs.errors import (
    DamagedBatch,
    GroupNotEmpty,
    GroupNotFound,
    InvalidRequest,
    OffsetOutOfRange,
    PartitionNotFound,
    SourceChanged,
    TopicNotFound,
    quoted,
)
from pxrs.groups.info import (
    CheckpointChange,
    GroupHistory,
    GroupInfo,
    GroupPartition,
    GroupSummary,
    MemberInfo,
    rebalance,
    together,
)
from pxrs.groups.resets import Reset, forget_old_resets, record_of_reset
from pxrs.stores.api import CoordStore, CountsMessages, LogStore, lots
from pxrs.topics import Topics, offset_or_end_at, require_in_range, settled_end
from pxrs.types import (
    RESERVED,
    Bounds,
    Check,
    Committed,
    Conflict,
    Counted,
    Delete,
    Fence,
    LogPartition,
    Put,
    Topic,
    TopicPartition,
    Versioned,
    Write,
)

Target = int | Literal["earliest", "latest"]


class _Group(NamedTuple):
    """The records of a group. `claims` are empty where they were not asked for."""

    head: Head
    version: int
    members: dict[str, MemberRecord]
    claims: dict[LogPartition, Versioned]

    def claim(self, where: LogPartition) -> Claim | None:
        return decode(self.claims[where], Claim) if where in self.claims else None

    def state(self, topics: Iterable[Topic]) -> GroupState:
        ids = {topic.id: name for name, topic in self.head.topics.items()}
        held = {
            TopicPartition(ids[where.topic_id], where.partition): decode(record, Claim)
            for where, record in self.claims.items()
            if where.topic_id in ids
        }
        there = {topic.name: GroupTopic(topic.id, topic.partitions) for topic in topics}
        return group_state(self.head, self.members, held, there)

    def awaited(self) -> tuple[str, ...]:
        """Static members that are gone, and whose partitions still wait for them."""
        if not self.members:
            # There is no member to give them to.
            return ()
        meant = (name for name, topics in self.head.target.items() if any(topics.values()))
        return tuple(
            sorted(name for name in meant if name in self.head.static and name not in self.members)
        )


class Groups:
    """Lists, describes, explains, resets and deletes groups. Thread-safe."""

    def __init__(self, coord: CoordStore, log: LogStore, topics: Topics, clock: Clock) -> None:
        self._coord = coord
        self._log = log
        self._topics = topics
        self._clock = clock

    # Looking

    def list(self) -> list[GroupSummary]:
        """All groups, by name."""
        found = []
        topics = self._topics.list()
        for record in self._coord.list(GROUPS_PREFIX):
            name = record.key.removeprefix(GROUPS_PREFIX)
            if name.startswith(RESERVED):
                continue
            group = self._of_head(name, record)
            found.append(
                GroupSummary(
                    name=name,
                    state=group.state(topics),
                    generation=group.head.generation,
                    members=len(group.members),
                )
            )
        return found

    def describe(self, group: str, *, lag_seconds: bool = True) -> GroupInfo:
        """The group's members and partitions, and how far behind it is.

        Partitions are those of all topics that it is subscribed to or has checkpoints in. The
        lag in seconds reads one batch of every partition that is behind; it can be left out.
        """
        seen = self._look(group)
        parts = self._partitions(seen, lag_seconds)
        owned: dict[str | None, list[TopicPartition]] = {}
        for part in parts:
            owned.setdefault(part.owner, []).append(TopicPartition(part.topic, part.partition))
        return GroupInfo(
            name=group,
            state=seen.state(self._topics.list()),
            generation=seen.head.generation,
            reason=seen.head.reason,
            coordinator=seen.head.coordinator,
            at_ms=seen.head.at_ms,
            members=tuple(
                MemberInfo(
                    name=name,
                    client=member.client,
                    topics=member.topics,
                    joined_ms=member.joined_ms,
                    static=member.rejoin_timeout is not None,
                    owned=tuple(owned.get(name, ())),
                )
                for name, member in sorted(seen.members.items())
            ),
            partitions=parts,
            awaited=seen.awaited(),
        )

    def _partitions(self, seen: _Group, lag_seconds: bool) -> tuple[GroupPartition, ...]:
        """Every partition of the group's topics. One whose owner is not connected has none."""
        living = {member.id for member in seen.members.values()}
        found = []
        for topic in self._consumed(seen):
            try:
                bounds = self._topics.bounds(topic)
            except TopicNotFound:
                continue  # deleted since it was listed
            held_claims = {
                number: seen.claim(LogPartition(topic.id, number)) or Claim() for number in bounds
            }
            lags = self._lags(topic, bounds, held_claims)
            for number, held in sorted(bounds.items()):
                claim = held_claims[number]
                found.append(
                    GroupPartition(
                        topic=topic.name,
                        partition=number,
                        owner=claim.name if claim.owner in living else None,
                        epoch=claim.epoch,
                        checkpoint=claim.checkpoint,
                        start=held.start,
                        end=held.end,
                        lag=lags[number].messages,
                        lag_is_exact=lags[number].exact,
                        lag_seconds=self._age(topic, number, claim, held) if lag_seconds else None,
                        metadata=claim.metadata,
                    )
                )
        return tuple(found)

    def _lags(
        self, topic: Topic, bounds: Mapping[int, Bounds], held: Mapping[int, Claim]
    ) -> Mapping[int, Counted]:
        """How many messages of each partition are not handled."""
        waiting = {
            number: pending(_first(held[number], each), each.end, held[number].done)
            for number, each in bounds.items()
        }
        if topic.source is not None and isinstance(self._log, CountsMessages):
            return self._log.count(topic.id, waiting)
        return {number: Counted(length(each), exact=True) for number, each in waiting.items()}

    def _age(self, topic: Topic, number: int, claim: Claim, held: Bounds) -> float | None:
        """Seconds since the first message not handled was sent."""
        offset = _first(claim, held)
        if offset >= held.end:
            return 0.0
        where, fence = LogPartition(topic.id, number), Fence(topic.name, number, claim.epoch)
        try:
            batches = self._log.fetch(where, offset, 1).batches
            messages = cut(Decoder().decode(batches[0], fence), offset) if batches else []
        except (DamagedBatch, OffsetOutOfRange, SourceChanged, TopicNotFound):
            return None
        if not messages or not messages[0].timestamp:
            # The next row of a source is far off, in another partition, or has no time.
            return None
        return max(0.0, (self._clock.wall_ms() - messages[0].timestamp) / 1000)

    def explain(self, group: str, limit: int = 20) -> GroupHistory:
        """Return the history of the group: its last generations, resets and seeks.

        `limit` counts all of them together; the newest are returned.
        """
        check_whole("limit", limit, least=1)
        self._find(group)
        moves = [decode(each, Move) for each in self._coord.list(history_prefix(group))]
        resets = together(self._coord.list(resets_prefix(group)))
        first_move, first_reset = len(moves), len(resets)
        # From the end, not sorted: clocks of members differ, and each list is in the right order.
        for _ in range(min(limit, len(moves) + len(resets))):
            if not first_reset or (
                first_move and moves[first_move - 1].at_ms >= resets[first_reset - 1].at_ms
            ):
                first_move -= 1
            else:
                first_reset -= 1
        return GroupHistory(
            name=group,
            rebalances=tuple(rebalance(move) for move in moves[first_move:]),
            resets=tuple(resets[first_reset:]),
        )

    # Changing

    def reset(
        self,
        group: str,
        topic: str,
        *,
        to: Target | None = None,
        timestamp_ms: int | None = None,
        partitions: Sequence[int] | None = None,
        force: bool = False,
    ) -> tuple[CheckpointChange, ...]:
        """Set the group's checkpoints in a topic, all or those of some partitions.

        `to` is "earliest", "latest" or an offset that every partition holds; `timestamp_ms`
        means the first message of that time or later, else the end. `GroupNotEmpty` if it has
        members, unless it is forced: then they lose these partitions, messages that they have not
        committed are handled again, and they go on from the new checkpoints at once.
        """
        self._find(group)
        found = self._topics.find(topic)
        offsets = self._offsets(found, to, timestamp_ms, partitions)
        stamp = self._stamp()
        changes: list[CheckpointChange] = []
        room = max(1, (self._coord.limits.operations - 2) // 3)
        while offsets:
            seen = self._look(group, force=force)
            now = dict(list(offsets.items())[:room])
            steps = {
                number: self._rewind(group, seen, found, number, offset, stamp)
                for number, offset in now.items()
            }
            some = [_change(topic, number, step, seen, found) for number, step in steps.items()]
            if not self._reset(group, seen, steps.values(), some, stamp):
                continue
            changes += some
            forget_old_resets(self._coord, group)
            offsets = {number: at for number, at in offsets.items() if number not in now}
        return tuple(changes)

    def import_checkpoint(self, group: str, topic: str, last: int) -> tuple[CheckpointChange, ...]:
        """Begin where another consumer has stopped: all rows up to `last`, inclusive, are handled.

        For a topic over a source that one consumer has read until now, by its own checkpoint. The
        group is made if there is none. `GroupNotEmpty` if it has members; a group that has
        checkpoints in the topic is refused: `reset` moves those.
        """
        check_whole("last", last, least=-1)
        found = self._topics.find(topic)
        self._make(group)
        seen = self._look(group, force=False)
        claims_there = (seen.claim(LogPartition(found.id, n)) for n in range(found.partitions))
        if any(claim is not None and claim.checkpoint is not None for claim in claims_there):
            raise InvalidRequest(
                f"group {group!r} has checkpoints in {topic!r} already; groups.reset moves them"
            )
        return self.reset(group, topic, to=last + 1)

    def _make(self, group: str) -> None:
        """Write the group's record, if there is none."""
        key = head_key(check_group_name(group))
        if self._coord.get(key) is None:
            head = Head(reason="a checkpoint was imported", at_ms=self._clock.wall_ms())
            self._coord.commit([Check(key, 0)], [Put(key, encode(head))])

    def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group: its checkpoints, history and members. Only its epochs stay.

        `GroupNotEmpty` if it has members, unless it is forced: then they are fenced, and those
        that live on join a new group of the same name, which has no checkpoints.
        """
        while True:
            seen = self._look(group, force=force)
            if seen.members and seen.head.target:
                stop_claims(self._coord, group, seen.head, seen.version)
            elif forget(self._coord, group, seen.version, seen.claims, self._stamp()):
                return

    def _reset(
        self,
        group: str,
        seen: _Group,
        steps: Iterable[Step],
        changes: Iterable[CheckpointChange],
        stamp: Stamp,
    ) -> bool:
        """Write some of a reset, its record, and the head, which every member watches."""
        steps = list(steps)
        records = [
            record_of_reset(
                group,
                Reset(
                    topic=change.topic,
                    partition=change.partition,
                    before=change.before,
                    after=change.after,
                    by=stamp.name,
                    at_ms=stamp.at_ms,
                ),
                stamp.write,
            )
            for change in changes
        ]
        touched = msgspec.structs.replace(seen.head, touched=secrets.token_hex(6))
        outcome = self._coord.commit(
            [Check(head_key(group), seen.version), *(step.check for step in steps)],
            [Put(head_key(group), encode(touched)), *(step.put for step in steps), *records],
        )
        return isinstance(outcome, Committed)

    def _rewind(
        self, group: str, seen: _Group, topic: Topic, number: int, offset: int, stamp: Stamp
    ) -> Step:
        key = claim_key(group, topic.id, number)
        record = seen.claims.get(LogPartition(topic.id, number))
        part = TopicPartition(topic.name, number)
        last = claims.last_epochs(seen.claims.values()).get(part, 0) if record is None else 0
        return claims.rewind(part, key, record, offset, stamp, last)

    def _offsets(
        self,
        topic: Topic,
        to: Target | None,
        timestamp_ms: int | None,
        partitions: Sequence[int] | None,
    ) -> dict[int, int]:
        """Returns the new checkpoint of each partition; raises if one is impossible."""
        if (to is None) == (timestamp_ms is None):
            raise InvalidRequest("a reset must have either `to` or `timestamp_ms`")
        if timestamp_ms is not None:
            check_time("timestamp_ms", timestamp_ms)
        numbers = range(topic.partitions) if partitions is None else check_numbers(partitions)
        if not numbers:
            raise InvalidRequest("partitions must name at least one partition, got none")
        bounds = self._topics.bounds(topic)
        offsets = {}
        for number in numbers:
            if number not in bounds:
                raise PartitionNotFound(topic.name, number, topic.partitions)
            start, end = bounds[number]
            where = LogPartition(topic.id, number)
            offset: int | str | None = start if to == "earliest" else to
            if timestamp_ms is not None:
                fence = Fence(topic.name, number, 0)
                offset = offset_or_end_at(self._log, where, fence, timestamp_ms)
            elif to == "latest":
                offset = settled_end(self._log, where)
            if not isinstance(offset, int) or isinstance(offset, bool):
                raise InvalidRequest(
                    f"to must be an offset, 'earliest' or 'latest', got {quoted(to)}"
                )
            if not start <= offset <= end and isinstance(to, int):
                require_in_range(self._log, where, topic.name, offset)
            offsets[number] = offset
        return offsets

    # Reading records

    def _look(self, group: str, *, force: bool = True) -> _Group:
        """All records of the group; `GroupNotEmpty` if it has members and is not forced.

        The head is read first: a member that is not seen after it has joined later, which
        changes the head.
        """
        seen = self._of_head(group, self._find(group), with_claims=True)
        if seen.members and not force:
            raise GroupNotEmpty(group, tuple(sorted(seen.members)))
        return seen

    def _find(self, group: str) -> Versioned:
        record = self._coord.get(head_key(check_group_name(group)))
        if record is None:
            raise GroupNotFound(group)
        return record

    def _of_head(self, group: str, record: Versioned, *, with_claims: bool = False) -> _Group:
        head = decode(record, Head)
        members = {
            each.key.removeprefix(members_prefix(group)): decode(each, MemberRecord)
            for each in self._coord.list(members_prefix(group))
        }
        found: dict[LogPartition, Versioned] = {}
        # Without members the state is EMPTY, whatever the claims are.
        if members or with_claims:
            for each in self._coord.list(claims_prefix(group)):
                topic_id, _, number = each.key.removeprefix(claims_prefix(group)).partition("/")
                found[LogPartition(topic_id, int(number))] = each
        return _Group(head, record.version, members, found)

    def _consumed(self, seen: _Group) -> Sequence[Topic]:
        """The topics that the group is subscribed to, or has checkpoints in."""
        names = {name for member in seen.members.values() for name in member.topics}
        names.update(*seen.head.subscriptions.values())
        ids = {
            where.topic_id
            for where, record in seen.claims.items()
            if not is_blank(decode(record, Claim))
        }
        return [topic for topic in self._topics.list() if topic.name in names or topic.id in ids]

    def _stamp(self) -> Stamp:
        client = f"{socket.gethostname()}:{os.getpid()}"
        return Stamp("", client, secrets.token_hex(8), self._clock.wall_ms())


def _first(claim: Claim, held: Bounds) -> int:
    """The first offset not handled that is still there."""
    return held.start if claim.checkpoint is None else max(held.start, claim.checkpoint)


def _change(topic: str, number: int, step: Step, seen: _Group, found: Topic) -> CheckpointChange:
    before = seen.claim(LogPartition(found.id, number))
    return CheckpointChange(
        topic=topic,
        partition=number,
        before=None if before is None else before.checkpoint,
        after=step.claim.checkpoint,
    )


class _Change(NamedTuple):
    """A write, and the check that has to hold for it."""

    checks: tuple[Check, ...]
    write: Write


def stop_claims(coord: CoordStore, group: str, head: Head, version: int) -> None:
    """Take the target away, if the head is still at that version.

    Every claim checks the head. So nothing is claimed unseen while the group is taken apart,
    until members that live make another target.
    """
    empty = Head(generation=head.generation + 1, reason="the group is being deleted")
    coord.commit([Check(head_key(group), version)], [Put(head_key(group), encode(empty))])


def forget(
    coord: CoordStore,
    group: str,
    version: int,
    found: Mapping[LogPartition, Versioned],
    stamp: Stamp,
) -> bool:
    """Remove all records of the group, the head last; false if one has changed meanwhile."""
    changes = [
        _Change((step.check,), step.put)
        for where, record in found.items()
        if not is_blank(decode(record, Claim))
        for step in [_rewound(where, record, stamp)]
    ]
    prefixes = (history_prefix, resets_prefix, members_prefix, relays_prefix)
    for prefix in (prefix_of(group) for prefix_of in prefixes):
        changes += [_Change((), Delete(each.key)) for each in coord.list(prefix)]
    changes.append(_Change((), Delete(head_key(group))))
    guard = Check(head_key(group), version)
    room = (coord.limits.operations - 1,)
    for now in lots(changes, lambda change: (1 + len(change.checks),), room):
        checks = [guard, *(check for change in now for check in change.checks)]
        if isinstance(coord.commit(checks, [change.write for change in now]), Conflict):
            return False
    return True


def is_blank(claim: Claim) -> bool:
    """Whether the claim holds nothing but its epoch."""
    return claim.owner is None and claim.checkpoint is None and not claim.metadata


def _rewound(where: LogPartition, record: Versioned, stamp: Stamp) -> Step:
    """The claim without owner and checkpoint, at a higher epoch."""
    return claims.rewind(TopicPartition(*where), record.key, record, None, stamp)
