"""Suites that every backend has to pass, ours and yours.

With pytest:

```python
@pytest.mark.parametrize("check", coord_checks(), ids=lambda check: check.__name__)
def test_coord(check):
    with closing(MyLab()) as lab:
        check(lab)
```

Without: `run_suite(coord_checks(), MyLab)` returns what failed. A check's docstring is the
rule it stands for.
"""

from __future__ import annotations

from pxrs.testing.conformance import (
    atomic,
    coord,
    doubts,
    log,
    producers,
    queue_counts,
    queue_locks,
    queue_order,
    queue_outcomes,
    queue_races,
    queue_refusals,
    queue_restore,
    queue_upkeep,
    queue_wakes,
    queues,
    retention,
    sessions,
    watches,
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
    run_suite,
)

__all__ = [
    "Rule",
    "FailingAppend",
    "FailingLab",
    "Failure",
    "Lab",
    "MemoryLab",
    "Violation",
    "atomic_checks",
    "await_end",
    "coord_checks",
    "doubt_checks",
    "log_checks",
    "queue_checks",
    "restore_checks",
    "run_suite",
    "wake_checks",
]


def coord_checks() -> tuple[Rule, ...]:
    """The checks of a `CoordStore`."""
    return coord.suite.checks() + sessions.suite.checks() + watches.suite.checks()


def log_checks() -> tuple[Rule, ...]:
    """The checks of a `LogStore`."""
    return log.suite.checks() + producers.suite.checks() + retention.suite.checks()


def doubt_checks() -> tuple[Rule, ...]:
    """The checks of a `LogStore` in a `FailingLab`, whose appends fail or go unanswered."""
    return doubts.suite.checks()


def queue_checks() -> tuple[Rule, ...]:
    """The checks of a `QueueStore`."""
    parts = (
        queues,
        queue_refusals,
        queue_locks,
        queue_counts,
        queue_order,
        queue_outcomes,
        queue_upkeep,
        queue_wakes,
        queue_races,
    )
    return tuple(check for part in parts for check in part.suite.checks())


def restore_checks() -> tuple[Rule, ...]:
    """The checks of an `ItemRestorer`: queues that can be filled from another store."""
    return queue_restore.suite.checks()


def wake_checks() -> tuple[Rule, ...]:
    """The checks, of all three protocols, that depend on wake-ups and on noticing ended sessions.

    For another way to the same store: without notifications, by polling.
    """
    parts = (sessions, watches, queue_wakes, queue_races)
    wakes = tuple(check for check in log.suite.checks() if "wake" in check.__name__)
    return tuple(check for part in parts for check in part.suite.checks()) + wakes


def atomic_checks() -> tuple[Rule, ...]:
    """The checks of `Stores.atomic`, where a backend offers it."""
    return atomic.suite.checks()
