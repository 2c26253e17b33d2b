"""Break groups in one place: the simulator has to notice, and to say what broke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from pxrs.consuming.in_hand import InFlight
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
from pxrs.core import claims
from pxrs.core.claims import OwnedClaim, Stamp, Step
from pxrs.core.records import Claim, decode, encode
from pxrs.errors import OutcomeUnknown
from pxrs.groups.membership import Membership
from pxrs.groups.owned_claims import Applied, Mark, OwnedClaims
from pxrs.types import Check, Committed, Conflict, Put, TopicPartition, Versioned, Write
from support.mutants import INTERRUPTED, NO_ANSWERS, Mutant, Patch, catch

pytestmark = pytest.mark.thorough


def no_fence(patch: Patch) -> None:
    """Claims are written whatever version the store has."""

    def send(
        self: OwnedClaims, steps: Sequence[Step], guard: Sequence[Check], also: Sequence[Write]
    ) -> Conflict | Committed:
        return self._coord.commit(guard, (*(step.put for step in steps), *also))

    patch.setattr(OwnedClaims, "_send", send)


def released_before_the_final_commit(patch: Patch) -> None:
    """The claim is given away first, and its last checkpoint written after."""
    release = OwnedClaims.release

    def late(
        self: OwnedClaims,
        marks: Mapping[TopicPartition, Mark | None],
        guard: Sequence[Check] = (),
        also: Sequence[Write] = (),
    ) -> Applied:
        applied = release(self, dict.fromkeys(marks), guard, also)
        for owned_claim in applied.written:
            mark = marks[owned_claim.part]
            if mark is not None:
                claim = msgspec.structs.replace(owned_claim.claim, checkpoint=mark.checkpoint)
                self._coord.commit(
                    [Check(owned_claim.key, owned_claim.version)],
                    [Put(owned_claim.key, encode(claim))],
                )
        return applied

    patch.setattr(OwnedClaims, "release", late)


def checkpoint_of_what_was_fetched(patch: Patch) -> None:
    patch.setattr(
        OwnedPartition, "mark", lambda owned: Mark(owned.position) if owned.started else None
    )


def epoch_stays_on_take_over(patch: Patch) -> None:
    def take(
        part: TopicPartition, key: str, found: Versioned | None, stamp: Stamp, last_epoch: int
    ) -> Step:
        before = decode(found, Claim) if found is not None else Claim()
        claim = msgspec.structs.replace(
            before, owner=stamp.owner, name=stamp.name, write=stamp.write
        )
        check = Check(key, found.version if found is not None else 0)
        return Step(part, check, Put(key, encode(claim)), claim)

    patch.setattr(claims, "take", take)


def lease_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(MemberSteps, "alive", True)


def no_answer_is_success(patch: Patch) -> None:
    send = OwnedClaims._send

    def hopeful(
        self: OwnedClaims, steps: Sequence[Step], guard: Sequence[Check], also: Sequence[Write]
    ) -> Conflict | Committed:
        try:
            return send(self, steps, guard, also)
        except OutcomeUnknown:
            return Committed({step.put.key: step.check.version + 1 for step in steps})

    patch.setattr(OwnedClaims, "_send", hopeful)


def doubts_are_forgotten(patch: Patch) -> None:
    """A claim that reached the store unnoticed blocks its partition for ever."""
    patch.setattr(Membership, "_settle_doubts", lambda membership, head: None)


def zombie_pushes_its_successor_out(patch: Patch) -> None:
    patch.setattr(Membership, "_refuse_if_displaced", lambda membership: None)


def target_may_be_old(patch: Patch) -> None:
    """Partitions are claimed by a target that is no longer the group's."""
    take = OwnedClaims.take

    def unguarded(self: OwnedClaims, found: Any, guard: Check, epochs: Any) -> Applied:
        current = self._coord.get(guard.key)
        assert current is not None
        return take(self, found, Check(guard.key, current.version), epochs)

    patch.setattr(OwnedClaims, "take", unguarded)


