"""The protocol that the author of a backend implements, and how checks are collected and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from pxrs.errors import PxrsError, SessionLost
from pxrs.stores.api import LogStore, Session, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyLog, Rates
from pxrs.types import Append, Appended, Put


class Lab(Protocol):
    """One empty place for data, made anew for every check."""

    @property
    def ttl(self) -> float:
        """A session TTL, in seconds, that is short enough to wait for."""
        ...

    @property
    def patience(self) -> float:
        """Seconds after which a check gives up waiting for something that must happen: 10, say."""
        ...

    def open(self) -> Stores:
        """Another handle on the same data, as another process would have; the lab closes it.

        A backend that lives in one process may give the same object every time.
        """
        ...

    def let_expire(self, session: Session) -> None:
        """Return as soon as the session's TTL is over, by the store's clock.

        On real time `await_end` does it.
        """
        ...

    def close(self) -> None:
        """Close the handles and remove the data."""
        ...


FailingAppend = Callable[[Sequence[Append]], list[Appended | PxrsError]]


@runtime_checkable
class FailingLab(Protocol):
    """A `Lab` that can let appends fail. `doubt_checks` need one."""

    @property
    def failing_appends(self) -> Sequence[FailingAppend]:
        """Ways to call `LogStore.append` while something goes wrong, each with its own handle.

        The answer is lost, the request, or the connection; the store is busy, or away: at the
        first batch, at a later one, or for all. Each way returns or raises what the log does, and
        ends the fault when it returns. Requests that were held up on their way may arrive later.
        """
        ...


Rule = Callable[[Lab], None]


class Patient(Protocol):
    """Any lab: it knows how long to wait, and is closed after its check."""

    @property
    def patience(self) -> float:
        """Seconds after which a check gives up waiting for something that must happen: 10, say."""
        ...

    def close(self) -> None:
        """Close the handles and remove the data."""
        ...


AnyLab = TypeVar("AnyLab", bound=Patient)


class Violation(AssertionError):  # noqa: N818 - a finding about a backend
    """A backend broke a rule."""


class Failure(NamedTuple):
    """A check that failed, the rule it stands for and what went wrong."""

    check: str
    rule: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.check}: {self.error!r} ({self.rule})"


def checks_of(*modules: ModuleType) -> tuple[Callable[[Any], None], ...]:
    """The functions of these modules whose names begin with `check_`, in source order."""
    return tuple(
        check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_")
    )


def run_suite(
    checks: Iterable[Callable[[AnyLab], None]], new_lab: Callable[[], AnyLab]
) -> list[Failure]:
    """Run every check in a lab of its own; returns the failures, none if the backend conforms."""
    failures = []
    for check in checks:
        lab = new_lab()
        try:
            check(lab)
        except Exception as error:  # noqa: BLE001 - any error of a backend is a finding
            failures.append(Failure(check.__name__, (check.__doc__ or "").strip(), error))
        finally:
            lab.close()
    return failures


def await_end(stores: Stores, session: Session, patience: float) -> None:
    """Block until a record bound to the session is gone, woken by a watch."""
    marker = f"lab/ends/{session.id}"
    watch = stores.coord.watch(marker)
    try:
        stores.coord.commit((), (Put(marker, b"", session.id),))
        while stores.coord.get(marker) is not None:
            if not watch.wait(session.ttl + patience):
                raise Violation(f"session {session.id} did not end within its TTL")
    except SessionLost:
        return
    finally:
        watch.close()


_TROUBLE = (
    Rates(unknown_applied=0.4),
    Rates(unknown_lost=0.4),
    Rates(unknown_late=0.4),
    Rates(unavailable=0.3),
    Rates(unknown_applied=0.2, unknown_lost=0.2, unknown_late=0.2, unavailable=0.1),
)
_TRIES = 4


class MemoryLab:
    """The lab of the memory backend, and of anything that can be built with a clock.

    Nothing fails in memory: `failing` wraps the log for the appends that have to fail.
    """

    ttl = 10.0

    def __init__(
        self,
        new_stores: Callable[[VirtualClock], Stores] | None = None,
        patience: float = 10.0,
        failing: Callable[[LogStore, Faults], LogStore] = FaultyLog,
    ) -> None:
        self.patience = patience
        self._failing = failing
        self._clock = VirtualClock()
        make = new_stores or (lambda clock: MemoryStores(clock=clock))
        self._stores = make(self._clock)

    def open(self) -> Stores:
        return self._stores

    def let_expire(self, session: Session) -> None:
        self._clock.advance(session.ttl)

    @property
    def failing_appends(self) -> Sequence[FailingAppend]:
        return [partial(self._append, rates, seed) for rates in _TROUBLE for seed in range(_TRIES)]

    def _append(
        self, rates: Rates, seed: int, appends: Sequence[Append]
    ) -> list[Appended | PxrsError]:
        faults = Faults(Random(seed), self._clock, rates)
        outcomes = self._failing(self._stores.log, faults).append(appends)
        if seed % 2:
            faults.heal()  # Late batches arrive now; otherwise they never would.
        return outcomes

    def close(self) -> None:
        self._stores.close()
