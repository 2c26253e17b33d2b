"""The fence: claim, commit, release and take over, as checks and writes.

Every change of a claim is one conditional write of its record. The check on the version that
this member last saw is the fence, and it stands in the write itself: a member that took the
partition over has changed the record, so a stale owner's write finds another version and does
nothing.
Nothing outside this module builds a claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pxrs.core.records import Claim, Ranges, decode, encode
from pxrs.types import Check, Put, TopicPartition, Versioned


class OwnedClaim(msgspec.Struct, frozen=True):
    """A claim of this member, with the version of the record that it last wrote."""

    part: TopicPartition
    key: str
    version: int
    claim: Claim

    @property
    def epoch(self) -> int:
        return self.claim.epoch


class Step(NamedTuple):
    """A change of one claim that waits to be committed."""

    part: TopicPartition
    check: Check
    put: Put
    claim: Claim

    def done(self, version: int) -> OwnedClaim:
        """Returns the claim as it is once the change is committed at that version."""
        return OwnedClaim(self.part, self.put.key, version, self.claim)


class Stamp(NamedTuple):
    """The writer, a unique id of the write, and the wall clock for people to read."""

    owner: str
    name: str
    write: str
    at_ms: int


def last_epochs(found: Iterable[Versioned]) -> dict[TopicPartition, int]:
    """Returns the highest epoch of each partition in these claims, whatever id its topic had.

    A fence names the topic, not its id. If the epochs of a topic that was made again began anew,
    fences that a handler has stored elsewhere under the old topic would refuse the new one's
    owners, and a late owner of the old topic would pass as the newest.
    """
    epochs: dict[TopicPartition, int] = {}
    for record in found:
        claim = decode(record, Claim)
        part = TopicPartition(claim.topic, int(record.key.rpartition("/")[2]))
        epochs[part] = max(claim.epoch, epochs.get(part, 0))
    return epochs


def take(
    part: TopicPartition, key: str, found: Versioned | None, stamp: Stamp, last_epoch: int = 0
) -> Step:
    """Claim a partition, free or not: the epoch rises, so a former owner is fenced.

    `last_epoch` is that of former topics of this name, if known.
    """
    before = decode(found, Claim) if found is not None else Claim()
    claim = msgspec.structs.replace(
        before,
        owner=stamp.owner,
        name=stamp.name,
        topic=part.topic,
        epoch=max(before.epoch, last_epoch) + 1,
        write=stamp.write,
        at_ms=stamp.at_ms,
    )
    return _step(part, key, found.version if found is not None else 0, claim)


def advance(
    owned_claim: OwnedClaim, checkpoint: int, done: Ranges, metadata: str | None, stamp: Stamp
) -> Step:
    """Move the checkpoint forward. It never goes back: a higher one stays, with its ranges."""
    before = owned_claim.claim
    claim = msgspec.structs.replace(before, write=stamp.write, at_ms=stamp.at_ms)
    if before.checkpoint is None or checkpoint >= before.checkpoint:
        claim = msgspec.structs.replace(
            claim,
            checkpoint=checkpoint,
            done=done,
            metadata=before.metadata if metadata is None else metadata,
        )
    return _step(owned_claim.part, owned_claim.key, owned_claim.version, claim)


def release(owned_claim: OwnedClaim, checkpoint: int | None, done: Ranges, stamp: Stamp) -> Step:
    """Write the final checkpoint and give the partition up, in one write. The epoch rises too."""
    if checkpoint is not None:
        owned_claim = OwnedClaim(
            owned_claim.part,
            owned_claim.key,
            owned_claim.version,
            advance(owned_claim, checkpoint, done, None, stamp).claim,
        )
    claim = msgspec.structs.replace(
        owned_claim.claim,
        owner=None,
        name=None,
        epoch=owned_claim.epoch + 1,
        write=stamp.write,
        at_ms=stamp.at_ms,
    )
    return _step(owned_claim.part, owned_claim.key, owned_claim.version, claim)


def seek(owned_claim: OwnedClaim, checkpoint: int, stamp: Stamp) -> Step:
    """Set the checkpoint, forward or back, because its owner asked for it."""
    claim = msgspec.structs.replace(
        owned_claim.claim, checkpoint=checkpoint, done=(), write=stamp.write, at_ms=stamp.at_ms
    )
    return _step(owned_claim.part, owned_claim.key, owned_claim.version, claim)


def pin(owned_claim: OwnedClaim, checkpoint: int, stamp: Stamp) -> Step:
    """Set the first checkpoint. An existing one stays."""
    claim = msgspec.structs.replace(owned_claim.claim, write=stamp.write, at_ms=stamp.at_ms)
    if claim.checkpoint is None:
        claim = msgspec.structs.replace(claim, checkpoint=checkpoint)
    return _step(owned_claim.part, owned_claim.key, owned_claim.version, claim)


def touch(owned_claim: OwnedClaim, stamp: Stamp) -> Step:
    """Write the claim again as it is: no earlier write can be applied any more."""
    claim = msgspec.structs.replace(owned_claim.claim, write=stamp.write, at_ms=stamp.at_ms)
    return _step(owned_claim.part, owned_claim.key, owned_claim.version, claim)


def rewind(
    part: TopicPartition,
    key: str,
    found: Versioned | None,
    checkpoint: int | None,
    stamp: Stamp,
    last_epoch: int = 0,
) -> Step:
    """Reset the checkpoint, the one way back. The claim has no owner then; the last is fenced."""
    before = decode(found, Claim) if found is not None else Claim()
    claim = Claim(
        topic=before.topic or part.topic,
        epoch=max(before.epoch, last_epoch) + 1,
        checkpoint=checkpoint,
        write=stamp.write,
        at_ms=stamp.at_ms,
    )
    return _step(part, key, found.version if found is not None else 0, claim)


class Happened(NamedTuple):
    """The record is the one that this very write made: an earlier try had succeeded."""

    version: int


class Behind(NamedTuple):
    """This member still owns it, at another version: write again on top of it."""

    owned_claim: OwnedClaim


class Lost(NamedTuple):
    """Another member owns it now, or none does."""

    claim: Claim | None


def judge(step: Step, owner: str, current: Versioned | None) -> Happened | Behind | Lost:
    """Decides what a conflict on this step's claim means, given the record in the store now."""
    if current is None:
        return Lost(None)
    claim = decode(current, Claim)
    if claim.write == step.claim.write:
        return Happened(current.version)
    expected = step.claim.epoch if step.claim.owner is not None else step.claim.epoch - 1
    if claim.owner == owner and claim.epoch == expected:
        return Behind(OwnedClaim(step.part, step.put.key, current.version, claim))
    return Lost(claim)


def free_or_dead(claim: Claim | None, name: str, living: Iterable[str]) -> bool:
    """Whether no other member can be working on the partition under this claim.

    It is free, its owner's session is over, or it was held by this member's own former self.
    """
    return (
        claim is None or claim.owner is None or claim.name == name or claim.owner not in set(living)
    )


def _step(part: TopicPartition, key: str, version: int, claim: Claim) -> Step:
    return Step(part, Check(key, version), Put(key, encode(claim)), claim)
