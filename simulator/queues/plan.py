"""What one run of queues is like, drawn from its seed."""

from __future__ import annotations

from random import Random

import msgspec

from pxrs.core.retry import AT_ONCE, Backoff
from pxrs.testing.faults import Rates
from simulator.stage import draw_rates

_BACKOFF = Backoff(first=0.5, longest=4.0)


class QueuePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A queue, and how it is taken from. `keys` is how many there are, 0 for items without."""

    fifo: bool
    keys: int
    retry: Backoff
    lock_for: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's size and how much goes wrong. Seconds."""

    seed: int
    workers: int
    queues: dict[str, QueuePlan]
    steps: int
    ttl: float
    rates: Rates
    interleave: float
    trouble: float


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = Random(f"queues {seed}")
    return Plan(
        seed=seed,
        workers=rng.choice((1, 2, 2, 3, 4)),
        queues={f"q{number}": _queue(rng) for number in range(rng.choice((1, 1, 2)))},
        steps=rng.choice((40, 70, 100)),
        ttl=rng.choice((2.0, 4.0)),
        rates=msgspec.structs.replace(
            draw_rates(rng), interrupted=rng.choice((0.0, 0.0, 0.02, 0.1))
        ),
        interleave=rng.choice((0.0, 0.05, 0.2)),
        trouble=rng.choice((0.3, 1.0, 2.0)),
    )


def _queue(rng: Random) -> QueuePlan:
    backoff = rng.choice((AT_ONCE, _BACKOFF))
    return QueuePlan(
        fifo=rng.random() < 0.25,
        keys=rng.choice((0, 0, 1, 3)),
        retry=msgspec.structs.replace(backoff, attempts=rng.choice((1, 2, 3, None))),
        lock_for=rng.choice((None, None, 1.0)),
    )
