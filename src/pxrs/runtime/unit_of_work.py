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
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from pxrs.clock import Clock
from pxrs.core.delivery import Dead, Forever, Policy, after_failure, describe, storable
from pxrs.errors import (
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    QueueNotFound,
    SessionLost,
    TransactionConflict,
)
from pxrs.runtime.item import Item, as_item, encode_body
from pxrs.runtime.keeper import GivenBack, Keeper, held_by
from pxrs.runtime.outgoing import Outgoing
from pxrs.runtime.topics import Topics
from pxrs.serde import Serde
from pxrs.stores.api import Atomic, Session, Stores, Watch
from pxrs.stores.queue_rules import validate_item
from pxrs.types import Delivery, Header, Held, Holder, NewItem, QueueChange, Release

# Behind the wake-ups: how long a lost one can go unnoticed.
_CAREFUL_WAIT = 5.0
_FOREVER = Forever()
_PATIENCE = 10

T = TypeVar("T")


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
        # Queues that were asked for items without an answer, because of an interrupt or an outage.
        self._asked: list[str] = []
        # A commit was sent, and nobody knows what became of it.
        self._in_doubt = False
        self._ended = ""
        self._nothing_left = False
        self._drop = weakref.finalize(self, _dropped, desk, self._holder, self._taken, self._asked)
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
        self, queue: str, most_items: int, policy: Policy, lock_for: float | None
    ) -> tuple[list[Item], float | None]:
        queues = self._desk.stores.queues
        with self._lock:
            self._require_open()
            self._asked.append(queue)
            try:
                items, due = queues.take(
                    queue, self._holder, most_items, most=policy.times, lock_for=lock_for
                )
            except OutcomeUnknown:
                known = {each.held for each in self._taken}
                items = self._ask(lambda: held_by(queues, queue, self._holder, known))
                due = 0.0
            except PxrsError:
                self._asked.remove(queue)
                raise
            self._taken += [InHand(delivery.held, policy) for delivery in items]
            self._asked.remove(queue)
            if not items and self._strict and queues.find(queue) is None:
                raise QueueNotFound(queue)
            return [self._as_item(delivery) for delivery in items], due

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor rolled back."""
        return not self._ended

    @property
    def in_hand(self) -> int:
        """How many items it holds."""
        return len(self._taken)

    def _as_item(self, delivery: Delivery) -> Item:
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
                    self._ended = "rolled back, as its commit failed"
                    self._release(describe(error))
                raise
            self._ended = "committed"
            self._nothing_left = True
            self._drop.detach()
            if self._asked:
                self._desk.keeper.give_back(GivenBack(self._holder, (), tuple(self._asked)))

    def finish(self) -> None:
        """Commit, unless the transaction has ended already."""
        with self._lock:
            if not self._ended:
                self.commit()

    def _commit(self) -> None:
        change = QueueChange(
            self._holder, tuple(each.held for each in self._taken), tuple(self._put)
        )
        if self._in_doubt and self._was_applied():
            return
        self._in_doubt = True
        try:
            if self._atomic is None and self._given is None and self._outgoing is None:
                if change.remove or change.put:
                    self._desk.stores.queues.apply(change)
            else:
                self._commit_atomically(change)
        except OutcomeUnknown:
            if not self._was_applied():
                self._in_doubt = False
                raise TransactionConflict("the transaction was not committed") from None
        except Exception:
            self._in_doubt = False
            raise

    def _commit_atomically(self, change: QueueChange) -> None:
        atomic = self._open_atomic()
        try:
            # Even if it is empty: that it was done is remembered with it.
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
            self._desk.keeper.release_unless_removed(
                _given_back(self._desk, self._holder, self._taken, (), "it was rolled back")
            )

    def _was_applied(self) -> bool:
        """Ask until there is an answer: nobody may be told that it is done when it is not."""
        if self._ask(lambda: self._desk.stores.queues.applied(self._holder)):
            return True
        if not self._desk.keeper.holds(self._session):
            raise OutcomeUnknown("the commit was not answered, and its session is forgotten")
        return False

    def _ask(self, question: Callable[[], T]) -> T:
        for failures in count(1):
            try:
                return question()
            except PxrsError as error:
                if not error.retryable or failures > _PATIENCE:
                    raise OutcomeUnknown(
                        "the store gave no answer, and can't say what became of the question"
                    ) from error
                self._desk.keeper.pause(failures)
        raise AssertionError

    def rollback(self, error: str = "") -> None:
        """Give back everything taken and forget everything else. It succeeds in the end.

        While the store is away it waits, at most until the session is over, which frees it all.
        What has had its last delivery is dead then; `error` is noted on it. One that was
        interrupted is finished by another thread; calling it again waits for that.
        """
        self._desk.keeper.refuse_after_fork()
        with self._lock:
            if self._nothing_left:
                return
            self._ended = self._ended or "rolled back"
            atomic, self._atomic = self._atomic, None
            try:
                if atomic is not None:
                    atomic.__exit__(PxrsError, PxrsError("rolled back"), None)
            finally:
                self._release(storable(error))

    def _release(self, error: str) -> None:
        keeper = self._desk.keeper
        given = _given_back(self._desk, self._holder, self._taken, self._asked, error)
        failures = 0
        try:
            while (given.releases or given.doubts) and not keeper.release(given):
                failures += 1
                keeper.pause(failures)
        except BaseException:
            keeper.give_back(given)
            raise
        self._nothing_left = True
        self._drop.detach()

    def _require_open(self) -> None:
        self._desk.keeper.refuse_after_fork()
        if self._ended:
            raise InvalidRequest(f"the transaction was {self._ended}; begin another")
        if not self._desk.keeper.holds(self._session):
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
            self.rollback(describe(error))
            return
        if self._ended:
            return
        if not self._commit_on_exit:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException as failure:
            self.rollback(describe(failure))
            raise


def _given_back(
    desk: Desk, holder: Holder, taken: Sequence[InHand], asked: Sequence[str], error: str
) -> GivenBack:
    """What becomes of everything that was taken, by the policy it was taken under."""
    releases = []
    for held, policy in taken:
        verdict = after_failure(policy, held.delivery, desk.random)
        if isinstance(verdict, Dead):
            releases.append(Release(held, error=error, dead=True))
        else:
            releases.append(Release(held, verdict.delay, error))
    return GivenBack(holder, tuple(releases), tuple(asked))


def _dropped(desk: Desk, holder: Holder, taken: list[InHand], asked: list[str]) -> None:
    """A transaction was forgotten without an end: its items must not stay locked."""
    if taken or asked:
        desk.keeper.give_back(
            _given_back(desk, holder, taken, asked, "its transaction was dropped")
        )
