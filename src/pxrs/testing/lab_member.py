"""One member of a `GroupLab`: the group's own code and a handler, step by step.

A step is what the threads of a consumer would do between two moments: renew the session, look at
the group, handle a message, commit. Nothing waits, and nothing happens but in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Literal, NamedTuple

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
from pxrs.consuming.reader import FETCH_BYTES
from pxrs.consuming.transactions import Checkpoint, Transaction
from pxrs.core.assign import assignor
from pxrs.core.claims import OwnedClaim
from pxrs.core.group import Rules
from pxrs.core.progress import Progress
from pxrs.decoding import Decoder, cut
from pxrs.errors import Fenced, SessionLost
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import Mark, OwnedClaims
from pxrs.queues.held_items import Desk
from pxrs.queues.hold_session import Keeper
from pxrs.running.handler_results import refuse_unfinished
from pxrs.stores.api import Stores
from pxrs.topics import Topics
from pxrs.types import Message, TopicPartition

Handler = Callable[..., Any]
State = Literal["running", "frozen", "killed", "stopped"]


class Crash(BaseException):
    """Raise it where the machine shall lose power: inside a handler, or what a handler calls.

    The member that runs the handler is gone at once, as by `GroupLab.kill`. No `except
    Exception` of the code under test stops it, as none would stop a power cut.
    """


class Place(NamedTuple):
    """Where a member lives: what all members of a lab share."""

    stores: Stores
    topics: Topics
    clock: Clock
    topic: str
    decoder: Decoder
    new_id: Callable[[], str]
    # Told of every message that a handler has seen, and of every commit that was refused.
    handled: Callable[[str, Message], None]
    fenced: Callable[[str, frozenset[TopicPartition]], None]


class _Hand:
    """Messages of one partition that were handed out, and how many of them are handled."""

    def __init__(self, owned: OwnedPartition, messages: list[Message]) -> None:
        self.owned = owned
        self.turn = owned.turn
        self.messages = messages
        self.next = 0

    @property
    def over(self) -> bool:
        """Whether nothing of it is to be worked on any more."""
        return self.next == len(self.messages) or self.owned.turn != self.turn


class LabMember:
    """A member and its handler. Made by `GroupLab.start`."""

    def __init__(
        self,
        place: Place,
        settings: ConsumerSettings,
        handler: Handler,
        in_hand: int,
        *,
        transaction: bool,
    ) -> None:
        self.name = settings.member_name
        self.state: State = "running"
        self._place = place
        self._settings = settings
        self._handler = handler
        self._most = in_hand
        self._transaction = transaction
        self._hands: list[_Hand] = []
        self._unaware = False
        self._table = PartitionTable(
            in_hand=lambda owned: any(hand.owned is owned for hand in self._hands),
            commits_handled=settings.auto_commit,
        )
        self._owned_claims = OwnedClaims(place.stores.coord, place.clock, place.new_id)
        self._membership = Membership(
            MemberSettings(
                group=settings.group,
                name=settings.member_name,
                topics=lambda: (place.topic,),
                rules=Rules(
                    settings.debounce, settings.revoke_timeout, assignor(settings.strategy)
                ),
                ttl=settings.session_ttl,
            ),
            place.stores.coord,
            place.topics,
            place.clock,
            self._owned_claims,
            self._table,
            place.new_id,
        )
        self._membership.join()
        now = place.clock.monotonic()
        self._renew_at = now + settings.session_ttl / 3
        self._commit_at = now + settings.auto_commit_interval
        self._look_at: float | None = now

    @property
    def assignment(self) -> set[int]:
        """The partitions that it takes for its own; a frozen one may be wrong about that."""
        return {
            part.partition
            for part, owned in self._table.partitions.items()
            if owned.state == "owned"
        }

    @property
    def in_hand(self) -> list[Message]:
        """Messages that were handed to it and that its handler has not seen yet."""
        return [message for hand in self._hands for message in hand.messages[hand.next :]]

    @property
    def version(self) -> int:
        """Rises whenever something about its partitions changes."""
        return self._table.version

    def due(self) -> float:
        """When it has something to do at the latest."""
        times = [self._renew_at, self._commit_at]
        return min(times if self._look_at is None else [*times, self._look_at])

    def step(self) -> None:
        """Do what there is to do now; at most one message is handled."""
        if self._unaware:
            # Just woken: the handler goes on before anybody looks at a clock.
            self._unaware = False
            self._handle_next()
            self._commit()
            return
        self._renew()
        self._look_at = self._membership.look()
        self._let_go()
        if not self._hands:
            self._fetch()
        self._handle_next()
        if self._place.clock.monotonic() >= self._commit_at:
            self._commit()

    def leave(self) -> None:
        """Commit what was handled, release everything, say goodbye."""
        self._hands = []
        self._membership.leave()

    def wake(self) -> None:
        """Go on, not knowing that any time has passed."""
        self.state = "running"
        self._unaware = bool(self.in_hand)

    # The session and the group

    def _renew(self) -> None:
        session = self._membership.session
        now = self._place.clock.monotonic()
        if session is None or now < self._renew_at:
            return
        self._renew_at = now + self._settings.session_ttl / 3
        try:
            session.renew()
        except SessionLost:
            # The look that follows opens another one.
            return

    def _let_go(self) -> None:
        """Drop what is not to be worked on any more, and release what has to go."""
        self._hands = [hand for hand in self._hands if not hand.over]
        while self._table.next_change() is not None:
            pass
        self._membership.release_what_is_finished()

    def _commit(self) -> None:
        self._commit_at = self._place.clock.monotonic() + self._settings.auto_commit_interval
        marks = self._table.marks() if self._settings.auto_commit else {}
        if not marks:
            return
        applied = self._owned_claims.commit(marks)
        self._table.committed(
            {owned_claim.part: marks[owned_claim.part] for owned_claim in applied.written}
        )
        if applied.lost:
            self._table.gone(applied.lost, lost=True)
            self._place.fenced(self.name, applied.lost)

    # Messages

    def _fetch(self) -> None:
        log = self._place.stores.log
        for owned in self._table.hungry():
            start, end = log.bounds(owned.where.topic_id)[owned.part.partition]
            if not owned.started:
                first = start if self._settings.start == "earliest" else end
                self._table.start(owned, first if owned.checkpoint is None else owned.checkpoint)
            messages: list[Message] = []
            position = owned.position
            for batch in log.fetch(owned.where, position, FETCH_BYTES).batches:
                messages += cut(self._place.decoder.decode(batch, owned.fence), position)
                position = batch.next
            self._table.fill(owned, owned.turn, messages, position)
        self._hands = [_Hand(*handed) for handed in self._table.hand_out(self._most)]

    def _handle_next(self) -> None:
        hand = next((hand for hand in self._hands if not hand.over), None)
        if hand is None:
            return
        message = hand.messages[hand.next]
        if self._transaction:
            self._handle_in_transaction(hand, message)
            return
        self._call(message)
        hand.next += 1
        hand.owned.finish(message.offset, message.offset + 1)

    def _handle_in_transaction(self, hand: _Hand, message: Message) -> None:
        place = self._place
        work = _Work(self._table, hand, message)
        try:
            checkpoint = Checkpoint(place.stores.coord, self._owned_claims, work)
            with Transaction(self._shared(), checkpoint) as tx:
                self._call(message, tx)
        except Fenced:
            place.fenced(self.name, frozenset([hand.owned.part]))

    def _shared(self) -> Desk:
        place = self._place
        keeper = Keeper(place.stores, place.clock, self._settings.session_ttl, threads=False)
        return Desk(place.stores, place.topics, place.clock, keeper, Random())

    def _call(self, message: Message, *more: Any) -> None:
        """Call the handler. Whatever it raises is the test's; the message will come again."""
        try:
            refuse_unfinished(self._handler(message, *more))
        except Exception:
            self._hands = []
            self._table.rewind(list(self._table.partitions.values()))
            raise
        self._place.handled(self.name, message)


class _Work:
    """See `pxrs.consuming.transactions.Work`: a single message."""

    def __init__(self, table: PartitionTable, hand: _Hand, message: Message) -> None:
        self._table = table
        self._hand = hand
        self._message = message

    def marks(self) -> dict[TopicPartition, Mark]:
        before = self._hand.owned.mark()
        if before is None:
            return {}
        progress = Progress(before.checkpoint, before.done)
        progress.finish(self._message.offset)
        return {self._hand.owned.part: Mark(progress.checkpoint, progress.runs)}

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        self._hand.next += 1
        self._hand.owned.finish(self._message.offset, self._message.offset + 1)
        self._table.committed(marks)

    def rolled_back(self) -> None:
        self._table.rewind([self._hand.owned])

    def moved(self, found: Mapping[TopicPartition, OwnedClaim]) -> None:
        if self._hand.owned.part in found:
            self._hand.owned.found(found[self._hand.owned.part])

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        self._table.gone(parts, lost=True)
