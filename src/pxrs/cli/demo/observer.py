"""The group as its records tell it: who owns what, since which epoch, how far it has come."""

from __future__ import annotations

from typing import NamedTuple

from pxrs.app import Pxrs
from pxrs.core.group import GroupState, group_state
from pxrs.core.records import (
    Claim,
    Head,
    MemberRecord,
    claims_prefix,
    decode,
    head_key,
    members_prefix,
)
from pxrs.stores.api import Watch
from pxrs.types import Topic, TopicPartition


class Row(NamedTuple):
    """A partition. `owner` is a member's name, None while nobody owns it."""

    owner: str | None
    epoch: int
    checkpoint: int
    end: int

    @property
    def lag(self) -> int:
        return self.end - self.checkpoint


class Picture(NamedTuple):
    """The group at one moment."""

    state: GroupState
    members: frozenset[str]
    rows: list[Row]

    @property
    def handled(self) -> int:
        return sum(row.checkpoint for row in self.rows)

    @property
    def end(self) -> int:
        return sum(row.end for row in self.rows)

    @property
    def lag(self) -> int:
        return sum(row.lag for row in self.rows)

    def owned_by(self, member: str) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.owner == member]


class Observer:
    """Looks at a group from outside, and notices what must never happen."""

    def __init__(self, px: Pxrs, topic: Topic, group: str) -> None:
        self._stores = px.stores
        self._topic = topic
        self._group = group
        self._last: list[Row] = []
        # Checkpoints or epochs that went back.
        self.went_back = 0
        self.looks = 0

    def watch(self) -> Watch:
        """Wakes when the group's records change."""
        group = self._group
        return self._stores.coord.watch(
            head_key(group), members_prefix(group), claims_prefix(group)
        )

    def look(self) -> Picture:
        coord = self._stores.coord
        found = coord.get(head_key(self._group))
        head = decode(found, Head) if found is not None else None
        prefix = members_prefix(self._group)
        members = {
            record.key.removeprefix(prefix): decode(record, MemberRecord)
            for record in coord.list(prefix)
        }
        claims = {
            TopicPartition(self._topic.name, int(record.key.rpartition("/")[2])): decode(
                record, Claim
            )
            for record in coord.list(claims_prefix(self._group))
        }
        # After the claims: a checkpoint is never past the end that is read now.
        ends = self._stores.log.bounds(self._topic.id)
        rows = []
        for number in range(self._topic.partitions):
            claim = claims.get(TopicPartition(self._topic.name, number), Claim())
            rows.append(Row(claim.name, claim.epoch, claim.checkpoint or 0, ends[number].end))
        self._compare(rows)
        return Picture(group_state(head, members, claims), frozenset(members), rows)

    def _compare(self, rows: list[Row]) -> None:
        self.looks += 1
        for row, before in zip(rows, self._last, strict=False):
            if row.epoch < before.epoch or row.checkpoint < before.checkpoint:
                self.went_back += 1
        self._last = rows
