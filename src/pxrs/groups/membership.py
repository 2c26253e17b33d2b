"""A member of a group: joins, looks, does what the group machine decides, leaves.

`look` is one step: read the records, decide, act. Threads call it when a watch wakes them or a
time has come; the simulator calls it in any order, over a store that fails. There is no waiting
in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from pxrs.clock import Clock
from pxrs.core.claims import OwnedClaim
from pxrs.core.group import Decision, Me, Memory, Rules, View, decide, moves_between, next_head
from pxrs.core.records import (
    HISTORY_LENGTH,
    Claim,
    GroupTopic,
    Head,
    MemberRecord,
    claim_key,
    decode,
    encode,
    head_key,
    history_key,
    member_key,
)
from pxrs.errors import Displaced, OutcomeUnknown, PxrsError, StoreError
from pxrs.groups.owned_claims import Mark, OwnedClaims, random_id
from pxrs.groups.snapshot import GroupReader, Snapshot, TopicFinder
from pxrs.stores.api import CoordStore, Session
from pxrs.types import Check, Committed, Delete, Put, TopicPartition, Write

_HAIR = 1e-6
_TRIES = 3


class PartitionWork(Protocol):
    """The part of a member that works on its partitions."""

    def claimed(self, owned_claims: list[OwnedClaim], topics: Mapping[str, GroupTopic]) -> None:
        """Start these partitions, which this member owns now, at their checkpoints."""
        ...

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        """Prepare to give up exactly these partitions: hand out nothing more of them."""
        ...

    def releasable(self) -> dict[TopicPartition, Mark | None]:
        """Return partitions to give up that no handler works on, and their progress."""
        ...

    def final_marks(self) -> dict[TopicPartition, Mark | None]:
        """Return the progress of all partitions, when the member leaves."""
        ...

    def gone(self, parts: Iterable[TopicPartition], *, lost: bool) -> None:
        """Drop partitions that are no longer ours: released, or lost."""
        ...


class MemberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The identity and timeouts of a member. Seconds."""

    group: str
    name: str
    topics: Callable[[], tuple[str, ...]]
    rules: Rules
    ttl: float
    client: str = ""
    node: str = ""
    rejoin_timeout: float | None = None