def checkpoint_goes_back(patch: Patch) -> None:
    """The committer writes what it was told, though the claim is further."""

    def advance(
        owned_claim: OwnedClaim, checkpoint: int, done: Any, metadata: Any, stamp: Stamp
    ) -> Step:
        return claims.seek(owned_claim, max(0, checkpoint - 1), stamp)

    patch.setattr(claims, "advance", advance)


def loop_counts_what_it_left(patch: Patch) -> None:
    """Leaving a loop counts everything that lies ready as handled."""

    def finish(self: MemberSteps) -> None:
        for left in self.table.in_flight:
            left.count(len(left.messages))
        self.table.in_flight = []

    patch.setattr(MemberSteps, "finish", finish)
    patch.setattr(MemberSteps, "_end", lambda self, flights: None)


def seek_keeps_what_came_before(patch: Patch) -> None:
    """What was handed out before a seek counts as done after it."""

    def count(self: InFlight, done: int) -> None:
        if done:
            self.owned.finish(self.messages[0].offset, self.messages[done - 1].offset + 1)

    patch.setattr(InFlight, "count", count)


def pause_ends_with_a_rebalance(patch: Patch) -> None:
    claimed = PartitionTable.claimed

    def anew(self: PartitionTable, owned_claims: list[OwnedClaim], topics: Any) -> None:
        self.paused = set()
        claimed(self, owned_claims, topics)

    patch.setattr(PartitionTable, "claimed", anew)


def loop_goes_on_with_what_is_paused(patch: Patch) -> None:
    patch.setattr(MemberSteps, "pause", lambda self, parts: self.table.pause(parts, paused=True))


def later_hand_outs_go_along(patch: Patch) -> None:
    """A commit in the background is of all that was handed out when its turn comes."""
    patch.setattr(MemberSteps, "commit_asked", lambda self, extents: self.commit_handled())


def interrupted_seek_is_forgotten(patch: Patch) -> None:
    """Ctrl-C while a checkpoint is set, which is done: the work goes on where it was."""

    def only_unknown(error: BaseException) -> bool:
        return isinstance(error, OutcomeUnknown)

    patch.setattr("pxrs.consuming.member_steps.leaves_doubt", only_unknown)
    patch.setattr("pxrs.groups.owned_claims.leaves_doubt", only_unknown)


MUTANTS = [
    Mutant(no_fence, r"wrote|epoch|went back|released|need not have"),
    Mutant(released_before_the_final_commit, r"wrote .* owned by None"),
    Mutant(checkpoint_of_what_was_fetched, r"was not handled"),
    Mutant(epoch_stays_on_take_over, r"both at epoch"),
    Mutant(lease_is_not_looked_at, r"after its lease was over"),
    Mutant(no_answer_is_success, r"handed out .* at epoch|no rest", {"rates": NO_ANSWERS}),
    Mutant(
        doubts_are_forgotten,
        r"no rest",
        {"rates": NO_ANSWERS, "revoke_timeout": None, "trouble": 4.0, "ttl": 6.0, "members": 4},
    ),
    Mutant(
        zombie_pushes_its_successor_out,
        r"came back and pushed",
        {"members": 3, "static": 3, "trouble": 4.0, "ttl": 2.0, "steps": 400},
        first=50,
    ),
    Mutant(target_may_be_old, r"which the target does not give it", {"interleave": 0.2}, first=20),
    Mutant(checkpoint_goes_back, r"went back|no rest|and has the effects"),
    Mutant(loop_counts_what_it_left, r"was not handled|and has the effects|without moving"),
    Mutant(later_hand_outs_go_along, r"was not handled", first=50),
    Mutant(
        interrupted_seek_is_forgotten,
        r"done before|was not handled|handed out before",
        {"rates": INTERRUPTED},
    ),
    Mutant(pause_ends_with_a_rebalance, r"paused", first=120),
    Mutant(loop_goes_on_with_what_is_paused, r"paused", first=230),
    Mutant(seek_keeps_what_came_before, r"was not handled|no rest|before"),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(mutant, monkeypatch)
