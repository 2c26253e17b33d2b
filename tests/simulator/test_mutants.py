"""Break the code under test in one place: the simulator has to notice, and to say what broke."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from pxrs.core import claims
from pxrs.core.claims import Holding, Stamp, Step
from pxrs.core.group import View
from pxrs.core.records import Claim, Head, decode, encode
from pxrs.errors import OffsetOutOfRange, OutcomeUnknown
from pxrs.runtime.checkpoint import Checkpoint
from pxrs.runtime.fetching import Fetcher
from pxrs.runtime.holdings import Applied, Holdings, Mark
from pxrs.runtime.membership import Membership
from pxrs.runtime.runs import Loose, Run
from pxrs.runtime.seat import Seat
from pxrs.runtime.transacting import Handed
from pxrs.runtime.worker import Worker
from pxrs.stores.api import Atomic
from pxrs.testing.faults import Rates
from pxrs.testing.simulator import Broken, draw, run
from pxrs.types import Check, Committed, Conflict, Put, TopicPartition, Versioned, Write

SEEDS = 300

Patch = pytest.MonkeyPatch


def no_fence(patch: Patch) -> None:
    """Claims are written whatever version the store has."""

    def send(
        self: Holdings, steps: Sequence[Step], guard: Sequence[Check], also: Sequence[Write]
    ) -> Conflict | Committed:
        return self._coord.commit(guard, (*(step.put for step in steps), *also))

    patch.setattr(Holdings, "_send", send)


def released_before_the_final_commit(patch: Patch) -> None:
    """The claim is given away first, and its last checkpoint written after."""
    release = Holdings.release

    def late(
        self: Holdings,
        marks: Mapping[TopicPartition, Mark | None],
        guard: Sequence[Check] = (),
        also: Sequence[Write] = (),
    ) -> Applied:
        applied = release(self, dict.fromkeys(marks), guard, also)
        for holding in applied.written:
            mark = marks[holding.part]
            if mark is not None:
                claim = msgspec.structs.replace(holding.claim, checkpoint=mark.checkpoint)
                self._coord.commit(
                    [Check(holding.key, holding.version)], [Put(holding.key, encode(claim))]
                )
        return applied

    patch.setattr(Holdings, "release", late)


def checkpoint_of_what_was_fetched(patch: Patch) -> None:
    patch.setattr(Seat, "mark", lambda seat: Mark(seat.position) if seat.started else None)


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
    patch.setattr(Worker, "alive", True)


def no_answer_is_success(patch: Patch) -> None:
    send = Holdings._send

    def hopeful(
        self: Holdings, steps: Sequence[Step], guard: Sequence[Check], also: Sequence[Write]
    ) -> Conflict | Committed:
        try:
            return send(self, steps, guard, also)
        except OutcomeUnknown:
            return Committed({step.put.key: step.check.version + 1 for step in steps})

    patch.setattr(Holdings, "_send", hopeful)


def doubts_are_forgotten(patch: Patch) -> None:
    """A claim that reached the store unnoticed blocks its partition for ever."""
    patch.setattr(Membership, "_settle_doubts", lambda membership, head: None)


def zombie_pushes_its_successor_out(patch: Patch) -> None:
    patch.setattr(Membership, "_refuse_if_displaced", lambda membership: None)


def target_may_be_old(patch: Patch) -> None:
    """Partitions are claimed by a target that is no longer the group's."""
    take = Holdings.take

    def unguarded(self: Holdings, found: Any, guard: Check, epochs: Any) -> Applied:
        current = self._coord.get(guard.key)
        assert current is not None
        return take(self, found, Check(guard.key, current.version), epochs)

    patch.setattr(Holdings, "take", unguarded)


def checkpoint_goes_back(patch: Patch) -> None:
    """The committer writes what it was told, though the claim is further."""

    def advance(holding: Holding, checkpoint: int, done: Any, metadata: Any, stamp: Stamp) -> Step:
        return claims.seek(holding, max(0, checkpoint - 1), stamp)

    patch.setattr(claims, "advance", advance)


def loop_counts_what_it_left(patch: Patch) -> None:
    """Leaving a loop counts everything that lies ready as handled."""

    def finish(self: Worker) -> None:
        for left in self.runs:
            left.count(len(left.messages))
        self.runs = []

    patch.setattr(Worker, "finish", finish)
    patch.setattr(Worker, "_end", lambda self, runs: None)