class Membership:
    """One member's part in its group. Not thread-safe: one thread looks."""

    def __init__(
        self,
        settings: MemberSettings,
        coord: CoordStore,
        topics: TopicFinder,
        clock: Clock,
        owned_claims: OwnedClaims,
        table: PartitionWork,
        new_id: Callable[[], str] = random_id,
        open_session: Callable[[float], Session] | None = None,
    ) -> None:
        self._settings = settings
        self._group = settings.group
        self._coord = coord
        self._topics = topics
        self._clock = clock
        self._owned_claims = owned_claims
        self._table = table
        self._new_id = new_id
        self._open_session = open_session or coord.session
        self._reader = GroupReader(settings.group, coord, topics)
        self._memory = Memory()
        # The topics in the member's record; None while they are not known.
        self._subscribed: tuple[str, ...] | None = None
        self.me = Me(settings.name, "")
        self.session: Session | None = None
        self.generation = 0
        # How many partitions the target gives to this member.
        self.meant = 0
        # Topics that it subscribes to and that do not exist any more.
        self.missing: tuple[str, ...] = ()
        self._verified = 0
        # Whether the group's records have this process, and under which ids.
        self._joined = False
        self._ids: set[str] = set()
        # Claims that other members still have: they are watched.
        self.waiting_for: frozenset[str] = frozenset()

    # Joining and leaving

    def join(self) -> None:
        """Open a session and write this member's record, touching the group in one commit."""
        self._begin()
        _announce([self])

    def _begin(self) -> None:
        """Take a new id, which the group has not seen yet."""
        self._lose_everything()
        former, self.session = self.session, None
        if former is not None:
            # A session that can't be closed ends by itself; it must not be used again.
            with suppress(StoreError):
                former.close()
        self.session = self._open_session(self._settings.ttl)
        self.me = Me(self._settings.name, f"{self._settings.name}.{self._new_id()}")
        self._ids.add(self.me.id)
        self._owned_claims.begin(self.me)
        self._memory = Memory()

    def leave(self, *, for_good: bool = False, silent: bool = False) -> None:
        """Write the final checkpoints, release all and say goodbye, in one commit.

        The commit carries the next target too, so others go on at once. A static member's
        partitions stay its own for its `rejoin_timeout`. If the commit fails the session ends all
        the same: messages that were not committed are handled again by the next owner. A member
        that leaves `for_good` gives its partitions up at once, and if that fails it is still there.
        One that was `silent` did not leave by itself: the recorded reason is that it is gone.
        """
        session = self.session
        if session is None:
            return
        try:
            self._say_goodbye(session, for_good, silent)
        except BaseException:
            if for_good:
                # Its record may be bound to a session that goes on: leaving is tried again.
                raise
            # Others must not wait for a member that is not there; the first error is raised.
            with suppress(PxrsError):
                self.drop_out()
            raise
        self.drop_out()

    def drop_out(self) -> None:
        """End the session without a word to the group, which finds that out by itself."""
        session = self.session
        self._lose_everything()
        self.session = None
        if session is not None:
            session.close()

    def _say_goodbye(self, session: Session, for_good: bool, silent: bool) -> None:
        while session.remaining() > 0:
            seen = self._reader.see({self.me.name: frozenset()})
            mine = seen.view.members.get(self.me.name)
            if mine is None or mine.id != self.me.id:
                return
            marks = self._table.final_marks()
            applied = self._owned_claims.release(
                marks,
                [Check(head_key(self._group), seen.head_version)],
                [
                    Delete(member_key(self._group, self.me.name)),
                    *self._farewell(seen.view, for_good, silent),
                ],
            )
            if not applied.stale:
                self._table.gone(marks, lost=False)
                return

    def _farewell(self, view: View, for_good: bool, silent: bool) -> list[Write]:
        rest = {
            name: tuple(sorted(member.topics))
            for name, member in view.members.items()
            if name != self.me.name
        }
        left = view.head.left if silent else (*view.head.left, self.me.name)
        head = msgspec.structs.replace(view.head, left=left)
        if self._settings.rejoin_timeout is not None and not for_good:
            return [self._put_head(msgspec.structs.replace(head, touched=self._new_id()))]
        for name in view.head.static:
            if name in view.head.subscriptions and name != self.me.name:
                rest.setdefault(name, view.head.subscriptions[name])
        seen = msgspec.structs.replace(view, head=head)
        after = next_head(seen, rest, self.me.name, self._settings.rules.assign)
        return self._head_writes(view.head, after)

    def _record(self, topics: tuple[str, ...]) -> Put:
        """This member's record, bound to its session."""
        assert self.session is not None
        record = MemberRecord(
            id=self.me.id,
            topics=topics,
            client=self._settings.client,
            node=self._settings.node,
            joined_ms=self._clock.wall_ms(),
            rejoin_timeout=self._settings.rejoin_timeout,
        )
        return Put(member_key(self._group, self.me.name), encode(record), self.session.id)

    def _refuse_if_displaced(self) -> None:
        """Raise if another process has taken this member's place: an old one must not push it out.

        Read after the head, which every join changes: no member can come in between.
        """
        if not self._joined:
            return
        record = self._coord.get(member_key(self._group, self.me.name))
        if record is not None and decode(record, MemberRecord).id not in self._ids:
            raise self._displaced()

    def _displaced(self) -> Displaced:
        return Displaced(
            f"another process joined group {self._group!r} as {self.me.name!r}; "
            "a static name belongs to one process at a time"
        )

    def safe_until(self) -> float:
        """Returns until when no other can take its partitions, even if no renewal succeeds."""
        # The clock first: a process frozen between the two calls promises too little, not too much.
        now, session = self._clock.monotonic(), self.session
        left = session.remaining() if session is not None else 0.0
        # A sum of floats may come out a hair too late.
        return now + left - _HAIR

    # Looking

    def look(self) -> float | None:
        """Look at the group once and act on it; returns when to look again at the latest.

        A session that is over is opened anew: this member owns nothing from before any more.
        `Displaced` if another process has joined under this member's static name.
        """
        if self.session is None or self.session.remaining() <= 0:
            self.join()
        if self._settings.topics() != self._subscribed:
            _announce([self])
        return self._follow(self._reader.see({self.me.name: self._owned_claims.parts}))

    def look_at(self, seen: Snapshot) -> float | None:
        """As `look`, with the caller's snapshot, which several members may share."""
        session = self.session
        if session is None or session.remaining() <= 0 or self._subscribed is None:
            return self.look()
        return self._follow(seen)

    def _follow(self, seen: Snapshot) -> float | None:
        mine = seen.view.members.get(self.me.name)
        if mine is None:
            self.join()
            return self._clock.monotonic()
        if mine.id != self.me.id:
            self._lose_everything()
            raise self._displaced()
        self._joined = True
        self.generation = seen.view.head.generation
        self.meant = len(seen.view.head.target_of(self.me.name))
        self.missing = tuple(
            name for name in self._subscribed or () if name not in seen.view.topics
        )
        if seen.head_version != self._verified:
            dropped = self._drop_what_others_have(seen)
            self._verified = seen.head_version
            if dropped:
                # The target may still give lost partitions to this member; that was not looked at.
                return self._clock.monotonic()
        self._settle_doubts(seen.view.head)
        decision = self._decide(seen)
        again = self._act(seen, decision)
        return self._clock.monotonic() if again else decision.look_again_at

    def _decide(self, seen: Snapshot) -> Decision:
        decision = decide(
            seen.view,
            self._memory,
            self.me,
            self._owned_claims.parts,
            self._clock.monotonic(),
            self._settings.rules,
        )
        self._memory = decision.memory
        return decision

    def _act(self, seen: Snapshot, decision: Decision) -> bool:
        """Execute a decision; true if that changed the group's records."""
        self._table.leaving(decision.revoke)
        self.release_what_is_finished()
        guard = Check(head_key(self._group), seen.head_version)
        changed = False
        wanted = {part: seen.claims[part] for part in sorted(decision.claim | decision.force)}
        if wanted:
            applied = self._owned_claims.take(wanted, guard, seen.last_epochs)
            self._table.claimed(applied.written, seen.view.head.topics)
            changed = applied.stale or bool(applied.lost)
        mine = seen.view.head.target_of(self.me.name)
        waited = (seen.claims.keys() & mine) - self._owned_claims.parts
        doubtful = frozenset(doubt.key for doubt in self._owned_claims.doubts.values())
        self.waiting_for = doubtful | {seen.claims[part][0] for part in waited}
        if decision.propose is not None:
            writes = self._head_writes(seen.view.head, decision.propose)
            self._coord.commit([guard], writes)
            changed = True
        return changed

    def release_what_is_finished(self) -> None:
        """Release the partitions to give up that no handler works on."""
        with self._owned_claims.lock:
            marks = self._table.releasable()
            if not marks:
                return
            applied = self._owned_claims.release(marks)
            self._table.gone([owned_claim.part for owned_claim in applied.written], lost=False)
            self._table.gone(sorted(applied.lost), lost=True)

    def _drop_what_others_have(self, seen: Snapshot) -> bool:
        """Drop partitions that this member does not own any more, after any change of the group.

        One may have been taken by force, reset by an operator, or its topic deleted and made
        again. A commit would show that too, but an idle member makes none.
        """
        held = {
            part: owned_claim
            for part in sorted(self._owned_claims.parts)
            if (owned_claim := self._owned_claims.get(part))
        }
        if not held:
            return False
        view, listed = seen.view, seen.all_claims
        dead = [
            part
            for part, owned_claim in held.items()
            if part.topic not in view.topics
            or owned_claim.key != claim_key(self._group, view.topics[part.topic].id, part.partition)
            or owned_claim.key not in listed
            or decode(listed[owned_claim.key], Claim).owner != self.me.id
        ]
        self._owned_claims.drop(dead)
        self._table.gone(dead, lost=True)
        return bool(dead)

    def _settle_doubts(self, head: Head) -> None:
        """Find out what became of writes that had no answer, or make them impossible.

        Otherwise a claim that reached the store unnoticed would block its partition for as long
        as this member lives, and a release could still arrive when the partition is in work again.
        """
        target = head.target_of(self.me.name)
        for part, doubt in sorted(self._owned_claims.doubts.items()):
            if self._owned_claims.get(part) is not None:
                # One that is leaving is released again, which settles it too.
                if part in target:
                    self._table.gone(self._owned_claims.confirm(part).lost, lost=True)
                continue
            if part in target:
                # It is claimed (again) by this look.
                continue
            found = self._coord.get(doubt.key)
            if found is not None and decode(found, Claim).owner == self.me.id:
                self._owned_claims.let_go(part, found)
            elif (found.version if found is not None else 0) == doubt.version:
                # It may still come; the watch on the claims that are waited for will wake.
                continue
            self._owned_claims.forget(part)

    def _lose_everything(self) -> None:
        parts = sorted(self._owned_claims.parts)
        self._owned_claims.drop(parts)
        self._table.gone(parts, lost=True)

    # Writing the head

    def _head_writes(self, before: Head, after: Head) -> list[Write]:
        after = msgspec.structs.replace(after, at_ms=self._clock.wall_ms(), left=())
        history = encode(moves_between(before, after))
        return [
            self._put_head(after),
            Put(history_key(self._group, after.generation), history),
            Delete(history_key(self._group, max(0, after.generation - HISTORY_LENGTH))),
        ]

    def _put_head(self, head: Head) -> Put:
        return Put(head_key(self._group), encode(head))


