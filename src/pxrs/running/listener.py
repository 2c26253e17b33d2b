"""`px.listen`: a handler, a queue and several workers.

Every worker takes an item, calls the handler with it and its transaction, and commits. If the
handler raises, the transaction is rolled back, and `retry` decides when the item is delivered
again. Workers wait for a store that is unavailable for a while.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import msgspec

from pxrs.clock import Clock
from pxrs.config import Stop
from pxrs.consuming.health import Health
from pxrs.consuming.outage import Outage
from pxrs.core.error_text import describe
from pxrs.core.retry import Backoff
from pxrs.errors import (
    Closed,
    Fenced,
    HandlerFailed,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreError,
)
from pxrs.queues.item import Item
from pxrs.queues.unit_of_work import CAREFUL_WAIT, Found, UnitOfWork
from pxrs.running.dead_letters import printable, words_of
from pxrs.running.handle import WorkerThreads
from pxrs.running.handler_results import refuse_unfinished
from pxrs.running.job import ListenJob
from pxrs.running.suspect_items import WorkerTurns
from pxrs.stores.api import QueueStore, Watch

Handler = Callable[[Item, UnitOfWork], Any]
_LOG = logging.getLogger("pxrs.listen")
_STORE_AWAY = Backoff(first=0.05, longest=5.0)
_EXTENSIONS_PER_DEADLINE = 3


class Listener:
    """Workers that handle a queue's items until they are stopped. See `handle.Work`."""

    def __init__(
        self,
        job: ListenJob,
        queues: QueueStore,
        begin: Callable[[], UnitOfWork],
        turns: WorkerTurns,
        clock: Clock,
    ) -> None:
        self._handler = job.handler
        self._job = job
        # To stop at an item is to leave it in the queue: no store may make it dead before.
        self._retry = (
            msgspec.structs.replace(job.retry, attempts=None)
            if isinstance(job.on_failure, Stop)
            else job.retry
        )
        self._queues = queues
        self._begin = begin
        self._turns = turns
        self._clock = clock
        self._random = random.Random()
        self._counting = threading.Lock()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._watches: set[Watch] = set()
        self._running: dict[UnitOfWork, float] = {}
        self._outage = Outage(f"listener of {job.queue!r}", clock, _LOG)
        self._threads = WorkerThreads(
            self, job.workers, self._work, lambda: len(self._running), job.max_handler_time
        )
        self.name = job.name
        self.handled = 0
        self.failed = 0

    def stop(self) -> None:
        """Take no more items and finish those in hand; does not wait. From any thread."""
        self._stopping.set()
        for watch in list(self._watches):
            watch.wake()
        self._turns.wake()

    def health(self) -> dict[str, Health]:
        """Return its health. From any thread."""
        if (failure := self._threads.failure) is not None:
            return {self.name: Health("failed", words_of(failure))}
        if (lost := self._outage.since) is not None:
            away = self._now() - lost
            detail = f"no answer from the store for {away:.1f} s"
            return {self.name: Health("lost the store", detail)}
        workers = self._job.workers
        if since := list(self._running.values()):
            longest = self._now() - min(since)
            busy = f"{len(since)} of {workers} workers are at an item, up to {longest:.0f} s"
            return {self.name: Health("running", busy)}
        return {self.name: Health("idle", f"{workers} workers, nothing waits")}

    def run(self) -> None:
        """Work until stopped; raises the error that made it stop by itself."""
        try:
            self._threads.start()
            if self._job.deadline is not None:
                threading.Thread(target=self._extend, name="pxrs-extend", daemon=True).start()
            self._stopping.wait()
            self._threads.drain(_LOG)
        finally:
            # Threads that were started before another could not be must not go on.
            self.stop()
            self._over.set()
        self._threads.raise_failure()

    # The workers

    def _work(self) -> None:
        try:
            self._work_until_stopped()
        except Closed:
            self._stopping.set()
            self._turns.wake()
        except Exception as error:  # noqa: BLE001 - `join` raises it
            self._threads.fail(error)
        except BaseException as error:  # noqa: BLE001 - it wanted to end the program
            what = f"the handler raised {type(error).__name__} on an item of {self._job.queue!r}"
            self._threads.fail_handler(what, error)

    def _work_until_stopped(self) -> None:
        failures = 0
        watch: Watch | None = None
        try:
            while not self._stopping.is_set():
                try:
                    if watch is None:
                        watch = self._queues.watch(self._job.queue)
                        self._watches.add(watch)
                    self._one_item(watch)
                    failures = 0
                except PxrsError as error:
                    if not _may_pass(error):
                        raise
                    if isinstance(error, StoreError):
                        self._outage.began(error)
                    failures += 1
                    self._stopping.wait(_STORE_AWAY.delay(failures, self._random))
        finally:
            if watch is not None:
                self._watches.discard(watch)
                watch.close()

    def _one_item(self, watch: Watch) -> None:
        work = self._begin()
        try:
            with work:
                try:
                    item = self._take(work, watch)
                except Exception as error:
                    if not work._held.surrendered:
                        raise
                    _LOG.warning("an item of %r: %s", self._job.queue, words_of(error))
                    # It was given back already, like an item that can't be handled.
                    self._count(failed=1)
                    self._stop_at(work._held.surrendered[-1].delivery, error)
                    return
                if item is not None:
                    self._handle(item, work)
        finally:
            # Not before it is removed or given back: until then a death would be counted.
            self._turns.end(work)

    def _take(self, work: UnitOfWork, watch: Watch) -> Item | None:
        """The next item; None if it stops before there is one."""
        while not self._stopping.is_set():
            if not self._turns.begin(work, partial(self._holds, work), self._stopping.is_set):
                break
            found = self._look(work)
            if found.items:
                return found.items[0]
            self._turns.end(work)
            watch.wait(CAREFUL_WAIT if found.due is None else min(found.due, CAREFUL_WAIT))
        return None

    def _look(self, work: UnitOfWork) -> Found:
        """Takes the next item if there is one; a suspect only if no other worker holds an item."""
        found = self._look_once(work, suspects=False)
        while found.suspect:
            alone = self._turns.be_alone(work, self._stopping.is_set)
            if not alone and self._stopping.is_set():
                return found
            # Another process may have taken it meanwhile: then the next one need not be alone.
            found = self._look_once(work, suspects=False)
            if alone and found.suspect:
                return self._look_once(work, suspects=True)
            if not found.suspect:
                self._turns.share(work)
        return found

    def _look_once(self, work: UnitOfWork, *, suspects: bool) -> Found:
        job, asked = self._job, self._now()
        try:
            found = work._look(job.queue, 1, self._retry, job.lock_for, suspects=suspects)
        except Exception:
            if work._held.surrendered:
                self._outage.over(asked)
            raise
        self._outage.over(asked)
        return found

    def _holds(self, work: UnitOfWork) -> bool:
        """Whether it may hold an item, for which a death of this process would be counted."""
        since = self._running.get(work)
        return not work._held.is_lost and (since is None or self._may_go_on(since))

    def _handle(self, item: Item, work: UnitOfWork) -> None:
        self._running[work] = self._now()
        try:
            refuse_unfinished(self._handler(item, work))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            self._give_back(item, work, error)
            return
        finally:
            del self._running[work]
        try:
            self._commit(work)
        except PxrsError as error:
            self._give_back(item, work, error)
            if isinstance(error, (StoreError, Closed)):
                raise
        else:
            self._count(handled=1)

    def _commit(self, work: UnitOfWork) -> None:
        """Commit a handled item, again while the session lives: else it is delivered once more."""
        for failures in count(1):
            try:
                with self._outage.noticed():
                    work.finish()
                return
            except PxrsError as error:
                if not error.retryable or not work.is_open:
                    raise
                threading.Event().wait(_STORE_AWAY.delay(failures, self._random))

    def _give_back(self, item: Item, work: UnitOfWork, error: Exception) -> None:
        _LOG.warning(
            "item %s of %r was not handled, delivery %s: %s",
            item.id,
            item.queue,
            item.deliveries,
            words_of(error),
            exc_info=printable(error),
        )
        work.rollback(describe(error))
        self._count(failed=1)
        if not isinstance(error, (StoreError, Closed, Fenced, SessionLost)):
            self._stop_at(item.deliveries, error)

    def _stop_at(self, deliveries: int, error: Exception) -> None:
        """End the listener with `on_failure=Stop()`, if that was the item's last attempt."""
        most = self._job.retry.attempts
        if isinstance(self._job.on_failure, Stop) and most is not None and deliveries >= most:
            raise HandlerFailed(
                f"the handler failed on an item of {self._job.queue!r}, delivery {deliveries}: "
                f"{words_of(error)}"
            ) from error

    def _count(self, *, handled: int = 0, failed: int = 0) -> None:
        with self._counting:
            self.handled += handled
            self.failed += failed

    def _extend(self) -> None:
        """Extend the hold on items whose handler still runs and may go on."""
        deadline = self._job.deadline
        assert deadline is not None
        while not self._over.wait(deadline / _EXTENSIONS_PER_DEADLINE):
            for work, since in list(self._running.items()):
                if self._may_go_on(since):
                    with suppress(PxrsError):
                        work._keep_hold(min(deadline, self._time_left(since)))

    def _may_go_on(self, since: float) -> bool:
        return self._time_left(since) > 0

    def _time_left(self, since: float) -> float:
        """For how many seconds a handler that began at `since` may still go on."""
        limit = self._job.max_handler_time
        return math.inf if limit is None else since + limit - self._now()

    def _now(self) -> float:
        return self._clock.monotonic()


def _may_pass(error: PxrsError) -> bool:
    """Whether to go on: with another session, or when the store is back."""
    return error.retryable or isinstance(error, (Fenced, SessionLost, OutcomeUnknown))
