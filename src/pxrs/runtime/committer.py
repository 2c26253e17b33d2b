"""Gets parcels into the log: one commit at a time, in order, again until it is known.

Only one round runs at a time and nothing overtakes it, so a partition's batches keep their
order under retry. Batches carry (producer id, epoch, sequence): a round whose outcome is
unknown is simply repeated, and the log recognises what it already has.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.errors import DeliveryFailed, OutcomeUnknown, PxrsError, TopicNotFound
from pxrs.log.batches import seal
from pxrs.log.sequences import SEQUENCES
from pxrs.runtime.outbox import Outbox
from pxrs.runtime.sent import Parcel
from pxrs.stores.api import LogStore
from pxrs.types import Append, Appended, LogPartition

_LAST_EPOCH = 2**15 - 1


class _Round(NamedTuple):
    parcels: list[Parcel]
    appends: list[Append]
    size: int


class Committer:
    """Commits what the outbox holds, for whichever thread asks."""

    def __init__(
        self,
        log: LogStore,
        outbox: Outbox,
        clock: Clock,
        *,
        delivery_timeout: float,
        before_settling: Callable[[Parcel, PxrsError | None], None],
    ) -> None:
        self._log = log
        self._outbox = outbox
        self._clock = clock
        self._delivery_timeout = delivery_timeout
        self._before_settling = before_settling
        self._lock = threading.Lock()
        self._backoff = Backoff(first=0.01, longest=1.0)
        self._random = random.Random(secrets.randbits(64))
        self._failures = 0
        self._pending: _Round | None = None
        self._sequences: dict[LogPartition, int] = {}
        self._new_identity()
        # True while a commit runs: senders then give up the interpreter now and then.
        self.busy = False

    def run(self, timeout: float | None = None, unless: Callable[[], bool] | None = None) -> bool:
        """Commit once what there is, unless `unless()` holds by then; false if the turn never came.

        A failure that may pass leaves the round pending; the next call repeats it.
        """
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            if unless is None or not unless():
                self._one_round()
        finally:
            self._lock.release()
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be committed."""
        return self._pending is None and self._outbox.oldest is None and not self._lock.locked()

    def _one_round(self) -> None:
        if self._pending is None:
            parcels = self._outbox.take()
            if not parcels:
                return
            self._pending = self._seal(parcels)
        else:
            time.sleep(self._backoff.delay(self._failures, self._random) or 0.0)
        current = self._pending
        self.busy = True
        try:
            results = self._log.append(current.appends)
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - whatever it was, the messages' owners are told
            self._failures += 1
            if self._give_up(error, current):
                self._finish(current, [_delivery_failed(error)] * len(current.parcels))
        else:
            self._finish(current, results)
        finally:
            self.busy = False

    def _give_up(self, error: Exception, current: _Round) -> bool:
        may_pass = isinstance(error, OutcomeUnknown) or getattr(error, "retryable", False)
        if not may_pass:
            return True
        oldest = min(parcel.born for parcel in current.parcels)
        return self._clock.monotonic() - oldest >= self._delivery_timeout

    def _seal(self, parcels: list[Parcel]) -> _Round:
        appends = []
        size = 0
        for parcel in parcels:
            size += parcel.weight
            sequence = self._sequences.get(parcel.where, 0)
            batch = seal(parcel.builder, self._id, self._epoch, sequence)
            self._sequences[parcel.where] = (sequence + parcel.count) % SEQUENCES
            appends.append(Append(parcel.where, batch))
        return _Round(parcels, appends, size)

    def _finish(self, current: _Round, results: list[Appended | PxrsError]) -> None:
        self._pending = None
        failed = False
        for parcel, result in zip(current.parcels, results, strict=True):
            if isinstance(result, Appended):
                base, error = result.base, None
            else:
                base, error = -1, _named(result, parcel)
                failed = True
            self._before_settling(parcel, error)
            parcel.settle(base, error)
        if failed:
            self._raise_epoch()
        self._outbox.release(current.size)

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


def _delivery_failed(cause: Exception) -> PxrsError:
    error = DeliveryFailed(f"not appended, and given up: {cause}")
    error.__cause__ = cause
    return error
