"""The unit of work: take and put items, send messages and run SQL, all or nothing.

Taking is the one thing that happens at once: the item is counted and held in a commit of its
own. Everything else is collected and applied at the end in one commit, together with the removal
of what was taken. The store's fence stands in that commit: an item that is not held any more by
this very delivery makes all of it fail.
"""

from __future__ import annotations

import random
import secrets
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from pxrs.clock import Clock
from pxrs.core.delivery import Dead, Forever, Policy, after_failure
from pxrs.core.retry import Backoff
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    QueueNotFound,
    SessionLost,
    TransactionConflict,
)
from pxrs.runtime.item import Item, as_item, encode_body
from pxrs.runtime.keeper import Keeper
from pxrs.runtime.outgoing import Outgoing
from pxrs.runtime.topics import Topics
from pxrs.serde import Serde
from pxrs.stores.api import Atomic, Session, Stores, Watch
from pxrs.stores.queue_rules import validate_item
from pxrs.types import Delivery, Header, Held, Holder, NewItem, QueueChange, Release

# Behind the wake-ups: how long a lost one can go unnoticed.
_CAREFUL_WAIT = 5.0
_RETRY = Backoff(first=0.01, longest=1.0)
_FOREVER = Forever()


class Desk(NamedTuple):
    """What transactions of one open store share."""

    stores: Stores
    topics: Topics
    clock: Clock
    keeper: Keeper
    random: random.Random


class InHand(NamedTuple):
    """A taken item and the policy it was taken under."""

    held: Held
    policy: Policy


