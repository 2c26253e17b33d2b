"""Stores that fail: a seeded wrapper over any backend, for tests of code that uses one.

```python
faults = Faults(Random(7), clock, Rates(unknown_applied=0.05, unavailable=0.05))
stores = FaultyStores(MemoryStores(clock=clock), faults, who="a")
faults.cut_off("a", until=clock.monotonic() + 30)
```

One `Faults` decides for all users of the store; each gets a wrapper with its own name, so that one
of them can be cut off. What can go wrong:

- a commit is done, and answered with `OutcomeUnknown`;
- a commit is not done, and answered with `OutcomeUnknown`, `StoreUnavailable` or `StoreBusy`;
- a commit is answered with `OutcomeUnknown` and done later, if its checks still hold then;
- a caller is interrupted while it commits or takes something, which is done, not done, or done
  later;
- the same for every call that changes a queue: `take`, `extend`, `apply` and `release`;
- the same for a transaction. One that is on its way holds its locks, and another commit
  of the same records waits until it has arrived; or it holds none, and may be overtaken;
- the same for each batch of an append by itself, or there is no room for it (`StoreFull`);
- reads and renewals fail;
- all users, or one, can't reach the store for a while; or it crashes, and what was on its way
  is lost;
- wake-ups are lost, or come late.

Each class below defines which faults the calls of its seam can have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.errors import (
    OutcomeUnknown,
    PxrsError,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.api import Atomic, CoordStore, LogStore, QueueStore, Session, Stores, Watch
from pxrs.testing.forwarding import Forwarding
from pxrs.types import Append, Appended, Check, Holder, LogPartition, Write


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of faults, each as a probability per call.

    `unknown_late` commits arrive up to `longest_delay` seconds later. `unlocked`: how many of the
    transactions among them have not reached the store at all, so that no commit waits for them.
    `interrupted` commits are done, not done, or done later, and their caller gets `Interrupted`
    instead of an answer. `full` applies to each batch of an append.
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
    """Raised in the middle of a call, as the signal handler of Ctrl-C does."""


class Faults:
    """Decides what fails.

    `before_call` is called before every call, `no_answer` with the keys of every commit whose
    outcome stays unknown to its caller. `interruptible` returns whether a signal can reach the
    thread of the current call; always, by default.
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
        self.interruptible = interruptible
        # Until when each user is cut off; None stands for all.
        self._cut_off: dict[str | None, float] = {}
        self._late: list[_Late] = []

    def cut_off(self, who: str | None, until: float) -> None:
        """Cut one user, or all with None, off from the store until then."""
        self._cut_off[who] = max(self._cut_off.get(who, until), until)

    def crash(self, until: float) -> None:
        """Let the store die; it can be reached again at that time.

        Everything that was on its way was not flushed, and is undone. What was answered is flushed,
        and no call reads what is not, so a commit that the crash undoes looks like one that was
        lost (`Rates.unknown_lost`). Numbers that a store gives out by itself may be given out once
        more after that: they prove nothing.
        """
        self._late.clear()
        self.cut_off(None, until)

    def heal(self) -> None:
        """Cause no faults from now on; commits that are still on their way arrive now."""
        self.rates = NOTHING
        self._cut_off.clear()
        for late in self._take_late(lambda late: True):
            late.arrive()

    def arrive(self) -> None:
        """Do the late commits whose time has come."""
        now = self.clock.monotonic()
        if self._late:
            for late in self._take_late(lambda late: late.at <= now):
                late.arrive()

    def call(self, who: str, what: str, rate: float = 0.0) -> None:
        """Begin a call; raises if it does not get through."""
        if self.before_call is not None:
            self.before_call(who, what)
        self.arrive()
        now = self.clock.monotonic()
        if now < self._cut_off.get(None, now) or now < self._cut_off.get(who, now):
            raise StoreUnavailable(f"{who} can't reach the store ({what})")
        if self.happens(rate):
            raise StoreUnavailable(f"{what} failed")

    def happens(self, rate: float) -> bool:
        """Draw whether something with this rate happens now."""
        return rate > 0 and self.rng.random() < rate

    def meet(self, sent: Sent, fates: Iterable[Fate]) -> None:
        """Draw these fates of a change, in order, before it is done. Raises if it fails."""
        for fate in fates:
            fate(self, sent)

    def make(self, sent: Sent, fates: Iterable[Fate]) -> Any:
        """Make a change that may meet these fates; its answer may be lost afterwards."""
        self.meet(sent, fates)
        result = sent.do()
        if self.happens(self.rates.unknown_applied):
            raise self.unknown(sent.who, f"the answer to {sent.name} was lost", sent.writes)
        return result

    def unknown(self, who: str, why: str, writes: Sequence[Write]) -> OutcomeUnknown:
        """The error for a commit that gets no answer."""
        if self._no_answer is not None:
            self._no_answer(who, why, [write.key for write in writes])
        return OutcomeUnknown(f"no answer came ({why})")

    def put_off(self, sent: Sent) -> None:
        """Do it later. Until then commits wait for the records that it has locked, if any."""
        is_there = bool(sent.locks) and not self.happens(self.rates.unlocked)
        delay = self.rng.random() * self.rates.longest_delay
        locked = frozenset(sent.locks if is_there else ())
        self._late.append(_Late(self.clock.monotonic() + delay, sent.do, sent.unit, locked))

    def wait_out(self, unit: Holder) -> None:
        """Let the unit arrive because a caller asks for it, or later: then the store refuses it."""
        if self.rng.random() < 0.5:
            for late in self._take_late(lambda late: late.unit == unit):
                late.arrive()

    def wait_for_locks(self, keys: Iterable[str]) -> None:
        """Let late commits arrive that have locked one of these records."""
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
        """Do it, if the store still accepts it; the answer is lost."""
        try:
            self.commit()
        except PxrsError:
            return


