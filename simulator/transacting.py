"""How an actor handles messages in transactions, and what it makes of their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from pxrs.clock import Clock
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.transactions import Transaction, Transactions
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.queues.held_items import Desk
from pxrs.stores.api import Stores
from pxrs.testing.faults import Interrupted
from pxrs.topics import Topics
from pxrs.types import Message
from simulator.account import Delivery
from simulator.effects import OUTPUT, TASKS, Told, effect_of
from simulator.plan import Plan
from simulator.stepped import SteppedKeeper

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
        self.keeper = SteppedKeeper(stores, clock, plan.ttl, wait)
        shared = Desk(stores, topics, clock, self.keeper, Random(rng.random()))
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
