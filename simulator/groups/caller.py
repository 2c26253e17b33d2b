"""The thread of a process that handles messages, in the ways that a consumer offers.

`Caller` takes and handles them; `Transacting` does so in transactions, and knows their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Literal, NamedTuple

from pxrs.clock import Clock
from pxrs.consuming.in_hand import Extent, InFlight
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.transactions import Transaction, Transactions
from pxrs.core.progress import Progress
from pxrs.core.schedule import Schedule
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.queues.held_items import Context
from pxrs.stores.api import Stores
from pxrs.testing.faults import Interrupted
from pxrs.topics import Topics
from pxrs.types import Fence, Message, TopicPartition
from simulator.groups.judge import OUTPUT, TASKS, Delivery, Ledger, Told, effect_of
from simulator.groups.plan import Plan
from simulator.stage import Blocked, Broken, SteppedKeeper

Mode = Literal["each", "poll", "asks", "keys", "transactions"]
MODES: tuple[Mode, ...] = ("each", "poll", "asks", "keys", "transactions")
_RETRY = 0.2


class Task(NamedTuple):
    """A message for one of several workers."""

    owned: OwnedPartition
    turn: int
    progress: Progress | None
    message: Message


class Caller:
    """Takes messages from a member and handles them, and tells the judge of both."""

    def __init__(
        self,
        who: str,
        mode: Mode,
        member: MemberSteps,
        transacting: Transacting,
        clock: Clock,
        ledger: Ledger,
        rng: Random,
        say: Callable[[str], None],
        remaining: Callable[[], float],
    ) -> None:
        self._who = who
        self._mode = mode
        self._member = member
        self._transacting = transacting
        self._clock = clock
        self._ledger = ledger
        self._rng = rng
        self._say = say
        # How long its lease lasts, by its own clock.
        self._remaining = remaining
        self.paused: set[TopicPartition] = set()
        # How many messages it takes at most.
        self.sizes: tuple[int, ...] = (1, 3, 10)
        self._loop: Iterator[Message] | None = None
        self._loops = rng.random() < 0.5
        self._in_hand: list[tuple[Message, Delivery]] = []
        # Commits that the background shall make.
        self.asked: list[Extent] = []
        # Of which topic's partition the messages are that carry this very fence.
        self._topic_ids: dict[int, tuple[Fence, str]] = {}
        self._schedule: Schedule[Task] = Schedule()
        self._tasks: list[tuple[Hashable, Task, Delivery]] = []

    @property
    def busy(self) -> bool:
        """Whether it has messages that it was given and has not handled."""
        return bool(self._in_hand or self._tasks or len(self._schedule))

    def work(self) -> None:
        """Go on with the messages: finish one, take the next."""
        if self._mode == "each":
            self._each()
        elif self._mode == "poll":
            self._poll()
        elif self._mode == "asks":
            self._poll_and_ask()
        elif self._mode == "transactions":
            self._transact()
        else:
            self._by_key()

    def give_up(self) -> None:
        """The handler raises: the messages it has are not handled."""
        if self._mode == "each" and self._loop is not None:
            self._say(f"{self._who} breaks out of its loop")
            self._leave_loop()

    def pause(self, part: TopicPartition) -> None:
        """Hand out nothing of it until further notice."""
        self.paused.add(part)
        self._member.pause({part})

    def resume(self, part: TopicPartition) -> None:
        self.paused.discard(part)
        self._member.table.pause([part], paused=False)

    def commit(self) -> None:
        """An explicit commit: of all that was handed out, or up to one message."""
        if self._mode == "asks" and self._in_hand:
            self._ask()
        if self._mode != "poll" or not self._in_hand:
            return
        last, of = self._rng.choice(self._in_hand)
        # After a seek it was not handed out, for all that the consumer knows.
        only_one = self._rng.random() < 0.5 and of.segment == of.account.segment
        for message, delivery in self._in_hand:
            if not only_one or (delivery is of and message.offset <= last.offset):
                self._ledger.handled(delivery, message)
        if only_one:
            self._member.commit_message(last)
        else:
            self._member.commit_up_to(self._member.extent())

    def _next(self) -> list[InFlight]:
        to_workers = self._mode == "keys"
        flights = self._member.hand_out(self._rng.choice(self.sizes), to_workers=to_workers)
        if not flights:
            try:
                self._member.fetch(lambda: None)
            except Interrupted as interrupted:
                # As `Consumer.poll` does.
                self._member.did_not_arrive(interrupted)
                raise
            flights = self._member.hand_out(self._rng.choice(self.sizes), to_workers=to_workers)
        for flight in flights:
            topic_id = flight.owned.where.topic_id
            self._topic_ids[id(flight.owned.fence)] = flight.owned.fence, topic_id
            self._refuse_if_paused(flight.owned.part)
            for message in flight.messages:
                self._ledger.handed(self._who, topic_id, message)
        return flights

    def _each(self) -> None:
        """`for message in consumer`."""
        if self._loop is None:
            self._member.finish()
            if not self._begin_loop():
                return
        self._count()
        self._turn()

    def _poll(self) -> None:
        """`consumer.poll()`."""
        self._count()
        self._take_all()

    def _poll_and_ask(self) -> None:
        """`consumer.poll()` without auto-commit: what it returned counts when that is asked for."""
        if self._in_hand and self._rng.random() < 0.3:
            self._ask()
        else:
            self._take_all()

    def _count(self) -> None:
        """What it had in hand is handled."""
        for message, delivery in self._in_hand:
            self._ledger.handled(delivery, message)
        self._in_hand = []

    def _take_all(self) -> None:
        self._member.finish()
        for flight in self._next():
            flight.seen = len(flight.messages)
            self._in_hand += [(message, self._began(message)) for message in flight.messages]

    def _ask(self) -> None:
        """`consumer.commit()`, or `consumer.commit_async()`. One that fails is asked for again."""
        for message, delivery in self._in_hand:
            self._ledger.handled(delivery, message)
        if self._rng.random() < 0.5:
            self._member.commit_up_to(self._member.extent())
        else:
            self._say(f"{self._who} asks for a commit")
            self.asked.append(self._member.ask())
        self._in_hand = []

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
        except Blocked:
            self._in_hand = in_hand
            raise
        finally:
            if not done and not self._in_hand and self._loop and self._rng.random() < 0.5:
                self._leave_loop()
        if done:
            for message, delivery in in_hand:
                self._ledger.handled(delivery, message)

    def _loop_on(self) -> None:
        """`for message in consumer`, one turn."""
        if self._loop is not None or self._begin_loop():
            self._turn()

    def _begin_loop(self) -> bool:
        """Whether there is something to loop over."""
        flights = self._next()
        if flights:
            self._loop = self._member.one_by_one(flights)
        return bool(flights)

    def _turn(self) -> None:
        """The loop's next message, if there is one."""
        assert self._loop is not None
        message = next(self._loop, None)
        if message is None:
            self._loop = None
        else:
            self._refuse_if_paused(TopicPartition(message.topic, message.partition))
            self._in_hand.append((message, self._began(message)))

    def _refuse_if_paused(self, part: TopicPartition) -> None:
        if part in self.paused:
            raise Broken(f"{self._who} got messages of {part.topic}/{part.partition}, paused")

    def _leave_loop(self) -> None:
        """Its body raised: the next one begins as every loop does."""
        loop, self._loop = self._loop, None
        self._in_hand = []
        loop.close()  # type: ignore[union-attr]
        self._member.finish()

    def _by_key(self) -> None:
        """`px.run` with several workers, in order per key: see `pxrs.running.runner`."""
        table = self._member.table
        if self._tasks and self._rng.random() < 0.5:
            key, task, delivery = self._tasks.pop(self._rng.randrange(len(self._tasks)))
            task.owned.working -= 1
            if self._rng.random() < 0.9:
                self._ledger.handled(delivery, task.message)
                if task.progress is not None:
                    task.progress.finish(task.message.offset)
                self._schedule.done(key)
            else:
                self._schedule.park(key, self._clock.monotonic() + self._rng.random())
            return
        taken = self._schedule.take(self._clock.monotonic())
        if taken is not None:
            key, task = taken
            progress = task.progress
            with table.lock:
                if not self._member.alive:
                    self._schedule.park(key, self._clock.monotonic() + _RETRY)
                elif (
                    task.owned.turn != task.turn
                    or progress is None
                    or progress.is_done(task.message.offset)
                ):
                    self._schedule.done(key)
                else:
                    self._tasks.append((key, task, self._began(task.message)))
                    task.owned.working += 1
            return
        for flight in self._next():
            for message in flight.messages:
                self._schedule.put(
                    (message.topic, message.partition, message.key),
                    Task(flight.owned, flight.turn, flight.progress, message),
                )

    def _began(self, message: Message) -> Delivery:
        _, topic_id = self._topic_ids[id(message.fence)]
        return self._ledger.began(self._who, topic_id, message, self._remaining())


