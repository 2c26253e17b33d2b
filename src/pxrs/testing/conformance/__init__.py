"""Suites that every backend has to pass, built-in or not.

With pytest:

```python
@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_coord(check):
    with closing(MyLab()) as lab:
        check(lab)
```

Without: `run_suite(coord_checks(), MyLab)` returns the checks that failed. A check's docstring is
the rule that it tests.
"""

from __future__ import annotations

from pxrs.testing.conformance import (
    atomic,
    coord,
    doubts,
    lent_sessions,
    log,
    queue_counts,
    queue_locks,
    queue_order,
    queue_outcomes,
    queue_restore,
    queue_wakes,
    queues,
    sessions,
    sources,
)
from pxrs.testing.conformance.lab import (
    FailingAppend,
    FailingLab,
    Failure,
    Lab,
    MemoryLab,
    Rule,
    Violation,
    await_end,
    checks_of,
    run_suite,
)
from pxrs.testing.conformance.sources import (
    HoldsRows,
    NewRow,
    SourceLab,
    SourceRule,
    SourceWriter,
    TrimsRows,
)

__all__ = [
    "Rule",
    "FailingAppend",
    "FailingLab",
    "Failure",
    "HoldsRows",
    "Lab",
    "MemoryLab",
    "NewRow",
    "SourceLab",
    "SourceRule",
    "SourceWriter",
    "TrimsRows",
    "Violation",
    "atomic_checks",
    "await_end",
    "coord_checks",
    "doubt_checks",
    "lent_session_checks",
    "log_checks",
    "queue_checks",
    "restore_checks",
    "run_suite",
    "source_checks",
    "wake_checks",
]


def coord_checks() -> tuple[Rule, ...]:
    """The checks of a `CoordStore`."""
    return checks_of(coord, sessions)


def lent_session_checks() -> tuple[Rule, ...]:
    """The checks of a `CoordStore` that also is a `LendsSessions`."""
    return checks_of(lent_sessions)


def log_checks() -> tuple[Rule, ...]:
    """The checks of a `LogStore`."""
    return checks_of(log)


def doubt_checks() -> tuple[Rule, ...]:
    """The checks of a `LogStore` in a `FailingLab`, whose appends fail or go unanswered."""
    return checks_of(doubts)


def queue_checks() -> tuple[Rule, ...]:
    """The checks of a `QueueStore`."""
    return checks_of(
        queues,
        queue_locks,
        queue_counts,
        queue_order,
        queue_outcomes,
        queue_wakes,
    )


def restore_checks() -> tuple[Rule, ...]:
    """The checks of an `ItemRestorer`: queues that can be filled from another store."""
    return checks_of(queue_restore)


def wake_checks() -> tuple[Rule, ...]:
    """The checks, of all three protocols, that depend on wake-ups and on noticing ended sessions.

    For another way to the same store: without notifications, by polling.
    """
    wakes = tuple(check for check in checks_of(log) if "wake" in check.__name__)
    return checks_of(sessions, queue_wakes) + wakes


def atomic_checks() -> tuple[Rule, ...]:
    """The checks of `Stores.atomic`, where a backend offers it."""
    return checks_of(atomic)


def source_checks() -> tuple[SourceRule, ...]:
    """The checks of a `Source`, each of which takes a `SourceLab`."""
    return checks_of(sources)
