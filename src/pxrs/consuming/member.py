"""A member of a group at work: its steps, the two threads beside its caller's, and the waiting.

`Consumer` is its interface for users; `px.run` and asyncio use it directly. The background threads
(`Background`) renew the session, look at the group and commit what was handled. The caller's own
thread fetches, decodes and hands out; it never waits for them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from pxrs.arguments import check_message
from pxrs.codec.messages import Decoder
from pxrs.config import ConsumerSettings
from pxrs.consuming.background import Background
from pxrs.consuming.callbacks import Callbacks, refuse_interrupted
from pxrs.consuming.health import Facts, Health, judge
from pxrs.consuming.in_hand import InFlight
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.outage import Outage
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
from pxrs.consuming.subscription import Subscription
from pxrs.consuming.transactions import Transactions
from pxrs.core.records import head_key
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    PxrsError,
    StoreError,
    StoreUnavailable,
)
from pxrs.groups.owned_claims import fenced
from pxrs.queues.held_items import Context
from pxrs.stores.api import LogStore, Watch
from pxrs.types import Message, TopicPartition

_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2


class Member:
    """Joins when it is made. One thread asks it for messages; close it.

    `most_out`: how many messages may be out with worker threads; None if the caller handles them.
    """

    def __init__(
        self,
        shared: Context,
        subscription: Subscription,
        settings: ConsumerSettings,
        decoder: Decoder,
        callbacks: Callbacks,
        most_out: int | None = None,
    ) -> None:
        self._hold_session = shared.hold_session
        stores, self._clock = shared.stores, shared.clock
        self._coord = stores.coord
        self._settings = settings
        self._callbacks = callbacks
        self._hands_to_workers = most_out is not None
        self.steps = MemberSteps(
            stores,
            shared.topics,
            self._clock,
            subscription.names,
            settings,
            decoder,
            asks_before_release=callbacks.revoked is not None,
            most_out=most_out,
        )
        self.table = self.steps.table
        self._membership = self.steps.membership
        self._log_watch = LogWatch(stores.log, self.table)
        self._woken = False
        self._closed = self._left = False
        self._closing, self.one_user = threading.RLock(), OneUser()
        self._log_outage = Outage(f"group {settings.group!r}, reading the log", self._clock)
        self.background = Background(
            stores.coord, self._clock, settings, self.steps, self._log_watch.wake
        )
        self.transactions = Transactions(shared, self.steps, self.background.wake)
        try:
            self._membership.join()
        except BaseException:
            # Otherwise its session would stay until it expires, though no thread renews it.
            with suppress(PxrsError):
                self._membership.leave()
            raise
        self.background.start()
        self._dropped = weakref.finalize(self, self.background.abandon, self._log_watch.close)
        self._dropped.atexit = False

    @property
    def name(self) -> str:
        """The member's name in its group."""
        return self._settings.member_name

    @property
    def has_left(self) -> bool:
        """Whether it was closed, and is in no group any more."""
        return self._left

    # Messages

    def take(self, most: int, timeout: float | None) -> list[InFlight]:
        """Messages, at most `most`; waits for the first up to `timeout`."""
        try:
            with self.one_user:
                return self.next(most, timeout)
        except BaseException as error:
            self.steps.did_not_arrive(error)
            raise

    def next(self, most: int, timeout: float | None) -> list[InFlight]:
        """`take` for its one user, which notes errors that keep messages from arriving."""
        self.require_open()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._attend()
            if flights := self.steps.hand_out(most, to_workers=self._hands_to_workers):
                return flights
            if self._look(deadline) is False:
                return []

    @property
    def has_news(self) -> bool:
        """Whether there is something to report to the caller before it takes more messages."""
        return self.background.fatal is not None or self._closed or self.table.has_changes

    def wait(self, timeout: float | None) -> bool:
        """Wait until there may be something to hand out; false when the time is over, or woken.

        It waits for a store that does not answer; raises if that lasts until the time is over.
        """
        self.require_open()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        found: bool | None = None
        while found is None:
            self._attend()
            # Once the lease is over nothing is handed out, until the background has joined again.
            found = (self.steps.alive and self.table.has_messages) or self._look(deadline)
        return found

    def _look(self, deadline: float | None) -> bool | None:
        """Fetch, or wait for messages to come. True: there may be something to hand out. False:
        the time is over, or the wait was ended by `wake`. None: look again."""
        trouble = None
        try:
            with self._log_outage.noticed():
                self._log_watch.arm()
                if self.steps.alive and self.steps.fetch(self.background.wake):
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
        return None

    def _refuse_out_of_touch(self) -> None:
        """Raise if it can't be known whether there are messages: to return none would be a lie.

        While it owns nothing, or may own nothing any more, the log is not read, and so reports no
        trouble.
        """
        if not self.steps.alive:
            self._coord.get(head_key(self._settings.group))
        elif not self.table.partitions and (error := self.background.outage.error) is not None:
            raise StoreUnavailable(f"the group's records can't be reached: {error}") from error

    def _attend(self) -> None:
        """Between messages: report changes to the caller, and release what has to go."""
        if self._closed:
            self.require_open()
        if self.table.has_changes:
            self._tell()
        if self.background.fatal is not None:
            raise self.background.fatal

    def _tell(self) -> None:
        try:
            self.one_user.in_callback = True
            self._callbacks.tell(self.table)
        except BaseException:
            self.background.wake()
            raise
        finally:
            self.one_user.in_callback = False
        try:
            self._membership.release_what_is_finished()
        except StoreError:
            # Not raised to the caller: the background tries again.
            self.background.wake()

    def came_back(self, owned: OwnedPartition) -> None:
        """Note that a worker thread has handled a message of the partition, or given it up."""
        if self.table.came_back(owned):
            self._log_watch.wake()

    def resume(self, parts: Iterable[TopicPartition]) -> None:
        """Go on with these partitions."""
        self.table.pause(parts, paused=False)
        self._log_watch.wake()

    def wake(self) -> None:
        """End the wait for messages, or the next one, with nothing. From any thread."""
        self._woken = True
        self._log_watch.wake()

    # Commits

    def committing(self, message: Message | None) -> Callable[[], None]:
        """Decides how far a commit goes; calling the result makes it."""
        self.require_open()
        if message is None:
            return partial(self._commit, partial(self.steps.commit_up_to, self.steps.extent()))
        check_message(message)
        return partial(self._commit, partial(self.steps.commit_message, message))

    def _commit(self, commit: Callable[[], frozenset[TopicPartition]]) -> None:
        self.require_open()
        if lost := commit():
            self.background.wake()
            raise fenced(lost)

    # Its state, and its end

    def require_open(self) -> None:
        """Raise if it was closed, in a forked child, and inside the block of its transaction."""
        self._hold_session.origin.refuse_child()
        if self._closed:
            raise Closed("the consumer was closed")
        # What was handled is not known yet: its end would undo a seek, or a commit not be undone.
        self.steps.owned_claims.refuse_inside_transaction()

    def health(self, *, stuck_after: float | None = None, lag_limit: int = 10_000) -> Health:
        """See `Consumer.health`."""
        if stuck_after is None:
            stuck_after = self._settings.stuck_after
        return judge(
            self._facts(), self._clock.monotonic(), stuck_after=stuck_after, lag_limit=lag_limit
        )

    def _facts(self) -> Facts:
        membership, fatal = self._membership, self.background.fatal
        session = membership.session
        lost_since = (self.background.outage.since, self._log_outage.since)
        with self.table.lock:
            partitions = [
                owned for owned in self.table.partitions.values() if owned.state == "owned"
            ]
            return Facts(
                generation=membership.generation,
                owned=len(partitions),
                meant=membership.meant,
                waiting=sum(owned.lag for owned in partitions),
                in_hand_since=self.steps.in_hand_since(),
                asked_at=self.steps.asked_at,
                store_lost_since=min(filter(None, lost_since), default=None),
                fatal=None if fatal is None else f"{type(fatal).__name__}: {fatal}",
                fenced=isinstance(fatal, Fenced),
                closed=self._closed,
                lease=None if session is None else session.remaining(),
                missing=membership.missing,
                unreadable=None if self.steps.trouble is None else str(self.steps.trouble),
            )

    def close(self, *, unheard: bool = False) -> None:
        """See `Consumer.close`.

        `unheard`: the store has just not answered another member that was leaving. If it does not
        answer this one either, this one leaves without a word.
        """
        if self._hold_session.origin.is_parent:
            return
        self.steps.owned_claims.refuse_inside_transaction()
        refuse_interrupted(self.steps.owned_claims.lock, self.table.lock)
        with self._closing:
            if self._left:
                return
            try:
                if not self._closed:
                    # A commit in the callback must not count the message at which a loop was left.
                    self.steps.leave_loop()
                    self._callbacks.tell_the_end(self.table, alive=self.steps.alive)
            finally:
                self._leave(unheard)

    def _leave(self, unheard: bool) -> None:
        self._closed = True
        self._dropped.detach()
        self.background.stop()
        try:
            if unheard and self._is_out_of_touch:
                self._membership.drop_out()
                return
            with suppress(PxrsError):
                self.background.commit_what_was_asked()
            self._membership.leave()
        finally:
            self.background.close()
            self._log_watch.close()
            self._left = True

    def stop_if_out_of_touch(self) -> None:
        """Have its threads not ask the store again if it does not answer, as it closes soon."""
        if self._is_out_of_touch and not self._hold_session.origin.is_parent:
            self.background.stop_soon()

    @property
    def _is_out_of_touch(self) -> bool:
        return self.background.outage.error is not None


