"""Snapshots of a group's records: what one look of a member sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from pxrs.core.claims import last_epochs
from pxrs.core.group import View
from pxrs.core.records import (
    Claim,
    GroupTopic,
    Head,
    MemberRecord,
    claim_key,
    claims_prefix,
    decode,
    head_key,
    members_prefix,
)
from pxrs.errors import TopicNotFound
from pxrs.stores.api import CoordStore
from pxrs.types import Topic, TopicPartition, Versioned

# Below this many claims they are read one by one, above it in one listing.
_FEW = 16


@dataclass
class Snapshot:
    """A view, with the versions behind it. Several members that one process holds may share it.

    `last_epochs` are the epochs of former topics of the same names, for partitions without a
    claim.
    """

    view: View
    head_version: int
    claims: dict[TopicPartition, tuple[str, Versioned | None]]
    last_epochs: Mapping[TopicPartition, int]
    list_claims: Callable[[], dict[str, Versioned]]

    @cached_property
    def all_claims(self) -> dict[str, Versioned]:
        """Every claim of the group by its key, listed at the first call."""
        return self.list_claims()


class TopicFinder(Protocol):
    """Looks topics up for a group: the part of `Topics` that it needs."""

    def find(self, name: str) -> Topic:
        """The topic of this name; `TopicNotFound` if there is none."""
        ...


class GroupReader:
    """Looks at one group. The head is read first: what changes after it changes its version."""

    def __init__(self, group: str, coord: CoordStore, topics: TopicFinder) -> None:
        self._group = group
        self._coord = coord
        self._topics = topics

    def see(self, held: Mapping[str, frozenset[TopicPartition]]) -> Snapshot:
        """Returns the view of the members of these names, without the claims that each holds."""
        found = self._coord.get(head_key(self._group))
        head = decode(found, Head) if found is not None else Head()
        members = {
            record.key.removeprefix(members_prefix(self._group)): decode(record, MemberRecord)
            for record in self._coord.list(members_prefix(self._group))
        }
        names = {topic for member in members.values() for topic in member.topics}
        names.update(*head.subscriptions.values())
        topics = {each: topic for each in sorted(names) if (topic := self._find(each))}
        missing = {part for name in held for part in head.target_of(name) - held[name]}
        claims, last_epochs = self._read_claims(head, missing)
        parsed = {
            part: decode(record, Claim) if record is not None else None
            for part, (_, record) in claims.items()
        }
        version = found.version if found is not None else 0
        view = View(head, members, topics, parsed)
        return Snapshot(view, version, claims, last_epochs, self._list_claims)

    def _read_claims(
        self, head: Head, parts: set[TopicPartition]
    ) -> tuple[dict[TopicPartition, tuple[str, Versioned | None]], dict[TopicPartition, int]]:
        keys = {
            part: claim_key(self._group, head.topics[part.topic].id, part.partition)
            for part in sorted(parts)
            if part.topic in head.topics
        }
        if len(keys) <= _FEW:
            found = {part: (key, self._coord.get(key)) for part, key in keys.items()}
            if all(record is not None for _, record in found.values()):
                return found, {}
        listed = self._list_claims()
        found = {part: (key, listed.get(key)) for part, key in keys.items()}
        return found, last_epochs(listed.values())

    def _list_claims(self) -> dict[str, Versioned]:
        return {record.key: record for record in self._coord.list(claims_prefix(self._group))}

    def _find(self, name: str) -> GroupTopic | None:
        try:
            topic = self._topics.find(name)
        except TopicNotFound:
            return None
        return GroupTopic(topic.id, topic.partitions)
