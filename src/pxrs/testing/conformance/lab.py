"""What the author of a backend brings to the suites, and how checks are collected and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from pxrs.errors import SessionLost
from pxrs.stores.api import Session, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.types import Put


class Lab(Protocol):
    """One empty place for data, made anew for every check."""

    @property
    def ttl(self) -> float:
        """A session TTL, in seconds, that is short enough to be waited for."""
        ...

    @property
    def patience(self) -> float:
        """Seconds after which what had to happen is taken not to have happened: 10, say."""
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


Rule = Callable[[Lab], None]


class Violation(AssertionError):  # noqa: N818 - a finding about a backend
    """A backend broke a rule."""


class Failure(NamedTuple):
    """A check that failed, the rule it stands for and what went wrong."""

    check: str
    rule: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.check}: {self.error!r} ({self.rule})"


class Suite:
    """Checks in the order in which they are written."""

    def __init__(self) -> None:
        self._checks: list[Rule] = []

    def __call__(self, check: Rule) -> Rule:
        """Register a check; its docstring is the rule."""
        self._checks.append(check)
        return check

    def checks(self) -> tuple[Rule, ...]:
        return tuple(self._checks)


def run_suite(checks: Iterable[Rule], new_lab: Callable[[], Lab]) -> list[Failure]:
    """Run every check in a lab of its own; what failed, nothing if the backend conforms."""
    failures = []
    for check in checks:
        lab = new_lab()
        try:
            check(lab)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding
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


class MemoryLab:
    """The lab of the memory backend, and of anything that can be built with a clock."""

    ttl = 10.0

    def __init__(
        self,
        new_stores: Callable[[VirtualClock], Stores] | None = None,
        patience: float = 10.0,
    ) -> None:
        self.patience = patience
        self._clock = VirtualClock()
        make = new_stores or (lambda clock: MemoryStores(clock=clock))
        self._stores = make(self._clock)

    def open(self) -> Stores:
        return self._stores

    def let_expire(self, session: Session) -> None:
        self._clock.advance(session.ttl)

    def close(self) -> None:
        self._stores.close()
