"""One member's work, step by step: fetch, hand out, count, commit, seek.

Nothing in here waits and no thread is started, so the simulator drives the very code that the
consumer's threads drive: the caller's thread takes the steps about messages, the background thread
those of the membership and the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from pxrs.clock import Clock
from pxrs.codec.messages import Decoder
from pxrs.config import ConsumerSettings
from pxrs.consuming.fetcher import Fetcher
from pxrs.consuming.in_hand import Extent, InFlight, Reached, Uncommitted, line_up
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.errors import (
    InvalidRequest,
    PxrsError,
    TopicNotFound,
)
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import (
    Applied,
    Mark,
    OwnedClaims,
    fenced,
    leaves_doubt,
    mark_of,
    not_owned,
    random_id,
)
from pxrs.groups.resets import Reset, forget_old_resets, record_of_reset
from pxrs.stores.api import Stores
from pxrs.topics import Topics, require_in_range
from pxrs.types import Message, TopicPartition, Write


class MemberSteps:
    """A member of a group, and its partitions and messages. See `Consumer` for its threads.

    `most_out`: how many messages may be out, where worker threads handle them.
    """

    def __init__(
        self,
        stores: Stores,
        topics: Topics,
        clock: Clock,
        names: Callable[[], tuple[str, ...]],
        settings: ConsumerSettings,
        decoder: Decoder,
        *,
        asks_before_release: bool = False,
        most_out: int | None = None,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self._coord = stores.coord
        self._log = stores.log
        self._topics = topics
        self._clock = clock
        self._settings = settings
        self._new_id = new_id
        # Only without auto-commit: otherwise they are committed soon anyway.
        self.uncommitted = Uncommitted()
        # The caller may still have messages that a transaction gave back when it failed.
        self.given_back = False
        # When the caller last got messages, None once it has asked for more; and when it asked.
        self.handed_at: float | None = None
        self.asked_at = clock.monotonic()
        # By worker thread: since when it has had its current message.
        self.working_since: dict[int, float] = {}
        self.table = PartitionTable(
            commits_handled=settings.auto_commit,
            asks_before_release=asks_before_release,
            most_out=most_out,
        )
        self._fetcher = Fetcher(
            stores.log, self.table, settings, decoder, self._pin, self._seek, self._is_deleted
        )
        self.owned_claims = OwnedClaims(stores.coord, clock, new_id)
        self.membership = Membership(
            MemberSettings(
                group=settings.group,
                name=settings.member_name,
                topics=names,
                rules=Rules(
                    settings.debounce, settings.revoke_timeout, assignor(settings.strategy)
                ),
                ttl=settings.session_ttl,
                client=settings.client,
                rejoin_timeout=settings.rejoin_timeout if settings.static else None,
            ),
            stores.coord,
            topics,
            clock,
            self.owned_claims,
            self.table,
            new_id,
        )

    # Handing out and handling

    @property
    def alive(self) -> bool:
        """Whether no other member can have taken its partitions, by its own clock."""
        session = self.membership.session
        return session is not None and session.remaining() > 0

    def hand_out(self, most: int, *, to_workers: bool = False) -> list[InFlight]:
        """Fetched messages for the caller, at most `most`; none once the lease may be over.

        `to_workers`: its worker threads handle them, in any order, and note their current message
        at the partition and in `working_since`.
        """
        with self.table.lock:
            flights = self.table.hand_out(most) if self.alive else []
            self.table.in_flight = [] if to_workers else list(flights)
            self.given_back = False
            self.asked_at = self._clock.monotonic()
            self.handed_at = self.asked_at if flights else None
            return flights

    def all_at_once(self, flights: list[InFlight]) -> list[Message]:
        """The flights' messages; they are handled when `finish` is called."""
        for flight in flights:
            flight.seen = len(flight.messages)
        # The caller gets its own list: it may sort it, or take from it; the flights still count.
        return list(chain.from_iterable(flight.messages for flight in flights))

    def one_by_one(self, flights: list[InFlight]) -> Iterator[Message]:
        """The messages of all flights; one is handled when the next one is asked for.

        A caller that stops in the middle gets the rest again.
        """
        now, until = self._clock.monotonic, 0.0
        try:
            line_up(flights, self.table.lock)
            for flight in flights:
                owned, turn, number = flight.owned, flight.turn, 0
                for message in flight.messages if self._begin(flight) else ():
                    if owned.turn != turn:
                        break
                    # The lease has to be checked for every message: a handler can take long, a
                    # process can be stopped. To ask the session each time is too slow.
                    if (at := now()) >= until and (until := self.membership.safe_until()) <= now():
                        break
                    self.handed_at = at
                    number += 1  # noqa: SIM113 - enumerate() is slower
                    flight.seen = number
                    yield message
                    flight.handled = number
                self._end([flight])
        finally:
            self._end(flights)

    def by_partition(self, flights: list[InFlight]) -> Iterator[list[Message]]:
        """The messages of each flight at once; one is handled when the next one is asked for."""
        try:
            line_up(flights, self.table.lock)
            for flight in flights:
                if self._begin(flight) and self.alive:
                    self.handed_at = self._clock.monotonic()
                    flight.seen = len(flight.messages)
                    yield list(flight.messages)
                    flight.handled = len(flight.messages)
                self._end([flight])
        finally:
            self._end(flights)

    def _begin(self, flight: InFlight) -> bool:
        """Whether a loop may show the flight. From then on the caller has it in hand."""
        with self.table.lock:
            flight.begun = flight.owned.turn == flight.turn
        self.given_back &= not flight.begun
        return flight.begun

    def finish(self) -> None:
        """Count all that the caller has seen as handled; the rest will be handed out again.

        A loop that was left has ended its flights itself: nothing of those is counted here.
        """
        with self.table.lock:
            for flight in self.table.in_flight:
                flight.handled = flight.seen
            self._end(self.table.in_flight)
            self.uncommitted.clear()

    def _end(self, flights: list[InFlight]) -> None:
        """Count what was handled in the flights and give back the rest; no handler has them now."""
        with self.table.lock:
            ended = [flight for flight in self.table.in_flight if flight in flights]
            for flight in ended:
                # An interrupt may come anywhere here: until they are forgotten, all of this can be
                # done once more, with the same result.
                flight.seen = flight.handled
                flight.count(flight.handled)
                if flight.handled and not self._settings.auto_commit and flight.is_uncommitted:
                    self.uncommitted.add(flight.owned)
                if flight.handled < len(flight.messages) and flight.owned.turn == flight.turn:
                    self.table.give_back(flight.owned, flight.messages[flight.handled].offset)
            self.table.in_flight = [
                flight for flight in self.table.in_flight if flight not in ended
            ]

    def did_not_arrive(self, error: BaseException) -> None:
        """Note that the caller gets this error, not messages: all not handled is handed out again.

        After Ctrl-C it is not known what was handed out; errors of pxrs come before that.
        """
        if isinstance(error, PxrsError):
            return
        with self.table.lock:
            self.table.in_flight = []
            self.table.hand_out_again()

    def give_back_all(self) -> None:
        """Count nothing of what the caller has: all of it comes again, from the checkpoints."""
        with self.table.lock:
            self.table.in_flight = []
            self.uncommitted.clear()
            self.table.rewind([owned for owned in self.table.partitions.values() if owned.started])

    def leave_loop(self) -> None:
        """End the loop: the message that it shows is not handled."""
        with self.table.lock:
            self._end([flight for flight in self.table.in_flight if flight.in_loop])

    def pause(self, parts: Collection[TopicPartition]) -> None:
        """Hand out nothing of these; messages that a loop has not shown wait for `resume`, too."""
        with self.table.lock:
            self.table.pause(parts, paused=True)
            for flight in self.table.in_flight:
                if flight.owned.part in parts:
                    flight.hold_back()

    def sync(self) -> None:
        """Count what the caller's loop has handled of its current flight."""
        with self.table.lock:
            for flight in self.table.in_flight:
                flight.count(flight.handled)

    def in_hand_since(self) -> float | None:
        """Since when the caller, or a worker thread, has had the same message."""
        handed_at = self.handed_at if self.table.in_flight else None
        return min(list(self.working_since.values()), default=handed_at)

    # Fetching

    @property
    def trouble(self) -> Exception | None:
        """The error that keeps a partition from being read, as of the last fetch."""
        return self._fetcher.trouble

    def fetch(self, topic_gone: Callable[[], None]) -> bool:
        """Fill empty buffers; true if anything came."""
        self.asked_at = self._clock.monotonic()
        return self._fetcher.fetch(topic_gone)

    def _pin(self, offsets: Mapping[OwnedPartition, int]) -> None:
        """Make these offsets the first checkpoints of partitions that have none."""
        with self.owned_claims.lock:
            current = {
                owned.part: offset for owned, offset in offsets.items() if self._is_current(owned)
            }
            if current:
                self._note(self.owned_claims.pin(current))

    def _is_deleted(self, owned: OwnedPartition) -> bool:
        """Whether the partition's topic was deleted, and perhaps made again as another one."""
        try:
            return self._topics.find(owned.part.topic).id != owned.where.topic_id
        except TopicNotFound:
            return True

    def owned_partition(self, topic: str, partition: int) -> OwnedPartition:
        """The partition if it is owned now, or about to be given away; else raises `Fenced`."""
        part = TopicPartition(topic, partition)
        if (owned := self.table.partitions.get(part)) is None:
            raise not_owned(part, self._topics)
        return owned

    # Committing

    def commit_handled(self) -> frozenset[TopicPartition]:
        """Commit what was handled by now; returns the partitions that turned out to be lost.

        Marks are taken and written under one lock: a seek in between would be undone.
        """
        with self.owned_claims.lock:
            self.sync()
            return self.commit(self.table.marks())

    def commit_empty(self) -> frozenset[TopicPartition]:
        """Commit that a source has nothing for some partitions; returns those that were lost.

        For callers that commit by themselves: they have no message to commit there, and a member
        that takes over would read all of it again.
        """
        with self.owned_claims.lock:
            return self.commit(self.table.empty_marks())

    def extent(self) -> Extent:
        """Counts what the caller has seen by now as handled, and returns it."""
        with self.table.lock:
            for flight in self.table.in_flight:
                flight.count(flight.seen)
            marks = self.table.marks()
            return Extent(
                self.uncommitted.partitions
                + [flight.owned for flight in self.table.in_flight if flight.seen],
                [Reached(self.table.partitions[part], mark) for part, mark in marks.items()],
                self.uncommitted.lost,
            )

    def commit_up_to(self, extent: Extent) -> frozenset[TopicPartition]:
        """Commit what the caller had seen, and no more; returns the partitions that were lost."""
        with self.owned_claims.lock:
            gone = {owned for owned in extent.partitions if not self._holds(owned)}
            with self.table.lock:
                self.table.in_flight = [
                    flight for flight in self.table.in_flight if flight.owned not in gone
                ]
                marks = extent.marks(self.table.partitions)
            lost = self.commit(marks)
            with self.table.lock:
                self.uncommitted.settle(extent, gone)
            return lost | {owned.part for owned in gone} | extent.lost

    def drop_stale(self) -> frozenset[TopicPartition]:
        """Forget what is in hand of partitions that were lost, even if claimed again since.

        Under the claims' lock: a partition that is lost and claimed in between is not the one
        whose messages were handed out.
        """
        with self.table.lock:
            stale = [flight for flight in self.table.in_flight if not self._holds(flight.owned)]
            self.table.in_flight = [
                flight for flight in self.table.in_flight if flight not in stale
            ]
            lost = self.uncommitted.drop(lambda owned: not self._holds(owned))
            return frozenset(flight.owned.part for flight in stale if flight.seen) | lost

    def _is_current(self, owned: OwnedPartition) -> bool:
        """Whether this is still the same ownership of the partition. Under the claims' lock."""
        return self.table.partitions.get(owned.part) is owned and self._holds(owned)

    def _holds(self, owned: OwnedPartition) -> bool:
        """Whether the partition is still owned under the epoch with which it was claimed."""
        owned_claim = self.owned_claims.get(owned.part)
        return (
            owned_claim is not None
            and owned_claim.epoch == owned.epoch
            and owned_claim.key == owned.key
        )

    def commit(self, marks: Mapping[TopicPartition, Mark]) -> frozenset[TopicPartition]:
        """Commit these marks; returns the partitions that turned out to be lost."""
        if not marks:
            return frozenset()
        with self.owned_claims.lock:
            return self._note(self.owned_claims.commit(marks))

    def _note(self, applied: Applied) -> frozenset[TopicPartition]:
        """Note in the table what the claims have now; returns the partitions that were lost.

        A mark behind its claim has changed nothing.
        """
        self.table.committed(
            {owned_claim.part: mark_of(owned_claim) for owned_claim in applied.written}
        )
        if applied.lost:
            self.table.gone(sorted(applied.lost), lost=True)
        return applied.lost

    def commit_with(self, owned: OwnedPartition, checkpoint: int, also: Sequence[Write]) -> None:
        """Commit this checkpoint of a partition together with other records, all or none.

        Raises `Fenced` if the partition was lost. A checkpoint never goes back.
        """
        with self.owned_claims.lock:
            mark = Mark(checkpoint, owned.done)
            applied = self._change_with(
                owned, lambda: self.owned_claims.commit_with(owned.part, mark, also)
            )
            self._note(applied)

    def _change_with(self, owned: OwnedPartition, change: Callable[[], Applied]) -> Applied:
        """Change the claim of a partition that is owned; raises `Fenced` if it is not any more."""
        if not self._is_current(owned):
            raise fenced([owned.part])
        try:
            applied = change()
        except BaseException as error:
            if leaves_doubt(error):
                # To claim it again will show where it goes on.
                self.table.gone([owned.part], lost=True)
            raise
        if applied.lost:
            self.table.gone(applied.lost, lost=True)
            raise fenced(applied.lost)
        return applied

    def ask(self) -> Extent:
        """Ask for a commit of what the caller has seen, made at the latest when giving it up."""
        with self.table.lock:
            extent = self.extent()
            self.table.ask(extent.marks(self.table.partitions))
            self.uncommitted.clear()
            return extent

    def commit_asked(self, extents: Iterable[Extent]) -> frozenset[TopicPartition]:
        """Commit what was asked for, and no more; returns what was lost of it."""
        with self.owned_claims.lock:
            lost = {
                owned.part
                for extent in extents
                for owned in extent.partitions
                if not owned.released and not self._holds(owned)
            }
            return self.commit(self.table.asked()) | lost

    def commit_message(self, message: Message) -> frozenset[TopicPartition]:
        """Commit everything up to one message; returns the partition if it was lost.

        Under one lock: a partition that is lost and claimed in between, even of a topic that was
        made again, is not the one of this message.
        """
        with self.owned_claims.lock:
            return self.commit(self._mark_of(message))

    def _mark_of(self, message: Message) -> dict[TopicPartition, Mark]:
        part = TopicPartition(message.topic, message.partition)
        owned = self.table.partitions.get(part)
        if owned is None or owned.epoch != message.fence.epoch or not self._holds(owned):
            raise fenced([part])
        if message.offset >= max(owned.handed, owned.shown):
            raise InvalidRequest(
                f"offset {message.offset} of {message.topic!r} partition {message.partition} was "
                f"not handed out; the next one will be {owned.handed}"
            )
        with self.table.lock:
            before = owned.mark()
            if before is None or before.checkpoint > message.offset:
                return {part: Mark(message.offset + 1)}
            owned.finish(before.checkpoint, message.offset + 1)
            return {part: owned.mark() or Mark(message.offset + 1)}

    def offset_at(self, part: TopicPartition, timestamp: int) -> int:
        """Offset of the first message of that time (ms) or later, else the end."""
        return self._fetcher.offset_at(self.owned_partition(*part), timestamp)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        self._seek(self.owned_partition(topic, partition), offset)

    def _seek(self, owned: OwnedPartition, offset: int, why: str = "") -> None:
        require_in_range(self._log, owned.where, owned.part.topic, offset)
        reset = Reset(
            topic=owned.part.topic,
            partition=owned.part.partition,
            before=owned.checkpoint,
            after=offset,
            by=self._settings.member_name,
            at_ms=self._clock.wall_ms(),
            why=why,
        )
        record = record_of_reset(self._settings.group, reset, self._new_id())
        with self.owned_claims.lock:
            self._change_with(owned, lambda: self.owned_claims.seek(owned.part, offset, [record]))
            self.table.restart(owned.part, offset)
        forget_old_resets(self._coord, self._settings.group)
