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
from pxrs.consuming.owned_partition import Seat
from pxrs.consuming.partition_table import ConsumerDesk
from pxrs.consuming.reader import FETCH_BYTES
from pxrs.consuming.transactions import Checkpoint, Transaction
from pxrs.core.assign import assignor
from pxrs.core.claims import Holding
from pxrs.core.group import Rules
from pxrs.core.progress import Progress
from pxrs.decoding import Decoder, cut
from pxrs.errors import Fenced, SessionLost
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import Holdings, Mark
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

    def __init__(self, seat: Seat, messages: list[Message]) -> None:
        self.seat = seat
        self.turn = seat.turn
        self.messages = messages
        self.next = 0

    @property
    def over(self) -> bool:
        """Whether nothing of it is to be worked on any more."""
        return self.next == len(self.messages) or self.seat.turn != self.turn


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
        self._desk = ConsumerDesk(
            in_hand=lambda seat: any(hand.seat is seat for hand in self._hands),
            commits_handled=settings.auto_commit,
        )
        self._holdings = Holdings(place.stores.coord, place.clock, place.new_id)
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
            self._holdings,
            self._desk,
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
        return {part.partition for part, seat in self._desk.seats.items() if seat.state == "owned"}

    @property
    def in_hand(self) -> list[Message]:
        """Messages that were handed to it and that its handler has not seen yet."""
        return [message for hand in self._hands for message in hand.messages[hand.next :]]

    @property
    def version(self) -> int:
        """Rises whenever something about its partitions changes."""
        return self._desk.version

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
        while self._desk.next_change() is not None:
            pass
        self._membership.release_what_is_finished()

    def _commit(self) -> None:
        self._commit_at = self._place.clock.monotonic() + self._settings.auto_commit_interval
        marks = self._desk.marks() if self._settings.auto_commit else {}
        if not marks:
            return
        applied = self._holdings.commit(marks)
        self._desk.committed({holding.part: marks[holding.part] for holding in applied.written})
        if applied.lost:
            self._desk.gone(applied.lost, lost=True)
            self._place.fenced(self.name, applied.lost)

    # Messages

    def _fetch(self) -> None:
        log = self._place.stores.log
        for seat in self._desk.hungry():
            start, end = log.bounds(seat.where.topic_id)[seat.part.partition]
            if not seat.started:
                first = start if self._settings.start == "earliest" else end
                self._desk.start(seat, first if seat.checkpoint is None else seat.checkpoint)
            messages: list[Message] = []
            position = seat.position
            for batch in log.fetch(seat.where, position, FETCH_BYTES).batches:
                messages += cut(self._place.decoder.decode(batch, seat.fence), position)
                position = batch.next
            self._desk.fill(seat, seat.turn, messages, position)
        self._hands = [_Hand(*handed) for handed in self._desk.hand_out(self._most)]

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
        hand.seat.finish(message.offset, message.offset + 1)

    def _handle_in_transaction(self, hand: _Hand, message: Message) -> None:
        place = self._place
        work = _Work(self._desk, hand, message)
        try:
            checkpoint = Checkpoint(place.stores.coord, self._holdings, work)
            with Transaction(self._shared(), checkpoint) as tx:
                self._call(message, tx)
        except Fenced:
            place.fenced(self.name, frozenset([hand.seat.part]))

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
            self._desk.rewind(list(self._desk.seats.values()))
            raise
        self._place.handled(self.name, message)


class _Work:
    """See `pxrs.consuming.transactions.Work`: a single message."""

    def __init__(self, desk: ConsumerDesk, hand: _Hand, message: Message) -> None:
        self._desk = desk
        self._hand = hand
        self._message = message

    def marks(self) -> dict[TopicPartition, Mark]:
        before = self._hand.seat.mark()
        if before is None:
            return {}
        progress = Progress(before.checkpoint, before.done)
        progress.finish(self._message.offset)
        return {self._hand.seat.part: Mark(progress.checkpoint, progress.runs)}

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        self._hand.next += 1
        self._hand.seat.finish(self._message.offset, self._message.offset + 1)
        self._desk.committed(marks)

    def rolled_back(self) -> None:
        self._desk.rewind([self._hand.seat])

    def moved(self, found: Mapping[TopicPartition, Holding]) -> None:
        if self._hand.seat.part in found:
            self._hand.seat.found(found[self._hand.seat.part])

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        self._desk.gone(parts, lost=True)