def close_together(members: Sequence[Member]) -> None:
    """Close them one after the other; raises the last error when all are closed.

    Each would wait for a store that does not answer. So when one has waited in vain, the others
    leave without a word; and the calls that they wait for now are their last ones.
    """
    unheard = False

    def close(member: Member) -> None:
        nonlocal unheard
        for each in members:
            each.stop_if_out_of_touch()
        try:
            member.close(unheard=unheard)
        except StoreUnavailable:
            unheard = True
            raise

    with ExitStack() as closing:
        for member in members:
            closing.callback(close, member)


class OneUser:
    """Lets one thread at a time ask for messages: each call counts those of the last as handled.

    A block is noted by its thread, not locked: an interrupt may come before or after any line of
    this, and the thread that was interrupted has to be able to go on.
    """

    def __init__(self) -> None:
        self._user: int | None = None
        # Whether a callback runs, which must not ask for messages.
        self.in_callback = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._user not in (None, me) or self.in_callback:
            raise InvalidRequest(
                "this consumer is already polling (in another thread, or in the call that invoked "
                "this callback); use one consumer per thread"
            )
        self._user = me

    def __exit__(self, *_: object) -> None:
        self._user = None


class LogWatch:
    """A watch on the table's logs, armed anew when its partitions change; any thread wakes it."""

    def __init__(self, log: LogStore, table: PartitionTable) -> None:
        self._log = log
        self._table = table
        self._watch: Watch | None = None
        self._version = -1
        self._closed = False
        # Ends a wait for a store that does not answer, when there may be no watch.
        self._nudge = threading.Event()

    def arm(self) -> None:
        """Arm the watch; call it before a look at the logs, so that nothing is missed in between.

        Once closed it stays so: every wait returns at once.
        """
        with self._table.lock:
            self._nudge.clear()
            if self._closed or (self._watch is not None and self._version == self._table.version):
                return
            version = self._table.version
            watch = self._log.watch(*(owned.where for owned in self._table.owned()))
            if self._watch is not None:
                self._watch.close()
            self._watch, self._version = watch, version

    def wait(self, seconds: float) -> None:
        """Wait until a log may have grown, `wake` is called, or the time is over."""
        if self._watch is not None and not self._closed:
            self._watch.wait(seconds)

    def wait_for_store(self, seconds: float) -> None:
        """Wait while the store does not answer: only `wake` or the time ends it."""
        if not self._closed:
            self._nudge.wait(seconds)

    def wake(self) -> None:
        """End the wait at hand, or the next one."""
        self._nudge.set()
        watch = self._watch
        if watch is not None:
            watch.wake()

    def close(self) -> None:
        with self._table.lock:
            self._closed = True
            if self._watch is not None:
                self._watch.close()
        self._nudge.set()
