"""Deleting a group: everything it remembers goes, but for its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pxrs.core import claims
from pxrs.core.claims import Stamp, Step
from pxrs.core.records import (
    Claim,
    Head,
    decode,
    encode,
    head_key,
    history_prefix,
    members_prefix,
    resets_prefix,
)
from pxrs.stores.api import CoordStore
from pxrs.types import (
    Check,
    Conflict,
    Delete,
    LogPartition,
    Put,
    TopicPartition,
    Versioned,
    Write,
)


class _Change(NamedTuple):
    """A write, and the check that has to hold for it."""

    checks: tuple[Check, ...]
    write: Write


def stop_claims(coord: CoordStore, group: str, head: Head, version: int) -> None:
    """Take the target away, if the head is still at that version.

    Whoever claims checks the head. So nothing is claimed unseen while the group is taken apart,
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
    """Remove all there is, the head last; false if something has changed meanwhile."""
    changes = [
        _Change((step.check,), step.put)
        for where, record in found.items()
        if not is_blank(decode(record, Claim))
        for step in [_rewound(where, record, stamp)]
    ]
    for prefix in (history_prefix(group), resets_prefix(group), members_prefix(group)):
        changes += [_Change((), Delete(each.key)) for each in coord.list(prefix)]
    guard = Check(head_key(group), version)
    room = coord.limits.operations - 2
    while True:
        now, changes = _fitting(changes, room)
        checks = [guard, *(check for change in now for check in change.checks)]
        writes = [change.write for change in now]
        writes += [] if changes else [Delete(head_key(group))]
        if isinstance(coord.commit(checks, writes), Conflict):
            return False
        if not changes:
            return True


def is_blank(claim: Claim) -> bool:
    """Whether the claim holds nothing but its epoch."""
    return claim.owner is None and claim.checkpoint is None and not claim.metadata


def _rewound(where: LogPartition, record: Versioned, stamp: Stamp) -> Step:
    """The claim without owner and checkpoint, at a higher epoch."""
    return claims.rewind(TopicPartition(*where), record.key, record, None, stamp)


def _fitting(changes: list[_Change], room: int) -> tuple[list[_Change], list[_Change]]:
    """As many changes as one commit can carry, and the rest."""
    for count, change in enumerate(changes):
        room -= 1 + len(change.checks)
        if room < 0:
            return changes[:count], changes[count:]
    return changes, []