class Sent(NamedTuple):
    """A change on its way to the store: `what` is the call, `name` its name for people.

    `keys`: the records that it concerns; `locks`: those that it has locked while it is late.
    """

    who: str
    what: str
    name: str
    do: Callable[[], Any]
    unit: Holder | None = None
    writes: Sequence[Write] = ()
    keys: Collection[str] = ()
    locks: Collection[str] = ()


# What may happen to a change before it is done: a fate raises, or lets it pass.
Fate = Callable[[Faults, Sent], None]


def _refused(rate: str, error: type[PxrsError], why: str) -> Fate:
    def refused(faults: Faults, sent: Sent) -> None:
        if faults.happens(getattr(faults.rates, rate)):
            raise error(why)

    return refused


_busy = _refused("busy", StoreBusy, "another process is writing")
_in_the_way = _refused("busy", TransactionConflict, "another transaction was in the way")
_full = _refused("full", StoreFull, "there is no room for the batch")
_away = _refused("unavailable", StoreUnavailable, "the partition can't be reached")


def _lost(faults: Faults, sent: Sent) -> None:
    if faults.happens(faults.rates.unknown_lost):
        raise faults.unknown(sent.who, f"{sent.name} was lost", sent.writes)


def _late(faults: Faults, sent: Sent) -> None:
    if faults.happens(faults.rates.unknown_late):
        faults.put_off(sent)
        raise faults.unknown(sent.who, f"{sent.name} is on its way", sent.writes)


def _interrupted(faults: Faults, sent: Sent) -> None:
    """Interrupt the caller; the change is done, done later or not at all."""
    if faults.interruptible(sent.who) and faults.happens(faults.rates.interrupted):
        fate = faults.rng.random()
        if fate < 1 / 3:
            sent.do()
        elif fate < 2 / 3:
            faults.put_off(sent)
        faults.unknown(sent.who, f"{sent.what} is interrupted", sent.writes)
        raise Interrupted(sent.what)


def _waits(faults: Faults, sent: Sent) -> None:
    faults.wait_for_locks(sent.keys)


class _Faulty(Forwarding):
    """One user's way to a store, a session or a watch that fails now and then.

    `reads` and `writes` name the calls of the seam that merely don't get through now and then.
    Calls that are not named, and not defined by the class, never fail.
    """

    def __init__(self, inner: Any, faults: Faults, who: str = "") -> None:
        super().__init__(inner)
        self._faults = faults
        self._who = who

    def __init_subclass__(
        cls,
        seam: type | None = None,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
    ) -> None:
        for name in reads:
            setattr(cls, name, _failing(name, "reads"))
        for name in writes:
            setattr(cls, name, _failing(name, "unavailable"))
        super().__init_subclass__(seam)


