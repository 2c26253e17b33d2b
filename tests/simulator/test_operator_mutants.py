"""Break what operators and retention do: the simulator has to notice, and to say what broke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from pxrs.consuming.fetcher import Fetcher
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core import claims
from pxrs.core.claims import Stamp, Step
from pxrs.core.records import Claim, Head, decode, encode
from pxrs.errors import OffsetOutOfRange
from pxrs.groups import admin as forgetting
from pxrs.groups.membership import Membership
from pxrs.groups.owned_claims import Applied, Mark, OwnedClaims
from pxrs.groups.resets import Reset
from pxrs.groups.snapshot import Snapshot
from pxrs.types import Check, Put, TopicPartition, Versioned
from support.mutants import NO_ANSWERS, Mutant, Patch, catch

pytestmark = pytest.mark.thorough


def reset_fences_nobody(patch: Patch) -> None:
    """The epoch stays, and the owner."""

    def rewind(
        part: TopicPartition,
        key: str,
        found: Versioned | None,
        checkpoint: int,
        stamp: Stamp,
        last_epoch: int,
    ) -> Step:
        before = decode(found, Claim) if found is not None else Claim()
        claim = msgspec.structs.replace(before, checkpoint=checkpoint, done=(), write=stamp.write)
        check = Check(key, found.version if found is not None else 0)
        return Step(part, check, Put(key, encode(claim)), claim)

    patch.setattr(claims, "rewind", rewind)


def nobody_hears_of_a_reset(patch: Patch) -> None:
    """Members that have nothing to commit hold on to what they had."""
    patch.setattr(Membership, "_drop_what_others_have", lambda self, seen: False)


def reset_is_not_recorded(patch: Patch) -> None:
    def elsewhere(group: str, reset: Reset, write: str) -> Put:
        return Put(f"resets/other/{reset.partition}", encode(Head()))

    patch.setattr("pxrs.groups.admin.record_of_reset", elsewhere)


def topic_is_its_name(patch: Patch) -> None:
    """What is held of a deleted topic counts as held of the one that was made again."""

    def by_name(self: Membership, seen: Snapshot) -> bool:
        gone = [
            part
            for part in sorted(self._owned_claims.parts)
            if (owned_claim := self._owned_claims.get(part))
            and (
                part.topic not in seen.view.topics
                or (found := self._coord.get(owned_claim.key)) is None
                or decode(found, Claim).owner != self.me.id
            )
        ]
        self._owned_claims.drop(gone)
        self._table.gone(gone, lost=True)
        return bool(gone)

    patch.setattr(Membership, "_drop_what_others_have", by_name)


def claims_under_the_name(patch: Patch) -> None:
    """A topic that was made again goes on at the checkpoint of the one before."""
    inherit: dict[tuple[str, int], Claim] = {}
    properly = claims.take

    def take(
        part: TopicPartition, key: str, found: Versioned | None, stamp: Stamp, last_epoch: int
    ) -> Step:
        step = properly(part, key, found, stamp, last_epoch)
        if found is None and part in inherit:
            claim = msgspec.structs.replace(step.claim, checkpoint=inherit[part].checkpoint)
            return Step(part, step.check, Put(key, encode(claim)), claim)
        inherit[part] = step.claim
        return step

    patch.setattr(claims, "take", take)


def trimmed_is_passed_over_in_silence(patch: Patch) -> None:
    """What retention has removed is not recorded."""

    def pass_over(self: Fetcher, owned: OwnedPartition, error: OffsetOutOfRange) -> bool:
        self._table.restart(owned.part, error.start)
        return True

    patch.setattr(Fetcher, "_out_of_range", pass_over)


def trimmed_is_no_error(patch: Patch) -> None:
    """It is passed over and recorded, though somebody wants to be told."""

    def pass_over(self: Fetcher, owned: OwnedPartition, error: OffsetOutOfRange) -> bool:
        self._skip(owned, error.start, "gone")
        return True

    patch.setattr(Fetcher, "_out_of_range", pass_over)


def latest_begins_without_a_checkpoint(patch: Patch) -> None:
    """Whoever takes over before the first commit begins at a later end."""

    def start(self: Fetcher, partitions: Sequence[OwnedPartition], ends: Any) -> None:
        for owned in partitions:
            if not owned.started and owned.checkpoint is None:
                self._table.start(owned, self._bounds(owned, ends).end)

    patch.setattr(Fetcher, "_pin_the_start", start)


def latest_begins_twice(patch: Patch) -> None:
    """A first checkpoint that had no answer is set again, to a later end."""

    def pin(self: OwnedClaims, checkpoints: Mapping[TopicPartition, int]) -> Applied:
        return self.commit({part: Mark(offset) for part, offset in checkpoints.items()})

    patch.setattr(OwnedClaims, "pin", pin)


def deleted_group_leaves_its_checkpoints(patch: Patch) -> None:
    """Those of partitions that nobody owns at the moment."""
    patch.setattr(forgetting, "is_blank", lambda claim: claim.owner is None)


RESETS = {"operator": 3.0}

MUTANTS = [
    Mutant(reset_fences_nobody, r"without fencing anybody", RESETS),
    Mutant(nobody_hears_of_a_reset, r"no rest .* owned by None|REBALANCING", RESETS),
    Mutant(reset_is_not_recorded, r"without a record", RESETS),
    Mutant(deleted_group_leaves_its_checkpoints, r"has its checkpoint still", RESETS),
    Mutant(topic_is_its_name, r"no rest", {**RESETS, "pattern": False}, first=445),
    Mutant(
        trimmed_is_passed_over_in_silence,
        r"was not handled|handed out before|no rest",
        {**RESETS, "on_trimmed": "earliest"},
    ),
    Mutant(trimmed_is_no_error, r"that is to be an error", {**RESETS, "on_trimmed": "error"}),
    Mutant(
        latest_begins_without_a_checkpoint,
        r"was not handled|handed out before",
        {"start": "latest"},
    ),
    Mutant(latest_begins_twice, r"was not handled", {"start": "latest", "rates": NO_ANSWERS}),
    Mutant(claims_under_the_name, r"changed the checkpoint .* while claiming", RESETS),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(mutant, monkeypatch)
