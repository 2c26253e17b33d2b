"""The claims that one member owns, and the one committer of their checkpoints.

Everything a member writes to its claims goes through here, one commit at a time: an auto-commit
and an explicit one that raced on a version would fence each other. A commit carries any number
of partitions; those that were lost are dropped from it and the rest is written.

No threads and no waiting: the same code runs under the simulator.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core import claims
from pxrs.core.claims import Behind, Happened, Lost, OwnedClaim, Stamp, Step
from pxrs.core.group import Me
from pxrs.core.records import Claim, Ranges, decode
from pxrs.errors import (
    Fenced,
    InsideTransaction,
    OutcomeUnknown,
    PartitionNotFound,
    PxrsError,
    StoreUnavailable,
)
from pxrs.stores.api import CoordStore, GivesWay
from pxrs.topics import Topics
from pxrs.types import Check, Committed, Conflict, TopicPartition, Versioned, Write

# Makes the ids of writes and of members, unless the caller chooses them.
random_id = partial(secrets.token_hex, 8)
_WHAT_TO_DO = "partitions are assigned when it polls: poll first, or seek in on_assigned"


def names_of(parts: Iterable[TopicPartition]) -> str:
    """The names of partitions, for people."""
    return ", ".join(f"{topic}/{partition}" for topic, partition in sorted(parts))


def fenced(parts: Iterable[TopicPartition]) -> Fenced:
    """The error that names these partitions."""
    parts = frozenset(parts)
    return Fenced(f"not committed, another member owns these now: {names_of(parts)}", parts)


def not_owned(part: TopicPartition, topics: Topics) -> Fenced | PartitionNotFound:
    """Builds the error for a partition that a consumer does not own, or that does not exist."""
    # Whatever the state of the topic or the store: the consumer does not own it.
    with suppress(PxrsError):
        partitions = topics.find(part.topic).partitions
        if not 0 <= part.partition < partitions:
            return PartitionNotFound(*part, partitions)
    what = f"{part.topic!r} partition {part.partition} is not owned by this consumer"
    return Fenced(f"{what}; {_WHAT_TO_DO}", [part])


def all_of(assignment: set[TopicPartition]) -> set[TopicPartition]:
    """Rejects a call about all owned partitions if there are none."""
    if not assignment:
        raise Fenced(f"this consumer owns no partition; {_WHAT_TO_DO}")
    return assignment


_TRIES = 3


class Mark(NamedTuple):
    """The progress of a partition: the checkpoint, and what is done above it."""

    checkpoint: int
    done: Ranges = ()
    metadata: str | None = None


def mark_of(owned_claim: OwnedClaim) -> Mark:
    """Returns the group's progress in a claim."""
    claim = owned_claim.claim
    return Mark(claim.checkpoint if claim.checkpoint is not None else -1, claim.done)


class Applied(NamedTuple):
    """The result of a change of several claims: what was written, what was lost.

    `stale` means that the guard did not hold, and nothing was written at all.
    """

    written: list[OwnedClaim]
    lost: frozenset[TopicPartition]
    stale: bool = False


class Doubt(NamedTuple):
    """A write of a claim that got no answer: done, lost, or still on its way.

    It is conditional on `version`. While the record has that version it may still be applied;
    at any other it was applied, or never will be.
    """

    key: str
    version: int


Rebuild = Callable[[OwnedClaim], Step]


def leaves_doubt(error: BaseException) -> bool:
    """Whether a commit that ended with this error may have been done, or may still be.

    Ctrl-C comes before the commit, after it, or in between. Every other error of pxrs means that
    nothing was done.
    """
    return isinstance(error, OutcomeUnknown) or not isinstance(error, PxrsError)