def _failing(
    name: str,
    rate: str | None = None,
    what: str = "",
    *,
    wrap: type[_Faulty] | None = None,
    unit: Callable[..., Holder] | None = None,
) -> Any:
    """A method that does not get through now and then; its result is wrapped, and may fail, too.

    `unit`: returns the unit that the call asks about, which may be on its way.
    """

    def method(self: _Faulty, *args: Any, **named: Any) -> Any:
        faults = self._faults
        often = 0.0 if rate is None else getattr(faults.rates, rate)
        faults.call(self._who, (what or name).format(*args, *named.values()), often)
        if unit is not None:
            faults.wait_out(unit(*args, **named))
        result = getattr(self._inner, name)(*args, **named)
        return result if wrap is None else wrap(result, faults, self._who)

    return method


def _changing(
    name: str, fates: Sequence[Fate], about: Callable[..., Mapping[str, Any]], words: str = ""
) -> Any:
    """A method that changes the store; `about` returns the other fields of `Sent`."""

    def method(self: _Faulty, *args: Any, **named: Any) -> Any:
        self._faults.call(self._who, name, self._faults.rates.unavailable)
        do = partial(getattr(self._inner, name), *args, **named)
        sent = Sent(self._who, name, words or name, do, **about(*args, **named))
        return self._faults.make(sent, fates)

    return method


class FaultyWatch(_Faulty, seam=Watch):
    """A `Watch` that loses wake-ups, or reports them one wait late."""

    _owed = False

    def wait(self, timeout: float | None = None) -> bool:
        woken, self._owed = self._owed, False
        if self._inner.wait(0 if woken else timeout):
            rates = self._faults.rates
            self._owed = self._faults.happens(rates.wake_late)
            woken = woken or not (self._owed or self._faults.happens(rates.wake_lost))
        return woken


class FaultySession(_Faulty, seam=Session):
    """A `Session` whose renewals fail now and then, some of them after they were done."""

    def __init__(self, inner: Session, faults: Faults, who: str) -> None:
        super().__init__(inner, faults, who)
        self._safe_until = faults.clock.monotonic() + inner.remaining()

    def renew(self) -> None:
        faults, sent = self._faults, self._faults.clock.monotonic()
        faults.call(self._who, "renew", faults.rates.renewals)
        self._inner.renew()
        if faults.happens(faults.rates.renewals):
            raise StoreUnavailable("renewed, but no answer came")
        self._safe_until = max(self._safe_until, sent + self.ttl)

    def remaining(self) -> float:
        left = self._safe_until - self._faults.clock.monotonic()
        kept: float = self._inner.remaining()
        return max(0.0, min(left, kept))

    close = _failing("close", "unavailable", "close the session")


class FaultyCoord(_Faulty, seam=CoordStore):
    """A `CoordStore` that fails now and then."""

    get = _failing("get", "reads", "get {}")
    list = _failing("list", "reads", "list {}")
    watch = _failing("watch", wrap=FaultyWatch)
    session = _failing("session", "unavailable", "open a session", wrap=FaultySession)
    commit = _changing(
        "commit",
        (_busy, _lost, _late, _interrupted, _waits),
        lambda checks, writes: {
            "writes": writes,
            "keys": [each.key for each in (*checks, *writes)],
        },
        "the commit",
    )


def _unit(holder: Holder, unit: str) -> Holder:
    return Holder(holder.session, unit)


_CHANGE = (_busy, _lost, _late)
# Calls that a program makes by itself. The others are also made by threads, which no signal meets.
_CALLED = (_busy, _interrupted, _lost, _late)


class FaultyQueues(
    _Faulty,
    seam=QueueStore,
    reads=(
        "create", "find", "all", "delete", "reap", "stats", "peek", "drop", "redrive", "purge",
    ),
):  # fmt: skip
    """A `QueueStore` that fails now and then."""

    take = _changing(
        "take",
        _CALLED,
        lambda queue, holder, count, *, unit="", **_: {"unit": _unit(holder, unit)},
    )
    apply = _changing("apply", _CALLED, lambda change: {"unit": _unit(change.holder, change.unit)})
    extend = _changing("extend", _CHANGE, lambda holder, held, lock_for: {"unit": holder})
    release = _changing("release", _CHANGE, lambda holder, releases: {"unit": holder})
    # From `ItemRestorer`; exists only if the inner store is one.
    restore = _changing("restore", _CHANGE, lambda queue, items: {"unit": Holder("", "restore")})
    held = _failing("held", "reads", unit=lambda queue, holder, unit: _unit(holder, unit))
    outcome = _failing("outcome", "reads", unit=Holder)
    watch = _failing("watch", "reads", wrap=FaultyWatch)