def seek_keeps_what_came_before(patch: Patch) -> None:
    """What was handed out before a seek counts as done after it."""

    def count(self: Run, done: int) -> None:
        if done:
            self.seat.finish(self.messages[0].offset, self.messages[done - 1].offset + 1)

    patch.setattr(Run, "count", count)


def checkpoint_beside_the_transaction(patch: Patch) -> None:
    """It is committed after the effects, in a commit of its own."""
    succeeded = Checkpoint.succeeded

    def late(self: Checkpoint, versions: Mapping[str, int]) -> None:
        outcome = self._coord.commit(
            [step.check for step in self._steps], [step.put for step in self._steps]
        )
        if isinstance(outcome, Committed):
            succeeded(self, outcome.versions)

    def stage(self: Checkpoint, atomic: Atomic) -> None:
        self._steps = self._holdings.steps_to_commit(self._marks)

    patch.setattr(Checkpoint, "stage", stage)
    patch.setattr(Checkpoint, "succeeded", late)


def transaction_is_not_fenced(patch: Patch) -> None:
    """The claims are written in it, whatever version the store has."""

    def stage(self: Checkpoint, atomic: Atomic) -> None:
        self._steps = self._holdings.steps_to_commit(self._marks)
        atomic.write(*(step.put for step in self._steps))

    patch.setattr(Checkpoint, "stage", stage)


def no_rewind_after_a_rollback(patch: Patch) -> None:
    patch.setattr(Handed, "rolled_back", lambda self: None)


def no_answer_means_not_committed(patch: Patch) -> None:
    patch.setattr(Checkpoint, "happened", lambda self, doubt: False)


def no_answer_means_committed(patch: Patch) -> None:
    def happened(self: Checkpoint, doubt: BaseException) -> bool:
        self._work.committed(self._marks)
        return True

    patch.setattr(Checkpoint, "happened", happened)


def transaction_takes_the_next_epoch_for_its_own(patch: Patch) -> None:
    """What was handed out before a partition was lost is committed after it was claimed again."""
    patch.setattr(Worker, "drop_stale_runs", lambda self: frozenset())


def transaction_undoes_a_seek(patch: Patch) -> None:
    """What was in hand before the seek counts after it."""
    properly = Handed.marks

    def marks(self: Handed) -> dict[TopicPartition, Mark]:
        ends = {run.seat.part: run.messages[run.seen - 1].offset + 1 for run in self._worker.runs}
        marks = properly(self)
        return marks | {part: Mark(end) for part, end in ends.items() if part in marks}

    patch.setattr(Handed, "marks", marks)


def loop_forgets_what_it_has_left(patch: Patch) -> None:
    """A transaction is about the partition that the loop is at, and no other."""
    patch.setattr(Loose, "add", lambda self, seat: None)


def claims_found_after_a_doubt_are_forgotten(patch: Patch) -> None:
    """A transaction landed while its claim was let go, and nobody looks at that claim again."""

    def let_go(self: Holdings, part: TopicPartition, found: Versioned) -> Applied:
        holding = Holding(part, found.key, found.version, decode(found, Claim))
        return self._apply([claims.release(holding, None, (), self._stamp())], None)

    patch.setattr(Holdings, "let_go", let_go)
    patch.setattr(Holdings, "_is_mine", lambda self, verdict: False)


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
    patch.setattr(Membership, "_drop_what_others_have", lambda self, view: False)


def reset_is_not_recorded(patch: Patch) -> None:
    def elsewhere(group: str, by: str, part: TopicPartition, *_: Any) -> Put:
        return Put(f"resets/other/{part.partition}", encode(Head()))

    patch.setattr("pxrs.runtime.groups.record_of_reset", elsewhere)


def topic_is_its_name(patch: Patch) -> None:
    """What is held of a deleted topic counts as held of the one that was made again."""

    def by_name(self: Membership, view: View) -> bool:
        gone = [
            part
            for part in sorted(self._holdings.parts)
            if (holding := self._holdings.get(part))
            and (
                part.topic not in view.topics
                or (found := self._coord.get(holding.key)) is None
                or decode(found, Claim).owner != self.me.id
            )
        ]
        self._holdings.drop(gone)
        self._desk.gone(gone, lost=True)
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

    def pass_over(self: Fetcher, seat: Seat, error: OffsetOutOfRange) -> bool:
        self._desk.restart(seat.part, error.start)
        return True

    patch.setattr(Fetcher, "_out_of_range", pass_over)


