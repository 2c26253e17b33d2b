"""Appends batches in order, one commit at a time, retrying until each outcome is known.

Only one round runs at a time and a partition's batches never overtake each other, so they keep
their order under retry. Batches carry (producer id, epoch, sequence): one whose outcome is unknown
is simply sent again, and the log recognises a batch that it already has. A round that was
interrupted at any point is unknown too; every step can be done twice.

An error concerns its own batch alone. A batch that has to be tried again holds up the later ones of
its partition, and no others. After a batch that failed for good the partition goes on under a
higher epoch, in which its waiting batches get new numbers: they must not look like successors of
a batch that never came, and one that was given up must be refused if it still arrives.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeGuard

from pxrs.clock import Clock
from pxrs.codec.batches import renumbered, seal
from pxrs.core.retry import Backoff
from pxrs.core.sequences import SEQUENCES
from pxrs.errors import (
    Closed,
    ConfigError,
    DeliveryFailed,
    InsideTransaction,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
    ProducerFenced,
    PxrsError,
    SequenceGap,
    TopicNotFound,
)
from pxrs.forks import Origin
from pxrs.producing.buffer import Outbox
from pxrs.producing.handles import PendingBatch, Undelivered
from pxrs.stores.api import LogStore
from pxrs.topics import Topics
from pxrs.types import Append, Appended, Batch, LogPartition, Topic

_LAST_EPOCH = 2**15 - 1
_SHORTEST_WAIT = 0.001
# How often the background thread looks for new batches while others are paused.
_LOOK_EVERY = 0.01
# Errors of a log about the batch itself: it was not appended, for the reason in the error. The
# first ones show nothing about an earlier try.
_OF_THIS_TRY = (ProducerFenced, SequenceGap, PermissionDenied)
_REFUSALS = (InvalidRequest, *_OF_THIS_TRY)

# Seconds between two applications of retention to a topic that grows.
_RETAIN_EVERY = 10.0

_NOWHERE: frozenset[LogPartition] = frozenset()
_Result = Appended | Exception


class _Pause(NamedTuple):
    """A partition whose last try failed: how many did in a row, and when to make the next."""

    failures: int
    until: float


class Retention:
    """Now and then applies retention to topics that have grown."""

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics = topics
        self._clock = clock
        self._grown: set[Topic] = set()
        self._retained: dict[str, float] = {}

    def note(self, topic: Topic) -> None:
        """Note that the topic has grown."""
        if topic.retention_ms is not None or topic.retention_bytes is not None:
            self._grown.add(topic)

    def keep_up(self) -> None:
        """Apply retention to the topics that have grown, if it is time."""
        now = self._clock.monotonic()
        for topic in list(self._grown):
            if now - self._retained.get(topic.id, -_RETAIN_EVERY) >= _RETAIN_EVERY:
                self._retained[topic.id] = now
                self._grown.discard(topic)
                # Retention is housekeeping: after any failure it is done the next time.
                with suppress(Exception):
                    self._topics._retain(topic)


class Committer:
    """Commits the batches of the outbox, in any thread that asks. See `handles.Driver`."""

    def __init__(
        self,
        log: LogStore,
        outbox: Outbox,
        undelivered: Undelivered,
        clock: Clock,
        retention: Retention,
        origin: Origin,
        *,
        delivery_timeout: float,
    ) -> None:
        self._log = log
        self._outbox = outbox
        self._undelivered = undelivered
        self._clock = clock
        self.delivery_timeout = delivery_timeout
        self._retention = retention
        self._origin = origin
        # Set when waiting batches are to be committed now.
        self.due = threading.Event()
        # Whether the background thread was ended by an error.
        self.broken = False
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._backoff = Backoff(first=0.01, longest=1.0)
        self._random = random.Random(secrets.randbits(64))
        # The current round. Not empty between rounds if it was interrupted.
        self._round: list[PendingBatch] = []
        self._pauses: dict[LogPartition, _Pause] = {}
        # Partitions that need a higher epoch; and those of them in which a batch was given up that
        # may still be appended under the present one.
        self._broken_off: set[LogPartition] = set()
        self._doubted: set[LogPartition] = set()
        self._epochs: dict[LogPartition, int] = {}
        self._sequences: dict[LogPartition, int] = {}
        self._new_identity()
        # True while a commit runs: senders then give up the interpreter now and then.
        self.busy = False

    def deliver(self, pending: PendingBatch, timeout: float | None) -> None:
        """Commit, in the calling thread, until this batch is settled."""
        if not self._drive(lambda: pending.settled, timeout):
            raise TimeoutError(f"not appended within {timeout:g} s; it is still being tried")

    def drain(self, timeout: float | None = None) -> None:
        """Commit, in the calling thread, until everything put so far is settled."""
        wanted = self._outbox.unsettled()
        if not self._drive(lambda: all(pending.settled for pending in wanted), timeout):
            raise TimeoutError(f"not everything was appended within {timeout:g} s")

    def hurry(self) -> None:
        """Have the background thread commit now, without waiting for company."""
        self.refuse_broken()
        if not self.due.is_set():
            self.due.set()

    def refuse_broken(self) -> None:
        """Raise if the background thread is not running: messages would not be committed."""
        self._origin.refuse_child()
        if self.broken:
            raise Closed("the producer's thread was ended by an error; flush it and make another")

    def _drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Commit until `done()`; false if that takes longer than the timeout.

        The time is checked between commits: one that has begun is not left.
        """
        self._origin.refuse_child()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while not done():
            left = None if deadline is None else deadline - self._clock.monotonic()
            if left is not None and left <= 0:
                return False
            self.run(left, unless=done)
            if (pause := self._pause_left()) and not done():
                # Without the lock: other threads may commit meanwhile.
                time.sleep(pause if left is None else min(pause, left))
        return True

    def run(self, timeout: float | None = None, unless: Callable[[], bool] | None = None) -> bool:
        """Commit once, unless `unless()` holds by then; false if its turn did not come in time.

        A batch whose failure may pass waits; a later call tries it again.
        """
        self.refuse_nested()
        me = threading.get_ident()
        longest = -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        try:
            if not self._lock.acquire(timeout=longest):
                return False
            self._owner = me
            if unless is None or not unless():
                # Senders give way from here on: taking their boxes waits for them, too.
                self.busy = True
                self._one_round()
            return True
        finally:
            # An interrupt may have come before the lock did, or just after: only the lock knows.
            if self._owner == me:
                self.busy = False
                self._owner = None
            try:  # noqa: SIM105 - a call before the release could be interrupted
                self._lock.release()
            except RuntimeError:
                pass

    def run_due(self, linger: float) -> bool:
        """Commit batches that have waited long enough, or all if `due`; false if there are none."""
        # Batches that did not fit into a commit have waited already.
        wait = linger or _SHORTEST_WAIT
        if self._outbox.waiting:
            wait = min(self._pause_left(), max(wait, _LOOK_EVERY))
        urgent = self.due.wait(wait)
        self.due.clear()
        oldest = self._outbox.oldest
        if urgent:
            self.run()
        elif self._outbox.waiting and not self._pause_left():
            # Another thread may make the round: batches that came after it still have time.
            self.run(unless=lambda: not self._outbox.waiting)
        elif oldest is None:
            return bool(self._outbox.unsettled())
        elif self._clock.monotonic() - oldest >= linger:
            self.run()
        return True

    def rest(self, timeout: float) -> None:
        """Return when no commit is under way, or after `timeout`."""
        self.run(timeout, unless=lambda: True)

    def refuse_nested(self) -> None:
        """Raise if this very thread sends or commits right now."""
        if self._owner == threading.get_ident():
            raise InsideTransaction(
                "this thread is committing, and a signal handler or destructor can't wait for "
                "it to finish; let it set a flag and do this afterwards"
            )
        self._outbox.refuse_own_sender()

    def _one_round(self) -> None:
        if not self._round:
            self._round = self._outbox.take(self._paused())
            if not self._round:
                return
        sealed = self._sealed()
        results = self._attempt(sealed) if sealed else []
        self._finish(sealed, results)

    def _sealed(self) -> list[tuple[PendingBatch, Batch]]:
        """The round's batches that are not settled. One that can't be sealed fails alone."""
        if self._broken_off:
            for where in {pending.where for pending in self._round} & self._broken_off:
                self._begin_anew(where)
        sealed = []
        for pending in self._round:
            if pending.settled:
                # By a round that was interrupted, perhaps before all callbacks ran.
                pending.call_back()
                continue
            where = pending.where
            identity = (self._id, self._epochs.get(where, 0))
            batch = pending.batch
            if batch is None:
                try:
                    batch = seal(pending.builder, *identity, self._sequences.get(where, 0))
                    pending.batch = batch
                except BaseException as error:
                    # The first try uses up a builder: there is no second one.
                    self._settle(pending, _delivery_failed(error))
                    if not isinstance(error, Exception):
                        raise
                    continue
            if (batch.producer_id, batch.producer_epoch) == identity:
                self._sequences[where] = (batch.base_sequence + batch.count) % SEQUENCES
            sealed.append((pending, batch))
        return sealed

    def _begin_anew(self, where: LogPartition) -> None:
        """Number the partition's waiting batches from 0 under a higher epoch.

        Not while one of the batches may be in the log, which has it under its old number: it must
        be known first whether the log has it.
        """
        waiting = self._outbox.unsettled_in(where)
        if any(pending.unsure for pending in waiting):
            return
        self._raise_epoch(where)
        sequence = 0
        for pending in waiting:
            if pending.batch is not None:
                epoch = self._epochs.get(where, 0)
                pending.batch = renumbered(pending.batch, self._id, epoch, sequence)
                sequence = (sequence + pending.batch.count) % SEQUENCES
        self._doubted.discard(where)
        self._broken_off.discard(where)

    def _attempt(self, sealed: list[tuple[PendingBatch, Batch]]) -> list[_Result]:
        """Append; returns the result of each batch. An error of the whole call is that of each."""
        doubts = [pending.unsure for pending, _ in sealed]
        # Noted before anything is sent: any interrupt from here on leaves a doubt.
        for pending, _ in sealed:
            pending.unsure = True
        results: list[_Result]
        try:
            results = [
                *self._log.append([Append(pending.where, batch) for pending, batch in sealed])
            ]
            if len(results) != len(sealed):
                raise OutcomeUnknown(f"{len(results)} answers to {len(sealed)} batches")
        except Exception as error:  # noqa: BLE001 - the handles of the batches raise it
            results = [error] * len(sealed)
        for (pending, _), result, doubt in zip(sealed, results, doubts, strict=True):
            if isinstance(result, PxrsError) and not isinstance(result, OutcomeUnknown):
                # This try did not append it. An earlier one may have.
                pending.unsure = doubt
        if results and isinstance(results[0], InsideTransaction):
            # This thread holds the store's writer. Another thread, or a later call, does the round.
            raise results[0]
        return results

    def _finish(self, sealed: list[tuple[PendingBatch, Batch]], results: list[_Result]) -> None:
        """Settle batches with a known outcome; the others wait for a later round."""
        held_up: set[LogPartition] = set()
        paused: set[LogPartition] = set()
        for (pending, batch), result in zip(sealed, results, strict=True):
            where = pending.where
            if isinstance(result, Appended):
                self._settle(pending, result)
            elif isinstance(result, SequenceGap) and self._can_renumber(pending, batch, held_up):
                held_up.add(where)
            elif self._may_pass(pending, result):
                held_up.add(where)
                paused.add(where)
            else:
                self._fail(pending, result)
        if paused or self._pauses:
            for where in {pending.where for pending, _ in sealed}:
                if where in paused:
                    self._pause(where)
                else:
                    self._pauses.pop(where, None)
        done = [pending for pending in self._round if pending.settled]
        self._outbox.release(done)
        self._round = []
        if failed := [pending for pending in done if pending.error is not None]:
            self._undelivered.log(failed)

    def _can_renumber(
        self, pending: PendingBatch, batch: Batch, held_up: set[LogPartition]
    ) -> bool:
        """Whether a batch that is out of sequence, by no fault of its own, can go on.

        Its predecessor failed, or waits to be tried again, or was lost by the server.
        """
        where = pending.where
        if where in held_up and where not in self._broken_off:
            return True  # Its predecessor comes first next time.
        if pending.unsure and where in self._doubted:
            # The batch that was given up and this one may both be on their way.
            return False
        if batch.base_sequence == 0:
            return False
        # The log does not have it, and an earlier try would be out of sequence as well.
        pending.unsure = False
        self._broken_off.add(where)
        return True

    def _may_pass(self, pending: PendingBatch, error: Exception) -> bool:
        if isinstance(error, OutcomeUnknown) or getattr(error, "retryable", False):
            return self._clock.monotonic() - pending.born < self.delivery_timeout
        return False

    def _fail(self, pending: PendingBatch, error: Exception) -> None:
        """Give the batch up; the next one of the partition must not look like its successor."""
        self._broken_off.add(pending.where)
        if _refuses(error) and not (pending.unsure and isinstance(error, _OF_THIS_TRY)):
            self._settle(pending, error)
        elif pending.unsure:
            self._doubted.add(pending.where)
            self._settle(pending, _maybe_delivered(error))
        else:
            self._settle(pending, _delivery_failed(error))

    def _pause(self, where: LogPartition) -> None:
        """Try this partition again only after a while."""
        before = self._pauses.get(where)
        failures = 1 if before is None else before.failures + 1
        delay = self._backoff.delay(failures, self._random) or 0.0
        self._pauses[where] = _Pause(failures, time.monotonic() + delay)

    def _paused(self) -> frozenset[LogPartition]:
        if not self._pauses:
            return _NOWHERE
        now = time.monotonic()
        # In one step: the background thread looks at it without the lock.
        pauses = tuple(self._pauses.items())
        return frozenset(where for where, pause in pauses if pause.until > now)

    def _pause_left(self) -> float:
        """Seconds until a waiting batch can be tried; 0 if one can be now, or none waits."""
        if not self._pauses:
            return 0.0
        paused = self._paused()
        if not paused or not self._outbox.waiting or not self._outbox.only_for(paused):
            return 0.0
        pauses = tuple(self._pauses.items())
        soonest = min((pause.until for where, pause in pauses if where in paused), default=0.0)
        return max(0.0, soonest - time.monotonic())

    def _settle(self, pending: PendingBatch, result: Appended | PxrsError) -> None:
        if isinstance(result, Appended):
            base, error = result.base, None
        else:
            base, error = -1, _named(result, pending)
            # First: a thread that sees it settled looks there.
            self._undelivered.note(pending, error)
        # Before any callback, so that one that sends again finds the topic gone or made again.
        if isinstance(error, TopicNotFound):
            self._outbox.mark_stale(pending.topic)
        else:
            self._retention.note(pending.topic)
        pending.settle(base, error)

    def _raise_epoch(self, where: LogPartition) -> None:
        epoch = self._epochs.get(where, 0)
        if epoch == _LAST_EPOCH:
            self._new_identity()
        else:
            self._epochs[where] = epoch + 1
            self._sequences[where] = 0

    def _new_identity(self) -> None:
        self._id = secrets.randbits(62)
        self._epochs = {}
        self._sequences = {}


def _refuses(error: Exception) -> TypeGuard[PxrsError]:
    return isinstance(error, _REFUSALS) and not isinstance(error, ConfigError)


def _named(error: PxrsError, pending: PendingBatch) -> PxrsError:
    """Puts the topic's name into errors of the log, which only knows its id."""
    return TopicNotFound(pending.topic.name) if isinstance(error, TopicNotFound) else error


def _delivery_failed(cause: BaseException) -> PxrsError:
    error = DeliveryFailed(f"not appended, and given up: {_text(cause)}")
    error.__cause__ = cause
    return error


def _maybe_delivered(cause: BaseException) -> PxrsError:
    error = OutcomeUnknown(
        f"given up, and it is not known whether it was appended: {_text(cause)}; "
        "look for the message in the topic before you send it again"
    )
    error.__cause__ = cause
    return error


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