class FaultyLog(
    _Faulty,
    seam=LogStore,
    reads=("fetch", "bounds", "size", "batch_at"),
    writes=("create", "drop", "trim", "expire"),
):
    """A `LogStore` that fails now and then, each batch of an append by itself."""

    watch = _failing("watch", "reads", wrap=FaultyWatch)

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        faults = self._faults
        faults.call(self._who, "append", faults.rates.unavailable)
        some = Sent(
            self._who, "append", "append", lambda: self._inner.append(self._some_of(appends))
        )
        faults.meet(some, (_interrupted,))
        held_up: set[LogPartition] = set()
        results: list[Appended | PxrsError] = []
        for append in appends:
            if append.where in held_up:
                results.append(StoreUnavailable("not sent: the batch before it still waits"))
                continue
            result = self._append_one(append)
            if isinstance(result, PxrsError) and (
                result.retryable or isinstance(result, OutcomeUnknown)
            ):
                held_up.add(append.where)
            results.append(result)
        return results

    def _some_of(self, appends: Sequence[Append]) -> list[Append]:
        """Returns the appends that were sent before an interrupt: the first of each partition."""
        ends = {where: self._faults.rng.random() < 0.5 for where, _ in appends}
        sent = []
        for append in appends:
            ends[append.where] = ends[append.where] or self._faults.rng.random() < 0.3
            if not ends[append.where]:
                sent.append(append)
        return sent

    def _append_one(self, append: Append) -> Appended | PxrsError:
        """Append one batch; returns its offset, or the error if this one fails."""

        def do() -> Appended:
            answer: Appended | PxrsError
            (answer,) = self._inner.append([append])
            if isinstance(answer, PxrsError):
                raise answer
            return answer

        sent = Sent(self._who, "append", "the batch", do)
        try:
            appended: Appended = self._faults.make(sent, (_full, _away, _lost, _late))
        except PxrsError as error:
            # The frames would keep all that they see as long as the error is kept.
            return error.with_traceback(None)
        return appended


class FaultyAtomic(_Faulty, seam=Atomic):
    """An `Atomic` that fails when it begins or when it commits.

    A late transaction holds its locks until it is done, and other commits of the same records wait
    for it; or it has not reached the store yet, and holds none. A commit may be interrupted: before
    it is done, after that, or while it is on its way.
    """

    def __init__(
        self, inner: AbstractContextManager[Atomic], faults: Faults, who: str = ""
    ) -> None:
        # Replaced by the result of entering the block.
        super().__init__(inner, faults, who)
        self._block = inner
        self._left = False
        self._keys: set[str] = set()
        self._writes: list[Write] = []

    def check(self, *checks: Check) -> None:
        self._keys.update(check.key for check in checks)
        self._inner.check(*checks)

    def write(self, *writes: Write) -> None:
        self._keys.update(write.key for write in writes)
        self._writes += writes
        self._inner.write(*writes)

    def __enter__(self) -> FaultyAtomic:
        faults = self._faults
        faults.call(self._who, "begin", faults.rates.unavailable)
        faults.meet(self._sent(), (_busy,))
        self._inner = self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # A change that is on its way already can't be stopped by its sender.
            if not self._left:
                self._block.__exit__(kind, error, trace)
            return
        faults, sent, self._left = self._faults, self._sent(), True
        try:
            faults.call(self._who, sent.what, faults.rates.unavailable)
            faults.meet(sent, (_in_the_way, _lost, _waits))
        except BaseException as failure:
            self._block.__exit__(type(failure), failure, failure.__traceback__)
            raise
        faults.make(sent, (_interrupted, _late))

    def _sent(self) -> Sent:
        return Sent(
            self._who,
            "commit the transaction",
            "the transaction",
            lambda: self._block.__exit__(None, None, None),
            writes=self._writes,
            keys=self._keys,
            locks=self._keys,
        )


class FaultyStores(Forwarding, seam=Stores):
    """`Stores` that fail now and then."""

    def __init__(self, inner: Stores, faults: Faults, who: str = "") -> None:
        super().__init__(inner)
        self._faults = faults
        self._who = who
        self.coord = FaultyCoord(inner.coord, faults, who)
        self.log = FaultyLog(inner.log, faults, who)
        self.queues = FaultyQueues(inner.queues, faults, who)

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        return FaultyAtomic(self._inner.atomic(connection), self._faults, self._who)
