"""Locks come in one order: workers that want the same lanes never wait for each other in a ring.

PostgreSQL would resolve it after a second, by rolling one of them back; the store would try again
and nobody would know why it is slow.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.testing.conformance.tools import together
from pxrs.types import NewItem
from support.postgres import PostgresLab, query

pytestmark = pytest.mark.engine("postgres")

WORKERS = 6
UNITS = 25
QUEUES = ("a", "b", "c")
KEYS = (None, "x", "y", "z")


def items(rng: random.Random) -> list[NewItem]:
    """Into several queues and lanes, in any order."""
    return [
        NewItem(
            queue=rng.choice(QUEUES),
            body=b"x",
            key=rng.choice(KEYS),
            dedupe=f"{rng.randrange(10)}" if rng.random() < 0.3 else None,
            dedupe_window=0.02,
        )
        for _ in range(rng.randrange(1, 6))
    ]


def work(stores: PostgresStores, seed: int) -> None:
    rng = random.Random(seed)
    session = Worker(stores).session
    for _ in range(UNITS):
        Worker(stores, session).apply(put=items(rng))
        worker = Worker(stores, session)
        taken = [each for queue in rng.sample(QUEUES, 2) for each in worker.take(3, queue)]
        given = [each for each in taken if rng.random() < 0.4]
        if given:
            worker.release(*given)
        worker.apply(*(each for each in taken if each not in given), put=items(rng))


def test_nobody_waits_in_a_ring(lab: PostgresLab, postgres_url: str) -> None:
    handles = [lab.open() for _ in range(3)]
    together(lab, *(partial(work, handles[seed % 3], seed) for seed in range(WORKERS)))
    for stores in handles:
        # What it counted is told when a connection ends.
        stores.close()
    ((deadlocks,),) = query(
        postgres_url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == 0
