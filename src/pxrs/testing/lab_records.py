"""What happened in a `GroupLab`, and what its records say: members, claims, checkpoints."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from pxrs.core.group import group_state
from pxrs.core.records import (
    Claim,
    Head,
    MemberRecord,
    claim_key,
    decode,
    head_key,
    members_prefix,
)
from pxrs.stores.api import Stores
from pxrs.types import Message, Topic, TopicPartition


class Handled(NamedTuple):
    """A message that a handler has seen. `stale`: somebody else owned its partition by then."""

    member: str
    message: Message
    at: float
    stale: bool


class Refused(NamedTuple):
    """A commit that was refused, because somebody else owns these partitions now."""

    member: str
    partitions: tuple[int, ...]
    at: float


class LabRecords:
    """Reads them anew at every call."""

    def __init__(self, stores: Stores, topic: Topic, group: str) -> None:
        self._stores = stores
        self._topic = topic
        self._group = group

    def claims(self) -> dict[int, Claim]:
        """The claim of each partition; an empty one where there is none yet."""
        found = {}
        for number in range(self._topic.partitions):
            record = self._stores.coord.get(claim_key(self._group, self._topic.id, number))
            found[number] = decode(record, Claim) if record is not None else Claim()
        return found

    def checkpoints(self) -> dict[int, int]:
        return {number: claim.checkpoint or 0 for number, claim in self.claims().items()}

    def lags(self) -> dict[int, int]:
        ends = self._stores.log.bounds(self._topic.id)
        return {number: ends[number].end - at for number, at in self.checkpoints().items()}

    def at_rest(self, names: Set[str]) -> bool:
        """Whether these are the members, and every partition is owned as it shall be."""
        coord = self._stores.coord
        prefix = members_prefix(self._group)
        members = {
            record.key.removeprefix(prefix): decode(record, MemberRecord)
            for record in coord.list(prefix)
        }
        found = coord.get(head_key(self._group))
        head = decode(found, Head) if found is not None else None
        claims = {
            TopicPartition(self._topic.name, number): claim
            for number, claim in self.claims().items()
        }
        return members.keys() == names and group_state(head, members, claims) == "STABLE"

    def fingerprint(self) -> list[tuple[str, int]]:
        """Differs whenever a record was written."""
        return [(record.key, record.version) for record in self._stores.coord.list("")]