def join_together(members: Sequence[Membership]) -> None:
    """`Membership.join` for members of one group, in as few commits as carry them."""
    if not members:
        return
    # One operation is the head's.
    room = max(1, members[0]._coord.limits.operations - 1)
    for at in range(0, len(members), room):
        for member in members[at : at + room]:
            member._begin()
        _announce(members[at : at + room])


def _announce(members: Sequence[Membership]) -> None:
    """Write the records of members of one group; a target computed before this fails."""
    first = members[0]
    coord, key = first._coord, head_key(first._group)
    topics = [member._settings.topics() for member in members]
    puts = [member._record(each) for member, each in zip(members, topics, strict=True)]
    here = {member.me.name for member in members}
    for member in members:
        member._subscribed = None
    unanswered = 0
    while True:
        found = coord.get(key)
        for member in members:
            member._refuse_if_displaced()
        head = decode(found, Head) if found is not None else Head()
        left = tuple(name for name in head.left if name not in here)
        head = msgspec.structs.replace(head, touched=first._new_id(), left=left)
        check = Check(key, found.version if found is not None else 0)
        try:
            outcome = coord.commit([check], [first._put_head(head), *puts])
        except OutcomeUnknown:
            # Done or not, it can be repeated: a late copy finds another head.
            unanswered += 1
            if unanswered == _TRIES:
                raise
            continue
        if isinstance(outcome, Committed):
            # Not before: a topic that was not announced has to be tried again.
            for member, each in zip(members, topics, strict=True):
                member._subscribed = each
                member._joined = True
            return