def trimmed_is_no_error(patch: Patch) -> None:
    """It is passed over and recorded, though somebody wants to be told."""

    def pass_over(self: Fetcher, seat: Seat, error: OffsetOutOfRange) -> bool:
        self._skip(seat, error.start, "gone")
        return True

    patch.setattr(Fetcher, "_out_of_range", pass_over)


def latest_begins_without_a_checkpoint(patch: Patch) -> None:
    """Whoever takes over before the first commit begins at a later end."""

    def start(self: Fetcher, seats: Sequence[Seat], ends: Any) -> None:
        for seat in seats:
            if not seat.started and seat.checkpoint is None:
                self._desk.start(seat, self._bounds(seat, ends).end)

    patch.setattr(Fetcher, "_pin_the_end", start)


def latest_begins_twice(patch: Patch) -> None:
    """A first checkpoint that had no answer is set again, to a later end."""

    def pin(self: Holdings, checkpoints: Mapping[TopicPartition, int]) -> Applied:
        return self.commit({part: Mark(offset) for part, offset in checkpoints.items()})

    patch.setattr(Holdings, "pin", pin)


class Mutant(NamedTuple):
    """How to break it, what the simulator shall say, and what a run has to have in it for that."""

    apply: Callable[[Patch], None]
    words: str
    plan: Mapping[str, Any] = MappingProxyType({})


# A commit is sent three times before its outcome counts as unknown.
NO_ANSWERS = Rates(unknown_applied=0.3, unknown_lost=0.3, unknown_late=0.3, longest_delay=1.0)

RESETS = {"operator": 3.0}
TRANSACTIONS = {"transactions": True}

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
    ),
    Mutant(target_may_be_old, r"which the target does not give it", {"interleave": 0.2}),
    Mutant(checkpoint_goes_back, r"went back|no rest|and has the effects"),
    Mutant(loop_counts_what_it_left, r"was not handled|and has the effects|without moving"),
    Mutant(seek_keeps_what_came_before, r"was not handled|no rest|before"),
    Mutant(checkpoint_beside_the_transaction, r"without moving its checkpoint", TRANSACTIONS),
    Mutant(transaction_is_not_fenced, r"wrote|epoch|went back|twice", TRANSACTIONS),
    Mutant(no_rewind_after_a_rollback, r"was not handled", TRANSACTIONS),
    Mutant(
        no_answer_means_not_committed,
        r"was committed.* told|twice",
        {**TRANSACTIONS, "rates": NO_ANSWERS},
    ),
    Mutant(
        no_answer_means_committed,
        r"left no effect",
        {**TRANSACTIONS, "rates": NO_ANSWERS},
    ),
    Mutant(
        transaction_takes_the_next_epoch_for_its_own,
        r"handed out before|was not handled|and has the effects|without moving|twice",
        {**TRANSACTIONS, "trouble": 1.0, "members": 3, "interleave": 0.2, "steps": 250},
    ),
    Mutant(loop_forgets_what_it_has_left, r"was not handled|without moving", TRANSACTIONS),
    Mutant(transaction_undoes_a_seek, r"was not handled", TRANSACTIONS),
    Mutant(
        claims_found_after_a_doubt_are_forgotten,
        r"no rest",
        {**TRANSACTIONS, "rates": NO_ANSWERS, "revoke_timeout": None, "interleave": 0.1},
    ),
    Mutant(reset_fences_nobody, r"without fencing anybody", RESETS),
    Mutant(nobody_hears_of_a_reset, r"no rest .* owned by None|REBALANCING", RESETS),
    Mutant(reset_is_not_recorded, r"without a record", RESETS),
    Mutant(topic_is_its_name, r"no rest", {**RESETS, "pattern": False}),
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
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(Broken, match=mutant.words):
        for seed in range(SEEDS):
            run(msgspec.structs.replace(draw(seed), **mutant.plan))
