"""Fences: what a remote member shows to commit a partition, to whichever node it asks.

A fence names the claim, its owner and its epoch. It is checked against the claim itself, in the
write that moves the checkpoint, so it needs no secret and no node that remembers it: an owner's id
can't be guessed, and a stale one is refused by the store.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping

import msgspec

from pxrs.clock import Clock
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
                return msgspec.json.decode(data, type=cls)
            except (binascii.Error, ValueError, msgspec.DecodeError):
                pass
        raise InvalidRequest(f"fence must be one that an assignment held, got {text[:40]!r}")

    @property
    def part(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def key(self) -> str:
        return claim_key(self.group, self.topic_id, self.partition)


def commit(
    coord: CoordStore, clock: Clock, offsets: Mapping[Fence, int]
) -> dict[Fence, int | None]:
    """Moves checkpoints forward where the fence still holds; None for those that are refused.

    Each is judged by itself; those that hold go into one commit, as far as it carries them.
    """
    results: dict[Fence, int | None] = dict.fromkeys(offsets)
    waiting = dict(offsets)
    room = max(1, coord.limits.operations // 2)
    while waiting:
        now = dict(sorted(waiting.items(), key=lambda each: each[0].key)[:room])
        steps = {}
        for fence, offset in now.items():
            step = _step(coord, clock, fence, offset)
            if step is None:
                waiting.pop(fence)
            else:
                steps[fence] = step
        if not steps:
            continue
        done = coord.commit(
            [step.check for step in steps.values()], [step.put for step in steps.values()]
        )
        if isinstance(done, Committed):
            for fence, step in steps.items():
                results[fence] = step.claim.checkpoint
                waiting.pop(fence)
    return results


def _step(coord: CoordStore, clock: Clock, fence: Fence, offset: int) -> Step | None:
    found = coord.get(fence.key)
    claim = decode(found, Claim) if found is not None else Claim()
    if found is None or claim.owner != fence.owner or claim.epoch != fence.epoch:
        return None
    owned = OwnedClaim(fence.part, fence.key, found.version, claim)
    stamp = Stamp(fence.owner, claim.name or "", secrets.token_hex(8), clock.wall_ms())
    return claims.advance(owned, offset, (), None, stamp)
