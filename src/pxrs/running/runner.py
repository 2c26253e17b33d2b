"""`px.run`: a handler, several workers, order per key, retries, dead letters.

One thread fetches and fills the schedule; workers take from it. A message counts as
handled when its handler has returned, in whatever order that happens: the claim carries the
finished ranges above the checkpoint.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from pxrs.clock import Clock
from pxrs.codec.messages import Decoder
from pxrs.consuming.health import Health
from pxrs.consuming.in_hand import InFlight
from pxrs.consuming.member import Member
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core.progress import Progress
from pxrs.core.schedule import Schedule
from pxrs.errors import (
    Closed,
    DeliveryFailed,
    HandlerFailed,
    OutcomeUnknown,
    PxrsError,
    TopicNotFound,
)
from pxrs.running.dead_letters import DeadLetters, printable, where, words_of
from pxrs.running.handle import WorkerThreads
from pxrs.running.handler_results import refuse_unfinished
from pxrs.running.job import RunJob
from pxrs.types import Message

_LOOK = 0.5
_LOG = logging.getLogger("pxrs.run")


class Abandoned(Exception):  # noqa: N818 - it is no error
    """Raised in place of a handler that has to stop: its message is neither handled nor failed."""


@runtime_checkable
class TakesTurns(Protocol):
    """A handler in which some messages wait for others; calls this when the turn of one came."""

    turn_came: Callable[[], None]


class Task(NamedTuple):
    """A message to be handled, with the turn and the progress under which it was handed out."""

    owned: OwnedPartition
    turn: int
    progress: Progress | None
    message: Message


class Runner:
    """Runs a handler over the messages of a consumer, until it is stopped."""

    def __init__(
        self,
        job: RunJob,
        clock: Clock,
        dead_letters: DeadLetters | None,
        join: Callable[[], Member],
    ) -> None:
        self._handler = job.handler
        if isinstance(self._handler, TakesTurns):
            self._handler.turn_came = self._turn_came
        self._job = job
        self._retry = job.retry
        self._clock = clock
        self._decoder = Decoder(job.key_serde, job.serde)
        self._dead_letters = dead_letters
        self._join = join
        self._random = random.Random()
        self._schedule: Schedule[Task] = Schedule()
        self._turn = threading.Condition()
        self._attempts: Counter[tuple[str, int, int]] = Counter()
        self._stopping = False
        self._member: Member | None = None
        self._seen_version = 0
        self._threads = WorkerThreads(
            self, job.workers, self._work, self._busy, job.max_handler_time
        )
        self.name = job.name
        self.handled = 0
        self.failed = 0

    def _busy(self) -> int:
        return 0 if self._member is None else len(self._member.steps.working_since)

    def stop(self) -> None:
        """Stop fetching, let the workers finish, commit and leave. From any thread or signal."""
        self._stopping = True
        if self._member is not None:
            # A signal handler must not wait for a lock that its own thread may hold.
            threading.Thread(target=self._member.wake, daemon=True).start()

    def health(self) -> dict[str, Health]:
        """Return the health of its member, or the error that ends the run."""
        if (failure := self._threads.failure) is not None:
            return {self.name: Health("failed", words_of(failure))}
        if self._member is None:
            return {self.name: Health("joining", "it has not joined its group yet")}
        return {self._member.name: self._member.health()}

    def run(self) -> None:
        """Work until stopped; raises the error that made it stop by itself."""
        try:
            member = self._member = self._join()
        except BaseException:
            self._close_dead_letters()
            raise
        try:
            self._threads.start()
            self._dispatch(member)
        finally:
            self._end_run(member)
        self._threads.raise_failure()

    def _dispatch(self, member: Member) -> None:
        while not self._stopping:
            try:
                for flight in member.take(self._job.max_in_flight, _LOOK):
                    self._put(flight)
            except Closed:
                if self._stopping:
                    return  # a handler closed the store, and this run with it
                raise
            except PxrsError as error:
                if not error.retryable:
                    raise
                # Wait for a store that is away for a while; others may have taken over then.
                self._pause()
            self._hurry_what_is_void(member)
            self._watch_the_clock(member)

    def _hurry_what_is_void(self, member: Member) -> None:
        """End the waits for another attempt of messages whose partition is not ours any more."""
        if member.table.version == self._seen_version:
            return
        self._seen_version = member.table.version
        with self._turn:
            self._schedule.hurry(lambda task: task.owned.turn != task.turn)
            self._turn.notify_all()

    def _pause(self) -> None:
        with self._turn:
            self._turn.wait(_LOOK)

    def _put(self, flight: InFlight) -> None:
        with self._turn:
            for message in flight.messages:
                task = Task(flight.owned, flight.turn, flight.progress, message)
                self._schedule.put(self._order_key(message), task)
            self._turn.notify_all()

    def _order_key(self, message: Message) -> Hashable:
        if self._job.parallel == "key" and message.key is not None:
            return (message.topic, message.partition, message.key)
        return (message.topic, message.partition)

    def _work(self) -> None:
        while (taken := self._next_task()) is not None:
            key, task = taken
            try:
                delay = self._handle(task)
            except BaseException as error:  # noqa: BLE001 - a worker must not die in silence
                delay = None
                what = f"the handler raised {type(error).__name__} on {where(task.message)}"
                self._threads.fail_handler(what, error)
            with self._turn:
                if delay is None:
                    self._schedule.done(key)
                else:
                    # A task that is void by now was not parked when others were hurried.
                    pause = delay if task.owned.turn == task.turn else 0.0
                    self._schedule.park(key, self._clock.monotonic() + pause)
                self._turn.notify_all()
            if delay is None and self._member is not None:
                self._attempts.pop(_place(task.message), None)
                self._member.came_back(task.owned)

    def _next_task(self) -> tuple[Hashable, Task] | None:
        with self._turn:
            while True:
                now = self._clock.monotonic()
                taken = None if self._stopping else self._schedule.take(now)
                if taken is not None or self._stopping:
                    return taken
                due = self._schedule.next_time()
                self._turn.wait(None if due is None else max(0.0, due - now))

    def _handle(self, task: Task) -> float | None:
        """Handle one message; returns the delay until another attempt, None if it is finished."""
        assert self._member is not None
        message = task.message
        if task.owned.turn != task.turn:
            return None
        if not self._member.steps.alive:
            # Look again: the lease is renewed in time after all, or lost, and its turn over too.
            return _LOOK
        if (first := self._begin(task)) != "begun":
            return _LOOK if first == "waits" else None
        done = False
        try:
            refuse_unfinished(self._handler(self._decoder.deserialize(message)))
            done = True
        except Abandoned:
            return _LOOK
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            if task.owned.turn != task.turn:
                # Another member owns it, or is about to: a fenced handler fails for that reason.
                return None
            delay = self._failed(task, error)
            done = delay is None and self._threads.failure is None
            return delay
        finally:
            self._end(task, done=done)
        return None

    def _begin(self, task: Task) -> Literal["begun", "void", "waits"]:
        """Note that a worker begins it; not if it is not ours, is done, or can't be noted as done.

        A claim has room for a limited number of gaps: once there are too many, only the message
        that closes the first one is begun.
        """
        assert self._member is not None
        progress, offset = task.progress, task.message.offset
        with self._member.table.lock:
            if task.owned.turn != task.turn or progress is None or progress.is_done(offset):
                return "void"
            if progress.full and not progress.is_first(offset):
                return "waits"
            task.owned.working += 1
            self._member.steps.working_since[threading.get_ident()] = self._clock.monotonic()
            return "begun"

    def _turn_came(self) -> None:
        """The handler of this thread begins only now: `max_handler_time` counts from here."""
        assert self._member is not None
        with self._member.table.lock:
            self._member.steps.working_since[threading.get_ident()] = self._clock.monotonic()

    def _end(self, task: Task, *, done: bool) -> None:
        assert self._member is not None
        owned = task.owned
        with self._member.table.lock:
            owned.working -= 1
            self._member.steps.working_since.pop(threading.get_ident(), None)
            if done and task.progress is not None:
                task.progress.finish(task.message.offset)
                self.handled += 1
            leaving = owned.state == "leaving"
        if leaving:
            self._member.background.wake()

    def _failed(self, task: Task, error: Exception) -> float | None:
        """Count the failure; returns the delay until the next attempt, None when there is none."""
        message = task.message
        place = _place(message)
        self._attempts[place] += 1
        with self._turn:
            self.failed += 1
        attempts = self._attempts[place]
        delay = self._retry.delay(attempts, self._random)
        what = _describe(message, attempts, error)
        if delay is not None:
            _LOG.warning("%s; again in %.2g s", what, delay)
            return delay
        if self._dead_letters is None:
            self._threads.fail_handler(what, error)
            return None
        return self._bury(self._dead_letters, task, attempts, error)

    def _bury(
        self, letters: DeadLetters, task: Task, attempts: int, error: Exception
    ) -> float | None:
        """Write the dead letter. While the store is away its message counts as not handled.

        A letter whose fate is not known is written again: two of them are better than none.
        """
        message = task.message
        while task.owned.turn == task.turn:
            try:
                grave = letters.bury(message, self._job.group, attempts, error)
                what = _describe(message, attempts, error)
                _LOG.error("%s; it is in %r now", what, grave, exc_info=printable(error))
                return None
            except PxrsError as failure:
                if isinstance(failure, TopicNotFound) and failure.topic == message.topic:
                    # The topic was deleted: the group is about to release its partitions.
                    return _LOOK
                if not _may_pass(failure):
                    self._threads.fail(failure)
                    return None
            if self._stopping:
                return _LOOK
            self._pause()
        # Another member handles the message now.
        return None

    def _watch_the_clock(self, member: Member) -> None:
        """End the run if a handler takes longer than it may: a thread can't be killed."""
        limit = self._job.max_handler_time
        if limit is None:
            return
        now = self._clock.monotonic()
        if any(now - since > limit for since in list(member.steps.working_since.values())):
            late = HandlerFailed(f"a handler took longer than max_handler_time ({limit:g} s)")
            self._threads.fail(late)

    def _end_run(self, member: Member) -> None:
        """Let the workers finish their current messages; queued ones are left to other members."""
        self._stopping = True
        with self._turn:
            self._turn.notify_all()
        try:
            self._threads.drain(_LOG)
        finally:
            try:
                member.close()
            finally:
                self._close_dead_letters()

    def _close_dead_letters(self) -> None:
        if self._dead_letters is not None:
            self._dead_letters.close()


def _may_pass(failure: PxrsError) -> bool:
    """Whether a dead letter that was not written may be written later."""
    if isinstance(failure, DeliveryFailed):
        cause = failure.__cause__
        return cause is None or (isinstance(cause, PxrsError) and _may_pass(cause))
    return failure.retryable or isinstance(failure, OutcomeUnknown)


def _place(message: Message) -> tuple[str, int, int]:
    return message.topic, message.partition, message.offset


def _describe(message: Message, attempts: int, error: Exception) -> str:
    times = "once" if attempts == 1 else f"{attempts} times"
    return f"the handler failed {times} on {where(message)}: {words_of(error)}"
