"""The listener container: a handler, a queue and several workers.

Every worker takes an item, calls the handler with it and its transaction, and commits. What the
handler raises rolls back, and the policy decides what becomes of the item. A store that is away
for a while is waited for.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

from pxrs.clock import Clock
from pxrs.consuming.health import Health, Outage
from pxrs.core.delivery import describe
from pxrs.core.retry import Backoff
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreError,
)
from pxrs.queues.item import Item
from pxrs.queues.unit_of_work import CAREFUL_WAIT, Found, UnitOfWork
from pxrs.running.dead_letters import printable, words_of
from pxrs.running.handler_results import refuse_unfinished
from pxrs.running.inside import employer, work_for
from pxrs.running.job import ListenerSettings
from pxrs.running.listener_turns import Turns
from pxrs.running.runner import QUIET, tell_of_the_wait
from pxrs.running.signals import stop_on_signals, wait_awake
from pxrs.stores.api import QueueStore, Watch

Handler = Callable[[Item, UnitOfWork], Any]
_LOG = logging.getLogger("pxrs.listen")
_STORE_AWAY = Backoff(first=0.05, longest=5.0)
_EXTENSIONS_PER_DEADLINE = 3


class Listener:
    """Workers that handle a queue's items until they are stopped. See `px.listen`."""

    def __init__(
        self,
        handler: Handler,
        settings: ListenerSettings,
        queues: QueueStore,
        begin: Callable[[], UnitOfWork],
        turns: Turns,
        clock: Clock,
        stop_all: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._settings = settings
        self._queues = queues
        self._begin = begin
        self._turns = turns
        self._clock = clock
        self._stop_all = stop_all
        self._random = random.Random()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._working = 0
        self._threads: list[threading.Thread] = []
        self._watches: set[Watch] = set()
        self._running: dict[UnitOfWork, float] = {}
        self._failure: BaseException | None = None
        self._outage = Outage(f"listener of {settings.queue!r}", clock, _LOG)
        self.handled = 0
        self.failed = 0

    def start(self) -> Listener:
        """Start the workers. After a `stop` it can be started again."""
        with self._changed:
            if any(thread.is_alive() for thread in self._threads):
                raise InvalidRequest("the listener is running")
            self._stopping.clear()
            self._over.clear()
            self._working = self._settings.workers
            self._failure = None
            self._threads = [
                threading.Thread(target=self._work, name=f"pxrs-listener-{number}", daemon=True)
                for number in range(self._settings.workers)
            ]
            if self._settings.deadline is not None:
                extender = threading.Thread(target=self._extend, name="pxrs-extend", daemon=True)
                self._threads.append(extender)
            for thread in self._threads:
                thread.start()
        return self

    def stop(self) -> None:
        """Take no more items and finish those in hand; does not wait. From any thread."""
        self._stopping.set()
        for watch in list(self._watches):
            watch.wake()
        self._turns.wake()

    def _health(self) -> dict[str, Health]:
        """How it is doing; nothing once it has ended as it was told to. From any thread."""
        name = f"listen:{self._settings.queue}"
        if self._failure is not None:
            return {name: Health("failed", words_of(self._failure))}
        if self._over.is_set():
            return {}
        if (lost := self._outage.since) is not None:
            away = self._now() - lost
            return {name: Health("lost the store", f"no answer from the store for {away:.1f} s")}
        workers = self._settings.workers
        if since := list(self._running.values()):
            longest = self._now() - min(since)
            busy = f"{len(since)} of {workers} workers are at an item, up to {longest:.0f} s"
            return {name: Health("running", busy)}
        return {name: Health("idle", f"{workers} workers, nothing waits")}

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all workers have finished; whether they have.

        In the main thread SIGTERM and SIGINT meanwhile do what `Pxrs.stop` does: this listener
        ends, and all else that runs under the same object. Raises what ended a worker that should
        have gone on.
        """
        if employer() is self:
            raise InvalidRequest("a handler can't wait for its own listener to end: only stop() it")
        deadline = None if timeout is None else self._now() + timeout
        with stop_on_signals(self._stop_all):
            self._wait_for_the_end(deadline)
        if self._failure is not None:
            raise self._failure
        return not any(thread.is_alive() for thread in self._threads)

    def _wait_for_the_end(self, deadline: float | None) -> None:
        """Until the workers have ended, or the deadline; says what it waits for once it stops."""

        def left(most: float | None = None) -> float | None:
            if deadline is None:
                return most
            seconds = max(0.0, deadline - self._now())
            return seconds if most is None else min(seconds, most)

        if self._threads and wait_awake(self._stopping.wait, left()):
            quiet = left(QUIET)
            if not self._over.wait(quiet) and quiet == QUIET:
                tell_of_the_wait(_LOG, len(self._running), None)
        for thread in self._threads:
            thread.join(left())

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()

    # The workers

    def _work(self) -> None:
        work_for(self)
        try:
            self._work_until_stopped()
        except Closed:
            self._stopping.set()
            self._turns.wake()
        except BaseException as error:  # noqa: BLE001 - whoever joins is told
            self._failure = self._failure or error
            self.stop()
        finally:
            with self._changed:
                self._working -= 1
                if self._working == 0:
                    self._over.set()

    def _work_until_stopped(self) -> None:
        failures = 0
        watch: Watch | None = None
        try:
            while not self._stopping.is_set():
                try:
                    if watch is None:
                        watch = self._queues.watch(self._settings.queue)
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
                    if not work.unread:
                        raise
                    _LOG.warning("an item of %r: %s", self._settings.queue, words_of(error))
                    # It was given back already, the way of one that can't be handled.
                    self._count(failed=1)
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
        """What there is now. A suspect is taken when nobody else has anything in hand."""
        found = self._look_once(work, suspects=False)
        while found.suspect:
            alone = self._turns.be_alone(work, self._stopping.is_set)
            if not alone and self._stopping.is_set():
                return found
            # Somebody else may have had it meanwhile: what comes then need not be alone.
            found = self._look_once(work, suspects=False)
            if alone and found.suspect:
                return self._look_once(work, suspects=True)
            if not found.suspect:
                self._turns.share(work)
        return found

    def _look_once(self, work: UnitOfWork, *, suspects: bool) -> Found:
        settings, asked = self._settings, self._now()
        try:
            found = work._look(
                settings.queue, 1, settings.policy, settings.deadline, suspects=suspects
            )
        except Exception:
            if work.unread:
                self._outage.over(asked)
            raise
        self._outage.over(asked)
        return found

    def _holds(self, work: UnitOfWork) -> bool:
        """Whether an item may be in its hand that a death of this process would be counted for."""
        since = self._running.get(work)
        return not work.is_lost and (since is None or self._may_go_on(since))

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
        """Commit what was handled, for as long as the session lives: a delivery is worth much."""
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

    def _count(self, *, handled: int = 0, failed: int = 0) -> None:
        with self._changed:
            self.handled += handled
            self.failed += failed

    def _extend(self) -> None:
        """Hold on to what is being handled, while its handler lives and may go on."""
        deadline = self._settings.deadline
        assert deadline is not None
        while not self._over.wait(deadline / _EXTENSIONS_PER_DEADLINE):
            for work, since in list(self._running.items()):
                if self._may_go_on(since):
                    with suppress(PxrsError):
                        work.keep_hold(deadline)

    def _may_go_on(self, since: float) -> bool:
        limit = self._settings.max_handler_time
        return limit is None or self._now() - since <= limit

    def _now(self) -> float:
        return self._clock.monotonic()


def _may_pass(error: PxrsError) -> bool:
    """Whether it is worth going on: another session, or the store when it is back."""
    return error.retryable or isinstance(error, (Fenced, SessionLost, OutcomeUnknown))
