"""Gets parcels into the log: one commit at a time, in order, again until it is known.

Only one round runs at a time and nothing overtakes it, so a partition's batches keep their
order under retry. Batches carry (producer id, epoch, sequence): a round whose outcome is
unknown is simply repeated, and the log recognises what it already has. A round that was
interrupted at any point is unknown too; every step can be done twice.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
import time
from collections.abc import Callable

from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.errors import (
    DeliveryFailed,
    InsideTransaction,
    OutcomeUnknown,
    PxrsError,
    TopicNotFound,
)
from pxrs.log.batches import seal
from pxrs.log.sequences import SEQUENCES
from pxrs.runtime.outbox import Outbox
from pxrs.runtime.sent import Parcel
from pxrs.runtime.undelivered import Undelivered
from pxrs.stores.api import LogStore
from pxrs.types import Append, Appended, LogPartition

_LAST_EPOCH = 2**15 - 1
_SHORTEST_WAIT = 0.001


class Committer:
    """Commits what the outbox holds, for whichever thread asks."""

    def __init__(
        self,
        log: LogStore,
        outbox: Outbox,
        undelivered: Undelivered,
        clock: Clock,
        *,
        delivery_timeout: float,
        before_settling: Callable[[Parcel, PxrsError | None], None],
    ) -> None:
        self._log = log
        self._outbox = outbox
        self._undelivered = undelivered
        self._clock = clock
        self.delivery_timeout = delivery_timeout
        self._before_settling = before_settling
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._backoff = Backoff(first=0.01, longest=1.0)
        self._random = random.Random(secrets.randbits(64))
        # The round at hand, how often it failed, and whether one of those may have been done.
        self._round: list[Parcel] = []
        self._failures = 0
        self._unsure = False
        self._sequences: dict[LogPartition, int] = {}
        self._new_identity()
        # True while a commit runs: senders then give up the interpreter now and then.
        self.busy = False

    def drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Commit until `done()`; false if that takes longer than the timeout.

        Time is looked at between commits: one that has begun is not left.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while not done():
            left = None if deadline is None else deadline - self._clock.monotonic()
            if left is not None and left <= 0:
                return False
            self.run(left, unless=done)
        return True

    def run(self, timeout: float | None = None, unless: Callable[[], bool] | None = None) -> bool:
        """Commit once what there is, unless `unless()` holds by then; false if the turn never came.

        A failure that may pass leaves the round pending; the next call repeats it.
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
                self._one_round(timeout)
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

    def run_due(self, due: threading.Event, linger: float) -> bool:
        """Commit what has waited long enough, or all if it is `due`; false if there is nothing."""
        # What has failed or did not fit into a commit has waited already.
        wait = 0.0 if self._outbox.waiting else linger or _SHORTEST_WAIT
        urgent = due.wait(wait)
        due.clear()
        oldest = self._outbox.oldest
        if urgent:
            self.run()
        elif self._outbox.waiting:
            # It may be another thread's round: what came after it still has time.
            self.run(unless=lambda: not self._outbox.waiting)
        elif oldest is None:
            return self._outbox.holds(math.inf)
        elif self._clock.monotonic() - oldest >= linger:
            self.run()
        return True

    def rest(self, timeout: float) -> None:
        """Return when no commit is under way, or after so long."""
        self.run(timeout, unless=lambda: True)

    def refuse_nested(self) -> None:
        """Raise if this very thread sends or commits right now."""
        if self._owner == threading.get_ident():
            raise InsideTransaction(
                "this thread is committing, and a signal handler or destructor can't wait for "
                "it to finish; let it set a flag and do this afterwards"
            )
        self._outbox.refuse_own_sender()

    def _one_round(self, patience: float | None) -> None:
        if not self._round:
            self._round = self._outbox.take()
            if not self._round:
                return
        elif self._failures:
            delay = self._backoff.delay(self._failures, self._random) or 0.0
            time.sleep(delay if patience is None else min(delay, patience))
        appends = self._sealed()
        results = self._attempt(appends) if appends else []
        if results is not None:
            self._finish(results)

    def _sealed(self) -> list[Append]:
        """The round's batches that are not settled. One that can't be sealed fails alone."""
        appends = []
        for parcel in self._round:
            if parcel.settled:
                # By a round that was interrupted, perhaps before everybody was told.
                parcel.call_back()
                continue
            batch = parcel.batch
            if batch is None:
                sequence = self._sequences.get(parcel.where, 0)
                try:
                    batch = seal(parcel.builder, self._id, self._epoch, sequence)
                    parcel.batch = batch
                except BaseException as error:
                    # A builder is used up by the first try: there is no second one.
                    self._settle(parcel, _delivery_failed(error))
                    if not isinstance(error, Exception):
                        raise
                    continue
            if (batch.producer_id, batch.producer_epoch) == (self._id, self._epoch):
                self._sequences[parcel.where] = (batch.base_sequence + batch.count) % SEQUENCES
            appends.append(Append(parcel.where, batch))
        return appends

    def _attempt(self, appends: list[Append]) -> list[Appended | PxrsError] | None:
        """What became of each batch; None if the round is to be repeated."""
        try:
            results = self._log.append(appends)
            if len(results) != len(appends):
                raise OutcomeUnknown(f"{len(results)} answers to {len(appends)} batches")
            return results
        except InsideTransaction:
            # This thread holds the store's writer. Others, or it later, will get the round done.
            raise
        except BaseException as error:
            self._failures += 1
            if isinstance(error, OutcomeUnknown) or not isinstance(error, PxrsError):
                self._unsure = True
            if not isinstance(error, Exception):
                raise
            if not self._give_up(error):
                return None
            failed = _maybe_delivered(error) if self._unsure else _delivery_failed(error)
            return [failed] * len(appends)

    def _give_up(self, error: Exception) -> bool:
        may_pass = isinstance(error, OutcomeUnknown) or getattr(error, "retryable", False)
        if not may_pass:
            return True
        oldest = min(parcel.born for parcel in self._round)
        return self._clock.monotonic() - oldest >= self.delivery_timeout

    def _finish(self, results: list[Appended | PxrsError]) -> None:
        if any(not isinstance(result, Appended) for result in results):
            self._raise_epoch()
        parcels = [parcel for parcel in self._round if not parcel.settled]
        for parcel, result in zip(parcels, results, strict=True):
            self._settle(parcel, result)
        self._outbox.release(self._round)
        done, self._round, self._failures, self._unsure = self._round, [], 0, False
        self._undelivered.log(done)

    def _settle(self, parcel: Parcel, result: Appended | PxrsError) -> None:
        if isinstance(result, Appended):
            base, error = result.base, None
        else:
            base, error = -1, _named(result, parcel)
            # First: whoever sees it settled looks there.
            self._undelivered.note(parcel, error)
        self._before_settling(parcel, error)
        parcel.settle(base, error)

    def _raise_epoch(self) -> None:
        """After a failure that stays: what comes next must not look like its successor."""
        if self._epoch == _LAST_EPOCH:
            self._new_identity()
        else:
            self._epoch += 1
            self._sequences = {}

    def _new_identity(self) -> None:
        self._id = secrets.randbits(62)
        self._epoch = 0
        self._sequences = {}


def _named(error: PxrsError, parcel: Parcel) -> PxrsError:
    """The log knows topics by their id only; people know them by their name."""
    return TopicNotFound(parcel.topic.name) if isinstance(error, TopicNotFound) else error


def _delivery_failed(cause: BaseException) -> PxrsError:
    error = DeliveryFailed(f"not appended, and given up: {_text(cause)}")
    error.__cause__ = cause
    return error


def _maybe_delivered(cause: BaseException) -> PxrsError:
    error = OutcomeUnknown(
        f"given up, and nobody can tell whether it was appended: {_text(cause)}; "
        "look for the message in the topic before you send it again"
    )
    error.__cause__ = cause
    return error


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
