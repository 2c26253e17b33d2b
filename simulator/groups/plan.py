"""What one run is like, drawn from its seed."""

from __future__ import annotations

from random import Random

import msgspec

from pxrs.config import OnTrimmed, Start, Strategy
from pxrs.testing.faults import Rates
from simulator.stage import draw_rates

GROUP = "g"
OPERATOR = "operator"
_STARTS: tuple[Start, ...] = ("earliest", "earliest", "earliest", "latest")
_ON_TRIMMED: tuple[OnTrimmed, ...] = ("error", "earliest", "latest")
_STRATEGIES: tuple[Strategy, ...] = ("sticky", "sticky", "sticky", "fair", "range")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's size, the group's patience, and how much goes wrong. Seconds.

    `transactions`: every member handles messages in transactions, and nowhere else. `queues`: these
    take and put items, too. `trouble` and `operator`: how often processes come and go, and how
    often somebody meddles with the group.
    """

    seed: int
    members: int
    static: int
    topics: dict[str, int]
    pattern: bool
    transactions: bool
    queues: bool
    # Topics lie over tables that somebody writes to.
    sources: bool = False
    tasks: int = 50
    steps: int
    ttl: float
    debounce: float
    revoke_timeout: float | None
    rejoin_timeout: float
    strategy: Strategy
    start: Start
    on_trimmed: OnTrimmed
    rates: Rates
    interleave: float
    trouble: float
    operator: float


def draw(seed: int, members: int | None = None) -> Plan:
    """The plan of a seed. One run in eight has a store without faults."""
    rng = Random(f"plan {seed}")
    count = members if members is not None else rng.choice((2, 2, 3, 3, 4, 5, 6, 8, 12))
    return Plan(
        seed=seed,
        members=count,
        static=rng.choice((0, 0, 1, 2, count)),
        topics={f"t{number}": rng.randint(1, 8) for number in range(rng.choice((1, 1, 2, 3)))},
        pattern=rng.random() < 0.3,
        transactions=rng.random() < 0.3,
        queues=Random(f"queues {seed}").random() < 0.3,
        sources=Random(f"sources {seed}").random() < 0.2,
        steps=rng.choice((100, 200, 300, 500)),
        ttl=rng.choice((2.0, 3.0, 6.0)),
        debounce=rng.choice((0.0, 0.1, 0.5)),
        revoke_timeout=rng.choice((None, None, 1.0, 4.0)),
        rejoin_timeout=rng.choice((1.0, 5.0)),
        strategy=rng.choice(_STRATEGIES),
        start=rng.choice(_STARTS),
        on_trimmed=rng.choice(_ON_TRIMMED),
        rates=msgspec.structs.replace(
            draw_rates(rng),
            interrupted=Random(f"interrupts {seed}").choice((0.0, 0.0, 0.02, 0.1)),
        ),
        interleave=rng.choice((0.0, 0.03, 0.1, 0.2)),
        trouble=rng.choice((0.3, 1.0, 1.0, 2.0)),
        operator=rng.choice((0.0, 0.3, 1.0)),
    )