class UnitOfWork:
    """See the module. Thread-safe. `px.transaction()` commits on success, `px.begin()` does not:
    there `commit()` has to be called, and leaving the block without it rolls back.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        connection: Any = None,
        serde: Serde | None = None,
        strict: bool = False,
        commit_on_exit: bool = True,
    ) -> None:
        self._desk = desk
        self._given = connection
        self._serde = serde
        self._strict = strict
        self._commit_on_exit = commit_on_exit
        self._lock = threading.RLock()
        self._session: Session = desk.keeper.session()
        self._holder = Holder(self._session.id, secrets.token_hex(8))
        self._taken: list[InHand] = []
        self._put: list[NewItem] = []
        self._outgoing: Outgoing | None = None
        self._atomic: Atomic | None = None
        # Statements of the caller's can't be repeated here: then a commit has only one try.
        self._ran_sql = False
        self._ended = ""
        self._drop = weakref.finalize(self, _dropped, desk.keeper, self._holder, self._taken)
        self._drop.atexit = False

    # Taking and putting

    def take(
        self,
        queue: str,
        timeout: float | None = None,
        *,
        policy: Policy = _FOREVER,
        lock_for: float | None = None,
    ) -> Item | None:
        """The next item of the queue, held until this transaction ends.

        Waits for one; None if none came within `timeout` seconds. `lock_for`: lose it after so
        many seconds, even if this process lives.
        """
        items = self.take_many(queue, 1, timeout, policy=policy, lock_for=lock_for)
        return items[0] if items else None

    def take_many(
        self,
        queue: str,
        max_items: int,
        timeout: float | None = None,
        *,
        policy: Policy = _FOREVER,
        lock_for: float | None = None,
        watch: Watch | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> list[Item]:
        """What there is, `max_items` at most; waits until there is one, `timeout` seconds at most.

        An item whose last holder died comes alone.
        """
        armed = watch
        deadline = None if timeout is None else self._desk.clock.monotonic() + timeout
        try:
            while True:
                items, due = self._take_now(queue, max_items, policy, lock_for)
                if items:
                    return items
                left = None if deadline is None else deadline - self._desk.clock.monotonic()
                if stopping() or (left is not None and left <= 0):
                    return []
                if armed is None:
                    # Armed first, then looked once more: nothing can come in between.
                    armed = self._desk.stores.queues.watch(queue)
                    continue
                waits = (wait for wait in (left, due, _CAREFUL_WAIT) if wait is not None)
                armed.wait(min(waits))
        finally:
            if armed is not None and watch is None:
                armed.close()

    def _take_now(
        self, queue: str, count: int, policy: Policy, lock_for: float | None
    ) -> tuple[list[Item], float | None]:
        queues = self._desk.stores.queues
        with self._lock:
            self._require_open()
            taken = queues.take(queue, self._holder, count, most=policy.times, lock_for=lock_for)
            if not taken.items and self._strict and queues.find(queue) is None:
                raise QueueNotFound(queue)
            self._taken += [InHand(delivery.held, policy) for delivery in taken.items]
            return [self._as_item(delivery, policy) for delivery in taken.items], taken.due

    def _as_item(self, delivery: Delivery, policy: Policy) -> Item:
        try:
            return as_item(delivery, self._serde)
        except Exception as error:
            error.add_note(f"item {delivery.held.id} of queue {delivery.held.queue!r}")
            raise

    def put(
        self,
        queue: str,
        value: Any,
        *,
        priority: int = 0,
        delay: float = 0.0,
        key: str | None = None,
        headers: list[Header] | None = None,
        dedupe: str | None = None,
        dedupe_window: float = 300.0,
    ) -> None:
        """Put an item when, and only if, this transaction commits.

        A higher `priority` goes first. `delay`: not before so many seconds have passed. Items of
        one `key` are handed out strictly in order. Of several with one `dedupe` key within the
        window only the first is put.
        """
        item = NewItem(
            queue=queue,
            body=encode_body(value, headers, self._serde),
            key=key,
            priority=priority,
            delay=delay,
            dedupe=dedupe,
            dedupe_window=dedupe_window if dedupe is not None else 0.0,
        )
        validate_item(item, self._desk.stores.queues.limits)
        with self._lock:
            self._require_open()
            self._put.append(item)

    def extend(self, seconds: float) -> None:
        """Hold on to everything taken for so many seconds from now. Raises `Fenced` if lost."""
        with self._lock:
            self._require_open()
            held = [each.held for each in self._taken]
            if held:
                self._desk.stores.queues.extend(self._holder, held, seconds)

    # Messages and SQL

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: list[Header] | None = None,
    ) -> None:
        """Send a message when, and only if, this transaction commits."""
        with self._lock:
            self._require_open()
            if self._outgoing is None:
                self._outgoing = Outgoing(self._desk.topics, self._desk.clock)
            self._outgoing.send(topic, value, key, partition, headers)

    @property
    def connection(self) -> Any:
        """The database connection that will commit, for the caller's own statements.

        From its first use on the store's writer is held: take items before.
        """
        with self._lock:
            self._require_open()
            self._ran_sql = True
            return self._open_atomic().connection

    def execute(self, statement: str, parameters: Any = ()) -> Any:
        """Run a statement of the caller's in this transaction. See `connection`."""
        return self.connection.execute(statement, parameters)

    def _open_atomic(self) -> Atomic:
        if self._atomic is None:
            self._atomic = self._desk.stores.atomic(self._given).__enter__()
        return self._atomic

    # Ending

    def commit(self) -> None:
        """Remove what was taken and do everything else, in one commit. If it returns, it is done.

        After `Fenced` or `SessionLost` nothing was done and everything else was given back.
        After an error that may pass (`error.retryable`) nothing was done either, and the
        transaction is still open: commit again, or roll back.
        """
        with self._lock:
            self._require_open()
            try:
                self._commit()
            except BaseException as error:
                if self._ran_sql or isinstance(error, (Fenced, SessionLost)):
                    self._end("rolled back, as its commit failed")
                    self._release(f"{type(error).__name__}: {error}")
                raise
            self._end("committed")

    def finish(self) -> None:
        """Commit, unless the transaction has ended already."""
        with self._lock:
            if not self._ended:
                self.commit()

    def _commit(self) -> None:
        change = QueueChange(
            self._holder, tuple(each.held for each in self._taken), tuple(self._put)
        )
        try:
            if self._atomic is None and self._given is None and self._outgoing is None:
                if change.remove or change.put:
                    self._desk.stores.queues.apply(change)
            else:
                self._commit_atomically(change)
        except OutcomeUnknown:
            if not self._was_applied():
                raise TransactionConflict("the transaction was not committed") from None

    def _commit_atomically(self, change: QueueChange) -> None:
        atomic = self._open_atomic()
        try:
            if change.remove or change.put:
                atomic.queue(change)
            for where, batch in self._outgoing.appends() if self._outgoing else ():
                atomic.append(where, batch)
        except BaseException as error:
            self._atomic = None
            atomic.__exit__(type(error), error, error.__traceback__)
            raise
        self._atomic = None
        atomic.__exit__(None, None, None)
        if atomic.joined and change.remove:
            # The caller may still roll back: then what was taken has to be free again.
            self._desk.keeper.release_unless_removed(self._holder, change.remove)

    def _was_applied(self) -> bool:
        """Ask until there is an answer: nobody may be told that it is done when it is not."""
        failures = 0
        while True:
            try:
                return self._desk.stores.queues.applied(self._holder)
            except PxrsError as error:
                failures += 1
                if not error.retryable or failures > 10:
                    raise OutcomeUnknown(
                        "the commit was not answered, and the store can't say what became of it"
                    ) from error
                self._pause(failures)

    def rollback(self, error: str = "") -> None:
        """Give back everything taken and forget everything else. It succeeds in the end.

        While the store is away it waits, at most until the session is over, which frees it all.
        What has had its last delivery is dead then; `error` is noted on it.
        """
        with self._lock:
            if self._ended:
                return
            self._end("rolled back")
            self._roll_back_atomic()
            self._release(error)

    def _roll_back_atomic(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(PxrsError, PxrsError("rolled back"), None)

    def _release(self, error: str) -> None:
        releases = [self._after(each, error) for each in self._taken]
        failures = 0
        while releases and self._session.remaining() > 0:
            try:
                self._desk.stores.queues.release(self._holder, releases)
                break
            except (SessionLost, Closed):
                # Nobody holds anything any more.
                break
            except PxrsError as trouble:
                failures += 1
                if not trouble.retryable and not isinstance(trouble, OutcomeUnknown):
                    # It can't be written down, so the session has to go, and all its locks.
                    self._desk.keeper.end(self._session)
                    break
                self._pause(failures)
        self._drop.detach()

    def _after(self, in_hand: InHand, error: str) -> Release:
        held = in_hand.held
        verdict = after_failure(in_hand.policy, held.delivery, self._desk.random)
        if isinstance(verdict, Dead):
            return Release(held, error=error, dead=True)
        return Release(held, verdict.delay, error)

    def _pause(self, failures: int) -> None:
        threading.Event().wait(_RETRY.delay(failures, self._desk.random))

    def _end(self, how: str) -> None:
        self._ended = how
        if how == "committed":
            self._drop.detach()

    def _require_open(self) -> None:
        self._desk.keeper.refuse_after_fork()
        if self._ended:
            raise InvalidRequest(f"the transaction was {self._ended}; begin another")
        if self._session.remaining() <= 0:
            raise SessionLost("the session of this transaction is over, and its items are free")

    def __enter__(self) -> UnitOfWork:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.rollback(f"{type(error).__name__}: {error}")
            return
        if self._ended:
            return
        if not self._commit_on_exit:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException as failure:
            self.rollback(f"{type(failure).__name__}: {failure}")
            raise


def _dropped(keeper: Keeper, holder: Holder, taken: list[InHand]) -> None:
    """A transaction was forgotten without an end: its items must not stay locked."""
    if taken:
        keeper.give_back(holder, [each.held for each in taken])
