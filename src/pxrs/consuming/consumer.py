"""The consumer: one member of a group, and the messages of the partitions it owns.

Two threads stand beside the caller's (`Background`): one renews the session, the other looks at the
group and commits what was handled. The caller's own thread fetches, decodes and hands out; it
never waits for either.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from pxrs import arguments
from pxrs.callers import refuse_unsaid
from pxrs.config import ConsumerSettings
from pxrs.consuming.background import Background, LogWatch
from pxrs.consuming.callbacks import Callbacks, Parts
from pxrs.consuming.health import Facts, Health, Outage, judge
from pxrs.consuming.in_hand import Elsewhere, Run
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.one_user import OneUser, refuse_interrupted
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.subscription import Subscription
from pxrs.consuming.transactions import Transaction, Transactions
from pxrs.core.records import head_key
from pxrs.decoding import Decoder
from pxrs.errors import Closed, Fenced, PxrsError, StoreError, StoreUnavailable
from pxrs.groups.owned_claims import all_of, fenced
from pxrs.queues.held_items import Context
from pxrs.types import Message, TopicPartition


def facts_of(
    member_steps: MemberSteps, background: Background, log: Outage, *, closed: bool
) -> Facts:
    """As of now. From any thread."""
    membership, fatal = member_steps.membership, background.fatal
    session = membership.session
    with member_steps.table.lock:
        partitions = [
            owned for owned in member_steps.table.partitions.values() if owned.state == "owned"
        ]
        return Facts(
            generation=membership.generation,
            owned=len(partitions),
            meant=membership.meant,
            waiting=sum(owned.lag for owned in partitions),
            in_hand_since=member_steps.in_hand_since(),
            asked_at=member_steps.asked_at,
            store_lost_since=min(filter(None, (background.outage.since, log.since)), default=None),
            fatal=None if fatal is None else f"{type(fatal).__name__}: {fatal}",
            fenced=isinstance(fatal, Fenced),
            closed=closed,
            lease=None if session is None else session.remaining(),
            missing=membership.missing,
            unreadable=None if member_steps.trouble is None else str(member_steps.trouble),
        )


T = TypeVar("T")
_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
RUN = 500


class Consumer:
    """Consumes topics as a member of a group. One thread uses it; close it, or use `with`."""

    def __init__(
        self,
        shared: Context,
        subscription: Subscription,
        settings: ConsumerSettings,
        decoder: Decoder,
        callbacks: Callbacks,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._hold_session = shared.hold_session
        stores, topics, self._clock = shared.stores, shared.topics, shared.clock
        self._coord = stores.coord
        self._settings = settings
        self._callbacks = callbacks
        self._steps = MemberSteps(
            stores,
            topics,
            self._clock,
            subscription.names,
            settings,
            decoder,
            elsewhere=elsewhere,
            asks_before_release=callbacks.revoked is not None,
        )
        self.table = self._steps.table
        self._membership = self._steps.membership
        self._log_watch = LogWatch(stores.log, self.table)
        self._woken = False
        self._closed = self._left = False
        self._closing, self._one_user = threading.RLock(), OneUser()
        self._log_outage = Outage(f"group {settings.group!r}, reading the log", self._clock)
        self._background = Background(
            stores.coord, self._clock, settings, self._steps, self._log_watch.wake
        )
        self._transactions = Transactions(shared, self._steps, self._background.wake)
        try:
            self._membership.join()
        except BaseException:
            # Its session would stay for as long as it lasts, and nobody renews it.
            with suppress(PxrsError):
                self._membership.leave()
            raise
        self._background.start()
        self._dropped = weakref.finalize(self, self._background.abandon, self._log_watch.close)
        self._dropped.atexit = False

    # What the caller sees

    @property
    def member(self) -> str:
        """This member's name in the group."""
        return self._settings.member_name

    @property
    def assignment(self) -> set[TopicPartition]:
        """The partitions owned now."""
        return {
            owned.part for owned in list(self.table.partitions.values()) if owned.state == "owned"
        }

    def health(self, *, stuck_after: float | None = None, lag_limit: int = 10_000) -> Health:
        """How this consumer is doing. From any thread; for probes, `health().ok`.

        `stuck_after`: how many seconds a handler may be at what it was given; as the consumer was
        made, unless another number is given.
        """
        if stuck_after is None:
            stuck_after = self._settings.stuck_after
        facts = facts_of(self._steps, self._background, self._log_outage, closed=self._closed)
        return judge(facts, self._clock.monotonic(), stuck_after=stuck_after, lag_limit=lag_limit)

    def poll(self, max_records: int = 500, timeout: float | None = None) -> list[Message]:
        """Messages of the partitions owned, at most so many; waits for the first up to `timeout`.

        What the last call returned counts as handled now. A store that is away is waited for, too;
        `StoreUnavailable` if it is still away when the time is over.
        """
        arguments.check_whole("max_records", max_records, least=1)
        arguments.check_timeout(timeout)
        self._require_open()
        try:
            with self._one_user:
                self._steps.finish()
                return self._steps.all_at_once(self._next(max_records, timeout))
        except BaseException as error:
            self._steps.did_not_arrive(error)
            raise

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, without end. One is handled when the next one is asked for."""
        self._begin_loop()
        while True:
            yield from self._steps.one_by_one(self._take_runs(RUN, None))

    def batches(self, max_records: int = 500) -> Iterator[list[Message]]:
        """Lists of messages, each of one partition. One is handled when the next is asked for."""
        arguments.check_whole("max_records", max_records, least=1)
        return self._batches(max_records)

    def _batches(self, max_records: int) -> Iterator[list[Message]]:
        self._begin_loop()
        while True:
            yield from self._steps.by_partition(self._take_runs(max_records, None))

    def _begin_loop(self) -> None:
        self._require_open()
        with self._one_user:
            self._steps.finish()

    def commit(self, message: Message | None = None) -> None:
        """Commit what was handed out so far, or up to and including one message.

        What is handed out while it waits for its turn is no part of it. Partitions that were lost
        are told by `Fenced`; the others are committed all the same. A checkpoint never goes back,
        and never past what was handed out.
        """
        self.committing(message)()

    def committing(self, message: Message | None = None) -> Callable[[], None]:
        """`commit` in two steps: this one says how far it goes, calling the result does it."""
        self._require_open()
        if message is None:
            return partial(self._commit, partial(self._steps.commit_up_to, self._steps.extent()))
        arguments.check_message(message)
        return partial(self._commit, partial(self._steps.commit_message, message))

    def _commit(self, commit: Callable[[], frozenset[TopicPartition]]) -> None:
        self._require_open()
        if lost := commit():
            self._background.wake()
            raise fenced(lost)

    def commit_async(self) -> Future[None]:
        """Commit what was handed out so far in the background; how it went, once it has.

        Its `result()` is that of `commit`. Nobody has to ask: what was lost is told by `on_lost`.
        What is handed out after this call is no part of it.
        """
        self._require_open()
        return self._background.commit_soon()

    def transaction(self, connection: None = None, *, commits: Any = None) -> Transaction:
        """Commit the checkpoint of what the last poll returned together with the caller's writes.

        In a loop: of the current message; without auto-commit of all since the last commit. On a
        connection of the caller's that pxrs `commits`, if one is given: the driver's own, or an
        SQLAlchemy Session or Connection; with what it had begun before. A block left by an
        exception is rolled back, and its messages are handed out again. `Fenced` if somebody else
        owns a partition now; `NotAtomic` where the store can't do it.
        """
        refuse_unsaid(connection, "consumer.transaction(commits=connection): pxrs does")
        self._require_open()
        return self._transactions.begin(commits)

    def run_transaction(
        self,
        work: Callable[[Transaction], T],
        *,
        commits: Any = None,
        attempts: int = 5,
        connection: None = None,
    ) -> T:
        """Run `work(tx)` in a transaction, again on a conflict that may pass; what it returns."""
        refuse_unsaid(connection, "consumer.run_transaction(work, commits=connection)")
        self._require_open()
        return self._transactions.run(work, commits, attempts)

    def attempts(self, commits: Any, most: int) -> Iterator[Transaction]:
        """Transactions over the same messages, one after the other; the last one gives them up."""
        self._require_open()
        return self._transactions.attempts(commits, most)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        arguments.check_whole("offset", offset)
        self._require_open()
        self._steps.seek(topic, partition, offset)

    def seek_to_time(self, timestamp: int, parts: Parts | None = None) -> None:
        """Go on from the first messages of this time (ms) or later, or from the end."""
        arguments.check_time("timestamp", timestamp)
        self._require_open()
        for part in all_of(self.assignment) if parts is None else arguments.check_parts(parts):
            self._steps.seek(*part, self._steps.offset_at(part, timestamp))

    def pause(self, *parts: TopicPartition) -> None:
        """Hand out nothing of these partitions until `resume`; kept across rebalances."""
        self._steps.pause(arguments.check_parts(parts))

    def resume(self, *parts: TopicPartition) -> None:
        """Go on with these partitions."""
        self.table.pause(arguments.check_parts(parts), paused=False)
        self._log_watch.wake()

    def close(self) -> None:
        """Finish: commit what was handled, release everything and leave the group at once.

        `on_revoked` is told of what is owned first; it can still commit what was handled. One
        that was interrupted can be called again.
        """
        if self._hold_session.origin.is_parent:
            return
        self._steps.owned_claims.refuse_inside_transaction()
        refuse_interrupted(self._steps.owned_claims.lock, self.table.lock)
        with self._closing:
            if self._left:
                return
            try:
                if not self._closed:
                    # A commit in the callback must not count the message that a loop has left.
                    self._steps.leave_loop()
                    self._callbacks.tell_the_end(self.table, alive=self.alive)
            finally:
                self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._dropped.detach()
        self._background.stop()
        try:
            with suppress(PxrsError):
                self._background.commit_what_was_asked()
            self._membership.leave()
        finally:
            self._background.close()
            self._log_watch.close()
            self._left = True

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_left(self) -> bool:
        """Whether it was closed, and is in no group any more."""
        return self._left

    # For `Runner`, which keeps its own account of what is in hand

    @property
    def member_steps(self) -> MemberSteps:
        return self._steps

    @property
    def alive(self) -> bool:
        """Whether messages that were taken may still be begun with."""
        return self._steps.alive

    def take_away(self, most: int, timeout: float) -> list[Run]:
        """Messages to be handled elsewhere, in any order; whoever does tells the partitions."""
        runs = self._take_runs(most, timeout)
        self._steps.forget_runs()
        return runs

    def came_back(self, owned: OwnedPartition) -> None:
        """A message that was taken away is handled, or was given up."""
        if self.table.came_back(owned):
            self._log_watch.wake()

    def wake_background(self) -> None:
        """Let the group be looked at now."""
        self._background.wake()

    # Handing out and handling

    def wake(self) -> None:
        """End the wait of `poll`, or the next one: it returns with nothing. From any thread."""
        self._woken = True
        self._log_watch.wake()

    def _take_runs(self, most: int, timeout: float | None) -> list[Run]:
        self._require_open()
        try:
            with self._one_user:
                return self._next(most, timeout)
        except BaseException as error:
            self._steps.did_not_arrive(error)
            raise

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
        return self._background.fatal is None and not self._closed and not self.table.has_changes

    def take(self, most: int) -> list[Run]:
        """What lies in the buffers, at most so many messages. Does not wait."""
        return self._steps.hand_out(most)

    def wait(self, timeout: float | None) -> bool:
        """Until there may be something to take; false when the time is over, or when woken.

        A store that does not answer may do so in time; if not, that is told.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._attend()
            # Once the lease is over nothing is handed out, until the background has joined anew.
            if self.alive and self.table.has_messages:
                return True
            trouble = None
            try:
                if self._fetch():
                    return True
            except StoreError as error:
                if not error.retryable:
                    raise
                trouble = error
            if self._woken:
                self._woken = False
                return False
            left = _CAREFUL_WAIT if trouble is None else _RETRY_PAUSE
            if deadline is not None:
                left = min(left, deadline - self._clock.monotonic())
                if left <= 0:
                    if trouble is not None:
                        raise trouble
                    self._refuse_out_of_touch()
                    return False
            if trouble is not None:
                self._log_watch.wait_for_store(left)
            else:
                self._log_watch.wait(left)

    def _refuse_out_of_touch(self) -> None:
        """Raise if nobody can tell whether there is anything for this member: "nothing" is a lie.

        While it owns nothing, or may own nothing any more, the log is not asked, and so tells of no
        trouble.
        """
        if not self.alive:
            self._coord.get(head_key(self._settings.group))
        elif not self.table.partitions and (error := self._background.outage.error) is not None:
            raise StoreUnavailable(f"the group's records can't be reached: {error}") from error

    def _fetch(self) -> bool:
        """Fill the buffers; true if there may be something to take."""
        with self._log_outage.noticed():
            self._log_watch.arm()
            return self.alive and self._steps.fetch(self._background.wake)

    def _attend(self) -> None:
        """Between messages: tell the caller what changed, and let go of what has to go."""
        self._require_open()
        if self.table.has_changes:
            self._tell()
        if self._background.fatal is not None:
            raise self._background.fatal

    def _require_open(self) -> None:
        self._hold_session.origin.refuse_child()
        if self._closed:
            raise Closed("the consumer was closed")
        # Nobody knows yet what was handled: its end would undo a seek, or a commit not be undone.
        self._steps.owned_claims.refuse_inside_transaction()

    def _tell(self) -> None:
        try:
            self._callbacks.tell(self.table, self._one_user)
        except BaseException:
            self._background.wake()
            raise
        try:
            self._membership.release_what_is_finished()
        except StoreError:
            # Not the caller's trouble: the background tries again.
            self._background.wake()
