"""The consumer: one member of a group, and the messages of the partitions it owns.

Two threads stand beside the caller's. One renews the session, whatever the handler does. The
other is the steward: it looks at the group when a watch wakes it, and commits what was handled.
The caller's own thread fetches, decodes and hands out; it never waits for either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.core.progress import Progress
from pxrs.core.records import head_key, members_prefix
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    NoCheckpoint,
    OffsetOutOfRange,
    PxrsError,
    SessionLost,
    TopicNotFound,
    TransactionConflict,
)
from pxrs.runtime.decoding import Decoder, cut
from pxrs.runtime.desk import ConsumerDesk, Seat
from pxrs.runtime.holdings import Holdings, Mark
from pxrs.runtime.membership import MemberSettings, Membership
from pxrs.runtime.reader import FETCH_BYTES
from pxrs.runtime.seeking import record_of_seek
from pxrs.runtime.subscription import Subscription
from pxrs.runtime.topics import Topics
from pxrs.runtime.transaction import Transaction
from pxrs.stores.api import Stores, Watch
from pxrs.types import Message, TopicPartition

_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
_RUN = 500
# Fetching from a partition at its end costs no more than asking so many together for their
# ends: 8 where the store is a file, more over a network.
_ASK_TOGETHER = 32

Parts = set[TopicPartition]


class Callbacks:
    """What the caller wants to hear of rebalances. Called in the consuming thread."""

    __slots__ = ("assigned", "lost", "revoked")

    def __init__(
        self,
        assigned: Callable[[dict[TopicPartition, int | None]], None] | None,
        revoked: Callable[[Parts], None] | None,
        lost: Callable[[Parts], None] | None,
    ) -> None:
        self.assigned = assigned
        self.revoked = revoked
        self.lost = lost


class Run:
    """Messages of one partition on their way to the caller: how many it has seen and handled.

    The caller's loop counts up without a lock; whoever reads takes the desk's.
    """

    __slots__ = ("handled", "messages", "seat", "seen", "turn")

    def __init__(self, seat: Seat, messages: list[Message]) -> None:
        self.seat = seat
        self.turn = seat.turn
        self.messages = messages
        self.seen = 0
        self.handled = 0

    def count(self, done: int) -> None:
        """Tell the seat's progress that the first `done` messages are done."""
        if done:
            self.seat.finish(self.messages[0].offset, self.messages[done - 1].offset + 1)


