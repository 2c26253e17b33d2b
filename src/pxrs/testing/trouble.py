"""What goes wrong with a store, decided by chance or by a test. See `pxrs.testing.faults`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.errors import OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.stores.api import Watch
from pxrs.types import Holder, Write


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How often what goes wrong, each as a probability per call.

    `unknown_late` commits arrive up to `longest_delay` seconds later. `unlocked`: how many of the
    transactions among them have not reached the store at all, so that nobody waits for them.
    `interrupted` commits are done, not done, or done later, and whoever waited for the answer got
    `Interrupted` instead. `full`: of the batches of an append.
    """

    unknown_applied: float = 0.0
    unknown_lost: float = 0.0
    unknown_late: float = 0.0
    unlocked: float = 0.0
    interrupted: float = 0.0
    unavailable: float = 0.0
    busy: float = 0.0
    full: float = 0.0
    reads: float = 0.0
    renewals: float = 0.0
    wake_lost: float = 0.0
    wake_late: float = 0.0
    longest_delay: float = 5.0


NOTHING = Rates()


class Interrupted(BaseException):
    """What a signal's handler raises in the middle of a call, as Ctrl-C does."""


class Faults:
    """Decides what fails.

    `before_call` is told of every call before it is made, `no_answer` of the keys of every
    commit whose outcome stays unknown to its caller. `interruptible` says whether a signal can
    meet the thread in which somebody calls right now; always, by default.
    """

    def __init__(
        self,
        rng: Random,
        clock: Clock,
        rates: Rates = NOTHING,
        before_call: Callable[[str, str], None] | None = None,
        no_answer: Callable[[str, str, Sequence[str]], None] | None = None,
        interruptible: Callable[[str], bool] = lambda who: True,
    ) -> None:
        self.rng = rng
        self.clock = clock
        self.rates = rates
        self.before_call = before_call
        self._no_answer = no_answer
        self._interruptible = interruptible
        self._cut_off: dict[str, float] = {}
        self._all_cut_off = 0.0
        self._late: list[_Late] = []

    def cut_off(self, who: str | None, until: float) -> None:
        """Let nobody, or not this one, reach the store until then."""
        if who is None:
            self._all_cut_off = max(self._all_cut_off, until)
        else:
            self._cut_off[who] = max(self._cut_off.get(who, until), until)

    def crash(self, until: float) -> None:
        """The store dies, and can be reached again at that time.

        What was not flushed is undone: all that was on its way. What was answered is flushed, and
        nobody reads what is not, so a commit that the crash undoes looks like one that was lost
        (`Rates.unknown_lost`). Numbers that a store gives out by itself may then be given out once
        more: they prove nothing.
        """
        self._late.clear()
        self.cut_off(None, until)

    def heal(self) -> None:
        """No faults from now on; commits that are still on their way arrive now."""
        self.rates = NOTHING
        self._cut_off.clear()
        self._all_cut_off = 0.0
        for late in self._take_late(lambda late: True):
            late.arrive()

    def arrive(self) -> None:
        """Do the late commits whose time has come."""
        now = self.clock.monotonic()
        if self._late:
            for late in self._take_late(lambda late: late.at <= now):
                late.arrive()

    def call(self, who: str, what: str, rate: float = 0.0) -> None:
        """Before a call: raises if it does not get through."""
        if self.before_call is not None:
            self.before_call(who, what)
        self.arrive()
        now = self.clock.monotonic()
        if now < self._all_cut_off or now < self._cut_off.get(who, now):
            raise StoreUnavailable(f"{who} can't reach the store ({what})")
        if self.happens(rate):
            raise StoreUnavailable(f"{what} failed")

    def happens(self, rate: float) -> bool:
        """Whether something that happens so often happens now."""
        return rate > 0 and self.rng.random() < rate

    def interrupt(
        self,
        who: str,
        what: str,
        change: Callable[[], object],
        unit: Holder | None = None,
        writes: Sequence[Write] = (),
        locking: Collection[str] = (),
    ) -> None:
        """Now and then: the caller is interrupted, and what was sent may be done or not."""
        if not self._interruptible(who) or not self.happens(self.rates.interrupted):
            return
        fate = self.rng.random()
        if fate < 1 / 3:
            change()
        elif fate < 2 / 3:
            is_there = bool(locking) and not self.happens(self.rates.unlocked)
            self.put_off(change, unit, locking if is_there else ())
        self.unknown(who, f"{what} is interrupted", writes)
        raise Interrupted(what)

    def unknown(self, who: str, why: str, writes: Sequence[Write]) -> OutcomeUnknown:
        """The error for a commit that gets no answer."""
        if self._no_answer is not None:
            self._no_answer(who, why, [write.key for write in writes])
        return OutcomeUnknown(f"no answer came ({why})")

    def put_off(
        self,
        commit: Callable[[], object],
        unit: Holder | None = None,
        locking: Collection[str] = (),
    ) -> None:
        """Do the commit later; records that it has locked wait for it."""
        delay = self.rng.random() * self.rates.longest_delay
        at = self.clock.monotonic() + delay
        self._late.append(_Late(at, commit, unit, frozenset(locking)))

    def wait_out(self, unit: Holder) -> None:
        """Somebody asks after this unit. It arrives now, or later: then the store refuses it."""
        if self.rng.random() < 0.5:
            for late in self._take_late(lambda late: late.unit == unit):
                late.arrive()

    def wait_for_locks(self, keys: Iterable[str]) -> None:
        """Do what is on its way and has locked one of these records."""
        if any(late.locked for late in self._late):
            wanted = frozenset(keys)
            for late in self._take_late(lambda late: not late.locked.isdisjoint(wanted)):
                late.arrive()

    def _take_late(self, wanted: Callable[[_Late], bool]) -> list[_Late]:
        taken = [late for late in self._late if wanted(late)]
        self._late = [late for late in self._late if not wanted(late)]
        return sorted(taken, key=lambda late: late.at)


class _Late(NamedTuple):
    """A commit on its way."""

    at: float
    commit: Callable[[], object]
    unit: Holder | None
    locked: frozenset[str]

    def arrive(self) -> None:
        """Do it, if the store still takes it; nobody hears the answer."""
        try:
            self.commit()
        except PxrsError:
            return


class FaultyWatch:
    """A `Watch` that loses wake-ups, or tells of them one wait late."""

    def __init__(self, inner: Watch, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._owed = False

    def wait(self, timeout: float | None = None) -> bool:
        woken, self._owed = self._owed, False
        if self._inner.wait(0 if woken else timeout):
            rates = self._faults.rates
            self._owed = self._faults.happens(rates.wake_late)
            woken = woken or not (self._owed or self._faults.happens(rates.wake_lost))
        return woken

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()
