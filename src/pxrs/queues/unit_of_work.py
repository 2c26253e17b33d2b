"""The unit of work: take and put items, send messages and run SQL, all or nothing.

Taking is the one thing that happens at once: the item is counted and held in a commit of its
own. Everything else is collected and applied at the end in one commit, together with the removal
of what was taken. The store's fence stands in that commit: an item that is not held any more by
this very delivery makes all of it fail.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, Unpack

from pxrs.core.error_text import describe, storable
from pxrs.core.queue import validate_item, validate_name
from pxrs.core.retry import AT_ONCE, Backoff, check_retry
from pxrs.errors import (
    CommitConflict,
    Fenced,
    InsideTransaction,
    InvalidRequest,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    QueueNotFound,
    SessionLost,
    TransactionConflict,
)
from pxrs.options import PutManyOptions, PutOptions, refuse_unknown, takes
from pxrs.producing.records import Outgoing
from pxrs.queues.held_items import Context, HeldItems
from pxrs.queues.hold_session import GivenBack
from pxrs.queues.item import Item, PutItem, as_item, encode_body
from pxrs.serde import Serde
from pxrs.stores.api import Atomic, Watch
from pxrs.stores.connections import Lent, is_writing
from pxrs.types import Append, Delivery, Header, Holder, NewItem, QueueChange, Release, Value

if TYPE_CHECKING:
    from pxrs.kv.transaction import TransactionKeys

_LOG = logging.getLogger("pxrs.queues")
# How long a lost wake-up can go unnoticed.
CAREFUL_WAIT = 5.0
# How often a commit is tried against others that write keys of the same shards.
_MOST_TRIES = 20
_MAKING = threading.Lock()


class Found(NamedTuple, Generic[Value]):
    """The result of one look at a queue: `pxrs.types.Taken`, with items as users see them."""

    items: list[Item[Value]]
    due: float | None
    suspect: bool


class UnitOfWork(Generic[Value]):
    """Takes and puts items, sends messages and runs SQL, all or nothing. Thread-safe.

    A `px.transaction()` commits when its block is left, and rolls back if that is by an exception.
    A `px.begin()` commits only by `commit()`; leaving its block without it rolls back.
    """

    def __init__(
        self,
        context: Context,
        *,
        connection: Any = None,
        serde: Serde[Value] | None = None,
        strict: bool = False,
        commit_on_exit: bool = True,
    ) -> None:
        self._context = context
        self._given = connection
        # A transaction of the caller's own, which the caller ends.
        self._is_callers = connection is not None and not isinstance(connection, Lent)
        # Whether it has written there, or tried to: even what was undone may stay locked for as
        # long as that transaction lasts (InnoDB keeps row locks over ROLLBACK TO SAVEPOINT).
        self._has_joined = False
        self._serde = serde
        self._strict = strict
        self._commit_on_exit = commit_on_exit
        self._lock = threading.RLock()
        self._held = HeldItems(context)
        self._put: list[NewItem] = []
        # The ids of what was put, once it is committed: see `PutItem`.
        self._ids: list[int | None] = []
        self._outgoing: Outgoing | None = None
        # Batches that are encoded already, behind those of `_outgoing`.
        self._batches: list[Append] = []
        self._keys: TransactionKeys | None = None
        self._atomic: Atomic | None = None
        # The caller's own statements can't be repeated here, so the commit is tried once.
        self._has_one_try = isinstance(connection, Lent)
        # The commit that was sent last, and whether its outcome is still unknown.
        self._sent = QueueChange(Holder("", ""))
        self._in_doubt = False
        self._ended = ""
        self._nothing_left = False
        self._drop: weakref.finalize[..., UnitOfWork[Value]] | None = None

    # Taking and putting

    def take(
        self,
        queue: str,
        timeout: float | None = None,
        *,
        retry: Backoff = AT_ONCE,
        lock_for: float | None = None,
    ) -> Item[Value] | None:
        """The next item of the queue, held until this transaction ends.

        Waits for one; None if none came within `timeout` seconds. `retry` decides how often the
        item may be delivered, and when again after a rollback: without limit and at once by
        default; `Backoff(attempts=1)` delivers it once and never again. `lock_for`: lose it after
        this many seconds, even if this process lives.
        """
        items = self.take_many(queue, 1, timeout, retry=retry, lock_for=lock_for)
        return items[0] if items else None

    def take_many(
        self,
        queue: str,
        max_items: int,
        timeout: float | None = None,
        *,
        retry: Backoff = AT_ONCE,
        lock_for: float | None = None,
    ) -> list[Item[Value]]:
        """Takes up to `max_items` items; waits for the first one, `timeout` seconds at most.

        An item whose last holder died comes alone.
        """
        armed: Watch | None = None
        deadline = None if timeout is None else self._context.clock.monotonic() + timeout
        try:
            while True:
                items, due, _ = self._look(queue, max_items, retry, lock_for)
                if items:
                    return items
                left = None if deadline is None else deadline - self._context.clock.monotonic()
                if left is not None and left <= 0:
                    return []
                if armed is None:
                    # Armed first, then another look: nothing can come in between.
                    armed = self._context.stores.queues.watch(queue)
                    continue
                waits = (wait for wait in (left, due, CAREFUL_WAIT) if wait is not None)
                armed.wait(min(waits))
        finally:
            if armed is not None:
                armed.close()

    def _look(
        self,
        queue: str,
        most_items: int,
        retry: Backoff,
        lock_for: float | None,
        *,
        suspects: bool = True,
    ) -> Found[Value]:
        """Takes the items there are now, without waiting. See `QueueStore.take` for `suspects`."""
        validate_name(queue)
        check_retry(retry)
        with self._locked():
            self._require_open()
            if self._given is not None and self._atomic is None and is_writing(self._given):
                raise InsideTransaction(
                    "taking is a commit of its own, and the caller's transaction holds the "
                    "writer: take items before it begins"
                )
            self._give_back_if_dropped()
            items, due, suspect = self._held.take(
                queue, most_items, retry, lock_for, suspects=suspects
            )
            if not items and self._strict and self._context.stores.queues.find(queue) is None:
                raise QueueNotFound(queue)
            return Found(self._decoded(queue, items, retry), due, suspect)

    def _decoded(self, queue: str, taken: Sequence[Delivery], retry: Backoff) -> list[Item[Value]]:
        """Decodes items, and gives back those that can't be decoded: no commit may remove them.

        One that will be delivered again keeps those behind it in its order back, too. Raises the
        first error if no item is left.
        """
        items: list[Item[Value]] = []
        errors: list[Exception] = []
        # By key, or by None in a fifo queue: what comes again, and goes before all that follow.
        waits_for: dict[str | None, str] = {}
        is_fifo = False
        for delivery in taken:
            ordered = is_fifo or delivery.key is not None
            if ordered and delivery.key in waits_for:
                self._held.surrender([delivery], waits_for[delivery.key])
                continue
            try:
                items.append(self._as_item(delivery))
            except Exception as error:  # noqa: BLE001 - a serde may raise anything
                self._held.surrender([delivery], describe(error))
                if not errors and delivery.key is None:
                    found = self._context.stores.queues.find(queue)
                    is_fifo = found is not None and found.fifo
                errors.append(error)
                comes_again = retry.attempts is None or delivery.held.delivery < retry.attempts
                if comes_again and (is_fifo or delivery.key is not None):
                    number = delivery.held.id
                    waits_for[delivery.key] = f"item {number} before it can't be decoded"
        if errors and not items:
            raise errors[0]
        for failure in errors:
            _LOG.warning("queue %r: an item was not handed out: %s", queue, describe(failure))
        return items

    def _give_back_if_dropped(self) -> None:
        """Arms the finalizer at the first take: a transaction that only puts needs none."""
        if self._drop is None:
            self._drop = weakref.finalize(
                self, self._held.release_later, "its transaction was dropped"
            )
            self._drop.atexit = False

    def _keep_if_dropped(self) -> None:
        if self._drop is not None:
            self._drop.detach()

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor rolled back."""
        return not self._ended

    @property
    def in_hand(self) -> int:
        """The number of items it holds."""
        return len(self._held.taken)

    def _as_item(self, delivery: Delivery) -> Item[Value]:
        try:
            return as_item(delivery, self._serde)
        except Exception as error:
            error.add_note(f"item {delivery.held.id} of queue {delivery.held.queue!r}")
            raise

    @takes(PutManyOptions, PutOptions, defaults=[NewItem])
    def put(self, queue: str, value: Value, **options: Unpack[PutOptions]) -> PutItem:
        """Put an item when, and only if, this transaction commits. Then it has an `id`."""
        refuse_unknown("put", options, PutOptions)
        item = self._new_item(queue, value, options)
        with self._locked():
            self._require_open()
            self._put.append(item)
            return PutItem(self._ids, len(self._put) - 1)

    @takes(PutManyOptions, defaults=[NewItem])
    def put_many(
        self, queue: str, values: Iterable[Value], **options: Unpack[PutManyOptions]
    ) -> list[PutItem]:
        """Put several items of one kind, in this order. See `put`."""
        refuse_unknown("put_many", options, PutManyOptions)
        items = [self._new_item(queue, value, options) for value in values]
        with self._locked():
            self._require_open()
            first = len(self._put)
            self._put += items
            return [PutItem(self._ids, first + index) for index in range(len(items))]

    def _new_item(self, queue: str, value: Value, options: Any) -> NewItem:
        headers = options.get("headers")
        if "headers" in options:
            options = {name: it for name, it in options.items() if name != "headers"}
        body = encode_body(value, headers, self._serde)
        item = NewItem(queue=queue, body=body, **options)
        validate_item(item, self._context.stores.queues.limits)
        return item

    def _forget_changes(self) -> None:
        """Drop what was put and sent so far; items that were taken stay held."""
        with self._locked():
            self._require_open()
            self._put, self._ids, self._outgoing, self._keys = [], [], None, None
            self._batches = []

    def extend(self, seconds: float) -> None:
        """Hold all items for `seconds` from now. Raises `Fenced` if one was lost."""
        with self._locked():
            self._require_open()
            self._held.extend(seconds)

    def _keep_hold(self, seconds: float) -> None:
        """`extend` from another thread, beside the transaction's own work, without waiting for it.

        Where its own block keeps all others from writing, nothing has to be extended.
        """
        atomic = self._atomic
        if self.is_open and (atomic is None or not atomic.is_exclusive):
            self._held.extend(seconds)

    # Messages and SQL

    def send(
        self,
        topic: str,
        value: Value | None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send a message when, and only if, this transaction commits.

        `timestamp` is in milliseconds, now by default.
        """
        with self._locked():
            self._require_open()
            if self._outgoing is None:
                self._outgoing = Outgoing(
                    self._context.topics, self._context.clock, value_serde=self._serde
                )
            self._outgoing.send(topic, value, key, partition, headers, timestamp)

    def _append(self, batches: Sequence[Append]) -> None:
        """Append encoded batches when, and only if, this transaction commits."""
        with self._locked():
            self._require_open()
            self._batches += batches

    @property
    def kv(self) -> TransactionKeys:
        """Keys and values, written when, and only if, this transaction commits."""
        from pxrs.kv.store import KeyValues
        from pxrs.kv.transaction import TransactionKeys

        # Not the transaction's own lock: an event loop calls this, and must not wait.
        with _MAKING:
            if self._keys is None:
                keys = KeyValues(self._context.stores.coord, self._context.clock)
                self._keys = TransactionKeys(keys, self._open_here)
            return self._keys

    @contextmanager
    def _open_here(self) -> Iterator[None]:
        with self._locked():
            self._require_open()
            yield

    @property
    def connection(self) -> Any:
        """The database connection that will commit, for the caller's own statements.

        From its first use on SQLite's only writer is held: take items before.
        """
        with self._locked():
            self._require_open()
            self._has_one_try = True
            return self._open_atomic().connection

    @property
    def _has_connection(self) -> bool:
        """Whether `connection` is there already, without a wait."""
        return self._atomic is not None

    def execute(self, statement: str, parameters: Any = ()) -> Any:
        """Run a statement of the caller's in this transaction. See `connection`.

        Raises the driver's errors about the statement, and those of pxrs if the connection is lost.
        """
        connection = self.connection
        if connection is None:
            raise NotAtomic(
                "this store is in memory, or behind nodes, and runs no SQL of yours; its "
                "transactions send, take and put"
            )
        try:
            return connection.execute(statement, parameters)
        except Exception as error:
            lost = self._atomic.lost(error) if self._atomic is not None else None
            if lost is None:
                raise
            raise lost from error

    def _open_atomic(self) -> Atomic:
        if self._atomic is None:
            self._has_joined = self._is_callers
            self._atomic = self._context.stores.atomic(self._given).__enter__()
        return self._atomic

    # Ending

    def commit(self) -> None:
        """Remove taken items and do everything else, in one commit. If it returns, it is done.

        After `Fenced` or `SessionLost` nothing was done, and all other items were given back.
        After an error that may pass (`error.retryable`) nothing was done either, and the
        transaction is still open: commit again, or roll back.
        """
        with self._locked():
            if self._in_doubt and not self._ended and self._settles_as_committed():
                return
            self._require_open()
            try:
                self._commit()
            except BaseException as error:
                self._leave_block(error)
                if self._has_one_try or isinstance(error, (Fenced, SessionLost)):
                    self._ended = "rolled back, as its commit failed"
                    self._release(describe(error))
                raise
            self._end_as_committed()

    def _end_as_committed(self) -> None:
        self._ended = "committed"
        if not self._ids:
            queued = [] if self._atomic is None else self._atomic.queued
            # Without the store's answer the ids are not known.
            self._ids += queued or [None] * len(self._put)
        self._atomic = None
        self._nothing_left = True
        self._keep_if_dropped()
        self._held.forget_doubts()

    def finish(self) -> None:
        """Commit, unless the transaction has ended already."""
        with self._locked():
            if not self._ended:
                self.commit()

    def _commit(self) -> None:
        try:
            if self._is_queues_alone:
                if self._held.taken or self._put:
                    self._ids += self._context.stores.queues.apply(self._change())
            else:
                self._commit_atomically()
        except OutcomeUnknown as lost:
            if not self._was_committed():
                raise TransactionConflict(
                    f"the transaction was not committed ({lost}); run it again"
                ) from lost
        except PxrsError:
            self._answered(committed=False)
            raise
        # Any other exception may have come before the commit or after it: that stays in doubt.
        else:
            self._answered(committed=True)

    @property
    def _is_queues_alone(self) -> bool:
        """Whether one call of the queue store does it all."""
        others = (self._atomic, self._given, self._outgoing, self._keys)
        return not self._batches and all(other is None for other in others)

    def _settles_as_committed(self) -> bool:
        """Whether an interrupted commit was done all the same: then the transaction has ended."""
        committed = self._was_committed()
        if committed:
            self._end_as_committed()
        return committed

    def _was_committed(self) -> bool:
        """Asks what became of the commit in doubt. Raises `OutcomeUnknown` if that is unknown."""
        committed = self._held.was_applied(self._sent.unit)
        self._answered(committed=committed)
        return committed

    def _answered(self, *, committed: bool) -> None:
        """Notes that the outcome of the commit is known: the store may forget its evidence."""
        if not self._in_doubt:
            return
        if committed:
            # Before the doubt goes: after an interrupt in between it must not be tried again.
            self._ended = "committed"
        self._in_doubt = False
        session = self._sent.holder.session
        # The evidence that a unit will never be done has to stay: it may still be on its way.
        for unit in (self._sent.unit,) if committed else self._sent.forget:
            self._context.hold_session.answered(session, unit)

    def _commit_atomically(self) -> None:
        """Commits all of it; again if others wrote other keys to the same shards meanwhile."""
        tries = 1 if self._has_one_try or self._is_callers else _MOST_TRIES
        while True:
            tries -= 1
            try:
                self._commit_block()
            except (CommitConflict, TransactionConflict) as conflict:
                if not tries or self._keys is None or not self._keys._may_have_caused(conflict):
                    raise
                self._answered(committed=False)
                self._atomic = None
            else:
                return

    def _commit_block(self) -> None:
        atomic = self._open_atomic()
        try:
            # Even if it is empty: it carries the evidence that the commit was done.
            self._stage(atomic, self._change())
        except BaseException as error:
            self._undo(error)
            raise
        # `_atomic` stays set until it is over: after an interrupt on the way in it can be ended.
        atomic.__exit__(None, None, None)
        if atomic.joined:
            # At once: what was written into the caller's transaction must not be written again.
            self._ended = "committed"
        if atomic.joined and self._held.taken:
            # The caller may still roll back: then what was taken has to be free again.
            self._held.release_when_caller_ends("it was rolled back")

    def _change(self) -> QueueChange:
        """Builds the change to send, as a unit of its own: another try is another unit."""
        holder, hold_session = self._held.holder, self._context.hold_session
        removed = tuple(each.held for each in self._held.taken)
        # The outcome of a caller's transaction is known to the caller; to ask would wait for it.
        # And no evidence of others is removed in one that the caller may yet roll back.
        unit = "" if self._is_callers else hold_session.next_name()
        forget = () if self._is_callers else hold_session.to_forget(holder.session)
        self._sent = QueueChange(holder, removed, tuple(self._put), unit, forget)
        self._in_doubt = not self._is_callers
        return self._sent

    def _stage(self, atomic: Atomic, change: QueueChange | None) -> None:
        if change is not None:
            atomic.queue(change)
        sent = self._outgoing.appends() if self._outgoing else []
        for where, batch in (*sent, *self._batches):
            atomic.append(where, batch)
        if self._keys is not None:
            self._keys._stage(atomic)

    def _undo(self, error: BaseException) -> None:
        """Roll the database's transaction back, if there is one."""
        if self._atomic is not None:
            self._leave_block(error)
        elif isinstance(self._given, Lent):
            self._given.rollback()

    def _leave_block(self, error: BaseException) -> None:
        """End the database's transaction, unless a commit has ended it, or has failed."""
        if self._atomic is not None:
            try:
                self._atomic.__exit__(type(error), error, error.__traceback__)
            except Exception:
                self._atomic = None
                raise
            self._atomic = None

    def rollback(self, error: str = "") -> None:
        """Give back all items and forget everything else. It succeeds in the end.

        While the store is away it waits, at most until the session is over, which frees all items.
        An item that has had its last delivery is dead then, with `error` noted on it. An
        interrupted rollback is finished by another thread; calling it again waits for that. If it
        has written into a transaction of the caller's, items come back when the caller ends that.

        Raises `OutcomeUnknown` if a commit was interrupted before and the store can't say whether
        it was done: it may be, or come to be.
        """
        self._roll_back(PxrsError("rolled back"), storable(error))
        if self._in_doubt:
            raise OutcomeUnknown(
                "the commit was interrupted, and the store can't be asked whether it was done; "
                "look before you repeat it"
            )

    def _roll_back(self, cause: BaseException, error: str) -> None:
        with self._locked():
            if self._nothing_left:
                return
            self._ended = self._ended or "rolled back"
            try:
                self._undo(cause)
            finally:
                self._release(error)

    def _release(self, error: str) -> None:
        if self._in_doubt:
            # An interrupted commit that has not come yet must not come after this.
            with suppress(PxrsError):
                self._was_committed()
        if self._has_joined or (self._is_callers and self._caller_may_write()):
            # Waiting for the caller's transaction in the caller's thread would take for ever.
            self._held.release_when_caller_ends(error)
        else:
            self._held.release(error)
        self._nothing_left = True
        self._keep_if_dropped()

    def _caller_may_write(self) -> bool:
        try:
            return is_writing(self._given)
        except Exception:  # noqa: BLE001 - closed, or failed: then do not wait
            return True

    def _locked(self) -> threading.RLock:
        # A forked child would wait for a thread that it does not have.
        self._context.hold_session.origin.refuse_child()
        return self._lock

    def _require_open(self) -> None:
        if self._ended:
            raise InvalidRequest(f"the transaction was {self._ended}; begin another")
        if self._in_doubt and self._settles_as_committed():
            raise InvalidRequest("the transaction was committed, though interrupted; begin another")
        if self._held.is_lost:
            raise SessionLost("the session of this transaction is over, and its items are free")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._roll_back(error, describe(error))
            return
        if self._ended:
            return
        if not self._commit_on_exit:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException as failure:
            self._roll_back(failure, describe(failure))
            raise


class UnreportedItems(Generic[Value]):
    """The items that a transaction took for a task on an event loop, until the task has them.

    A blocking `take` hands its items to its caller. A task can be cancelled while a thread takes
    for it, and then it has not seen the items of that thread: they must neither be removed by a
    commit nor stay locked. Thread-safe.
    """

    def __init__(self, work: UnitOfWork[Value]) -> None:
        self.work = work
        self._items: dict[tuple[str, int], Item[Value]] = {}

    def take(
        self, queue: str, count: int, retry: Backoff, lock_for: float | None
    ) -> tuple[list[Item[Value]], float | None]:
        """Takes the items there are now, without waiting; and the seconds until there may be more.

        Until they are `seen` the items go back when the transaction ends, by commit or rollback.
        """
        with self.work._lock:
            items, due, _ = self.work._look(queue, count, retry, lock_for)
            self._items.update(((item.queue, item.id), item) for item in items)
        return items, due

    def seen(self, items: Sequence[Item[Value]]) -> None:
        """Notes that the task has them. Does not wait."""
        for item in items:
            self._items.pop((item.queue, item.id), None)

    def give_back(self, items: Sequence[Item[Value]]) -> None:
        """Releases them; the transaction goes on without them.

        Their deliveries stay counted, and no error is noted.
        """
        work = self.work
        with work._lock:
            unwanted = {(item.queue, item.id) for item in items}
            given = [held for held, _ in work._held.taken if (held.queue, held.id) in unwanted]
            # In place: the transaction's finalizer looks at the same list.
            work._held.taken[:] = [each for each in work._held.taken if each.held not in given]
            self.seen(items)
        if not given or not work.is_open:
            return
        unseen = GivenBack(work._held.holder, tuple(Release(held) for held in given))
        hold_session = work._context.hold_session
        # Inside a write transaction of its own this thread can't release: another one will.
        if work._atomic is not None or not hold_session.release(unseen):
            hold_session.give_back(unseen)

    def end(self, how: Callable[[], None]) -> None:
        """Ends the transaction by `how`, without the items that the task has not seen."""
        with self.work._lock:
            self.give_back(list(self._items.values()))
            how()