class Consumer:
    """Consumes topics as a member of a group. One thread uses it; close it, or use `with`."""

    def __init__(
        self,
        stores: Stores,
        topics: Topics,
        clock: Clock,
        subscription: Subscription,
        settings: ConsumerSettings,
        decoder: Decoder,
        callbacks: Callbacks,
        in_hand: Callable[[Seat], bool] | None = None,
    ) -> None:
        self._stores = stores
        self._topics = topics
        self._clock = clock
        self._settings = settings
        self._decoder = decoder
        self._callbacks = callbacks
        self._desk = ConsumerDesk(
            in_hand=in_hand or self._in_hand,
            commits_handled=settings.auto_commit,
            asks_before_release=callbacks.revoked is not None,
        )
        self._holdings = Holdings(stores.coord, clock)
        self._membership = Membership(
            MemberSettings(
                group=settings.group,
                name=settings.member_name,
                topics=subscription.names,
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
            self._holdings,
            self._desk,
        )
        self._runs: list[Run] = []
        self._log_watch: Watch | None = None
        self._watched_version = -1
        self._group_watch: Watch | None = None
        self._fatal: PxrsError | None = None
        self._closed = False
        self._stop = threading.Event()
        self._commit_soon = threading.Event()
        self._membership.join()
        self._threads = [
            threading.Thread(target=target, name=f"pxrs-{name}", daemon=True)
            for name, target in (("session", self._keep_session), ("steward", self._steward))
        ]
        for thread in self._threads:
            thread.start()

    # What the caller sees

    @property
    def member(self) -> str:
        """This member's name in the group."""
        return self._settings.member_name

    @property
    def assignment(self) -> set[TopicPartition]:
        """The partitions owned now."""
        return {seat.part for seat in list(self._desk.seats.values()) if seat.state == "owned"}

    def poll(self, max_records: int = 500, timeout: float | None = None) -> list[Message]:
        """Messages of the partitions owned, at most so many; waits for the first up to `timeout`.

        What the last call returned counts as handled now.
        """
        if max_records < 1:
            raise InvalidRequest(f"max_records = {max_records}; at least 1 is needed")
        self._finish_runs()
        runs = self._next(max_records, timeout)
        for run in runs:
            run.seen = len(run.messages)
        if len(runs) == 1:
            return runs[0].messages
        return [message for run in runs for message in run.messages]

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, without end. One is handled when the next one is asked for."""
        self._finish_runs()
        while True:
            for run in self._next(_RUN, None):
                yield from self._iterate(run)

    def batches(self, max_records: int = 500) -> Iterator[list[Message]]:
        """Lists of messages, each of one partition. One is handled when the next is asked for."""
        self._finish_runs()
        while True:
            for run in self._next(max_records, None):
                if run.seat.turn == run.turn:
                    run.seen = len(run.messages)
                    yield run.messages
                    run.handled = len(run.messages)
                self._end_run(run)

    def commit(self, message: Message | None = None) -> None:
        """Commit what was handed out so far, or up to and including one message.

        Partitions that were lost are told by `Fenced`; the others are committed all the same.
        """
        marks = self._marks_handed() if message is None else self._mark_of(message)
        lost = self._commit(marks)
        if lost:
            raise Fenced(f"not committed, owned by somebody else now: {_names(lost)}")

    def commit_async(self) -> None:
        """Commit what was handled soon, in the background. Losses are told by `on_lost`."""
        self._marks_handed()
        self._commit_soon.set()
        self._wake_steward()

    def transaction(self, connection: Any = None) -> Transaction:
        """Commit the checkpoint of what the last poll returned together with the caller's writes.

        In a loop: of everything up to the current message. On a connection of the caller's, if
        one is given; pxrs commits it. A block left by an exception is rolled back, and its
        messages are handed out again. `Fenced` if somebody else owns a partition now;
        `NotAtomic` where the store can't do it.
        """
        return self._transaction(connection, keep_on_conflict=False)

    def run_transaction(
        self, work: Callable[[Transaction], Any], *, connection: Any = None, attempts: int = 5
    ) -> Any:
        """Run `work(tx)` in a transaction, again on a conflict that may pass; what it returns."""
        for left in reversed(range(attempts)):
            try:
                with self._transaction(connection, keep_on_conflict=left > 0) as tx:
                    return work(tx)
            except TransactionConflict:
                if not left:
                    raise
        raise InvalidRequest(f"{attempts} attempts; at least 1 is needed")

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        seat = self._owned_seat(topic, partition)
        held = self._topics.bounds(self._topics.find(topic))[partition]
        if not held.start <= offset <= held.end:
            raise OffsetOutOfRange(topic, partition, offset, *held)
        record = record_of_seek(
            self._settings.group, self.member, seat.part, seat.checkpoint, offset, self._clock
        )
        applied = self._holdings.seek(seat.part, offset, [record])
        if applied.lost:
            self._desk.gone(applied.lost, lost=True)
            raise Fenced(f"owned by somebody else now: {_names(applied.lost)}")
        self._desk.restart(seat.part, offset)

    def seek_to_time(self, timestamp: int, parts: Parts | None = None) -> None:
        """Go on from the first messages of this time (ms) or later, or from the end."""
        for part in parts if parts is not None else self.assignment:
            seat = self._owned_seat(*part)
            offset = self._decoder.offset_at(self._stores.log, seat.where, seat.fence, timestamp)
            if offset is None:
                offset = self._topics.bounds(self._topics.find(part.topic))[part.partition].end
            self.seek(part.topic, part.partition, offset)

    def pause(self, *parts: TopicPartition) -> None:
        """Hand out nothing of these partitions until `resume`; kept across rebalances."""
        self._desk.pause(parts, paused=True)

    def resume(self, *parts: TopicPartition) -> None:
        """Go on with these partitions."""
        self._desk.pause(parts, paused=False)
        self._wake_consumer()

    def close(self) -> None:
        """Finish: commit what was handled, release everything and leave the group at once."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._wake_steward()
        for thread in self._threads:
            thread.join()
        self._sync()
        try:
            self._membership.leave()
        finally:
            for watch in (self._log_watch, self._group_watch):
                if watch is not None:
                    watch.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # For `Runner`, which keeps its own account of what is in hand

    @property
    def desk(self) -> ConsumerDesk:
        return self._desk

    def take(self, most: int, timeout: float) -> list[Run]:
        """Messages to be handled elsewhere, in any order; whoever does tells the seats."""
        runs = self._next(most, timeout)
        with self._desk.lock:
            self._runs = []
        return runs

    def wake(self) -> None:
        """End a wait for messages."""
        self._wake_consumer()

    def wake_steward(self) -> None:
        """Let the group be looked at now."""
        self._wake_steward()

    # Handing out and handling

    def _next(self, most: int, timeout: float | None) -> list[Run]:
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._attend()
            with self._desk.lock:
                runs = [Run(seat, messages) for seat, messages in self._desk.hand_out(most)]
                self._runs = list(runs)
            if runs:
                return runs
            watch = self._armed_watch()
            if self._fetch():
                continue
            left = _CAREFUL_WAIT
            if deadline is not None:
                left = min(left, deadline - self._clock.monotonic())
                if left <= 0:
                    return []
            watch.wait(left)

    def _iterate(self, run: Run) -> Iterator[Message]:
        """Yield a run's messages; those before `handled` are handled, whoever asks."""
        seat, turn, number = run.seat, run.turn, 0
        try:
            for message in run.messages:
                if seat.turn != turn:
                    break
                number += 1
                run.seen = number
                yield message
                run.handled = number
        finally:
            self._end_run(run)

    def _end_run(self, run: Run) -> None:
        """Nobody works on the run any more: count what was handled, give back the rest."""
        with self._desk.lock:
            self._runs = [other for other in self._runs if other is not run]
            run.count(run.handled)
            if run.handled < len(run.messages) and run.seat.turn == run.turn:
                self._desk.give_back(run.seat, run.messages[run.handled].offset)

    def _in_hand(self, seat: Seat) -> bool:
        """Whether the caller works on messages of this partition."""
        return any(run.seat is seat for run in self._runs)

    def _finish_runs(self) -> None:
        """All that was handed out is handled."""
        with self._desk.lock:
            for run in self._runs:
                run.count(len(run.messages))
            self._runs = []

    def _sync(self) -> None:
        """Count what the caller's loop has handled of its current run."""
        with self._desk.lock:
            for run in self._runs:
                run.count(run.handled)

    def _marks_handed(self) -> dict[TopicPartition, Mark]:
        """Everything up to the last message that the caller has seen."""
        with self._desk.lock:
            for run in self._runs:
                run.count(run.seen)
            return self._desk.marks()

    def _mark_of(self, message: Message) -> dict[TopicPartition, Mark]:
        part = TopicPartition(message.topic, message.partition)
        seat = self._desk.seats.get(part)
        if seat is None or seat.epoch != message.fence.epoch:
            raise Fenced(f"{message.topic!r} partition {message.partition} is not owned any more")
        return {part: Mark(message.offset + 1)}

    def _attend(self) -> None:
        """Between messages: tell the caller what changed, and let go of what has to go."""
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise Closed("the consumer was closed")
        if not self._desk.has_changes:
            return
        for change in self._desk.changes():
            parts = set(change.parts)
            if change.kind == "assigned" and self._callbacks.assigned:
                self._callbacks.assigned(change.parts)
            elif change.kind == "leaving":
                if self._callbacks.revoked:
                    self._callbacks.revoked(parts)
                self._desk.said_goodbye(parts)
            elif change.kind == "lost" and self._callbacks.lost:
                self._callbacks.lost(parts)
        self._membership.release_what_is_finished()

    # Fetching

    def _armed_watch(self) -> Watch:
        """A watch on the logs of what is owned; armed before they are looked at."""
        with self._desk.lock:
            if self._log_watch is None or self._watched_version != self._desk.version:
                if self._log_watch is not None:
                    self._log_watch.close()
                self._watched_version = self._desk.version
                self._log_watch = self._stores.log.watch(
                    *(seat.where for seat in self._desk.owned())
                )
            return self._log_watch

    def _fetch(self) -> bool:
        """Fill empty buffers; true if anything came."""
        came = False
        ends: dict[str, Mapping[int, Any]] = {}
        hungry = self._desk.hungry()
        for seat in hungry:
            try:
                if seat.started and len(hungry) * _ASK_TOGETHER <= seat.siblings:
                    came = self._fetch_seat(seat) or came
                    continue
                topic_id = seat.where.topic_id
                if topic_id not in ends:
                    ends[topic_id] = self._stores.log.bounds(topic_id)
                if not seat.started:
                    self._start(seat, *ends[topic_id][seat.part.partition])
                if ends[topic_id][seat.part.partition].end > seat.position:
                    came = self._fetch_seat(seat) or came
            except TopicNotFound:
                # The topic was deleted under us; the steward will notice and drop the seat.
                self._wake_steward()
        return came

    def _fetch_seat(self, seat: Seat) -> bool:
        batches = self._stores.log.fetch(seat.where, seat.position, FETCH_BYTES).batches
        if not batches:
            return False
        messages: list[Message] = []
        position = seat.position
        for batch in batches:
            messages += cut(self._decoder.decode(batch, seat.fence), position)
            position = batch.next
        return self._desk.fill(seat, messages, position)

    def _start(self, seat: Seat, start: int, end: int) -> None:
        """Where to begin: at the checkpoint; by policy where there is none or it is gone."""
        if seat.checkpoint is not None:
            if start <= seat.checkpoint <= end:
                self._desk.start(seat, seat.checkpoint)
                return
            if self._settings.on_trimmed == "error":
                raise OffsetOutOfRange(*seat.part, seat.checkpoint, start, end)
            self._desk.start(seat, start if self._settings.on_trimmed == "earliest" else end)
            return
        if self._settings.start == "error":
            raise NoCheckpoint(
                f"group {self._settings.group!r} has no checkpoint in {seat.part.topic!r} "
                f"partition {seat.part.partition}"
            )
        self._desk.start(seat, start if self._settings.start == "earliest" else end)

    def _owned_seat(self, topic: str, partition: int) -> Seat:
        seat = self._desk.seats.get(TopicPartition(topic, partition))
        if seat is None or seat.state != "owned":
            raise Fenced(f"{topic!r} partition {partition} is not owned by this consumer")
        return seat

    # Committing

    def _transaction(self, connection: Any, *, keep_on_conflict: bool) -> Transaction:
        return Transaction(
            self._stores,
            self._topics,
            self._clock,
            self._holdings,
            _Work(self),
            connection,
            keep_on_conflict=keep_on_conflict,
        )

    def _commit(self, marks: dict[TopicPartition, Mark]) -> frozenset[TopicPartition]:
        if not marks:
            return frozenset()
        applied = self._holdings.commit(marks)
        self._desk.committed({holding.part: marks[holding.part] for holding in applied.written})
        if applied.lost:
            self._desk.gone(applied.lost, lost=True)
            self._wake_steward()
        return applied.lost

    # The threads

    def _keep_session(self) -> None:
        while not self._stop.wait(self._settings.session_ttl / 3):
            session = self._membership.session
            if session is None:
                continue
            try:
                session.renew()
            except SessionLost:
                self._wake_steward()
            except PxrsError:
                # The store may come back; the session's own deadline decides.
                continue

    def _steward(self) -> None:
        watched: frozenset[str] | None = None
        commit_at = self._clock.monotonic() + self._settings.auto_commit_interval
        while not self._stop.is_set():
            try:
                if watched != self._membership.waiting_for:
                    watched = self._membership.waiting_for
                    self._watch_group(watched)
                version = self._desk.version
                look_at = self._membership.look()
                commit_at = self._commit_when_due(commit_at)
                if self._desk.version != version:
                    self._wake_consumer()
            except Fenced as error:
                self._fatal = error
                self._wake_consumer()
                return
            except PxrsError:
                look_at = self._clock.monotonic() + _RETRY_PAUSE
            if watched == self._membership.waiting_for and self._group_watch is not None:
                now = self._clock.monotonic()
                times = [now + _CAREFUL_WAIT, commit_at]
                times += [look_at] if look_at is not None else []
                self._group_watch.wait(max(0.0, min(times) - now))

    def _commit_when_due(self, due: float) -> float:
        now = self._clock.monotonic()
        soon = self._commit_soon.is_set()
        if now < due and not soon:
            return due
        self._commit_soon.clear()
        if self._settings.auto_commit or soon:
            self._sync()
            self._commit(self._desk.marks())
        return now + self._settings.auto_commit_interval

    def _watch_group(self, claims: frozenset[str]) -> None:
        if self._group_watch is not None:
            self._group_watch.close()
        group = self._settings.group
        self._group_watch = self._stores.coord.watch(
            head_key(group), members_prefix(group), "topics/", *sorted(claims)
        )

    def _wake_steward(self) -> None:
        watch = self._group_watch
        if watch is not None:
            watch.wake()

    def _wake_consumer(self) -> None:
        watch = self._log_watch
        if watch is not None:
            watch.wake()


class _Work:
    """See `pxrs.runtime.transaction.Work`: the runs that are with the caller."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._desk = consumer._desk
        self._runs: list[Run] = []

    def marks(self) -> dict[TopicPartition, Mark]:
        with self._desk.lock:
            self._runs = [run for run in self._consumer._runs if run.seen]
            marks: dict[TopicPartition, Mark] = {}
            for run in self._runs:
                before = run.seat.mark()
                if before is None:
                    continue
                progress = Progress(before.checkpoint, before.done)
                progress.finish(run.messages[0].offset, run.messages[run.seen - 1].offset + 1)
                marks[run.seat.part] = Mark(progress.checkpoint, progress.runs)
            return marks

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        with self._desk.lock:
            for run in self._runs:
                run.count(run.seen)
        self._desk.committed(marks)

    def rolled_back(self) -> None:
        with self._desk.lock:
            self._consumer._runs = [run for run in self._consumer._runs if run not in self._runs]
            self._desk.rewind(run.seat for run in self._runs)

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        self._desk.gone(parts, lost=True)
        self._consumer._wake_steward()


def _names(parts: frozenset[TopicPartition]) -> str:
    return ", ".join(f"{topic}/{partition}" for topic, partition in sorted(parts))
