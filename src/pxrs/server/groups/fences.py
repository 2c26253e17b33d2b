"""Fences: the proof of ownership with which a remote member commits a partition, on any node.

A fence names the claim, its owner and its epoch. It is checked against the claim itself, in the
write that moves the checkpoint, so it needs no secret and no node that remembers it: an owner's id
can't be guessed, and a stale one is refused by the store.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from pxrs.chance import CHANCE
from pxrs.clock import Clock
from pxrs.config import check_group_name, check_topic_name
from pxrs.core import claims
from pxrs.core.claims import OwnedClaim, Stamp, Step
from pxrs.core.records import Claim, claim_key, claims_prefix, decode
from pxrs.core.retry import Backoff
from pxrs.errors import InvalidRequest, TransactionConflict, quoted
from pxrs.stores.api import CoordStore
from pxrs.types import Committed, TopicPartition, Versioned

_LONGEST = 2000
# The most claims that are read one by one.
_ONE_BY_ONE = 16
# How often in a row a commit may be refused because claims have changed, and the pauses between.
_MOST_CONFLICTS = 100
_BETWEEN = Backoff(first=0.0005, longest=0.05)


class Fence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A partition as one member owns it."""

    group: str
    topic: str
    topic_id: str
    partition: int
    owner: str
    epoch: int

    def encode(self) -> str:
        """The fence as text, opaque to clients."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Fence:
        """Reads a fence that a client sent; raises `InvalidRequest` if it is none."""
        if len(text) <= _LONGEST:
            try:
                data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
                fence = msgspec.json.decode(data, type=cls)
                fence._check()
                return fence
            except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError):
                pass
        raise InvalidRequest(f"fence must be one from an assignment, got {quoted(text)}")

    def _check(self) -> None:
        """Raises a `ValueError` for values that no assignment has: they become part of a key."""
        check_group_name(self.group)
        check_topic_name(self.topic)
        check_topic_name(self.topic_id)
        if not 0 <= self.partition < 2**31 or not 0 <= self.epoch < 2**63:
            raise ValueError("the partition or the epoch is out of range")

    @property
    def part(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def key(self) -> str:
        return claim_key(self.group, self.topic_id, self.partition)


def commit(
    coord: CoordStore,
    clock: Clock,
    offsets: Mapping[Fence, int],
    check: Callable[[Mapping[TopicPartition, int]], None],
) -> dict[Fence, int | None]:
    """Moves checkpoints forward where the fence still holds; None for those that are refused.

    Each fence is checked by itself; those that hold share one commit, as far as it has room.
    `check` may refuse offsets before the first commit. It sees only fences that hold: its error
    gives the bounds of a partition away, which a client with a made-up fence must not learn.
    """
    results: dict[Fence, int | None] = dict.fromkeys(offsets)
    records = _read(coord, offsets)
    found = {
        fence: _step(clock, fence, records.get(fence.key), at) for fence, at in offsets.items()
    }
    steps = {fence: step for fence, step in found.items() if step is not None}
    check({fence.part: offsets[fence] for fence in steps})
    room = max(1, coord.limits.operations // 2)
    conflicts = 0
    while steps:
        now = dict(sorted(steps.items(), key=lambda each: each[0].key)[:room])
        done = coord.commit(
            [step.check for step in now.values()], [step.put for step in now.values()]
        )
        if isinstance(done, Committed):
            conflicts = 0
            for fence, step in now.items():
                del steps[fence]
                results[fence] = step.claim.checkpoint
            continue
        for fence in now:
            if fence.key in done.current:
                again = _step(clock, fence, done.current[fence.key], offsets[fence])
                del steps[fence]
                if again is not None:
                    steps[fence] = again
        conflicts += 1
        if conflicts == _MOST_CONFLICTS:
            raise TransactionConflict(
                "the checkpoints could not be committed because another process kept changing "
                "them; commit them again"
            )
        time.sleep(_BETWEEN.delay(conflicts, CHANCE) or 0.0)
    return results


def _read(coord: CoordStore, fences: Collection[Fence]) -> dict[str, Versioned]:
    """Read the claims: a few one by one; for many, all claims of their groups at once.

    A client may send thousands of fences, made up or not, and must not cause thousands of reads.
    """
    if len(fences) <= _ONE_BY_ONE:
        found = [coord.get(fence.key) for fence in fences]
        return {record.key: record for record in found if record is not None}
    groups = sorted({fence.group for fence in fences})
    return {record.key: record for group in groups for record in coord.list(claims_prefix(group))}


def _step(clock: Clock, fence: Fence, found: Versioned | None, offset: int) -> Step | None:
    claim = decode(found, Claim) if found is not None else Claim()
    if found is None or claim.owner != fence.owner or claim.epoch != fence.epoch:
        return None
    if claim.topic != fence.topic:
        return None
    owned = OwnedClaim(fence.part, fence.key, found.version, claim)
    stamp = Stamp(fence.owner, claim.name or "", secrets.token_hex(8), clock.wall_ms())
    return claims.advance(owned, offset, (), None, stamp)
