"""One member's work, step by step: fetch, hand out, count, commit, seek.

Nothing in here waits and no thread is started, so the simulator drives the very code that the
consumer's threads drive: the caller's thread takes steps of the desk and its runs, the steward's
those of the membership and the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.consuming.fetcher import Fetcher
from pxrs.consuming.in_hand import Elsewhere, Extent, Loose, Reached, Run, line_up, recall
from pxrs.consuming.owned_partition import Seat
from pxrs.consuming.partition_table import ConsumerDesk
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.decoding import Decoder
from pxrs.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    PxrsError,
)
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import (
    Applied,
    Holdings,
    Mark,
    fenced,
    leaves_doubt,
    mark_of,
    not_owned,
)
from pxrs.groups.resets import forget_old_resets, record_of_seek
from pxrs.stores.api import Stores
from pxrs.topics import Topics, named
from pxrs.types import Message, TopicPartition


class Worker:
    """A member of a group and what it works on. See `Consumer` for which thread does what."""

    def __init__(
        self,
        stores: Stores,
        topics: Topics,
        clock: Clock,
        names: Callable[[], tuple[str, ...]],
        settings: ConsumerSettings,
        decoder: Decoder,
        *,
        elsewhere: Elsewhere | None = None,
        asks_before_release: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._coord = stores.coord
        self._log = stores.log
        self._topics = topics
        self._clock = clock
        self._settings = settings
        self._new_id = new_id
        self.runs: list[Run] = []
        # With auto-commit they are committed soon, and nobody has to mean them.
        self.loose = Loose()
        # The caller may still have messages that a transaction gave back when it failed.
        self.given_back = False
        # When the caller was last given messages, None once it has asked for more; when it asked.
        self.handed_at: float | None = None
        self.asked_at = clock.monotonic()
        handling = elsewhere or Elsewhere(self._in_hand, self._in_hand_since)
        self.in_hand_since = handling.since
        self.desk = ConsumerDesk(
            in_hand=handling.in_hand,
            commits_handled=settings.auto_commit,
            asks_before_release=asks_before_release,
            recall=lambda: recall(self.runs),
            most_out=handling.most,
        )
        self._fetcher = Fetcher(stores.log, self.desk, settings, decoder, self._pin, self._seek)
        self.holdings = Holdings(stores.coord, clock, new_id)
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
                rejoin_timeout=settings.rejoin_timeout if settings.instance else None,
            ),
            stores.coord,
            topics,
            clock,
            self.holdings,
            self.desk,
            new_id,
        )

    # Handing out and handling

    @property
    def alive(self) -> bool:
        """Whether nobody else can have taken this member's place, by its own clock."""
        session = self.membership.session
        return session is not None and session.remaining() > 0

    def hand_out(self, most: int) -> list[Run]:
        """Fetched messages for the caller, at most so many; none once the lease may be over."""
        with self.desk.lock:
            out = self.desk.hand_out(most) if self.alive else []
            self.runs = [Run(seat, messages) for seat, messages in out]
            self.given_back = False
            self.asked_at = self._clock.monotonic()
            self.handed_at = self.asked_at if self.runs else None
            return list(self.runs)

    def all_at_once(self, runs: list[Run]) -> list[Message]:
        """The runs' messages; they are handled when `finish` is called."""
        for run in runs:
            run.seen = len(run.messages)
        # A list of the caller's own: it may sort it, or take from it, and the runs still count.
        return list(chain.from_iterable(run.messages for run in runs))

    def one_by_one(self, runs: list[Run]) -> Iterator[Message]:
        """The messages of all runs; one is handled when the next one is asked for.

        Whoever stops in the middle gets the rest again.
        """
        now, until = self._clock.monotonic, 0.0
        try:
            line_up(runs, self.desk.lock)
            for run in runs:
                seat, turn, number = run.seat, run.turn, 0
                for message in run.messages if self._begin(run) else ():
                    if seat.turn != turn:
                        break
                    # The lease has to be looked at for every message: a handler can take long,
                    # a process can be stopped. Asking the session each time is too slow.
                    if (at := now()) >= until and (until := self.membership.safe_until()) <= now():
                        break
                    self.handed_at = at
                    number += 1  # noqa: SIM113 - enumerate() is slower
                    run.seen = number
                    yield message
                    run.handled = number
                self._end([run])
        finally:
            self._end(runs)

    def by_partition(self, runs: list[Run]) -> Iterator[list[Message]]:
        """Each run whole; one is handled when the next one is asked for."""
        try:
            line_up(runs, self.desk.lock)
            for run in runs:
                if self._begin(run) and self.alive:
                    self.handed_at = self._clock.monotonic()
                    run.seen = len(run.messages)
                    yield list(run.messages)
                    run.handled = len(run.messages)
                self._end([run])
        finally:
            self._end(runs)

    def _begin(self, run: Run) -> bool:
        """Whether a loop may show it."""
        begun = run.begin(self.desk.lock)
        self.given_back &= not begun
        return begun

    def finish(self) -> None:
        """All that the caller has seen is handled; what it has not seen will be handed out again.

        A loop that was left has ended its runs itself: of those nothing is counted here.
        """
        with self.desk.lock:
            for run in self.runs:
                run.handled = run.seen
            self._end(self.runs)
            self.loose.clear()

    def _end(self, runs: list[Run]) -> None:
        """Nobody works on the runs any more: count what was handled, give back the rest."""
        with self.desk.lock:
            ended = [run for run in self.runs if run in runs]
            for run in ended:
                # An interrupt may come anywhere here: until they are forgotten, all of it can be
                # done once more, and counts no more than this.
                run.seen = run.handled
                run.count(run.handled)
                if run.handled and not self._settings.auto_commit and run.is_loose:
                    self.loose.add(run.seat)
                if run.handled < len(run.messages) and run.seat.turn == run.turn:
                    self.desk.give_back(run.seat, run.messages[run.handled].offset)
            self.runs = [run for run in self.runs if run not in ended]

    def did_not_arrive(self, error: BaseException) -> None:
        """The caller gets this instead of messages: all that is not handled comes again.

        After Ctrl-C nobody knows what was handed out; errors of our own come before that.
        """
        if isinstance(error, PxrsError):
            return
        with self.desk.lock:
            self.runs = []
            self.desk.hand_out_again()

    def leave_loop(self) -> None:
        """The loop goes no further: the message that it shows is not handled."""
        with self.desk.lock:
            self._end([run for run in self.runs if run.in_loop])

    def pause(self, parts: Collection[TopicPartition]) -> None:
        """Hand out nothing of these; what a loop has not shown yet waits for `resume`, too."""
        with self.desk.lock:
            self.desk.pause(parts, paused=True)
            for run in self.runs:
                if run.seat.part in parts:
                    run.hold_back()

    def forget_runs(self) -> None:
        """Somebody else keeps the account of what was handed out."""
        with self.desk.lock:
            self.runs = []

    def sync(self) -> None:
        """Count what the caller's loop has handled of its current run."""
        with self.desk.lock:
            for run in self.runs:
                run.count(run.handled)

    def _in_hand_since(self) -> float | None:
        return self.handed_at if self.runs else None

    def _in_hand(self, seat: Seat) -> bool:
        """Whether the caller works on messages of this partition."""
        return any(run.seat is seat and not run.is_void for run in self.runs)

    # Fetching

    @property
    def trouble(self) -> Exception | None:
        """What keeps a partition from being read, as of the last fetch."""
        return self._fetcher.trouble

    def fetch(self, topic_gone: Callable[[], None]) -> bool:
        """Fill empty buffers; true if anything came."""
        self.asked_at = self._clock.monotonic()
        return self._fetcher.fetch(topic_gone)

    def _pin(self, offsets: Mapping[Seat, int]) -> None:
        """Make these offsets the first checkpoints of seats that have none."""
        with self.holdings.lock:
            current = {
                seat.part: offset for seat, offset in offsets.items() if self._is_current(seat)
            }
            if current:
                self._note(self.holdings.pin(current))

    def owned_seat(self, topic: str, partition: int) -> Seat:
        """The seat of a partition that is owned now, if only to be given away, or `Fenced`."""
        part = TopicPartition(topic, partition)
        if (seat := self.desk.seats.get(part)) is None:
            raise not_owned(part, self._topics)
        return seat

    # Committing

    def commit_handled(self) -> frozenset[TopicPartition]:
        """Commit what was handled by now; the partitions that turned out to be lost.

        Marks are taken and written under one lock: a seek in between would be undone.
        """
        with self.holdings.lock:
            self.sync()
            return self.commit(self.desk.marks())

    def extent(self) -> Extent:
        """What the caller has seen by now; from here on it counts as handled."""
        with self.desk.lock:
            for run in self.runs:
                run.count(run.seen)
            marks = self.desk.marks()
            return Extent(
                self.loose.seats + [run.seat for run in self.runs if run.seen],
                [Reached(self.desk.seats[part], mark) for part, mark in marks.items()],
                self.loose.lost,
            )

    def commit_up_to(self, extent: Extent) -> frozenset[TopicPartition]:
        """Commit what the caller had seen, and no more; the partitions that were lost."""
        with self.holdings.lock:
            gone = {seat for seat in extent.seats if not self._holds(seat)}
            with self.desk.lock:
                self.runs = [run for run in self.runs if run.seat not in gone]
                marks = extent.marks(self.desk.seats)
            lost = self.commit(marks)
            with self.desk.lock:
                self.loose.settle(extent, gone)
            return lost | {seat.part for seat in gone} | extent.lost

    def drop_stale_runs(self) -> frozenset[TopicPartition]:
        """Forget what is in hand of partitions that were lost, even if claimed again since.

        Under the holdings' lock: what is lost and claimed in between is not what was handed out.
        """
        with self.desk.lock:
            stale = [run for run in self.runs if not self._holds(run.seat)]
            self.runs = [run for run in self.runs if run not in stale]
            loose = self.loose.drop(lambda seat: not self._holds(seat))
            return frozenset(run.seat.part for run in stale if run.seen) | loose

    def _is_current(self, seat: Seat) -> bool:
        """Whether what was found out for this seat is still about it. Under the holdings' lock."""
        return self.desk.seats.get(seat.part) is seat and self._holds(seat)

    def _holds(self, seat: Seat) -> bool:
        """Whether the partition is still held under the epoch that the seat was taken with."""
        holding = self.holdings.get(seat.part)
        return holding is not None and holding.epoch == seat.epoch and holding.key == seat.key

    def commit(self, marks: Mapping[TopicPartition, Mark]) -> frozenset[TopicPartition]:
        """Commit these marks; the partitions that turned out to be lost."""
        if not marks:
            return frozenset()
        with self.holdings.lock:
            return self._note(self.holdings.commit(marks))

    def _note(self, applied: Applied) -> frozenset[TopicPartition]:
        """Let the desk know what stands in the claims now; the partitions that were lost.

        A mark behind its claim has changed nothing.
        """
        self.desk.committed({holding.part: mark_of(holding) for holding in applied.written})
        self.desk.gone(sorted(applied.lost), lost=True)
        return applied.lost

    def ask(self) -> Extent:
        """What the caller has seen shall be committed, at the latest when it is given away."""
        with self.desk.lock:
            extent = self.extent()
            self.desk.ask(extent.marks(self.desk.seats))
            self.loose.clear()
            return extent

    def commit_asked(self, extents: Iterable[Extent]) -> frozenset[TopicPartition]:
        """Commit what was asked for, and no more; what was lost of it, and of these since."""
        with self.holdings.lock:
            lost = {
                seat.part
                for extent in extents
                for seat in extent.seats
                if not seat.released and not self._holds(seat)
            }
            return self.commit(self.desk.asked()) | lost

    def commit_message(self, message: Message) -> frozenset[TopicPartition]:
        """Commit everything up to one message; the partition if it was lost.

        Under one lock: a partition that is lost and claimed in between, of a topic that was made
        again even, is not the one that the message is of.
        """
        with self.holdings.lock:
            return self.commit(self._mark_of(message))

    def _mark_of(self, message: Message) -> dict[TopicPartition, Mark]:
        part = TopicPartition(message.topic, message.partition)
        seat = self.desk.seats.get(part)
        if seat is None or seat.epoch != message.fence.epoch or not self._holds(seat):
            raise fenced([part])
        if message.offset >= max(seat.handed, seat.shown):
            raise InvalidRequest(
                f"offset {message.offset} of {message.topic!r} partition {message.partition} was "
                f"not handed out; the next one will be {seat.handed}"
            )
        with self.desk.lock:
            before = seat.mark()
            if before is None or before.checkpoint > message.offset:
                return {part: Mark(message.offset + 1)}
            seat.finish(before.checkpoint, message.offset + 1)
            return {part: seat.mark() or Mark(message.offset + 1)}

    def offset_at(self, part: TopicPartition, timestamp: int) -> int:
        """Offset of the first message of that time (ms) or later, else the end."""
        return self._fetcher.offset_at(self.owned_seat(*part), timestamp)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        self._seek(self.owned_seat(topic, partition), offset)

    def _seek(self, seat: Seat, offset: int, why: str = "") -> None:
        with named(seat.part.topic):
            held = self._log.bounds(seat.where.topic_id)[seat.part.partition]
        if not held.start <= offset <= held.end:
            raise OffsetOutOfRange(*seat.part, offset, *held)
        record = record_of_seek(
            self._settings.group,
            self._settings.member_name,
            seat.part,
            seat.checkpoint,
            offset,
            self._clock,
            self._new_id,
            why,
        )
        with self.holdings.lock:
            if not self._is_current(seat):
                raise fenced([seat.part])
            try:
                applied = self.holdings.seek(seat.part, offset, [record])
            except BaseException as error:
                if leaves_doubt(error):
                    # Claiming it again will tell where it goes on.
                    self.desk.gone([seat.part], lost=True)
                raise
            if applied.lost:
                self.desk.gone(applied.lost, lost=True)
                raise fenced(applied.lost)
            self.desk.restart(seat.part, offset)
        forget_old_resets(self._coord, self._settings.group)
