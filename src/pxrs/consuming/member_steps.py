"""One member's work, step by step: fetch, hand out, count, commit, seek.

Nothing in here waits and no thread is started, so the simulator drives the very code that the
consumer's threads drive: the caller's thread takes steps of the table and its runs, the background
thread those of the membership and the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.consuming.fetcher import Fetcher
from pxrs.consuming.in_hand import Elsewhere, Extent, Loose, Reached, Run, line_up, recall
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
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
    Mark,
    OwnedClaims,
    fenced,
    leaves_doubt,
    mark_of,
    not_owned,
)
from pxrs.groups.resets import forget_old_resets, record_of_seek
from pxrs.stores.api import Stores
from pxrs.topics import Topics, named
from pxrs.types import Message, TopicPartition


class MemberSteps:
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
        self.table = PartitionTable(
            in_hand=handling.in_hand,
            commits_handled=settings.auto_commit,
            asks_before_release=asks_before_release,
            recall=lambda: recall(self.runs),
            most_out=handling.most,
        )
        self._fetcher = Fetcher(stores.log, self.table, settings, decoder, self._pin, self._seek)
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
        """Whether nobody else can have taken this member's place, by its own clock."""
        session = self.membership.session
        return session is not None and session.remaining() > 0

    def hand_out(self, most: int) -> list[Run]:
        """Fetched messages for the caller, at most so many; none once the lease may be over."""
        with self.table.lock:
            out = self.table.hand_out(most) if self.alive else []
            self.runs = [Run(owned, messages) for owned, messages in out]
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
            line_up(runs, self.table.lock)
            for run in runs:
                owned, turn, number = run.owned, run.turn, 0
                for message in run.messages if self._begin(run) else ():
                    if owned.turn != turn:
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
            line_up(runs, self.table.lock)
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
        begun = run.begin(self.table.lock)
        self.given_back &= not begun
        return begun

    def finish(self) -> None:
        """All that the caller has seen is handled; what it has not seen will be handed out again.

        A loop that was left has ended its runs itself: of those nothing is counted here.
        """
        with self.table.lock:
            for run in self.runs:
                run.handled = run.seen
            self._end(self.runs)
            self.loose.clear()

    def _end(self, runs: list[Run]) -> None:
        """Nobody works on the runs any more: count what was handled, give back the rest."""
        with self.table.lock:
            ended = [run for run in self.runs if run in runs]
            for run in ended:
                # An interrupt may come anywhere here: until they are forgotten, all of it can be
                # done once more, and counts no more than this.
                run.seen = run.handled
                run.count(run.handled)
                if run.handled and not self._settings.auto_commit and run.is_loose:
                    self.loose.add(run.owned)
                if run.handled < len(run.messages) and run.owned.turn == run.turn:
                    self.table.give_back(run.owned, run.messages[run.handled].offset)
            self.runs = [run for run in self.runs if run not in ended]

    def did_not_arrive(self, error: BaseException) -> None:
        """The caller gets this instead of messages: all that is not handled comes again.

        After Ctrl-C nobody knows what was handed out; errors of our own come before that.
        """
        if isinstance(error, PxrsError):
            return
        with self.table.lock:
            self.runs = []
            self.table.hand_out_again()

    def leave_loop(self) -> None:
        """The loop goes no further: the message that it shows is not handled."""
        with self.table.lock:
            self._end([run for run in self.runs if run.in_loop])

    def pause(self, parts: Collection[TopicPartition]) -> None:
        """Hand out nothing of these; what a loop has not shown yet waits for `resume`, too."""
        with self.table.lock:
            self.table.pause(parts, paused=True)
            for run in self.runs:
                if run.owned.part in parts:
                    run.hold_back()

    def forget_runs(self) -> None:
        """Somebody else keeps the account of what was handed out."""
        with self.table.lock:
            self.runs = []

    def sync(self) -> None:
        """Count what the caller's loop has handled of its current run."""
        with self.table.lock:
            for run in self.runs:
                run.count(run.handled)

    def _in_hand_since(self) -> float | None:
        return self.handed_at if self.runs else None

    def _in_hand(self, owned: OwnedPartition) -> bool:
        """Whether the caller works on messages of this partition."""
        return any(run.owned is owned and not run.is_void for run in self.runs)

    # Fetching

    @property
    def trouble(self) -> Exception | None:
        """What keeps a partition from being read, as of the last fetch."""
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

    def owned_seat(self, topic: str, partition: int) -> OwnedPartition:
        """The partition of a partition that is owned now, if only to be given away, or `Fenced`."""
        part = TopicPartition(topic, partition)
        if (owned := self.table.partitions.get(part)) is None:
            raise not_owned(part, self._topics)
        return owned

    # Committing

    def commit_handled(self) -> frozenset[TopicPartition]:
        """Commit what was handled by now; the partitions that turned out to be lost.

        Marks are taken and written under one lock: a seek in between would be undone.
        """
        with self.owned_claims.lock:
            self.sync()
            return self.commit(self.table.marks())

    def extent(self) -> Extent:
        """What the caller has seen by now; from here on it counts as handled."""
        with self.table.lock:
            for run in self.runs:
                run.count(run.seen)
            marks = self.table.marks()
            return Extent(
                self.loose.partitions + [run.owned for run in self.runs if run.seen],
                [Reached(self.table.partitions[part], mark) for part, mark in marks.items()],
                self.loose.lost,
            )

    def commit_up_to(self, extent: Extent) -> frozenset[TopicPartition]:
        """Commit what the caller had seen, and no more; the partitions that were lost."""
        with self.owned_claims.lock:
            gone = {owned for owned in extent.partitions if not self._holds(owned)}
            with self.table.lock:
                self.runs = [run for run in self.runs if run.owned not in gone]
                marks = extent.marks(self.table.partitions)
            lost = self.commit(marks)
            with self.table.lock:
                self.loose.settle(extent, gone)
            return lost | {owned.part for owned in gone} | extent.lost

    def drop_stale_runs(self) -> frozenset[TopicPartition]:
        """Forget what is in hand of partitions that were lost, even if claimed again since.

        Under the claims' lock: what is lost and claimed in between is not what was handed out.
        """
        with self.table.lock:
            stale = [run for run in self.runs if not self._holds(run.owned)]
            self.runs = [run for run in self.runs if run not in stale]
            loose = self.loose.drop(lambda owned: not self._holds(owned))
            return frozenset(run.owned.part for run in stale if run.seen) | loose

    def _is_current(self, owned: OwnedPartition) -> bool:
        """Whether what was found out is still about this partition. Under the claims' lock."""
        return self.table.partitions.get(owned.part) is owned and self._holds(owned)

    def _holds(self, owned: OwnedPartition) -> bool:
        """Whether the partition is still held under the epoch that the partition was taken with."""
        owned_claim = self.owned_claims.get(owned.part)
        return (
            owned_claim is not None
            and owned_claim.epoch == owned.epoch
            and owned_claim.key == owned.key
        )

    def commit(self, marks: Mapping[TopicPartition, Mark]) -> frozenset[TopicPartition]:
        """Commit these marks; the partitions that turned out to be lost."""
        if not marks:
            return frozenset()
        with self.owned_claims.lock:
            return self._note(self.owned_claims.commit(marks))

    def _note(self, applied: Applied) -> frozenset[TopicPartition]:
        """Let the table know what stands in the claims now; the partitions that were lost.

        A mark behind its claim has changed nothing.
        """
        self.table.committed(
            {owned_claim.part: mark_of(owned_claim) for owned_claim in applied.written}
        )
        self.table.gone(sorted(applied.lost), lost=True)
        return applied.lost

    def ask(self) -> Extent:
        """What the caller has seen shall be committed, at the latest when it is given away."""
        with self.table.lock:
            extent = self.extent()
            self.table.ask(extent.marks(self.table.partitions))
            self.loose.clear()
            return extent

    def commit_asked(self, extents: Iterable[Extent]) -> frozenset[TopicPartition]:
        """Commit what was asked for, and no more; what was lost of it, and of these since."""
        with self.owned_claims.lock:
            lost = {
                owned.part
                for extent in extents
                for owned in extent.partitions
                if not owned.released and not self._holds(owned)
            }
            return self.commit(self.table.asked()) | lost

    def commit_message(self, message: Message) -> frozenset[TopicPartition]:
        """Commit everything up to one message; the partition if it was lost.

        Under one lock: a partition that is lost and claimed in between, of a topic that was made
        again even, is not the one that the message is of.
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
        return self._fetcher.offset_at(self.owned_seat(*part), timestamp)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        self._seek(self.owned_seat(topic, partition), offset)

    def _seek(self, owned: OwnedPartition, offset: int, why: str = "") -> None:
        with named(owned.part.topic):
            held = self._log.bounds(owned.where.topic_id)[owned.part.partition]
        if not held.start <= offset <= held.end:
            raise OffsetOutOfRange(*owned.part, offset, *held)
        record = record_of_seek(
            self._settings.group,
            self._settings.member_name,
            owned.part,
            owned.checkpoint,
            offset,
            self._clock,
            self._new_id,
            why,
        )
        with self.owned_claims.lock:
            if not self._is_current(owned):
                raise fenced([owned.part])
            try:
                applied = self.owned_claims.seek(owned.part, offset, [record])
            except BaseException as error:
                if leaves_doubt(error):
                    # Claiming it again will tell where it goes on.
                    self.table.gone([owned.part], lost=True)
                raise
            if applied.lost:
                self.table.gone(applied.lost, lost=True)
                raise fenced(applied.lost)
            self.table.restart(owned.part, offset)
        forget_old_resets(self._coord, self._settings.group)
