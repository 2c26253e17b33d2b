"""The consumer: one member of a group, and the messages of the partitions it owns.

Two threads stand beside the caller's. One renews the session, whatever the handler does. The
other is the steward: it looks at the group when a watch wakes it, and commits what was handled.
The caller's own thread fetches, decodes and hands out; it never waits for either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.core.records import head_key, members_prefix
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    PxrsError,
    SessionLost,
    StoreError,
    TransactionConflict,
)
from pxrs.runtime.decoding import Decoder
from pxrs.runtime.desk import ConsumerDesk, Seat
from pxrs.runtime.health import Facts, Health, judge
from pxrs.runtime.subscription import Subscription
from pxrs.runtime.topics import Topics
from pxrs.runtime.transaction import Transaction
from pxrs.runtime.worker import Handed, Run, Worker, names_of
from pxrs.stores.api import Stores, Watch
from pxrs.types import Message, TopicPartition

_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
RUN = 500

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
        self._worker = Worker(
            stores,
            topics,
            clock,
            subscription.names,
            settings,
            decoder,
            in_hand=in_hand,
            asks_before_release=callbacks.revoked is not None,
        )
        self._desk = self._worker.desk
        self._membership = self._worker.membership
        self._log_watch: Watch | None = None
        self._watched_version = -1
        self._group_watch: Watch | None = None
        self._fatal: PxrsError | None = None
        self._store_lost_since: float | None = None
        self._closed = False
        self._woken = False
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

    def health(self, *, stuck_after: float = 60.0, lag_limit: int = 10_000) -> Health:
        """How this consumer is doing. From any thread; for probes, `health().ok`.

        `stuck_after`: how many seconds a handler may be at what it was given.
        """
        with self._desk.lock:
            seats = [seat for seat in self._desk.seats.values() if seat.state == "owned"]
            facts = Facts(
                generation=self._membership.generation,
                owned=len(seats),
                meant=self._membership.meant,
                waiting=sum(seat.lag for seat in seats),
                in_hand_since=self._worker.handed_at if self._worker.runs else None,
                store_lost_since=self._store_lost_since,
                fatal=str(self._fatal) if self._fatal is not None else None,
            )
        return judge(facts, self._clock.monotonic(), stuck_after=stuck_after, lag_limit=lag_limit)

    def poll(self, max_records: int = 500, timeout: float | None = None) -> list[Message]:
        """Messages of the partitions owned, at most so many; waits for the first up to `timeout`.

        What the last call returned counts as handled now.
        """
        if max_records < 1:
            raise InvalidRequest(f"max_records = {max_records}; at least 1 is needed")
        self.finish()
        return self.all_at_once(self._next(max_records, timeout))

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, without end. One is handled when the next one is asked for."""
        self.finish()
        while True:
            yield from self.one_by_one(self._next(RUN, None))

    def batches(self, max_records: int = 500) -> Iterator[list[Message]]:
        """Lists of messages, each of one partition. One is handled when the next is asked for."""
        self.finish()
        while True:
            yield from self.by_partition(self._next(max_records, None))

    def commit(self, message: Message | None = None) -> None:
        """Commit what was handed out so far, or up to and including one message.

        Partitions that were lost are told by `Fenced`; the others are committed all the same.
        """
        if message is None:
            lost = self._worker.commit_handed()
        else:
            lost = self._worker.commit(self._worker.mark_of(message))
        if lost:
            self._wake_steward()
            raise Fenced(f"not committed, owned by somebody else now: {names_of(lost)}")

    def commit_async(self) -> None:
        """Commit what was handled soon, in the background. Losses are told by `on_lost`."""
        self._worker.marks_handed()
        self._commit_soon.set()
        self._wake_steward()

    def transaction(self, connection: Any = None) -> Transaction:
        """Commit the checkpoint of what the last poll returned together with the caller's writes.

        In a loop: of everything up to the current message. On a connection of the caller's, if
        one is given: the driver's own, or an SQLAlchemy Session or Connection. pxrs commits it,
        with what it had begun before. A block left by an exception is rolled back, and its
        messages are handed out again. `Fenced` if somebody else owns a partition now;
        `NotAtomic` where the store can't do it.
        """
        return self._transaction(connection, keep_on_conflict=False)

    def run_transaction(
        self, work: Callable[[Transaction], Any], *, connection: Any = None, attempts: int = 5
    ) -> Any:
        """Run `work(tx)` in a transaction, again on a conflict that may pass; what it returns."""
        for begun in self.attempts(connection, attempts):
            try:
                with begun as tx:
                    return work(tx)
            except TransactionConflict:
                if not begun.keeps_on_conflict:
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    def attempts(self, connection: Any, most: int) -> Iterator[Transaction]:
        """Transactions over the same messages, one after the other; the last one gives them up."""
        if most < 1:
            raise InvalidRequest(f"{most} attempts; at least 1 is needed")
        for left in reversed(range(most)):
            yield self._transaction(connection, keep_on_conflict=left > 0)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        self._worker.seek(topic, partition, offset)

    def seek_to_time(self, timestamp: int, parts: Parts | None = None) -> None:
        """Go on from the first messages of this time (ms) or later, or from the end."""
        for part in parts if parts is not None else self.assignment:
            seat = self._worker.owned_seat(*part)
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
        self._worker.sync()
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

    @property
    def alive(self) -> bool:
        """Whether messages that were taken may still be begun with."""
        return self._worker.alive

    def take_away(self, most: int, timeout: float) -> list[Run]:
        """Messages to be handled elsewhere, in any order; whoever does tells the seats."""
        runs = self._next(most, timeout)
        self._worker.forget_runs()
        return runs

    def wake_steward(self) -> None:
        """Let the group be looked at now."""
        self._wake_steward()

    # Handing out and handling

    def wake(self) -> None:
        """End the wait of `poll`, or the next one: it returns with nothing. From any thread."""
        self._woken = True
        self._wake_consumer()

    def _next(self, most: int, timeout: float | None) -> list[Run]:
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._attend()
            if runs := self.take(most):
                return runs
            left = None if deadline is None else deadline - self._clock.monotonic()
            if not self.wait(left):
                return []

    @property
    def settled(self) -> bool:
        """Whether there is nothing to tell the caller before it takes more messages."""
        return self._fatal is None and not self._closed and not self._desk.has_changes

    def take(self, most: int) -> list[Run]:
        """What lies in the buffers, at most so many messages. Does not wait."""
        return self._worker.hand_out(most)

    def wait(self, timeout: float | None) -> bool:
        """Until there may be something to take; false when the time is over, or when woken."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._attend()
            if self._desk.has_messages:
                return True
            watch = self._armed_watch()
            if self._worker.fetch(self._wake_steward):
                return True
            if self._woken:
                self._woken = False
                return False
            left = _CAREFUL_WAIT
            if deadline is not None:
                left = min(left, deadline - self._clock.monotonic())
                if left <= 0:
                    return False
            watch.wait(left)

    def all_at_once(self, runs: list[Run]) -> list[Message]:
        """The runs' messages; they are handled when `finish` is called."""
        return self._worker.all_at_once(runs)

    def one_by_one(self, runs: list[Run]) -> Iterator[Message]:
        """The runs' messages, each handled when the next one is asked for."""
        return self._worker.one_by_one(runs)

    def by_partition(self, runs: list[Run]) -> Iterator[list[Message]]:
        """The messages run by run, each run handled when the next one is asked for."""
        return self._worker.by_partition(runs)

    def finish(self) -> None:
        """All that the caller has seen is handled."""
        self._worker.finish()

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
        try:
            self._membership.release_what_is_finished()
        except StoreError:
            # Not the caller's trouble: the steward tries again.
            self._wake_steward()

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

    # Committing

    def _transaction(self, connection: Any, *, keep_on_conflict: bool) -> Transaction:
        return Transaction(
            self._stores,
            self._topics,
            self._clock,
            self._worker.holdings,
            Handed(self._worker, self._wake_steward),
            connection,
            keep_on_conflict=keep_on_conflict,
        )

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
                self._store_lost_since = None
                if self._desk.version != version:
                    self._wake_consumer()
            except Fenced as error:
                self._fatal = error
                self._wake_consumer()
                return
            except PxrsError:
                now = self._clock.monotonic()
                self._store_lost_since = self._store_lost_since or now
                look_at = now + _RETRY_PAUSE
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
        if (self._settings.auto_commit or soon) and self._worker.commit_handled():
            self._wake_steward()
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
