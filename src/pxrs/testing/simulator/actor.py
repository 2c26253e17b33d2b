"""A simulated process: the real worker, driven by steps instead of by threads.

Three threads of a consumer are three kinds of steps here: the steward's (`look`, `commit`), the
session's (`renew`) and the caller's (everything about messages). A step that is stopped inside a
store call lets steps of the other kinds happen in between, as far as the real locks would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Literal, NamedTuple

from pxrs.clock import Clock
from pxrs.config import ConsumerSettings
from pxrs.core.progress import Progress
from pxrs.core.records import head_key, members_prefix
from pxrs.core.schedule import Schedule
from pxrs.errors import (
    Displaced,
    Fenced,
    PxrsError,
    SessionLost,
    StoreError,
    TransactionConflict,
)
from pxrs.runtime.decoding import Decoder
from pxrs.runtime.runs import Run
from pxrs.runtime.seat import Seat
from pxrs.runtime.topics import Topics
from pxrs.runtime.worker import Worker
from pxrs.stores.api import Stores, Watch
from pxrs.testing.simulator.account import Delivery
from pxrs.testing.simulator.effects import OUTPUT
from pxrs.testing.simulator.ledger import Ledger
from pxrs.testing.simulator.plan import GROUP, Plan
from pxrs.testing.simulator.transacting import Transacting
from pxrs.types import Message, TopicPartition

Mode = Literal["each", "poll", "keys", "transactions"]
MODES: tuple[Mode, ...] = ("each", "poll", "keys", "transactions")
_CAREFUL = 1.0
_RETRY = 0.2


class Died(Exception):  # noqa: N818 - what happened, not an error
    """The process was killed while it waited for the store."""


class ShiftedClock:
    """The clock of another machine: it ticks alike and shows something else."""

    def __init__(self, clock: Clock, shift: float) -> None:
        self._clock = clock
        self._shift = shift

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._shift

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + round(self._shift * 1000)


class Task(NamedTuple):
    """A message for one of several workers."""

    seat: Seat
    turn: int
    progress: Progress | None
    message: Message


class Actor:
    """One process of the group, from its start to its end."""

    def __init__(
        self,
        who: str,
        stores: Stores,
        clock: Clock,
        plan: Plan,
        ledger: Ledger,
        rng: Random,
        say: Callable[[str], None],
        *,
        static: bool,
        mode: Mode,
    ) -> None:
        self.who = who
        self.name = who.partition("#")[0]
        self.static = static
        self.mode = mode
        self._ledger = ledger
        self._rng = rng
        self._say = say
        self._coord = stores.coord
        self._clock = ShiftedClock(clock, rng.uniform(0, 1000))
        numbers = count(1)
        topics = Topics(stores.coord, stores.log, self._clock)
        self.worker = Worker(
            stores,
            topics,
            self._clock,
            (lambda: tuple(each.name for each in topics.list() if each.name != OUTPUT))
            if plan.pattern
            else (lambda: tuple(sorted(plan.topics))),
            ConsumerSettings(
                group=GROUP,
                member_name=self.name,
                instance=static,
                session_ttl=plan.ttl,
                debounce=plan.debounce,
                revoke_timeout=plan.revoke_timeout,
                rejoin_timeout=plan.rejoin_timeout,
                strategy=plan.strategy,
                auto_commit=mode != "transactions",
            ),
            Decoder(),
            in_hand=self._working_on if mode == "keys" else None,
            asks_before_release=rng.random() < 0.3,
            new_id=lambda: f"{who}-{next(numbers)}",
        )
        self._transacting = Transacting(
            who, stores, topics, self._clock, self.worker, ledger.told, rng, plan.ttl
        )
        self.alive = True
        self.frozen = False
        self.thaw_at = 0.0
        # What its threads are at right now, further down the stack.
        self.stewarding = self.calling = self._fetching = self._renewing = False
        self._watch: Watch | None = None
        self._watched: frozenset[str] | None = None
        self._joined = False
        self._look_at = 0.0
        self._commit_at = 0.0
        # What is with the handlers.
        self._loop: Iterator[Message] | None = None
        self._loops = rng.random() < 0.5
        self._in_hand: list[tuple[Message, Delivery]] = []
        self._schedule: Schedule[Task] = Schedule()
        self._tasks: list[tuple[Hashable, Task, Delivery]] = []

    # The session's thread

    @property
    def remaining(self) -> float:
        session = self.worker.membership.session
        return session.remaining() if session is not None else 0.0

    def renew(self) -> None:
        session = self.worker.membership.session
        if session is not None and not self._renewing:
            self._renewing = True
            with self._tolerating("renew"):
                session.renew()
            self._renewing = False

    # The steward's thread

    @property
    def steward_free(self) -> bool:
        """Whether the steward could run now: no lock is held while the log is read."""
        return not self.stewarding and (not self.calling or self._fetching)

    @property
    def due(self) -> bool:
        """Whether the steward would wake up now."""
        now = self._clock.monotonic()
        return (
            self._watch is None
            or now >= self._look_at
            or now >= self._commit_at
            or self._watch.wait(0)
        )

    def steward(self) -> None:
        """Look at the group, then commit if it is time: one turn of the steward's loop."""
        membership = self.worker.membership
        now = self._clock.monotonic()
        self._look_at = now + _RETRY
        with self._tolerating("look"):
            if not self._joined:
                # As `Consumer` does before it starts its threads.
                membership.join()
                self._joined = True
                self._ledger.joined(self.who)
            if not self.worker.alive:
                self._ledger.lease_over(self.who)
            self._arm(membership.waiting_for)
            wanted = membership.look()
            now = self._clock.monotonic()
            self._look_at = now + _CAREFUL if wanted is None else min(now + _CAREFUL, wanted)
            if now >= self._commit_at:
                self._commit_at = now + _CAREFUL
                if self.mode != "transactions":
                    self.worker.commit_handled()
            if self._watched != membership.waiting_for:
                self._look_at = now

    def commit(self) -> None:
        """Commit what was handled, without looking."""
        if self.mode == "transactions":
            return
        with self._tolerating("commit"):
            self.worker.commit_handled()

    def _arm(self, claims: frozenset[str]) -> None:
        if self._watch is not None and self._watched == claims:
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._watch = self._coord.watch(
            head_key(GROUP), members_prefix(GROUP), "topics/", *sorted(claims)
        )
        self._watched = claims

    # The caller's thread

    def work(self) -> None:
        """Go on with the messages: finish one, take the next."""
        with self._tolerating("work"):
            if self.mode == "each":
                self._each()
            elif self.mode == "poll":
                self._poll()
            elif self.mode == "transactions":
                self._transact()
            else:
                self._by_key()

    @property
    def busy(self) -> bool:
        """Whether it has messages that it was given and has not handled."""
        return bool(self._in_hand or self._tasks or len(self._schedule))

    def attend(self) -> None:
        """Between messages: hear what has changed, let go of what has to go."""
        desk = self.worker.desk
        with self._tolerating("attend"):
            while (change := desk.next_change()) is not None:
                if change.kind == "leaving":
                    desk.said_goodbye(change.parts)
            self.worker.membership.release_what_is_finished()

    def give_up(self) -> None:
        """The handler raises: the messages it has are not handled."""
        if self.mode == "each" and self._loop is not None:
            self._say(f"{self.who} breaks out of its loop")
            self._leave_loop()

    def seek(self, part: TopicPartition, offset: int) -> None:
        with self._tolerating(f"seek {part.topic}/{part.partition} to {offset}"):
            self.worker.seek(*part, offset)

    def commit_seen(self) -> None:
        """An explicit commit: all that was handed out is handled, says the caller."""
        if self.mode == "poll":
            for message, delivery in self._in_hand:
                self._ledger.handled(delivery, message)
            with self._tolerating("commit()"):
                self.worker.commit(self.worker.marks_handed())

    def _next_runs(self) -> list[Run]:
        runs = self.worker.hand_out(self._rng.choice((1, 3, 10)))
        if not runs:
            self._fetching = True
            try:
                self.worker.fetch(lambda: None)
            finally:
                self._fetching = False
            runs = self.worker.hand_out(self._rng.choice((1, 3, 10)))
        for run in runs:
            for message in run.messages:
                self._ledger.handed(self.who, message)
        return runs

    def _each(self) -> None:
        """`for message in consumer`."""
        if self._loop is None:
            self.worker.finish()
            runs = self._next_runs()
            if not runs:
                return
            self._loop = self.worker.one_by_one(runs)
        for message, delivery in self._in_hand:
            self._ledger.handled(delivery, message)
        self._in_hand = []
        message_or_none = next(self._loop, None)
        if message_or_none is None:
            self._loop = None
        else:
            self._in_hand = [(message_or_none, self._began(message_or_none))]

    def _poll(self) -> None:
        """`consumer.poll()`."""
        for message, delivery in self._in_hand:
            self._ledger.handled(delivery, message)
        self._in_hand = []
        self.worker.finish()
        for run in self._next_runs():
            run.seen = len(run.messages)
            self._in_hand += [(message, self._began(message)) for message in run.messages]

    def _transact(self) -> None:
        """What `consumer.poll()` returned, or some turns of a loop, in one transaction."""
        if not self._in_hand or (self._loops and self._rng.random() < 0.6):
            if self._loops:
                self._loop_on()
            else:
                self._poll()
            return
        in_hand, self._in_hand = self._in_hand, []
        done = False
        try:
            done = self._transacting.handle(in_hand, self._say)
        finally:
            if not done and self._loop is not None and self._rng.random() < 0.5:
                self._leave_loop()
        if done:
            for message, delivery in in_hand:
                self._ledger.handled(delivery, message)

    def _loop_on(self) -> None:
        """`for message in consumer`, one turn."""
        if self._loop is None:
            runs = self._next_runs()
            if not runs:
                return
            self._loop = self.worker.one_by_one(runs)
        message = next(self._loop, None)
        if message is None:
            self._loop = None
        else:
            self._in_hand.append((message, self._began(message)))

    def _leave_loop(self) -> None:
        """Its body raised: the next one begins as every loop does."""
        loop, self._loop = self._loop, None
        self._in_hand = []
        loop.close()  # type: ignore[union-attr]
        self.worker.finish()

    def _by_key(self) -> None:
        """`px.run` with several workers, in order per key: see `pxrs.runtime.runner`."""
        desk = self.worker.desk
        if self._tasks and self._rng.random() < 0.5:
            lane, task, delivery = self._tasks.pop(self._rng.randrange(len(self._tasks)))
            if self._rng.random() < 0.9:
                self._ledger.handled(delivery, task.message)
                if task.progress is not None:
                    task.progress.finish(task.message.offset)
                self._schedule.done(lane)
            else:
                self._schedule.park(lane, self._clock.monotonic() + self._rng.random())
            return
        taken = self._schedule.take(self._clock.monotonic())
        if taken is not None:
            lane, task = taken
            progress = task.progress
            with desk.lock:
                if not self.worker.alive:
                    self._schedule.park(lane, self._clock.monotonic() + _RETRY)
                elif (
                    task.seat.turn != task.turn
                    or progress is None
                    or progress.is_done(task.message.offset)
                ):
                    self._schedule.done(lane)
                else:
                    self._tasks.append((lane, task, self._began(task.message)))
            return
        runs = self._next_runs()
        self.worker.forget_runs()
        for run in runs:
            for message in run.messages:
                self._schedule.put(
                    (message.topic, message.partition, message.key),
                    Task(run.seat, run.turn, run.progress, message),
                )

    def _working_on(self, seat: Seat) -> bool:
        return any(task.seat is seat for _, task, _ in self._tasks)

    def _began(self, message: Message) -> Delivery:
        return self._ledger.began(self.who, message, self.remaining)

    # Its end

    def leave(self) -> None:
        """Close: what was handled is committed, everything is released."""
        self._say(f"{self.who} leaves")
        with self._tolerating("leave"):
            self.worker.sync()
            self.worker.membership.leave()
        self.end()

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        if self._watch is not None:
            self._watch.close()

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        """Errors that a caller has to expect; anything else is a bug."""
        try:
            yield
        except Displaced as error:
            self._say(f"{self.who} {what}: {error}")
            self.end()
        except (StoreError, Fenced, SessionLost, TransactionConflict) as error:
            self._say(f"{self.who} {what}: {type(error).__name__}: {error}")
        except Died:
            self._say(f"{self.who} died in {what}")
            self.end()
        except PxrsError as error:
            raise AssertionError(f"{self.who} {what}: {type(error).__name__}: {error}") from error