_ATTEMPTS = 3


class GaveUp(Exception):  # noqa: N818 - what happened, not an error
    """The handler raised, inside the block of its transaction."""


class Transacting:
    """The transactions of one process: each handles all messages that it is given, or none."""

    def __init__(
        self,
        who: str,
        stores: Stores,
        topics: Topics,
        clock: Clock,
        member: MemberSteps,
        told: Told,
        rng: Random,
        plan: Plan,
        wait: Callable[[], None],
    ) -> None:
        self._who = who
        self._told = told
        self._rng = rng
        self._numbers = count(1)
        self._with_queues = plan.queues
        self.hold_session = SteppedKeeper(stores, clock, plan.ttl, wait)
        shared = Context(stores, topics, clock, self.hold_session, Random(rng.random()))
        self._transactions = Transactions(shared, member, lambda: None)

    def handle(
        self, messages: Sequence[tuple[Message, Delivery]], say: Callable[[str], None]
    ) -> bool:
        """Do it; whether it is done. Raises what the caller of a transaction has to expect."""
        tries: list[str] = []
        gives_up = self._rng.random() < 0.1

        def work(tx: Transaction) -> None:
            if tries:
                self._told.failed(tries[-1], "to try again")
            tries.append(f"{self._who}:{next(self._numbers)}")
            say(f"{self._who} begins transaction {tries[-1]}")
            if self._with_queues and self._rng.random() < 0.5:
                self._take_task(tx, tries[-1])
            # One way for each key, so that the order of its effects can be told.
            to_queue = self._rng.randrange(2) if self._with_queues else None
            for message, delivery in messages:
                effect = effect_of(tries[-1], message, delivery)
                if message.key[-1] % 2 == to_queue:
                    tx.put(OUTPUT, effect.encode())
                else:
                    tx.send(OUTPUT, effect.encode(), message.key)
            if gives_up:
                raise GaveUp

        try:
            if self._rng.random() < 0.5:
                self._transactions.run(work, None, _ATTEMPTS)
            else:
                with self._transactions.begin() as tx:
                    work(tx)
        except GaveUp:
            say(f"{self._who} gives up transaction {tries[-1]}")
            self._told.failed(tries[-1], "nothing, as it had raised itself")
            return False
        except OutcomeUnknown:
            raise
        except PxrsError as error:
            if tries:
                self._told.failed(tries[-1], f"{type(error).__name__}: {error}")
            raise
        self._told.committed(tries[-1])
        return True

    def _take_task(self, tx: Transaction, name: str) -> None:
        try:
            item = tx.take(TASKS, 0)
        except (OutcomeUnknown, Interrupted) as doubt:
            # Of the take. What leaves the block by an exception is rolled back for sure.
            raise GaveUp from doubt
        if item is not None:
            self._told.took(name, item.id)
