"""Break queues in one place: the simulator has to notice, and to say what broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest
from simulator.queues import draw, run
from simulator.queues.plan import QueuePlan

from pxrs.core.queue import QueueItem, WorkQueue, held_in
from pxrs.core.retry import AT_ONCE, Backoff
from pxrs.errors import OutcomeUnknown
from pxrs.queues.held_items import HeldItems
from pxrs.queues.hold_session import GivenBack, HoldSession
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.memory.queues import MemoryQueues
from pxrs.testing.faults import FaultyQueues, Interrupted, Rates
from pxrs.types import Delivery, Held, Holder, ItemState, Outcome, QueueChange
from simulator import Broken
from support.mutants import SEEDS, Mutant, Patch

pytestmark = pytest.mark.thorough

KEYED = QueuePlan(fifo=False, keys=2, retry=AT_ONCE, lock_for=None)


def counted_after_the_hand_out(patch: Patch) -> None:
    """A delivery counts when the item comes back: who dies with it in hand is not counted."""
    hold = WorkQueue.hold
    give_back = WorkQueue.give_back

    def uncounted(self: WorkQueue, item: QueueItem, *rest: Any) -> Delivery:
        delivery = hold(self, item, *rest)
        item.deliveries -= 1
        return delivery

    def counted(self: WorkQueue, item: QueueItem, now_ms: int) -> None:
        item.deliveries += not item.suspect
        give_back(self, item, now_ms)

    def is_held_as(self: QueueItem, holder: Holder, delivery: int, now: float) -> bool:
        in_time = self.lock_until is None or now < self.lock_until
        return self.holder == holder and self.deliveries == delivery - 1 and in_time

    patch.setattr(WorkQueue, "hold", uncounted)
    patch.setattr(WorkQueue, "give_back", counted)
    patch.setattr(QueueItem, "is_held_as", is_held_as)


def fence_ignores_the_delivery(patch: Patch) -> None:
    """A transaction that lost its item and took it again commits the delivery it lost."""

    def is_held_as(self: QueueItem, holder: Holder, delivery: int, now: float) -> bool:
        in_time = self.lock_until is None or now < self.lock_until
        return self.holder == holder and in_time

    held_items = MemoryQueues._held_items

    def once_each(self: MemoryQueues, holder: Holder, held: Sequence[Held]) -> Any:
        return held_items(self, holder, {each.id: each for each in reversed(held)}.values())

    patch.setattr(QueueItem, "is_held_as", is_held_as)
    patch.setattr(MemoryQueues, "_held_items", once_each)


def fence_ignores_the_holder(patch: Patch) -> None:
    def is_held(self: MemoryQueues, holder: Holder, held: Held, item: QueueItem) -> bool:
        return item.holder is not None

    patch.setattr(MemoryQueues, "_is_held", is_held)


def fence_ignores_the_deadline(patch: Patch) -> None:
    def is_held_as(self: QueueItem, holder: Holder, delivery: int, now: float) -> bool:
        return self.holder == holder and self.deliveries == delivery

    patch.setattr(QueueItem, "is_held_as", is_held_as)


def locks_survive_their_session(patch: Patch) -> None:
    patch.setattr(MemoryQueues, "_reap", lambda self, queue: None)


def key_locks_the_item(patch: Patch) -> None:
    """What is in hand holds up nobody: the next one of its key is shown."""

    def settle_key_order(self: WorkQueue, key_order: str, now_ms: int) -> None:
        for number in self.key_orders.get(key_order, []):
            item = self.items[number]
            if item.state is ItemState.WAITING:
                self._show(item, now_ms)

    patch.setattr(WorkQueue, "settle_key_order", settle_key_order)


def unanswered_take_is_forgotten(patch: Patch) -> None:
    ask, release = HeldItems._ask, HoldSession.release

    def forget(self: HeldItems, question: Callable[[], Any]) -> Any:
        if isinstance(answer := ask(self, question), list):
            raise OutcomeUnknown("nobody knows")
        return answer

    patch.setattr(HeldItems, "_ask", forget)
    patch.setattr(
        HoldSession, "release", lambda self, given: release(self, given._replace(doubts=()))
    )


def no_answer_is_success(patch: Patch) -> None:
    patch.setattr(HeldItems, "was_applied", lambda self, unit: True)


def no_answer_is_failure(patch: Patch) -> None:
    patch.setattr(HeldItems, "was_applied", lambda self, unit: False)


def never_is_not_final(patch: Patch) -> None:
    """Reads that a unit was not done, and lets it come later."""
    outcome = MemoryQueues.outcome

    def for_now(self: MemoryQueues, session: str, unit: str) -> Outcome:
        known = unit in self._outcomes[session]
        found = outcome(self, session, unit)
        if not known:
            self._outcomes[session].pop(unit, None)
        return found

    patch.setattr(MemoryQueues, "outcome", for_now)


def late_takes_hold(patch: Patch) -> None:
    patch.setattr(
        MemoryQueues, "held", lambda self, queue, holder, unit: held_in(self, queue, holder)
    )


def evidence_is_a_ring(patch: Patch) -> None:
    """Only a session's latest units are remembered: one in doubt may be older."""
    remember = MemoryQueues._remember

    def the_latest(self: MemoryQueues, change: QueueChange) -> None:
        remember(self, change)
        units = self._outcomes[change.holder.session]
        while len(units) > 1:
            del units[next(iter(units))]

    patch.setattr(MemoryQueues, "_remember", the_latest)


