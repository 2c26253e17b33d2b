"""Fences: what a remote member shows to commit a partition, to whichever node it asks.

A fence names the claim, its owner and its epoch. It is checked against the claim itself, in the
write that moves the checkpoint, so it needs no secret and no node that remembers it: an owner's id
can't be guessed, and a stale one is refused by the store.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping

import msgspec

from pxrs.clock import Clock
from pxrs.config import check_group_name, check_topic_name
from pxrs.core import claims
from pxrs.core.claims import OwnedClaim, Stamp, Step
from pxrs.core.records import Claim, claim_key, decode
from pxrs.errors import InvalidRequest
from pxrs.stores.api import CoordStore
from pxrs.types import Committed, TopicPartition

_LONGEST = 2000


class Fence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A partition as one member owns it."""

    group: str
    topic: str
    topic_id: str
    partition: int
    owner: str
    epoch: int

    def encode(self) -> str:
        """As clients keep it; they need not look inside."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Fence:
        """Reads what a client sent; raises `InvalidRequest` if it is no fence."""
        if len(text) <= _LONGEST:
            try:
                data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
                fence = msgspec.json.decode(data, type=cls)
                fence._check()
                return fence
            except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError):
                pass
        raise InvalidRequest(f"fence must be one that an assignment held, got {text[:40]!r}")

    def _check(self) -> None:
        """Raises a `ValueError` if it holds what no assignment holds: it becomes part of a key."""
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

    Each is judged by itself; those that hold go into one commit, as far as it carries them. `check`
    may refuse offsets before the first commit. It sees only fences that hold: it tells what a
    topic holds, which is nothing for whoever makes up a fence.
    """
    results: dict[Fence, int | None] = dict.fromkeys(offsets)
    found = {fence: _step(coord, clock, fence, at) for fence, at in offsets.items()}
    steps = {fence: step for fence, step in found.items() if step is not None}
    check({fence.part: offsets[fence] for fence in steps})
    room = max(1, coord.limits.operations // 2)
    while steps:
        now = dict(sorted(steps.items(), key=lambda each: each[0].key)[:room])
        done = coord.commit(
            [step.check for step in now.values()], [step.put for step in now.values()]
        )
        for fence, step in now.items():
            del steps[fence]
            if isinstance(done, Committed):
                results[fence] = step.claim.checkpoint
            elif (again := _step(coord, clock, fence, offsets[fence])) is not None:
                steps[fence] = again
    return results


def _step(coord: CoordStore, clock: Clock, fence: Fence, offset: int) -> Step | None:
    found = coord.get(fence.key)
    claim = decode(found, Claim) if found is not None else Claim()
    if found is None or claim.owner != fence.owner or claim.epoch != fence.epoch:
        return None
    if claim.topic != fence.topic:
        return None
    owned = OwnedClaim(fence.part, fence.key, found.version, claim)
    stamp = Stamp(fence.owner, claim.name or "", secrets.token_hex(8), clock.wall_ms())
    return claims.advance(owned, offset, (), None, stamp)