class OwnedClaims:
    """The claims that this member owns. Thread-safe; every write is serialised."""

    def __init__(
        self, coord: CoordStore, clock: Clock, new_id: Callable[[], str] = random_id
    ) -> None:
        self._coord = coord
        self._clock = clock
        self._new_id = new_id
        self.lock = threading.RLock()
        # The thread whose transaction holds the lock.
        self.transacting: int | None = None
        # The thread that commits beside the caller's; and whether the caller, which may hold the
        # store's one writer by a connection of its own, waits for the lock: the two would wait
        # for each other.
        self.beside: int | None = None
        self.wanted = False
        self._owned: dict[TopicPartition, OwnedClaim] = {}
        self._doubts: dict[TopicPartition, Doubt] = {}
        self._me = Me("", "")

    def begin(self, me: Me) -> None:
        """Start anew under another id: this member owns nothing from before any more."""
        with self.lock:
            self._me = me
            self._owned = {}
            self._doubts = {}

    def refuse_inside_transaction(self) -> None:
        """Raise where the call would wait for the end of this block, or be undone by it."""
        if self.transacting == threading.get_ident():
            raise InsideTransaction("leave the block of the consumer's transaction first")

    @property
    def owner(self) -> str:
        """The id under which this member owns claims."""
        return self._me.id

    @property
    def parts(self) -> frozenset[TopicPartition]:
        """The partitions owned, as far as this member knows."""
        return frozenset(self._owned)

    def get(self, part: TopicPartition) -> OwnedClaim | None:
        return self._owned.get(part)

    @property
    def doubts(self) -> dict[TopicPartition, Doubt]:
        """Writes whose outcome is not known, of claims owned or not."""
        with self.lock:
            return dict(self._doubts)

    def forget(self, part: TopicPartition) -> None:
        """End the doubt about this claim."""
        with self.lock:
            self._doubts.pop(part, None)

    def confirm(self, part: TopicPartition) -> Applied:
        """Settle the doubt about a claim that is owned, by a write of our own."""
        return self._change([part], claims.touch)

    def let_go(self, part: TopicPartition, found: Versioned) -> Applied:
        """Release a claim that turned out to be this member's, though no handler works on it.

        Works even if another unanswered write of ours comes in between.
        """
        with self.lock:
            stamp = self._stamp()

            def release(owned_claim: OwnedClaim) -> Step:
                return claims.release(owned_claim, None, (), stamp)

            owned_claim = OwnedClaim(part, found.key, found.version, decode(found, Claim))
            return self._apply([release(owned_claim)], release)

    def drop(self, parts: Iterable[TopicPartition]) -> None:
        """Forget claims that another member owns now."""
        with self.lock:
            for part in parts:
                self._owned.pop(part, None)

    def take(
        self,
        found: Mapping[TopicPartition, tuple[str, Versioned | None]],
        guard: Check,
        last_epochs: Mapping[TopicPartition, int],
    ) -> Applied:
        """Claim partitions as they were found, if `guard` still holds."""
        with self.lock:
            stamp = self._stamp()
            steps = [
                claims.take(part, key, record, stamp, last_epochs.get(part, 0))
                for part, (key, record) in found.items()
            ]
            applied = self._apply(steps, None, (guard,))
            self._owned |= {owned_claim.part: owned_claim for owned_claim in applied.written}
            return applied

    def commit(self, marks: Mapping[TopicPartition, Mark]) -> Applied:
        """Move checkpoints forward, all in one commit; never back."""
        return self._change(
            marks, lambda owned, stamp: claims.advance(owned, *marks[owned.part], stamp)
        )

    def pin(self, checkpoints: Mapping[TopicPartition, int]) -> Applied:
        """Set first checkpoints, all in one commit.

        If an earlier try had no answer and was done, its checkpoints count.
        """
        return self._change(
            checkpoints, lambda owned, stamp: claims.pin(owned, checkpoints[owned.part], stamp)
        )

    def release(
        self,
        marks: Mapping[TopicPartition, Mark | None],
        guard: Sequence[Check] = (),
        also: Sequence[Write] = (),
    ) -> Applied:
        """Write the final checkpoints and release, in one commit that includes `also`."""

        def release(owned: OwnedClaim, stamp: Stamp) -> Step:
            mark = marks[owned.part] or Mark(-1)
            checkpoint = mark.checkpoint if mark.checkpoint >= 0 else None
            return claims.release(owned, checkpoint, mark.done, stamp)

        with self.lock:
            applied = self._change(marks, release, guard, also)
            self.drop(owned_claim.part for owned_claim in applied.written)
            return applied

    def steps_to_commit(self, marks: Mapping[TopicPartition, Mark]) -> list[Step]:
        """The writes of `commit`, for a transaction that makes them itself. Under the lock."""
        stamp = self._stamp()
        return [
            claims.advance(self._owned[part], *mark, stamp)
            for part, mark in marks.items()
            if part in self._owned
        ]

    def steps_to_touch(self, parts: Iterable[TopicPartition]) -> list[Step]:
        """Writes that change nothing, after which no earlier write can land. Under the lock."""
        stamp = self._stamp()
        return [claims.touch(self._owned[part], stamp) for part in parts]

    def refresh(self, found: Iterable[OwnedClaim]) -> dict[TopicPartition, OwnedClaim]:
        """Adopt owned claims from the store; returns those with another checkpoint than known."""
        with self.lock:
            moved = {}
            for owned_claim in found:
                if mark_of(owned_claim) != mark_of(self._owned[owned_claim.part]):
                    moved[owned_claim.part] = owned_claim
                self._owned[owned_claim.part] = owned_claim
                self._doubts.pop(owned_claim.part, None)
            return moved

    def seek(self, part: TopicPartition, checkpoint: int, also: Sequence[Write]) -> Applied:
        """Set a checkpoint, forward or back: explicit, and recorded by `also`."""
        return self._change_with(
            part, lambda owned: claims.seek(owned, checkpoint, self._stamp()), also
        )

    def commit_with(self, part: TopicPartition, mark: Mark, also: Sequence[Write]) -> Applied:
        """Move one checkpoint forward, and write `also` in the same commit if it is still owned."""
        return self._change_with(
            part, lambda owned: claims.advance(owned, *mark, self._stamp()), also
        )

    def _change_with(self, part: TopicPartition, build: Rebuild, also: Sequence[Write]) -> Applied:
        with self.lock:
            owned = self._owned.get(part)
            if owned is None:
                return Applied([], frozenset([part]))
            # Not by `_change`: if the claim is lost, `also` must not be written without it.
            step = build(owned)
            while True:
                try:
                    outcome = self._send([step], (), also)
                except BaseException as error:
                    if leaves_doubt(error):
                        self._doubt([step], ())
                        self.drop([part])
                    raise
                if isinstance(outcome, Committed):
                    self._owned[part] = step.done(outcome.versions[step.put.key])
                    return Applied([self._owned[part]], frozenset())
                verdict = claims.judge(step, self._me.id, outcome.current[step.put.key])
                if isinstance(verdict, Happened):
                    self._owned[part] = step.done(verdict.version)
                    return Applied([self._owned[part]], frozenset())
                if not isinstance(verdict, Behind):
                    self.drop([part])
                    return Applied([], frozenset([part]))
                step = build(verdict.owned_claim)

    def wrote(self, steps: Iterable[Step], versions: Mapping[str, int]) -> None:
        """Note what a transaction has committed."""
        for step in steps:
            self._owned[step.part] = step.done(versions[step.put.key])
            self._doubts.pop(step.part, None)

    def doubt(self, steps: Sequence[Step]) -> None:
        """Note the doubt about steps of a transaction whose outcome could not be found out."""
        with self.lock:
            self._doubt(steps, ())
            self.drop(step.part for step in steps)

    def _change(
        self,
        parts: Iterable[TopicPartition],
        build: Callable[[OwnedClaim, Stamp], Step],
        guard: Sequence[Check] = (),
        also: Sequence[Write] = (),
    ) -> Applied:
        """Write the changes that `build` makes of these claims, and note them."""
        with self.lock:
            stamp = self._stamp()
            steps = [build(self._owned[part], stamp) for part in parts if part in self._owned]
            unknown = frozenset(part for part in parts if part not in self._owned)
            applied = self._apply(steps, lambda owned: build(owned, stamp), guard, also)
            self._owned |= {owned_claim.part: owned_claim for owned_claim in applied.written}
            self.drop(applied.lost)
            return Applied(applied.written, applied.lost | unknown, applied.stale)

    def _apply(
        self,
        steps: list[Step],
        rebuild: Rebuild | None,
        guard: Sequence[Check] = (),
        also: Sequence[Write] = (),
    ) -> Applied:
        """Write the steps, dropping lost claims and repeating undecided ones."""
        # In the order of their keys: two members that lock rows in one order never deadlock.
        steps = sorted(steps, key=attrgetter("put.key"))
        written: list[OwnedClaim] = []
        lost: set[TopicPartition] = set()
        room = max(1, (self._coord.limits.operations - len(guard) - len(also)) // 2)
        while steps or also:
            now, later = steps[:room], steps[room:]
            extra = () if later else tuple(also)
            try:
                outcome = self._send(now, guard, extra)
            except BaseException as error:
                self._doubt(now if leaves_doubt(error) else (), written)
                raise
            if not isinstance(outcome, Conflict):
                written += [step.done(outcome.versions[step.put.key]) for step in now]
                for step in now:
                    self._doubts.pop(step.part, None)
                steps, also = later, () if not later else also
                continue
            steps = self._sort_out(now, outcome, rebuild, written, lost) + later
            if any(check.key in outcome.current for check in guard):
                return Applied(written, frozenset(lost), stale=True)
        return Applied(written, frozenset(lost))

    def _send(
        self, steps: Sequence[Step], guard: Sequence[Check], also: Sequence[Write]
    ) -> Conflict | Committed:
        """One commit, sent again when its outcome is unknown.

        Each step is conditional on the version that it was built for, so at most one of the
        tries is applied, and the write id in the record shows whether that one was ours. Once a
        try had no answer, the failure of a later one does not make the outcome certain again.
        """
        checks = (*guard, *(step.check for step in steps))
        writes = (*(step.put for step in steps), *also)
        coord, unknown = self._coord, None
        for left in reversed(range(_TRIES)):
            try:
                if self.beside == threading.get_ident() and isinstance(coord, GivesWay):
                    return coord.commit_unless(checks, writes, lambda: self.wanted)
                return coord.commit(checks, writes)
            except OutcomeUnknown as error:
                unknown = error
            except StoreUnavailable:
                if not left and unknown is None:
                    raise
            except PxrsError as error:
                if unknown is None:
                    raise
                raise unknown from error
        assert unknown is not None
        raise unknown

    def _doubt(self, unknown: Sequence[Step], written: Sequence[OwnedClaim]) -> None:
        """Note a commit without an answer, after others of the same change had been done."""
        for step in unknown:
            self._doubts[step.part] = Doubt(step.put.key, step.check.version)
        for owned_claim in written:
            self._doubts[owned_claim.part] = Doubt(owned_claim.key, -1)

    def _sort_out(
        self,
        steps: Sequence[Step],
        conflict: Conflict,
        rebuild: Rebuild | None,
        written: list[OwnedClaim],
        lost: set[TopicPartition],
    ) -> list[Step]:
        """Returns the steps that are left to write after a conflict."""
        left: list[Step] = []
        for step in steps:
            if step.put.key not in conflict.current:
                left.append(step)
                continue
            verdict = claims.judge(step, self._me.id, conflict.current[step.put.key])
            self._doubts.pop(step.part, None)
            if isinstance(verdict, Happened):
                written.append(step.done(verdict.version))
            elif isinstance(verdict, Behind) and rebuild is not None:
                left.append(rebuild(verdict.owned_claim))
            else:
                lost.add(step.part)
                if self._is_mine(verdict):
                    # By an earlier try of ours, or a transaction, whose answer was lost.
                    self._doubts[step.part] = Doubt(step.put.key, -1)
        return left

    def _is_mine(self, verdict: Behind | Lost) -> bool:
        """Whether the store has this member as the owner of a claim that it did not know of."""
        if isinstance(verdict, Behind):
            return True
        return verdict.claim is not None and verdict.claim.owner == self._me.id

    def _stamp(self) -> Stamp:
        return Stamp(self._me.id, self._me.name, self._new_id(), self._clock.wall_ms())