def begun_is_done(patch: Patch) -> None:
    """Believes that what was sent was done, as a server does that gives a number out twice."""
    patch.setattr(MemoryQueues, "outcome", lambda self, session, unit: Outcome.DONE)


def number_is_given_out_again(patch: Patch) -> None:
    """Evidence by a number that the store counts itself, as `pg_xact_status` gives it.

    A unit would get the next one. If it is lost with the server, whoever commits next gets that
    number, and the unit counts as done.
    """
    apply, place, outcome = FaultyQueues.apply, MemoryQueues.place, MemoryQueues.outcome
    last: WeakKeyDictionary[MemoryQueues, int] = WeakKeyDictionary()
    sent: WeakKeyDictionary[MemoryQueues, dict[Holder, int]] = WeakKeyDictionary()

    def send(self: FaultyQueues, change: QueueChange) -> list[int | None]:
        observed: Any = self._inner
        unit = Holder(change.holder.session, change.unit)
        sent.setdefault(observed._inner, {})[unit] = last.get(observed._inner, 0) + 1
        numbers: list[int | None] = apply(self, change)
        return numbers

    def count(self: MemoryQueues, change: QueueChange) -> list[int | None]:
        last[self] = last.get(self, 0) + 1
        return place(self, change)

    def by_number(self: MemoryQueues, session: str, unit: str) -> Outcome:
        number = sent.get(self, {}).get(Holder(session, unit))
        if number is not None and number <= last.get(self, 0):
            return Outcome.DONE
        return outcome(self, session, unit)

    patch.setattr(FaultyQueues, "apply", send)
    patch.setattr(MemoryQueues, "place", count)
    patch.setattr(MemoryQueues, "outcome", by_number)


def interrupted_is_failure(patch: Patch) -> None:
    """A doubt is noted only where the store said that it does not know."""
    commit = UnitOfWork._commit

    def forgetful(self: UnitOfWork) -> None:
        try:
            commit(self)
        except Interrupted:
            self._in_doubt = False
            raise

    patch.setattr(UnitOfWork, "_commit", forgetful)


def interrupted_goes_on(patch: Patch) -> None:
    """More is taken and put in a transaction whose commit was interrupted, and done."""
    require_open = UnitOfWork._require_open

    def careless(self: UnitOfWork) -> None:
        doubt, self._in_doubt = self._in_doubt, False
        try:
            require_open(self)
        finally:
            self._in_doubt = doubt

    patch.setattr(UnitOfWork, "_require_open", careless)


def rollback_leaves_it_on_its_way(patch: Patch) -> None:
    """What was interrupted, and then rolled back, may still come."""
    release = UnitOfWork._release

    def careless(self: UnitOfWork, error: str) -> None:
        self._in_doubt = False
        release(self, error)

    patch.setattr(UnitOfWork, "_release", careless)


def dropped_stays_locked(patch: Patch) -> None:
    patch.setattr(HoldSession, "give_back", lambda self, given: None)


def rollback_gives_up(patch: Patch) -> None:
    """A store that is away keeps what it was to be told."""
    release = HoldSession.release

    def once(self: HoldSession, given: GivenBack) -> bool:
        release(self, given)
        return True

    patch.setattr(HoldSession, "release", once)


def suspects_are_forgiven(patch: Patch) -> None:
    """What dies with its holder costs no delivery."""
    reap = MemoryQueues._reap

    def forgiving(self: MemoryQueues, queue: WorkQueue) -> None:
        held = [queue.items[number] for number in queue.held]
        reap(self, queue)
        for item in held:
            if item.suspect and item.holder is None:
                item.deliveries = 0

    patch.setattr(MemoryQueues, "_reap", forgiving)


def puts_are_not_atomic(patch: Patch) -> None:
    """What was handled is removed; what it put is lost with the answer."""
    place = MemoryQueues.place

    def half(self: MemoryQueues, change: QueueChange) -> list[int | None]:
        numbers = place(self, change)
        if change.remove and change.put:
            found = self._queues[change.put[0].queue]
            item = found.items[numbers[0] or 0]
            found.remove(item, 0)
        return numbers

    patch.setattr(MemoryQueues, "place", half)


NO_ANSWERS = Rates(unknown_applied=0.2, unknown_lost=0.2, unknown_late=0.2, longest_delay=1.0)
INTERRUPTED = Rates(interrupted=0.3, longest_delay=5.0)
AWAY = Rates(unavailable=0.3, busy=0.2)
BRIEF = {"q0": QueuePlan(fifo=False, keys=0, retry=AT_ONCE, lock_for=1.0)}
TWICE = {"q0": QueuePlan(fifo=False, keys=0, retry=Backoff(first=0.0, attempts=2), lock_for=None)}

MUTANTS = [
    Mutant(counted_after_the_hand_out, r"counts as|handed out", {"queues": TWICE, "trouble": 2.0}),
    Mutant(fence_ignores_the_delivery, r"as delivery|done twice", {"queues": BRIEF}),
    Mutant(fence_ignores_the_holder, r"holds it|done twice|two living hands"),
    Mutant(fence_ignores_the_deadline, r"holds it", {"queues": BRIEF}),
    Mutant(locks_survive_their_session, r"no rest", {"trouble": 2.0}),
    Mutant(key_locks_the_item, r"before", {"queues": {"q0": KEYED}}),
    Mutant(unanswered_take_is_forgotten, r"no rest", {"rates": NO_ANSWERS}),
    Mutant(no_answer_is_success, r"nothing was committed", {"rates": NO_ANSWERS}),
    Mutant(no_answer_is_failure, r"was done|put twice", {"rates": NO_ANSWERS}),
    Mutant(never_is_not_final, r"was done|put twice|more than once", {"rates": NO_ANSWERS}),
    Mutant(late_takes_hold, r"no rest", {"rates": NO_ANSWERS}),
    Mutant(evidence_is_a_ring, r"was done|put twice", {"rates": INTERRUPTED}),
    Mutant(interrupted_is_failure, r"was done|put twice|given up", {"rates": INTERRUPTED}),
    Mutant(interrupted_goes_on, r"no rest|lost|was done", {"rates": INTERRUPTED}),
    Mutant(rollback_leaves_it_on_its_way, r"given up", {"rates": INTERRUPTED}),
    Mutant(
        number_is_given_out_again,
        r"nothing was committed|lost",
        {"rates": Rates(unknown_lost=0.2), "workers": 4, "interleave": 0.2},
    ),
    Mutant(begun_is_done, r"nothing was committed", {"rates": NO_ANSWERS}),
    Mutant(dropped_stays_locked, r"no rest"),
    Mutant(rollback_gives_up, r"no rest", {"rates": AWAY}),
    Mutant(suspects_are_forgiven, r"counts as|handed out", {"queues": TWICE, "trouble": 2.0}),
    Mutant(puts_are_not_atomic, r"lost"),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(Broken, match=mutant.words):
        for seed in range(SEEDS):
            run(msgspec.structs.replace(draw(seed), **mutant.plan))
